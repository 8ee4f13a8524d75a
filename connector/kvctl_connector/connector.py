"""The connector that vLLM loads: the installed vLLM's MultiConnector, with our halves beside it.

Configured as ``"kv_connector": "MultiConnector", "kv_connector_module_path":
"kvctl_connector.connector"``. The class is named MultiConnector on purpose: vLLM tests that name
in up to ten places (the HMA gate, ``has_connector``, the API server's statistics), so another
name would switch features off silently. Children stay upstream's classes.

``KVCTL_CONNECTOR=off`` in the environment makes it behave as stock MultiConnector.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import multi_connector as upstream
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from .completion import Released
from .config import ConfigError, Options
from .facts import Fact
from .guard import logger
from .lease import Lease
from .scheduler_half import SchedulerHalf
from .threads import kept_together
from .worker_half import WorkerHalf

NAME = "MultiConnector"
MODULE = "kvctl_connector.connector"
SWITCH = "KVCTL_CONNECTOR"

# Which tier a child serves, by the prefix of its class's name.
_TIER_OF = {"Nixl": "peer", "Offloading": "host", "SimpleCPUOffload": "host"}


@dataclass
class Metadata(upstream.MultiKVConnectorMetadata):
    """Scheduler half → workers: upstream's, the loads that begin (request → children), and the
    leases of requests that have just arrived."""

    loads: dict[str, tuple[int, ...]] = field(default_factory=dict)
    leases: dict[str, Lease] = field(default_factory=dict)


@dataclass
class WorkerMetadata(upstream.MultiKVConnectorWorkerMetadata):
    """Workers → scheduler half: upstream's, and what this step's transfers were."""

    facts: list[Fact] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    strays: int = 0  # reports of completions that nobody awaited

    def aggregate(self, other: Any) -> WorkerMetadata:
        """Joins two ranks; the first one's type decides, so every rank sends this type."""
        joined = super().aggregate(other)
        return WorkerMetadata(
            metadata=joined.metadata,
            facts=[*self.facts, *other.facts],
            missing=self.missing,
            strays=self.strays + other.strays,
        )


class MultiConnector(upstream.MultiConnector):
    """NIXL and offload under one roof, reporting every transfer.

    Raises:
        ConfigError: at start, when the configuration cannot work.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        transfer = vllm_config.kv_transfer_config
        if transfer.kv_connector != NAME:
            raise ConfigError(_wrong_name(transfer.kv_connector))
        # Options first: a typo must not cost the time of building the children.
        options = Options.parse(transfer.kv_connector_extra_config.get("kvctl") or {})
        on_cpu = vllm_config.device_config.device_type == "cpu"
        pinned = role is KVConnectorRole.WORKER and on_cpu
        with kept_together(_local_rank(vllm_config)) if pinned else contextlib.nullcontext():
            super().__init__(vllm_config, role, kv_cache_config)

        self._scheduler_half: SchedulerHalf | None = None
        self._worker_half: WorkerHalf | None = None
        self._waits: dict[str, bool] = {}
        self._new_loads: dict[str, tuple[int, ...]] = {}
        if os.environ.get(SWITCH) == "off":
            logger.warning("kvctl: %s=off, this is stock MultiConnector", SWITCH)
            return
        tiers = [_tier(child) for child in self._connectors]
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler_half = SchedulerHalf(
                options, vllm_config, tiers, self._connectors, self._ktc_kv_transfer_config
            )
        else:
            parallel = vllm_config.parallel_config
            self._worker_half = WorkerHalf(
                tiers,
                self._connectors,
                parallel.rank,
                parallel.world_size,
                options.clock_margin_ms,
            )

    def shutdown(self) -> None:
        if self._scheduler_half is not None:
            self._scheduler_half.close()
        super().shutdown()

    # Scheduler half

    def on_new_request(self, request: Any) -> None:
        # Before any child sees the offer: NIXL begins to send heartbeats to where it points.
        if self._scheduler_half is not None:
            self._scheduler_half.arrived(request)
        super().on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if self._scheduler_half is None:
            return super().get_num_new_matched_tokens(request, num_computed_tokens)
        self._scheduler_half.arrived(request)  # vLLM 0.20.2 does not announce new requests
        # A choice of an earlier query must not outlive it when this one finds nothing.
        self._requests_to_connector.pop(request.request_id, None)
        tokens, waits = super().get_num_new_matched_tokens(request, num_computed_tokens)
        self._waits[request.request_id] = waits
        return tokens, waits

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        chosen = self._requests_to_connector.get(request.request_id)
        half = self._scheduler_half
        if half is not None and chosen is not None and num_external_tokens > 0:
            waits = self._waits.pop(request.request_id, True)
            if waits:
                self._new_loads[request.request_id] = (chosen,)
            half.allocated(request.request_id, chosen, num_external_tokens, waits=waits)
            self._tell_reused_blocks(chosen, blocks)
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def _tell_reused_blocks(self, chosen: int, blocks: Any) -> None:
        """Tells the offload children which blocks another child is about to write.

        They keep copying blocks of finished requests and wait for such a copy when its block is
        allocated again, but up to vLLM 0.32.0 they do not see allocations for another child's
        load (vllm-project/vllm issue 46951): it would overwrite a block that is being stored.
        """
        for index, child in enumerate(self._connectors):
            allocated = getattr(
                getattr(child, "connector_scheduler", None),
                "_current_batch_allocated_block_ids",
                None,
            )
            if index != chosen and allocated is not None:
                allocated.update(b.block_id for group in blocks.blocks for b in group)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        meta = super().build_connector_meta(scheduler_output)
        half = self._scheduler_half
        if half is None:
            return meta
        if scheduler_output.scheduled_new_reqs:
            half.scheduled(scheduler_output.scheduled_new_reqs)
        for child in meta.metadata:
            if jobs := getattr(child, "store_jobs", None):
                half.announced(jobs)
        leases = half.take_leases()
        if self._new_loads or leases:
            meta = Metadata(**vars(meta), loads=self._new_loads, leases=leases)
            self._new_loads = {}
        return meta

    def update_connector_output(self, connector_output: Any) -> None:
        super().update_connector_output(connector_output)
        half = self._scheduler_half
        if half is None:
            return
        worker_meta = connector_output.kv_connector_worker_meta
        received = connector_output.finished_recving
        if isinstance(worker_meta, WorkerMetadata):
            if worker_meta.missing:
                half.missing(worker_meta.missing)
            half.completed(worker_meta.facts, received or (), worker_meta.strays)
        elif received:
            half.completed((), received, 0)

    def _aggregate_request_finished(self, request: Any, per_connector_fn: Any) -> Any:
        held, params = super()._aggregate_request_finished(request, per_connector_fn)
        if self._scheduler_half is not None:
            self._waits.pop(request.request_id, None)
            self._scheduler_half.offer(request, params)
            self._scheduler_half.finished(
                request.request_id, offered=bool(held and params is not None)
            )
        return held, params

    def take_events(self) -> list[Any]:
        # A list: upstream's generator is true even when it is empty, and vLLM tests it.
        return [event for child in self._connectors for event in child.take_events()]

    # Worker half

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        if self._worker_half is not None:
            self._worker_half.caches_registered()

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        super().bind_connector_metadata(connector_metadata)
        if self._worker_half is not None:
            self._worker_half.bound(
                getattr(connector_metadata, "loads", None),
                getattr(connector_metadata, "leases", None),
                connector_metadata.metadata,
            )

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        # What the engine asks from vLLM 0.30.0 on.
        if self._worker_half is None:
            return super().get_transfer_results(finished_req_ids)
        sent, released = self._collect("get_transfer_results", finished_req_ids)
        return upstream.KVConnectorTransferResults(sent, released.received, released.failed)

    def get_finished(self, finished_req_ids: set[str]) -> Any:
        # What it asks up to 0.28.0; later releases answer it from the method above.
        if self._worker_half is None or hasattr(upstream, "KVConnectorTransferResults"):
            return super().get_finished(finished_req_ids)
        sent, released = self._collect("get_finished", finished_req_ids)
        return sent or None, released.received or None

    def _collect(self, question: str, finished_req_ids: set[str]) -> tuple[set[str], Released]:
        """Asks every child, and lets pass what is complete."""
        half = self._worker_half
        assert half is not None
        sent: set[str] = set()
        released = Released()
        for index, child in enumerate(self._connectors):
            answer = getattr(child, question)(finished_req_ids)
            if isinstance(answer, tuple):
                sending, receiving, failed = answer[0] or set(), answer[1] or set(), set()
            else:
                sending, receiving = answer.finished_sending, answer.finished_recving
                failed = answer.failed_recving
            half.reported(index, sending, receiving, failed, released)
            sent.update(request for request in sending if self._last_save(request))
        if finished_req_ids:
            half.forget(finished_req_ids)
        return sent, released

    def get_block_ids_with_load_errors(self) -> set[int]:
        blocks: set[int] = super().get_block_ids_with_load_errors()
        if self._worker_half is None:
            return blocks
        return blocks | self._worker_half.take_unreadable()

    def _last_save(self, request: str) -> bool:
        """Whether no further child still saves this request (upstream's counter)."""
        pending = self._extra_async_saves.get(request, 0)
        if pending > 1:
            self._extra_async_saves[request] = pending - 1
        elif pending == 1:
            del self._extra_async_saves[request]
        return pending == 0

    def build_connector_worker_meta(self) -> Any:
        meta = super().build_connector_worker_meta()
        half = self._worker_half
        if half is None:
            return meta
        facts = half.take_facts()
        missing, strays = half.take_missing(), half.take_strays()
        if meta is None and not (facts or missing or strays):
            return None
        slots = meta.metadata if meta is not None else (None,) * len(self._connectors)
        return WorkerMetadata(metadata=slots, facts=facts, missing=missing, strays=strays)


def _local_rank(vllm_config: Any) -> int:
    """Of this worker among all of its engine on this machine, data-parallel ranks included."""
    parallel = vllm_config.parallel_config
    replica = getattr(parallel, "data_parallel_rank_local", 0) or 0
    return int(replica * parallel.world_size + parallel.rank)


def _tier(child: Any) -> str:
    name = type(child).__name__
    return next((tier for prefix, tier in _TIER_OF.items() if name.startswith(prefix)), "host")


def _wrong_name(name: object) -> str:
    return (
        f"kvctl's connector is configured as {name!r}; vLLM switches features off for any name "
        f'but {NAME!r}. Write "kv_connector": "{NAME}", "kv_connector_module_path": "{MODULE}"'
    )


class ConnectorNameError(AttributeError):
    """The module was asked for a connector of another name; the message says what to write."""


def __getattr__(name: str) -> Any:
    # vLLM looks the configured class up here (kv_connector/factory.py, get_connector_class).
    if name.endswith("Connector"):
        raise ConnectorNameError(_wrong_name(name))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
