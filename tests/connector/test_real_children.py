"""The scheduler half of vLLM's own children, in vLLM's own scheduler, with hand-made requests.

Their worker halves need a GPU: of SimpleCPUOffloadConnector (CUDA streams), and of NIXL that
stages through host memory on an accelerator.
"""

import json
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_scheduler
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.simple_kv_offload.metadata import SimpleCPUOffloadWorkerMetadata
from vllm.v1.structured_output import StructuredOutputManager

from kvctl_connector.connector import WorkerMetadata

BLOCK = 16
BLOCKS = 64
PROMPT = list(range(1, 101))  # six full blocks and a part of one
LAYERS = ["layer.0", "layer.1"]
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": len(LAYERS),
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "torch_dtype": "float32",
}
SIMPLE = {
    "kv_connector": "SimpleCPUOffloadConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 22},
}
OFFLOADING = SIMPLE | {"kv_connector": "OffloadingConnector"}

Start = Callable[..., Scheduler]


def nixl(role: str) -> dict[str, Any]:
    return {"kv_connector": "NixlConnector", "kv_role": role, "kv_buffer_device": "cpu"}


@pytest.fixture(scope="module")
def plain_config(tmp_path_factory: pytest.TempPathFactory) -> VllmConfig:
    """Of a small model; its weights are never read."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(LLAMA))
    return VllmConfig(
        model_config=ModelConfig(
            model=str(folder), skip_tokenizer_init=True, dtype="float32", max_model_len=512
        ),
        cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=True),
        scheduler_config=SchedulerConfig(
            max_num_seqs=8,
            max_num_batched_tokens=512,
            max_model_len=512,
            is_encoder_decoder=False,
            disable_hybrid_kv_cache_manager=True,
        ),
        device_config=DeviceConfig("cpu"),
    )


def caches() -> KVCacheConfig:
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=16, dtype=torch.float32)
    region = spec.page_size_bytes * BLOCKS
    if "layers" in {field.name for field in fields(KVCacheTensor)}:
        tensors = [
            KVCacheTensor(
                size=region * len(LAYERS),
                layers=LAYERS,
                layer_stride=region,
                block_stride=spec.page_size_bytes,
            )
        ]
    else:  # up to 0.28.0
        tensors = [KVCacheTensor(size=region, shared_by=[layer]) for layer in LAYERS]
    return KVCacheConfig(
        num_blocks=BLOCKS,
        kv_cache_tensors=tensors,
        kv_cache_groups=[KVCacheGroupSpec(LAYERS, spec)],
    )


@pytest.fixture
def start(
    plain_config: VllmConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Start]:
    """Starts vLLM's scheduler with our connector and the children given."""
    monkeypatch.setenv("KVCTL_RUNTIME_DIR", str(tmp_path))
    made: list[Scheduler] = []
    init_none_hash(sha256)

    def start(role: str, *children: dict[str, Any]) -> Scheduler:
        config = copy(plain_config)
        config.cache_config.num_gpu_blocks = BLOCKS
        config.kv_transfer_config = KVTransferConfig(
            kv_connector="MultiConnector",
            kv_role=role,
            kv_connector_module_path="kvctl_connector.connector",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={"connectors": list(children)},
        )
        made.append(
            Scheduler(
                vllm_config=config,
                kv_cache_config=caches(),
                structured_output_manager=StructuredOutputManager(config),
                block_size=BLOCK,
            )
        )
        return made[-1]

    yield start
    for scheduler in made:
        scheduler.shutdown()


def ask(scheduler: Scheduler, name: str, **params: Any) -> Request:
    request = Request(
        request_id=name,
        prompt_token_ids=PROMPT,
        sampling_params=SamplingParams(
            max_tokens=1, extra_args={"kv_transfer_params": params} if params else None
        ),
        pooling_params=None,
        block_hasher=get_request_block_hasher(BLOCK, sha256),
    )
    scheduler.add_request(request)
    return request


def offer() -> dict[str, Any]:
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": "prefill",
        "remote_request_id": "prefill-r",
        "remote_block_ids": [list(range(-(-len(PROMPT) // BLOCK)))],
        "remote_host": "127.0.0.1",
        "remote_port": 1,
        "tp_size": 1,
    }


def step(scheduler: Scheduler, **connector_output: Any) -> Any:
    """Schedules a step and takes its output; returns the metadata for the workers."""
    scheduled = scheduler.schedule()
    names = list(scheduled.num_scheduled_tokens)
    scheduler.update_from_output(
        scheduled,
        ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=[[7] for _ in names],
            kv_connector_output=KVConnectorOutput(**connector_output),
        ),
    )
    return scheduled.kv_connector_metadata


def test_nixl_and_the_simple_offload_connector(start: Start) -> None:
    scheduler = start("kv_consumer", nixl("kv_consumer"), SIMPLE)
    assert scheduler.connector._connectors[1].scheduler_manager._gpu_block_pool is not None

    # What the peer offers is pulled, and the simple connector loads nothing.
    request = ask(scheduler, "r", **offer())
    meta = step(scheduler)
    assert meta.loads == {"r": (0,)}
    assert list(meta.metadata[0].reqs_to_recv) == ["r"]
    assert meta.metadata[1].load_event < 0

    # The pull ends; the request runs, and the simple connector stores what was pulled.
    step(scheduler, finished_recving={"r"})
    stores = [step(scheduler).metadata[1] for _ in range(3)]
    stored = [meta for meta in stores if meta.store_event >= 0]
    assert request.is_finished()
    assert sum(len(meta.store_gpu_blocks) for meta in stored) == len(PROMPT) // BLOCK

    # Stored: the same prompt, gone from the GPU, is loaded from there.
    done = {meta.store_event: 1 for meta in stored}
    worker_meta = WorkerMetadata((None, SimpleCPUOffloadWorkerMetadata(done)))
    step(scheduler, kv_connector_worker_meta=worker_meta)
    assert scheduler.reset_prefix_cache()
    again = ask(scheduler, "s")
    meta = step(scheduler)
    assert meta.loads == {"s": (1,)}
    assert len(meta.metadata[1].load_gpu_blocks) == len(PROMPT) // BLOCK
    step(scheduler, finished_recving={"s"})
    step(scheduler)
    assert again.is_finished()


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """NIXL's scheduler half as on an accelerator, whose KV it stages through host memory."""
    monkeypatch.setattr(base_scheduler, "current_platform", SimpleNamespace(device_type="cuda"))


@pytest.mark.usefixtures("accelerator")
def test_prefill_that_stages_through_host_memory(start: Start) -> None:
    scheduler = start("kv_producer", nixl("kv_producer"), OFFLOADING)
    assert scheduler.connector._connectors[0].connector_scheduler.use_host_buffer

    request = ask(scheduler, "r", do_remote_decode=True)
    meta = step(scheduler)
    # Staged are the blocks of the request itself, though no child loads anything.
    (staged,) = meta.metadata[0].reqs_to_save.values()
    assert len(staged.local_block_ids[0]) == -(-len(PROMPT) // BLOCK)

    # It is held for the reader, who is announced by name, until it has been read.
    assert request.is_finished()
    assert step(scheduler).saves == {"r": (0,)}
    assert "r" in scheduler.requests
    step(scheduler, finished_sending={"r"})
    assert "r" not in scheduler.requests


@pytest.mark.usefixtures("accelerator")
def test_decode_that_stages_through_host_memory(start: Start) -> None:
    scheduler = start("kv_consumer", nixl("kv_consumer"), OFFLOADING)
    request = ask(scheduler, "r", **offer())
    meta = step(scheduler)
    assert meta.loads == {"r": (0,)}
    assert "r" in meta.leases, "the lease guard judges the read as any other"
    assert list(meta.metadata[0].reqs_to_recv) == ["r"]
    step(scheduler, finished_recving={"r"})
    step(scheduler)
    assert request.is_finished()
