"""vLLM's MultiConnector with what it forgets, broadcasts or refuses put right.

Only what the children say and are told, and who gets it; which child loads, and what is believed,
is decided elsewhere. Each override names the defect (docs/defects.md) it settles. Where
`_composes` is false everything is upstream's.
"""

from __future__ import annotations

import functools
import re
from copy import copy
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import multi_connector as upstream
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from . import store_fence
from .guard import guarded, logger
from .saves import OwnReports, SaveMap, saves_by_name
from .slots import ChildEvents, ChildHandshakes

# Whether a worker can report that a request's load has failed; from vLLM 0.30.0 on.
FAILS_REQUESTS = hasattr(upstream, "KVConnectorTransferResults")


class Forwarding(upstream.MultiConnector):
    """What several children give reaches those it is meant for."""

    _composes = False  # until the options have been read

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._begin(vllm_config.parallel_config.world_size)

    def _begin(self, ranks: int) -> None:
        self._tails: dict[str, set[int]] = {}
        self._new_saves: dict[str, tuple[int, ...]] = {}
        self._saves = SaveMap()
        self._own_saves: list[tuple[int, str]] = []
        self._own_reports = OwnReports(ranks)

    # Set-up

    @classmethod
    def _get_connector_classes_and_configs(cls, vllm_config: Any) -> list[tuple[type, Any]]:
        """D5: a child may have an ``engine_id`` of its own, which upstream passes on twice.

        Data-parallel engine cores add ``_dp<rank>`` to the engine's id before they build the
        connector (v1/engine/core.py 0.20.2 to 0.33.0); a child's own id must differ as well.
        """
        transfer = vllm_config.kv_transfer_config
        children = transfer.kv_connector_extra_config.get("connectors") or []
        if not any("engine_id" in child for child in children):
            return super()._get_connector_classes_and_configs(vllm_config)
        plain = copy(vllm_config)
        plain.kv_transfer_config = copy(transfer)
        plain.kv_transfer_config.kv_connector_extra_config = {
            **transfer.kv_connector_extra_config,
            "connectors": [
                {name: value for name, value in child.items() if name != "engine_id"}
                for child in children
            ],
        }
        made = super()._get_connector_classes_and_configs(plain)
        rank = re.search(r"_dp\d+$", transfer.engine_id or "")
        for child, (_, config) in zip(children, made, strict=True):
            if own := child.get("engine_id"):
                config.kv_transfer_config.engine_id = own + (rank.group() if rank else "")
        return made

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        # D7: vLLM 0.20.2 asks whether the wrapper has this method, and upstream's has none, so
        # SimpleCPUOffloadConnector stores nothing (simple_kv_offload/manager.py 0.20.2:206).
        for child in self._connectors:
            if hasattr(child, "bind_gpu_block_pool"):
                child.bind_gpu_block_pool(gpu_block_pool)

    def get_handshake_metadata(self) -> Any:
        """D6: what each child wants to send, not only what the first one does."""
        if not self._composes:
            return super().get_handshake_metadata()
        given = {
            index: metadata
            for index, child in enumerate(self._connectors)
            if (metadata := child.get_handshake_metadata()) is not None
        }
        return ChildHandshakes(given) if given else None

    def set_xfer_handshake_metadata(self, metadata: dict[Any, Any]) -> None:
        # What the engine calls up to 0.22.1.
        if not self._hand_out(metadata, "set_xfer_handshake_metadata"):
            super().set_xfer_handshake_metadata(metadata)

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[Any, Any]) -> None:
        # What it calls from 0.24.0 on.
        if not self._hand_out(metadata, "set_xfer_handshake_metadata_pp_aware"):
            super().set_xfer_handshake_metadata_pp_aware(metadata)

    def _hand_out(self, metadata: dict[Any, Any], setter: str) -> bool:
        """D6: gives handshake metadata, by rank, to the children that made it.

        Upstream gives it to all, and the base class's answer to a rank of a later pipeline stage
        is a ValueError: a child without handshakes would keep the engine from starting.
        """
        if not metadata or not all(type(given) is ChildHandshakes for given in metadata.values()):
            return False
        for index, child in enumerate(self._connectors):
            own = {
                rank: given.by_child[index]
                for rank, given in metadata.items()
                if index in given.by_child
            }
            if own:
                getattr(child, setter)(own)
        return True

    # A request's end

    def register_finished_partial_tail(
        self, request: Any, block_ids: Any, partial_tail_offloads: Any
    ) -> bool:
        """D11: a child that accepts a tail reads the request's blocks until it reports."""
        if not self._composes:
            return super().register_finished_partial_tail(request, block_ids, partial_tail_offloads)
        accepted = {
            index
            for index, child in enumerate(self._connectors)
            if child.register_finished_partial_tail(request, block_ids, partial_tail_offloads)
        }
        if accepted:
            self._tails[request.request_id] = accepted
        return bool(accepted)

    def request_finished(self, request: Any, blocks: list[int]) -> Any:
        # vLLM 0.20.2 has no `_aggregate_request_finished`: it does all of it here.
        if not self._composes:
            return super().request_finished(request, blocks)
        return self._aggregate_request_finished(
            request, lambda child: child.request_finished(request, blocks)
        )

    def _aggregate_request_finished(self, request: Any, per_connector_fn: Any) -> Any:
        """D10, D15: who saves is announced by name, and the children's params are joined."""
        if not self._composes:
            return super()._aggregate_request_finished(request, per_connector_fn)
        savers = self._tails.pop(request.request_id, set())
        params: dict[str, Any] | None = None
        for index, child in enumerate(self._connectors):
            saves, own = per_connector_fn(child)
            store_fence.never_ran(child, request.request_id)
            if saves:
                savers.add(index)
            if own is not None:
                params = own if params is None else _joined(params, own)
        if savers:
            self._new_saves[request.request_id] = tuple(sorted(savers))
        self._requests_to_connector.pop(request.request_id, None)
        return bool(savers), params

    def _take_saves(self) -> dict[str, tuple[int, ...]]:
        """Requests that have ended since the last step, and the children that still save them."""
        if not self._new_saves:
            return {}
        saves, self._new_saves = self._new_saves, {}
        return saves

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        super().bind_connector_metadata(connector_metadata)
        if saves := getattr(connector_metadata, "saves", None):
            self._saves.expect(saves)

    def _saved(self, index: int, requests: set[str]) -> None:
        """A child's worker half has saved these; see `saves`."""
        if not requests:
            return
        if not self._composes:
            self._saves.pass_on(r for r in requests if self._last_save(r))
            return
        self._saves.report(index, requests)
        if saves_by_name(self._connectors[index]):
            self._own_saves += [(index, request) for request in requests]

    def _last_save(self, request: str) -> bool:
        """Whether no further child still saves this request: upstream's counter."""
        pending = self._extra_async_saves.pop(request, 0)
        if pending > 1:
            self._extra_async_saves[request] = pending - 1
        return pending == 0

    def _take_own_saves(self) -> list[tuple[int, str]]:
        """What children that must know their own saves have reported since the last step (D9)."""
        if not self._own_saves:
            return []
        own, self._own_saves = self._own_saves, []
        return own

    # A step's output

    def update_connector_output(self, connector_output: Any) -> None:
        """D1, D9: each child sees its own worker metadata, events and, if it must, saves."""
        if not self._composes:
            super().update_connector_output(connector_output)
            return
        output = connector_output
        joined, events = output.kv_connector_worker_meta, output.kv_cache_events
        sent, reports = output.finished_sending, getattr(joined, "own_saves", None)
        own = self._own_reports.add(reports) if reports else {}
        by_child = events.by_child if type(events) is ChildEvents else None
        try:
            for index, child in enumerate(self._connectors):
                if joined is not None:
                    output.kv_connector_worker_meta = joined.metadata[index]
                if by_child is not None:
                    output.kv_cache_events = by_child.get(index)
                if sent or own:
                    output.finished_sending = own.get(index) if saves_by_name(child) else sent
                child.update_connector_output(output)
        finally:
            output.kv_connector_worker_meta, output.kv_cache_events = joined, events
            output.finished_sending = sent

    def get_kv_connector_kv_cache_events(self) -> Any:
        """D1: the events of all children; upstream answers None for them."""
        if not self._composes:
            return super().get_kv_connector_kv_cache_events()
        given = {
            index: events
            for index, child in enumerate(self._connectors)
            if (events := child.get_kv_connector_kv_cache_events())
        }
        return ChildEvents(given) if given else None

    # Statistics

    def get_kv_connector_stats(self) -> Any:
        """D12: the API server dies of statistics of a class that it cannot look up."""
        stats = super().get_kv_connector_stats()
        if stats is None or not self._composes:
            return stats
        for name in [name for name in stats.data if not registered(name)]:
            del stats.data[name]
        return stats if stats.data else None

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any
    ) -> Any:
        made = super().build_prom_metrics(
            vllm_config, metric_types, labelnames, per_engine_labelvalues
        )
        return PromMetrics(
            vllm_config, metric_types, labelnames, per_engine_labelvalues, made._prom_metrics
        )


class PromMetrics(upstream.MultiKVConnectorPromMetrics):
    """D12: upstream's, in the API server, where an exception ends all output of the engine."""

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, stats in transfer_stats_data.items():
            if name in self._prom_metrics:  # up to 0.32.0 upstream asserts this
                self._observe_child(name, stats, engine_idx)

    @guarded
    def _observe_child(self, name: str, stats: Any, engine_idx: int) -> None:
        if isinstance(stats, KVConnectorStats):
            # An engine in one process hands over the objects; up to 0.28.0 upstream reads them
            # as the dict that serialization makes of them.
            stats = stats.to_dict() if hasattr(stats, "to_dict") else {"data": stats.data}
        super().observe({name: stats}, engine_idx)


@functools.cache
def registered(name: str) -> bool:
    """Whether vLLM finds a connector class by this name, as it must to read its statistics."""
    try:
        KVConnectorFactory.get_connector_class_by_name(name)
    except ValueError:
        return False
    return True


def _joined(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Params of two children. Upstream raises on a clash, which ends the engine."""
    if clashes := sorted(set(first) & set(second)):
        _tell_clash(tuple(clashes))
    return {**second, **first}


@functools.cache
def _tell_clash(clashes: tuple[str, ...]) -> None:
    logger.warning(
        "kvctl: two children return the same kv_transfer_params (%s); those of the child that "
        "comes first in the list are used",
        ", ".join(clashes),
    )
