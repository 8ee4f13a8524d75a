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
import re
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import multi_connector as upstream
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from . import start_checks
from .choosing import Choosing
from .completion import Released
from .config import ConfigError, Options
from .forwarding import FAILS_REQUESTS
from .guard import logger
from .metadata import Metadata, WorkerMetadata
from .offload_index import OffloadIndex
from .scheduler_half import SchedulerHalf
from .threads import kept_together
from .worker_half import WorkerHalf

NAME = "MultiConnector"
MODULE = "kvctl_connector.connector"
SWITCH = "KVCTL_CONNECTOR"

# Specs of OffloadingConnector that load straight from storage have such a word in their name.
# vLLM's own load through host memory, whatever lies behind it (v1/kv_offload/, 0.20.2 to 0.33.0).
_STORAGE = re.compile("storage|disk|nvme|filesystem|gds", re.IGNORECASE)


class MultiConnector(Choosing):
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
        switched_off = _switched_off()
        self._composes = options.mode == "compose" and not switched_off
        start_checks.listed(transfer)
        start_checks.before_building(
            vllm_config,
            self._get_connector_classes_and_configs(vllm_config),
            kv_cache_config,
            enforced=self._composes,
        )
        on_cpu = vllm_config.device_config.device_type == "cpu"
        pinned = role is KVConnectorRole.WORKER and on_cpu
        with kept_together(_local_rank(vllm_config)) if pinned else contextlib.nullcontext():
            super().__init__(vllm_config, role, kv_cache_config)

        self._worker_half: WorkerHalf | None = None
        self._indexes: dict[int, OffloadIndex] = {}
        if role is KVConnectorRole.SCHEDULER:
            start_checks.after_building(
                transfer, self._connectors, self._ktc_kv_transfer_config, enforced=self._composes
            )
        if switched_off:
            logger.warning("kvctl: %s=off, this is stock MultiConnector", SWITCH)
            return
        tiers = list(map(_tier, self._connectors, self._ktc_kv_transfer_config))
        self._chooses = self._composes and options.tier_policy == "fastest"
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler_half = SchedulerHalf(
                options,
                vllm_config,
                kv_cache_config,
                tiers,
                self._connectors,
                self._ktc_kv_transfer_config,
            )
            if not self._chooses:
                self._hear_offers()
            if self._composes:
                tell = self._scheduler_half.missing
                self._indexes = OffloadIndex.find_all(self._connectors, tell)
        else:
            parallel = vllm_config.parallel_config
            self._worker_half = WorkerHalf(
                tiers,
                self._connectors,
                parallel.rank,
                parallel.world_size,
                options.clock_margin_ms,
                observes=not self._composes,
                by_block=not FAILS_REQUESTS,
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

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        meta = super().build_connector_meta(scheduler_output)
        half = self._scheduler_half
        if half is None:
            return meta
        if scheduler_output.scheduled_new_reqs:
            half.scheduled(scheduler_output.scheduled_new_reqs)
        for index, child in enumerate(meta.metadata):
            # By job from vLLM 0.22.1 on, by request in 0.20.2.
            for stores in ("store_jobs", "reqs_to_store"):
                if announced := getattr(child, stores, None):
                    half.announced(index, announced)
        leases = half.arrivals.take_leases()
        given_up, saves = half.give_up_overdue(), self._take_saves()
        if self._new_loads or leases or given_up or saves:
            meta = Metadata(**vars(meta), loads=self._new_loads, leases=leases, given_up=given_up)
            meta.saves = saves
            self._new_loads = {}
        return meta

    def has_pending_push_work(self) -> bool:
        # An engine without requests takes no steps, and would never hear that a load which was
        # given up has ended.
        half = self._scheduler_half
        holds = half is not None and half.waits.holds
        return holds or bool(super().has_pending_push_work())

    def update_connector_output(self, connector_output: Any) -> None:
        worker_meta = connector_output.kv_connector_worker_meta
        for job in getattr(worker_meta, "failed", ()):
            self._indexes[job.child].failed(job)  # before upstream completes it
        super().update_connector_output(connector_output)
        half = self._scheduler_half
        if half is None:
            return
        received = connector_output.finished_recving
        if isinstance(worker_meta, WorkerMetadata):
            if worker_meta.missing:
                half.missing(worker_meta.missing)
            half.completed(worker_meta.facts, received or (), worker_meta.strays, worker_meta.ended)
        elif received:
            half.completed((), received, 0)

    def request_finished(self, request: Any, blocks: list[int]) -> Any:
        # On vLLM 0.20.2 a request that is aborted before it was queried comes here first, and NIXL
        # tells prefill, wherever its offer points.
        if self._scheduler_half is not None:
            self._scheduler_half.arrived(request)
        return super().request_finished(request, blocks)

    def _aggregate_request_finished(self, request: Any, per_connector_fn: Any) -> Any:
        held, params = super()._aggregate_request_finished(request, per_connector_fn)
        if self._scheduler_half is not None:
            self._choices.pop(request.request_id, None)
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

    def register_cross_layers_kv_cache(self, kv_cache: Any, attn_backend: Any) -> None:
        # What the engine calls instead, up to vLLM 0.28.0, if all children prefer it.
        super().register_cross_layers_kv_cache(kv_cache, attn_backend)
        if self._worker_half is not None:
            self._worker_half.caches_registered()

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        super().bind_connector_metadata(connector_metadata)
        if self._worker_half is not None:
            self._worker_half.bound(
                getattr(connector_metadata, "loads", None),
                getattr(connector_metadata, "leases", None),
                getattr(connector_metadata, "given_up", None),
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
        if self._worker_half is None or FAILS_REQUESTS:
            return super().get_finished(finished_req_ids)
        sent, released = self._collect("get_finished", finished_req_ids)
        return sent or None, released.received or None

    def _collect(self, question: str, finished_req_ids: set[str]) -> tuple[set[str], Released]:
        """Asks every child, and lets pass what is complete."""
        half = self._worker_half
        assert half is not None
        released = Released()
        for index, child in enumerate(self._connectors):
            answer = getattr(child, question)(finished_req_ids)
            if isinstance(answer, tuple):
                sending, receiving, failed = answer[0] or set(), answer[1] or set(), set()
            else:
                sending, receiving = answer.finished_sending, answer.finished_recving
                failed = answer.failed_recving
            half.reported(index, sending, receiving, failed, released)
            self._saved(index, sending)
        half.completion.release_given_up(released)
        if finished_req_ids:
            half.forget(finished_req_ids)
        return self._saves.take(), released

    def get_block_ids_with_load_errors(self) -> set[int]:
        blocks: set[int] = super().get_block_ids_with_load_errors()
        if self._worker_half is None:
            return blocks
        unreadable = self._worker_half.take_unreadable()
        blocks |= self._worker_half.take_unwritten()
        # A failed request says it all. Block ids say less, being unique only within a KV group:
        # of these the scheduler of a model with several groups dies (v1/core/sched/scheduler.py
        # 0.32.0, _handle_invalid_blocks). So only where there is no other way.
        return blocks if FAILS_REQUESTS else blocks | unreadable

    def build_connector_worker_meta(self) -> Any:
        meta = super().build_connector_worker_meta()
        half = self._worker_half
        if half is None:
            return meta
        facts = half.take_facts()
        missing, strays, failed = half.take_missing(), half.take_strays(), half.take_failed()
        ended, own_saves = half.completion.take_ended(), self._take_own_saves()
        if meta is None and not (facts or missing or strays or ended or own_saves or failed):
            return None
        slots = meta.metadata if meta is not None else (None,) * len(self._connectors)
        return WorkerMetadata(slots, facts, missing, strays, ended, own_saves, failed)


def _switched_off() -> bool:
    """Raises ConfigError: the switch says something else, which must not pass for on or off."""
    switch = os.environ.get(SWITCH, "")
    if switch not in ("", "off"):
        raise ConfigError(f'{SWITCH} is "{switch}"; write "off", or leave it out')
    return switch == "off"


def _local_rank(vllm_config: Any) -> int:
    """Of this worker among all of its engine on this machine, data-parallel ranks included."""
    parallel = vllm_config.parallel_config
    replica = getattr(parallel, "data_parallel_rank_local", 0) or 0
    return int(replica * parallel.world_size + parallel.rank)


def _tier(child: Any, config: Any) -> str:
    """Which tier a child serves."""
    if type(child).__name__.startswith("Nixl"):
        return "peer"
    spec = (config.kv_connector_extra_config or {}).get("spec_name")
    return "disk" if _STORAGE.search(str(spec)) else "host"


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
