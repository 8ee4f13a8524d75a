"""A store or load of an offload child that failed: what its index may no longer offer.

Upstream's scheduler half completes each job as if it had succeeded (offloading/scheduler.py,
``update_connector_output``, 0.20.2 to 0.33.0). In front of its manager stand four methods that
know better: blocks that were not written leave the index instead of becoming hits, and blocks
that could not be read leave it too, else a request that is queried again would load them again,
for ever.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from typing import Any

from .bounded import trim
from .guard import logger, shadow
from .offload_failures import FailedJob

try:
    from vllm.v1.kv_offload import base
except ImportError:  # 0.20.2
    from vllm.v1.kv_offload import abstract as base

LIMIT = 65_536  # unreadable keys remembered at once; one forgotten is only tried again

# What ``lookup`` answers for a key that is not there: an enum from 0.26.0 on, a bool before.
_MISS = base.LookupResult.MISS if hasattr(base, "LookupResult") else False


class OffloadIndex:
    """In front of the manager of one offload child, scheduler role.

    While jobs are in flight nothing is to be done: keys of a store are no hits before it is
    complete (v1/kv_offload/cpu/manager.py: ``lookup`` says not ready), and it completes when the
    last rank has reported. So the keys of a job that failed on one rank are remembered until then.

    Attributes:
        missing: what the installed vLLM, or this manager, does not have.
    """

    def __init__(self, connector_scheduler: Any) -> None:
        self.missing: list[str] = []
        self._scheduler = connector_scheduler
        self._manager = manager = connector_scheduler.manager
        self._unwritten: set[Any] = set()
        self._unreadable: OrderedDict[Any, None] = OrderedDict()
        # Where rows are given out: itself, the host tier of several, or behind a filter (0.20.2).
        behind = (getattr(manager, name, None) for name in ("primary_tier", "_backing"))
        self._pool = next(filter(_gives_out_rows, (manager, *behind)), None)
        if not _takes_failure(manager) or not _names_jobs(connector_scheduler):
            self.missing.append("offload_store_failure")
            logger.warning(
                "kvctl: %s of this vLLM cannot be told of a failed store; the engine ends when "
                "one fails, rather than offer blocks that were not written",
                type(manager).__name__,
            )
        self._complete_store, self._complete_load = manager.complete_store, manager.complete_load
        self._lookup = manager.lookup
        manager.complete_store = self.complete_store
        manager.complete_load = self.complete_load
        manager.lookup = self.lookup
        shadow(manager, "reset_cache", self._reset)

    @classmethod
    def find(cls, child: Any) -> OffloadIndex | None:
        """For one child connector; None where it has no such manager."""
        scheduler = getattr(child, "connector_scheduler", None)
        manager = getattr(scheduler, "manager", None)
        wanted = ("complete_store", "complete_load", "lookup")
        if not all(callable(getattr(manager, name, None)) for name in wanted):
            return None
        return cls(scheduler)

    @classmethod
    def find_all(
        cls, children: list[Any], tell: Callable[[list[str]], None]
    ) -> dict[int, OffloadIndex]:
        """By the index of the child; `tell` hears of the hooks that are missing."""
        found = {at: index for at, child in enumerate(children) if (index := cls.find(child))}
        for index in found.values():
            tell(index.missing)
        return found

    def failed(self, job: FailedJob) -> None:
        """A job failed on a rank; call it before upstream sees the same step's output.

        Raises:
            RuntimeError: a store failed, and the manager cannot be told.
        """
        if job.store and self.missing:
            raise RuntimeError(
                "a store of the offload tier failed, and its manager "
                f"({type(self._manager).__name__}) has no way to take its blocks out of the index: "
                "the engine ends, rather than answer from blocks that were not written"
            )
        keys = self._keys_of(job)
        if job.store:
            self._unwritten.update(keys)
            return
        self._unreadable.update(dict.fromkeys(keys))
        trim(self._unreadable, LIMIT)

    def complete_store(self, keys: Collection[Any], *args: Any, **kwargs: Any) -> Any:
        """One call for one job, as upstream counts them (v1/kv_offload/tiering/manager.py)."""
        failed = bool(self._unwritten) and not self._unwritten.isdisjoint(keys)
        if failed or self._too_early(keys):
            self._unwritten.difference_update(keys)
            result = self._complete_store(keys, *args, **{**kwargs, "success": False})
            self._forget_events(keys)
            return result
        for key in keys if self._unreadable else ():
            self._unreadable.pop(key, None)  # written anew
        return self._complete_store(keys, *args, **kwargs)

    def complete_load(self, keys: Collection[Any], *args: Any, **kwargs: Any) -> Any:
        result = self._complete_load(keys, *args, **kwargs)
        if self._unreadable:
            self._drop([key for key in keys if key in self._unreadable])
        return result

    def lookup(self, key: Any, *args: Any, **kwargs: Any) -> Any:
        if key in self._unreadable:
            self._drop([key])  # if others were still reading it when its load failed
            return _MISS
        return self._lookup(key, *args, **kwargs)

    def _too_early(self, keys: Collection[Any]) -> bool:
        """Whether nobody can know yet if these were written.

        0.20.2 completes the stores of a preempted request when it asks the workers to wait for
        them (offloading/scheduler.py, ``build_connector_meta``): they are then not offered.
        """
        being_stored = getattr(self._scheduler, "_reqs_being_stored", {})
        return any(keys is those for those in being_stored.values())

    def _reset(self) -> None:
        self._unwritten.clear()
        self._unreadable.clear()

    def _keys_of(self, job: FailedJob) -> Iterable[Any]:
        """The keys of a job; none if a reset of the cache has forgotten it."""
        jobs = getattr(self._scheduler, "_jobs", None)
        if jobs is not None:  # from 0.22.1 on
            status = jobs.get(job.name)
            return () if status is None else status.keys
        table = "_reqs_being_stored" if job.store else "_reqs_being_loaded"
        return list(getattr(self._scheduler, table).get(job.name, ()))

    def _drop(self, keys: list[Any]) -> None:
        """Takes keys that nobody reads out of the index, so that they can be stored again.

        As an eviction does (v1/kv_offload/cpu/manager.py, ``prepare_store``). Without a pool of
        known form they stay, and are merely never hit.
        """
        pool = self._pool
        if pool is None:
            return
        unit = "chunk" if hasattr(pool, "_free_chunk") else "block"  # chunks from 0.30.0 on
        evictable = f"_num_evictable_cache_{unit}s"  # counted from 0.24.0 on
        dropped = []
        for key in keys:
            row = pool._policy.get(key)
            if row is None or row.ref_cnt != 0:
                continue
            if hasattr(pool, evictable):
                pool._policy.mark_non_evictable(key)
                setattr(pool, evictable, getattr(pool, evictable) - 1)
            pool._policy.remove(key)
            getattr(pool, f"_free_{unit}")(row)
            dropped.append(key)
        if dropped and pool.events is not None:
            event = base.OffloadingEvent(keys=dropped, medium=pool.medium, removed=True)
            pool.events.append(event)

    def _forget_events(self, keys: Collection[Any]) -> None:
        """The descriptions of blocks whose BlockStored will never come (offloading/events.py:
        kept until their removal, and only what was stored is removed). From 0.33.0 on the manager
        tells the tracker itself."""
        if hasattr(base.OffloadingEvent, "metadata_only"):
            return
        tracker = getattr(self._scheduler, "_events_tracker", None)
        pending = getattr(tracker, "_pending_event_metadata", None) or {}
        for key in keys:
            described = pending.get(key)
            if described is None:
                continue
            homes = getattr(described, "active_residencies", None)  # from 0.30.0 on
            if homes is not None:
                homes.discard((getattr(self._pool, "medium", None), None))
            if not homes:
                del pending[key]


def _gives_out_rows(manager: Any) -> bool:
    """Whether it is of the form of CPUOffloadingManager (v1/kv_offload/cpu/manager.py)."""
    free = hasattr(manager, "_free_chunk") or hasattr(manager, "_free_block")
    return free and hasattr(manager, "_policy") and hasattr(manager, "events")


def _takes_failure(manager: Any) -> bool:
    parameters = inspect.signature(manager.complete_store).parameters
    return "success" in parameters or any(
        parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()
    )


def _names_jobs(scheduler: Any) -> bool:
    return hasattr(scheduler, "_jobs") or hasattr(scheduler, "_reqs_being_stored")
