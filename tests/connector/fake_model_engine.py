"""A vLLM engine core without a model: its scheduler, our connector, offload children: real.

The fake model writes into each block of the KV cache what it stands for, a hash of all tokens up
to its end, and looks before each step whether every block that the scheduler takes for computed
holds that: so an answer over blocks that nobody wrote is found, whoever caused it.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import failing_tier
import numpy as np
import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVEventsConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
)
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from kvctl_connector.connector import MultiConnector

BLOCK = 16  # tokens
BLOCKS = 40  # on the device
DEADLINE = 20.0  # seconds
_MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64,
    "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2,
    "num_hidden_layers": 1, "vocab_size": 256, "max_position_embeddings": 2048,
    "dtype": "float32",
}  # fmt: skip


class FakeModelEngine:
    """An engine of `ranks` workers, all in this process; `options` are the connector's own.

    Attributes:
        wrong: (request, block) of each block that was taken for computed and was not.
        finished: how each request has ended.
        seen: what the workers' halves told the scheduler in each step.
        events: KV events, as a router would get them.
    """

    def __init__(
        self, folder: Path, *, policy: str = "recompute", ranks: int = 1, **options: Any
    ) -> None:
        (folder / "config.json").write_text(json.dumps(_MODEL))
        self.config = _vllm_config(folder, policy, ranks, {"topology": "test", **options})
        self.config.cache_config.num_gpu_blocks = BLOCKS
        self.cache_config = _kv_cache_config()
        init_none_hash(sha256)
        self._hash_blocks = get_request_block_hasher(BLOCK, sha256)
        self.scheduler = Scheduler(
            vllm_config=self.config,
            kv_cache_config=self.cache_config,
            structured_output_manager=StructuredOutputManager(self.config),
            block_size=BLOCK,
            log_stats=False,
        )
        self.connector: Any = self.scheduler.connector
        self.events: list[Any] = []
        publisher: Any = self.scheduler.kv_event_publisher
        publisher.publish = lambda batch: self.events.extend(batch.events)
        self.pages = [torch.zeros((BLOCKS, 64), dtype=torch.int8) for _ in range(ranks)]
        self.workers = [self._worker(rank) for rank in range(ranks)]
        self._aggregator = KVOutputAggregator(ranks)
        self.wrong: list[tuple[str, int]] = []
        self.finished: dict[str, str] = {}
        self.seen: list[Any] = []

    def close(self) -> None:
        for worker in self.workers:
            worker.shutdown()
        self.connector.shutdown()

    @property
    def facts(self) -> list[Any]:
        """Of all transfers that ended, as the workers told them."""
        metas = (told.kv_connector_worker_meta for told in self.seen)
        return [fact for meta in metas for fact in getattr(meta, "facts", ())]

    @property
    def offload(self) -> Any:
        """The offload child's scheduler half."""
        return self.connector._connectors[0].connector_scheduler

    @property
    def manager(self) -> Any:
        return self.offload.manager

    def copier(self, rank: int = 0) -> Any:
        """The real worker of the tier, behind what stands in front of it."""
        worker = self.workers[rank]._connectors[0].connector_worker.worker
        while "_kvctl_original" in vars(worker):
            worker = worker._kvctl_original
        return worker

    def answer(self, name: str, prompt: list[int], tokens: int = 2) -> None:
        """Takes a prompt and steps until it has ended."""
        self.add(name, prompt, tokens)
        self.step_until(lambda: name in self.finished, f"{name} has not ended")

    def add(self, name: str, prompt: list[int], tokens: int = 2) -> None:
        sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
        if hasattr(sampling, "update_from_generation_config"):
            sampling.update_from_generation_config({}, 2)
        self.scheduler.add_request(
            Request(name, prompt, sampling, None, block_hasher=self._hash_blocks)
        )

    def settle(self) -> None:
        """Steps until nothing is in flight."""
        self.step_until(lambda: not self.offload._jobs, "jobs are in flight")

    def step_until(self, done: Any, what: str) -> None:
        ends = time.monotonic() + DEADLINE
        while not done():
            assert time.monotonic() < ends, what
            self.step()

    def evict(self) -> None:
        """The device cache forgets everything."""
        self.settle()
        assert self.scheduler.kv_cache_manager.reset_prefix_cache()
        for pages in self.pages:
            pages.fill_(-1)

    def step(self) -> None:
        """One step of the engine, as vLLM's model runner and engine core make it."""
        planned = self.scheduler.schedule()
        self._look(planned)
        outputs = [self._execute(rank, planned) for rank in range(len(self.workers))]
        output = self._aggregator.aggregate(outputs)
        told = output.kv_connector_output
        self.seen.append(told)
        for engine_outputs in self.scheduler.update_from_output(planned, output).values():
            for each in engine_outputs.outputs:
                if each.finish_reason is not None:
                    self.finished[each.request_id] = str(each.finish_reason)

    def _worker(self, rank: int) -> Any:
        self.config.parallel_config.rank = rank
        made = MultiConnector(self.config, KVConnectorRole.WORKER, self.cache_config)
        self.config.parallel_config.rank = 0
        child = made._connectors[0].connector_worker
        child.worker = child.spec.get_worker(
            CanonicalKVCaches(
                tensors=[CanonicalKVCacheTensor(self.pages[rank], 64)],
                group_data_refs=[[CanonicalKVCacheRef(0, 64)]],
            )
        )
        child.worker.rank = rank
        made._worker_half.caches_registered()
        return made

    def _execute(self, rank: int, planned: Any) -> Any:
        """What a model runner does with its connector (v1/worker, kv_connector_model_runner)."""
        worker = self.workers[rank]
        meta = planned.kv_connector_metadata
        worker.handle_preemptions(meta)
        worker.bind_connector_metadata(meta)
        self._write(rank, planned)
        worker.start_load_kv(None)
        worker.wait_for_save()
        told = KVConnectorOutput()
        if hasattr(told, "failed_recving"):
            results = worker.get_transfer_results(planned.finished_req_ids)
            told.finished_sending = results.finished_sending or None
            told.finished_recving = results.finished_recving or None
            told.failed_recving = results.failed_recving
        else:
            told.finished_sending, told.finished_recving = worker.get_finished(
                planned.finished_req_ids
            )
        told.invalid_block_ids = worker.get_block_ids_with_load_errors()
        told.kv_connector_worker_meta = worker.build_connector_worker_meta()
        worker.clear_connector_metadata()
        names = list(planned.num_scheduled_tokens)
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=[self._sampled(name, planned) for name in names],
            kv_connector_output=told,
        )

    def _sampled(self, name: str, planned: Any) -> list[int]:
        request = self.scheduler.requests[name]
        return [7] if request.num_computed_tokens >= request.num_tokens else []

    def _look(self, planned: Any) -> None:
        """Does every block that counts as computed hold what it stands for, on every rank?"""
        for name, count in planned.num_scheduled_tokens.items():
            request = self.scheduler.requests[name]
            computed = request.num_computed_tokens - count
            for index, block in self._blocks(name, 0, computed):
                for pages in self.pages:
                    if (pages[block].numpy() != _content(request, index)).any():
                        self.wrong.append((name, index))

    def _write(self, rank: int, planned: Any) -> None:
        for name, count in planned.num_scheduled_tokens.items():
            request = self.scheduler.requests[name]
            first = request.num_computed_tokens - count
            for index, block in self._blocks(name, first, request.num_computed_tokens):
                self.pages[rank][block] = torch.from_numpy(_content(request, index))

    def _blocks(self, name: str, first: int, end: int) -> list[tuple[int, int]]:
        """(index, block) of the full blocks that end in these positions."""
        (blocks,) = self.scheduler.kv_cache_manager.get_block_ids(name)
        return [(at, blocks[at]) for at in range(first // BLOCK, end // BLOCK)]


def _content(request: Any, index: int) -> np.ndarray:
    seed = hash(tuple(request.all_token_ids[: (index + 1) * BLOCK])) & 0xFFFFFFFF
    return np.random.default_rng(seed).integers(0, 127, 64, dtype=np.int8)


def _vllm_config(folder: Path, policy: str, ranks: int, options: dict[str, Any]) -> Any:
    offload = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "cpu_bytes_to_use": 1 << 20,
            "spec_name": "FailingHostSpec",
            "spec_module_path": failing_tier.__name__,
            "self_describing_kv_events": True,
        },
    }
    return VllmConfig(
        model_config=ModelConfig(
            model=str(folder), skip_tokenizer_init=True, dtype="float32", max_model_len=512
        ),
        cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=True),
        scheduler_config=SchedulerConfig(
            max_num_seqs=8, max_num_batched_tokens=512, max_model_len=512,
            is_encoder_decoder=False,
        ),
        parallel_config=ParallelConfig(
            tensor_parallel_size=ranks, distributed_executor_backend="mp"
        ),
        device_config=DeviceConfig("cpu"),
        kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null"),
        kv_transfer_config=KVTransferConfig(
            kv_connector="MultiConnector",
            kv_connector_module_path="kvctl_connector.connector",
            kv_role="kv_both",
            kv_load_failure_policy=policy,
            kv_connector_extra_config={"connectors": [offload], "kvctl": options},
        ),
    )  # fmt: skip


def _kv_cache_config() -> Any:
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.int8)
    names = ["layer"]
    tensors = []
    if "shared_by" in KVCacheTensor.__dataclass_fields__:  # up to 0.28.0 the pages are sized by it
        tensors = [KVCacheTensor(size=BLOCKS * spec.page_size_bytes, shared_by=names)]
    return KVCacheConfig(
        num_blocks=BLOCKS,
        kv_cache_tensors=tensors,
        kv_cache_groups=[KVCacheGroupSpec(names, spec)],
    )
