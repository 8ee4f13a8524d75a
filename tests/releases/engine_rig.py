"""One engine without a model: a release's own scheduler and our connector in both roles.

The scheduler, the order in which a worker calls the connector, NIXL's handshake over its side
channel and both children are vLLM's own code of the release under test. What does not run is the
model (a "forward" writes each block's tokens into its pages) and NIXL's transport
(``fake_nixl``: the bytes are copied within this process).
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_nixl import FakeNixlAgent
from vllm import SamplingParams
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
    set_current_vllm_config,
)
from vllm.distributed import nixl_utils, parallel_state
from vllm.distributed.kv_transfer.kv_connector import utils as kv_utils
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.models import registry
from vllm.utils.hashing import sha256
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker import kv_connector_model_runner_mixin as runner

BLOCK = 32  # tokens
BLOCKS = 64  # of the KV cache; block 0 is vLLM's null block
HEAD = 32
LAYERS = ("model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn")
DEADLINE = 10.0  # seconds, for what ends within milliseconds

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HEAD,
    "intermediate_size": 64,
    "num_hidden_layers": len(LAYERS),
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": HEAD,
    "vocab_size": 258,
    "max_position_embeddings": 2048,
    "dtype": "float32",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
}


def prepare(monkeypatch: Any, runtime_dir: Path) -> None:
    """Once a process: NIXL's stand-in, and what a worker process sets up before a connector."""
    real = nixl_utils.NixlWrapper
    for module in list(sys.modules.values()):  # those that have imported it by name already, too
        if vars(module).get("NixlWrapper") is real:
            monkeypatch.setattr(module, "NixlWrapper", FakeNixlAgent)
    monkeypatch.setenv("KVCTL_RUNTIME_DIR", str(runtime_dir))
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_HOST", "127.0.0.1")
    # vLLM would import the model's class in a process of its own, to see what kind it is.
    monkeypatch.setattr(registry._ModelRegistry, "inspect_model_cls", _fake_inspection)
    kv_cache_utils.init_none_hash(sha256)
    meeting = tempfile.mktemp(dir=runtime_dir)
    with set_current_vllm_config(VllmConfig()):
        parallel_state.init_distributed_environment(
            world_size=1,
            rank=0,
            local_rank=0,
            distributed_init_method=f"file://{meeting}",
            backend="gloo",
        )
        parallel_state.ensure_model_parallel_initialized(1, 1)


def _fake_inspection(_: Any, architectures: Any, *__: Any, **___: Any) -> tuple[Any, str]:
    known: dict[str, Any] = {field.name: False for field in dataclasses.fields(registry._ModelInfo)}
    known |= {"architecture": "LlamaForCausalLM", "is_text_generation_model": True}
    texts = ("default_pooling_type", "default_seq_pooling_type", "default_tok_pooling_type")
    known |= {name: "LAST" for name in texts if name in known}
    known |= {name: None for name in ("attn_type", "score_type") if name in known}
    return registry._ModelInfo(**known), "LlamaForCausalLM"


class Engine:
    """One engine.

    Args:
        name: its engine id.
        folder: for the model's configuration.
        children: the child connectors' configurations.
        stock: vLLM's own MultiConnector instead of ours.
        options: ``kv_connector_extra_config["kvctl"]``.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        children: list[dict[str, Any]],
        *,
        stock: bool = False,
        **options: Any,
    ) -> None:
        os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(_free_port())  # read by NIXL's scheduler
        self.config = _config(name, folder, children, None if stock else options)
        layers = self.config.compilation_config.static_forward_context
        layers.update({layer: FakeAttentionLayer() for layer in LAYERS})
        with set_current_vllm_config(self.config):
            if hasattr(self.config.cache_config, "kv_cache_layout"):  # resolved by the engine core
                kind = KVConnectorFactory.get_connector_class(self.config.kv_transfer_config)
                layout = kind.get_required_kvcache_layout(self.config)
                self.config.cache_config.kv_cache_layout = layout
            self.kv_cache_config = _kv_cache_config(self.config)
            self.config.cache_config.num_gpu_blocks = self.kv_cache_config.num_blocks
            self.scheduler = Scheduler(
                vllm_config=self.config,
                kv_cache_config=self.kv_cache_config,
                structured_output_manager=StructuredOutputManager(self.config),
                block_size=BLOCK,
                log_stats=True,
            )
            self.worker: Any = KVConnectorFactory.create_connector(
                self.config, base.KVConnectorRole.WORKER, self.kv_cache_config
            )
            self.caches = {layer: _cache() for layer in LAYERS}
            self.worker.register_kv_caches(self.caches)
        self.finished: dict[str, Any] = {}
        self.invalid: set[int] = set()
        self._shake_hands()

    @property
    def connector(self) -> Any:
        """The scheduler's half."""
        return self.scheduler.connector

    def _shake_hands(self) -> None:
        """As the engine core does once the workers have registered their caches."""
        metadata = self.worker.get_handshake_metadata()
        if metadata is None:
            return
        if hasattr(base.KVConnectorBase_V1, "set_xfer_handshake_metadata_pp_aware"):
            self.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): metadata})
        else:
            self.connector.set_xfer_handshake_metadata({0: metadata})

    def add(self, name: str, prompt: list[int], params: dict[str, Any] | None = None) -> Any:
        """A request; it runs with the next steps."""
        sampling = SamplingParams(max_tokens=1, ignore_eos=True)
        request = Request(
            request_id=name,
            prompt_token_ids=prompt,
            sampling_params=sampling,
            pooling_params=None,
            block_hasher=kv_cache_utils.get_request_block_hasher(BLOCK, sha256),
        )
        request.kv_transfer_params = params
        self.scheduler.add_request(request)
        return request

    def step(self) -> Any:
        """One step of the engine; returns what the scheduler planned."""
        planned = self.scheduler.schedule()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(runner, "get_kv_transfer_group", lambda: self.worker)
            patch.setattr(runner, "has_kv_transfer_group", lambda: True)
            self.worker.handle_preemptions(planned.kv_connector_metadata)
            if planned.total_num_scheduled_tokens:
                output = self._forward(planned)
            else:
                output = runner.KVConnectorModelRunnerMixin.kv_connector_no_forward(
                    planned, self.config
                )
        if output.kv_connector_output is not None:
            self.invalid |= output.kv_connector_output.invalid_block_ids or set()
        for answers in self.scheduler.update_from_output(planned, output).values():
            self.finished |= {
                answer.request_id: answer
                for answer in answers.outputs
                if answer.finish_reason is not None
            }
        return planned

    def _forward(self, planned: Any) -> ModelRunnerOutput:
        names = list(planned.num_scheduled_tokens)
        mixin = runner.KVConnectorModelRunnerMixin
        with (
            set_forward_context(None, self.config),
            mixin.maybe_get_kv_connector_output(planned) as reported,
        ):
            for name, count in planned.num_scheduled_tokens.items():
                request = self.scheduler.requests[name]
                # schedule() has already counted them as computed.
                self._write(name, request.num_computed_tokens - count, request.num_computed_tokens)
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=[[7] for _ in names],
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=None,
            kv_connector_output=reported,
        )

    def _write(self, name: str, first: int, end: int) -> None:
        tokens = self.scheduler.requests[name].all_token_ids
        for index in range(first // BLOCK, -(-end // BLOCK)):
            content = content_of(tokens[index * BLOCK : (index + 1) * BLOCK])
            for number, cache in enumerate(self.caches.values()):
                _page(cache, self.blocks(name)[index])[:] = content + number

    def blocks(self, name: str) -> list[int]:
        """The blocks of a request that has not been freed."""
        (group,) = self.scheduler.kv_cache_manager.get_block_ids(name)
        return list(group)

    def run(self, name: str) -> Any:
        """Steps until a request has ended; its last answer."""
        self.until(lambda: name in self.finished, f"{name} ended")
        return self.finished[name]

    def until(self, condition: Any, what: str) -> None:
        """Steps until a condition holds.

        Raises:
            AssertionError: it does not within the deadline.
        """
        deadline = time.monotonic() + DEADLINE
        while not condition():
            assert time.monotonic() < deadline, f"not within {DEADLINE} s: {what}"
            self.step()
            time.sleep(0.001)

    def value(self, metric: str, *attributes: str) -> float:
        """Of a counter or gauge: the sum over all series that have these attribute values."""
        half = self.connector._scheduler_half
        return sum(
            series.value
            for series in half.recorder.everything()
            if series.metric == f"kvctl.{metric}"
            and set(attributes) <= set(map(str, series.attributes.values()))
        )

    def close(self) -> None:
        self.worker.shutdown()
        self.scheduler.shutdown()


def content_of(tokens: Any) -> float:
    """What a forward writes for a block of these tokens."""
    return float(sum((place + 1) * token for place, token in enumerate(tokens)) % 65_521)


def expected(prompt: list[int]) -> list[float]:
    """What must be in the full blocks of a prompt."""
    full = len(prompt) // BLOCK
    return [content_of(prompt[index * BLOCK : (index + 1) * BLOCK]) for index in range(full)]


def contents(engine: Engine, blocks: list[int]) -> list[float]:
    """What is in these blocks; fails if a page is torn or the layers disagree."""
    found = []
    for block in blocks:
        first, second = (_page(cache, block) for cache in engine.caches.values())
        assert (first == first.flatten()[0]).all() and (second == first + 1).all()
        found.append(float(first.flatten()[0]))
    return found


class FakeAttentionLayer(AttentionLayerBase):
    """Tells NIXL and the offload child how the layer's KV cache is laid out."""

    def get_attn_backend(self) -> Any:
        return Layout if _NEEDS_BLOCKS_FIRST else CPUAttentionBackend

    def get_kv_cache_spec(self, _: Any) -> Any:
        return _spec()


class Layout(CPUAttentionBackend):
    """K and V of a block together, in the five dimensions that 0.24.0's NIXL takes.

    It does not take those of its own CPU attention, which has four by then.
    """

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, *_: Any, **__: Any
    ) -> tuple[int, ...]:
        return num_blocks, 2, num_kv_heads, block_size, head_size


def _shape(backend: Any) -> tuple[int, ...]:
    if not hasattr(backend, "get_kv_cache_shape"):  # from 0.30.0 on
        return BLOCKS, 1, BLOCK, 2 * HEAD
    return tuple(backend.get_kv_cache_shape(BLOCKS, BLOCK, 1, HEAD))


_NEEDS_BLOCKS_FIRST = (
    hasattr(kv_utils.TransferTopology, "split_k_and_v") and len(_shape(CPUAttentionBackend)) == 4
)


def _cache() -> torch.Tensor:
    """One layer's KV cache."""
    return torch.zeros(_shape(FakeAttentionLayer().get_attn_backend()))


def _page(cache: torch.Tensor, block: int) -> torch.Tensor:
    return cache[block] if cache.shape[0] == BLOCKS else cache[:, block]


def _spec() -> FullAttentionSpec:
    return FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=HEAD, dtype=torch.float32)


def _kv_cache_config(config: VllmConfig) -> Any:
    spec = _spec()
    name = "get_kv_cache_config_from_groups"
    planner = getattr(kv_cache_utils, name, None) or getattr(
        importlib.import_module("vllm.v1.core.kv_cache_planning"), name
    )
    return planner(
        config,
        [KVCacheGroupSpec(list(LAYERS), spec)],
        available_memory=BLOCKS * len(LAYERS) * spec.page_size_bytes,
    )


def _config(
    name: str, folder: Path, children: list[dict[str, Any]], options: dict[str, Any] | None
) -> VllmConfig:
    extra: dict[str, Any] = {"connectors": children}
    if options is not None:
        extra["kvctl"] = {"topology": "contract", "instance": name, **options}
    (folder / "config.json").write_text(json.dumps(MODEL))
    return VllmConfig(
        model_config=ModelConfig(
            model=str(folder), dtype="float32", max_model_len=1024, skip_tokenizer_init=True
        ),
        cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=True),
        scheduler_config=SchedulerConfig(
            max_num_seqs=8,
            max_num_batched_tokens=1024,
            max_model_len=1024,
            is_encoder_decoder=False,
            disable_hybrid_kv_cache_manager=True,
        ),
        device_config=DeviceConfig("cpu"),
        kv_transfer_config=KVTransferConfig(
            kv_connector="MultiConnector",
            kv_connector_module_path=(None if options is None else "kvctl_connector.connector"),
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            engine_id=name,
            kv_connector_extra_config=extra,
        ),
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
