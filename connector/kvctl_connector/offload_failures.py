"""A store or load of an offload child that fails is survived: the worker's part.

Upstream's worker half asserts that each job was submitted and has succeeded (offloading/worker.py,
0.20.2 to 0.33.0: ``start_kv_transfers``, ``handle_preemptions``, ``get_finished``), so one EIO
kills the engine. Only to hide a failure from it would be worse: its scheduler half completes a
store without asking whether it succeeded, and the next lookup hits blocks that nobody wrote.

Here a failure of any form becomes a result that says so; the probe sees it; then upstream is told
that the job has ended, so that its books stay right, and we keep what it does not ask for: for a
load its request and blocks, for the scheduler half the job (offload_index.py).
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from .guard import Proxy, logger

HOOK = "offload_failures"  # counted as missing where upstream's assertion has to stay

# submit_*: from 0.26.0 on; transfer_async: before (v1/kv_offload/worker/worker.py).
_SUBMITS = ("submit_store", "submit_load", "transfer_async")


class FailedJob(NamedTuple):
    """One job of an offload child that failed on one rank, as the scheduler half is told.

    Attributes:
        child: index of the child connector.
        store: else it was a load.
        name: the number of the job; in 0.20.2, whose scheduler half knows requests only, the
            request.
    """

    child: int
    store: bool
    name: int | str


@dataclass(frozen=True)
class Ended:
    """A ``TransferResult`` of ours, for any release (v1/kv_offload/base.py; before 0.26.0
    worker/worker.py), with why and when it failed. Without size and time upstream adds nothing
    to its own statistics."""

    job_id: int
    success: bool = True
    transfer_size: int | None = None
    transfer_time: float | None = None
    transfer_type: tuple[str, str] | None = None
    phase: str = "move"
    reason: str = "unknown"
    cause: str = "no cause given"

    @classmethod
    def failed(cls, job: int, error: Exception, phase: str = "move") -> Ended:
        """The result of a job that ended in an exception."""
        cause = f"{type(error).__name__}: {error}"
        return cls(job, success=False, phase=phase, reason=reason_of(error), cause=cause)


def reason_of(error: Exception) -> str:
    """The reason, of ``semconv.REASONS``, that an exception of a copy stands for."""
    if not isinstance(error, OSError):
        return "unknown"
    return "no_space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "io_error"


@dataclass(frozen=True)
class _Job:
    """A job in flight. `blocks`: where a load writes to, device block ids; None for a store.

    `request`: who waits for a load. None for a load that upstream waits for before the forward
    (0.33.0, ``sync``): its request is running already.
    """

    name: int | str
    request: str | None = None
    blocks: Any = None


class OffloadFailures:
    """The failed jobs of one worker's offload child.

    Args:
        child: index of the child connector.
        by_block: whether failed loads of waiting requests are told by their blocks too. Those of
            running requests are told by nothing else.

    Attributes:
        missing: hooks that the installed vLLM does not have; then its assertions stay.
    """

    def __init__(self, child: int, *, by_block: bool) -> None:
        self.missing: list[str] = []
        self._child = child
        self._by_block = by_block
        self._connector_worker: Any = None
        self._jobs: dict[int, _Job] = {}
        self._never_begun: list[Ended] = []
        self._doubtful: dict[int, Exception] = {}
        self._failed: set[FailedJob] = set()
        self._requests: set[str] = set()
        self._blocks: set[int] = set()
        self._told: set[tuple[str, str]] = set()

    def install(self, connector_worker: Any, between: Callable[[Any], None]) -> None:
        """Goes around the worker that copies; call it after ``register_kv_caches``.

        `between` is called with the connector worker, to put in front of its worker what is to
        see failures as results.
        """
        worker: Any = getattr(connector_worker, "worker", None)
        submits = [name for name in _SUBMITS if callable(getattr(worker, name, None))]
        # _load_jobs: job → request, from 0.22.1 on; _jobs: job → (request, is it a store), before.
        knows = hasattr(connector_worker, "_load_jobs") or hasattr(connector_worker, "_jobs")
        if not submits or not knows:
            self.missing.append(HOOK)
            between(connector_worker)
            return
        self._connector_worker = connector_worker
        connector_worker.worker = Proxy(
            worker,
            {
                **{name: self._submitting(getattr(worker, name)) for name in submits},
                "get_finished": self._collecting(worker.get_finished),
                "wait": self._waiting(worker.wait),
            },
        )
        between(connector_worker)
        seen = connector_worker.worker
        connector_worker.worker = Proxy(
            seen, {"get_finished": self._acknowledging(seen.get_finished)}
        )

    def take_failed(self) -> set[FailedJob]:
        """The jobs that failed here since the last call."""
        failed, self._failed = self._failed, set()
        return failed

    def take_blocks(self) -> set[int]:
        """The blocks that loads since the last call have left unwritten, or half written."""
        blocks, self._blocks = self._blocks, set()
        return blocks

    def failed_of(self, received: set[str]) -> set[str]:
        """The requests, among those whose load has ended, whose load failed; told once."""
        failed = self._requests & received
        self._requests -= failed
        return failed

    def _submitting(self, original: Any) -> Any:
        def submit(job_id: int, *specs: Any, **options: Any) -> bool:
            self._jobs[job_id] = self._describe(job_id, specs)
            try:
                if original(job_id, *specs, **options):
                    return True
                ended = Ended(job_id, success=False, phase="post", cause="the worker refused it")
            except Exception as error:
                ended = Ended.failed(job_id, error, "post")
            self._never_begun.append(ended)
            return True

        return submit

    def _describe(self, number: int, specs: tuple[Any, ...]) -> _Job:
        loads = getattr(self._connector_worker, "_load_jobs", None)
        name: int | str = number
        if loads is None:
            name, store = self._connector_worker._jobs[number]
            request = None if store else str(name)
        else:
            request, store = loads.get(number), number not in loads
        if store:
            return _Job(name)
        # Source and target: two arguments, or one pair (transfer_async).
        target = (specs[0] if len(specs) == 1 else specs)[1]
        return _Job(name, request, target.block_ids)

    def _collecting(self, original: Any) -> Any:
        def get_finished(*args: Any, **kwargs: Any) -> list[Any]:
            try:
                results = original(*args, **kwargs)
            except Exception as error:
                # Which jobs have ended is unknown, and they may be copying still: they stay in
                # flight, with their blocks, until a later call tells.
                self._tell("report", reason_of(error), repr(error))
                results = []
            if self._doubtful:
                results = [self._doubt(result) for result in results]
            if self._never_begun:
                results = [*self._never_begun, *results]
                self._never_begun = []
            return results  # type: ignore[no-any-return]

        return get_finished

    def _doubt(self, result: Any) -> Any:
        error = self._doubtful.pop(result.job_id, None)
        return result if error is None else Ended.failed(result.job_id, error)

    def _waiting(self, original: Any) -> Any:
        def wait(job_ids: set[int]) -> None:
            never_begun = {ended.job_id for ended in self._never_begun}
            begun = {job for job in job_ids if job in self._jobs} - never_begun
            try:
                original(begun)
            except Exception as error:
                if any(self._feeds_this_step(job) for job in begun):
                    raise  # the forward would run over what is still being copied
                # What upstream does next may write where these jobs read: when they end they
                # count as failed, whatever they say.
                self._doubtful.update(dict.fromkeys(begun, error))

        return wait

    def _feeds_this_step(self, number: int) -> bool:
        job = self._jobs[number]
        return job.blocks is not None and job.request is None

    def _acknowledging(self, seen: Any) -> Any:
        def get_finished(*args: Any, **kwargs: Any) -> list[Any]:
            results = seen(*args, **kwargs)
            return [self._acknowledge(result) for result in results] if results else results

        return get_finished

    def _acknowledge(self, result: Any) -> Any:
        job = self._jobs.pop(result.job_id, None)
        if result.success or job is None:
            return result
        store = job.blocks is None
        self._failed.add(FailedJob(self._child, store, job.name))
        if job.request is not None:
            self._requests.add(job.request)
        if not store and (self._by_block or job.request is None):
            self._blocks.update(map(int, job.blocks))
        self._tell(
            "store" if store else "load",
            getattr(result, "reason", "unknown"),
            getattr(result, "cause", "no cause given"),
        )
        return Ended(result.job_id)

    def _tell(self, what: str, reason: str, cause: str) -> None:
        if (what, reason) not in self._told:
            self._told.add((what, reason))
            logger.warning(
                "kvctl: a %s of the offload tier failed (%s, %s). %s This is logged once; further "
                "ones are counted in kvctl.transfer.failures",
                what, reason, cause, _CONSEQUENCE[what],
            )  # fmt: skip


_CONSEQUENCE = {
    "store": "Its blocks are not offered from there.",
    "load": "Its request is recomputed, or failed if kv_load_failure_policy says so.",
    "report": "The jobs in flight wait for the next one.",
}
