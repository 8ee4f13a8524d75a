"""Watches every store and load of one worker's OffloadingConnector.

``connector_worker.worker`` is the engine of the copies: ``submit_store`` and ``submit_load``
start one job each (vllm/v1/kv_offload/base.py, from 0.26.0 on), ``transfer_async`` either kind
(v1/kv_offload/worker/worker.py, up to 0.24.0). ``get_finished`` returns the jobs that ended, with
bytes and the time of the copy itself. It exists once the caches are registered, so the probe is
installed after that.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .facts import Fact
from .guard import Proxy, guarded


@dataclass
class _Job:
    direction: str
    submitted: int  # Unix ns


@dataclass
class OffloadProbe:
    """The store and load jobs of one worker.

    Attributes:
        tier: ``host`` or ``disk``.
        rank, ranks: of this worker, and how many report each job.
        out: facts of jobs that ended; the worker half ships them with the step.
        missing: hooks that the installed vLLM does not have.
    """

    tier: str
    rank: int
    ranks: int
    out: deque[Fact]
    missing: list[str] = field(default_factory=list)
    _jobs: dict[int, _Job] = field(default_factory=dict)
    _requests: dict[int, str] = field(default_factory=dict)

    def install(self, connector_worker: Any) -> None:
        """Puts the probe in front of the worker that copies; call it after register_kv_caches."""
        worker: Any = getattr(connector_worker, "worker", None)
        if callable(getattr(worker, "submit_store", None)):
            starts = {
                "submit_store": self._watch_submit(worker.submit_store, "store"),
                "submit_load": self._watch_submit(worker.submit_load, "load"),
            }
        elif callable(getattr(worker, "transfer_async", None)):
            # Up to 0.20.2 the worker numbers the jobs itself, so it also knows whose they are.
            owners = getattr(connector_worker, "_jobs", {})
            starts = {"transfer_async": self._watch_transfer(worker.transfer_async, owners)}
        else:
            self.missing.append("offload_worker")
            return
        spec = getattr(connector_worker, "spec", None)
        if getattr(spec, "replicated_layout", False):
            self.ranks = 1  # one rank writes and reads for all (OFF/worker.py 0.32.0:50)
        finished = self._watch_finished(worker.get_finished)
        connector_worker.worker = Proxy(worker, {**starts, "get_finished": finished})

    @guarded
    def announce(self, jobs: Mapping[int, Any]) -> None:
        """Learns which request each job belongs to, from the child's metadata."""
        for job, entry in jobs.items():
            self._requests[job] = entry.req_id

    def _watch_submit(self, original: Any, direction: str) -> Any:
        def submit(job_id: int, *args: Any, **kwargs: Any) -> Any:
            self._jobs[job_id] = _Job(direction, time.time_ns())
            return original(job_id, *args, **kwargs)

        return submit

    def _watch_transfer(self, original: Any, owners: Mapping[int, tuple[str, bool]]) -> Any:
        @guarded
        def note(job_id: int, spec: Any) -> None:
            direction = "store" if spec[0].medium() == "GPU" else "load"
            self._jobs[job_id] = _Job(direction, time.time_ns())
            if job_id in owners:
                self._requests[job_id] = owners[job_id][0]

        def transfer_async(job_id: int, spec: Any) -> Any:
            note(job_id, spec)
            return original(job_id, spec)

        return transfer_async

    def _watch_finished(self, original: Any) -> Any:
        @guarded
        def note(results: Any) -> None:
            now = time.time_ns()
            for result in results:
                job = self._jobs.pop(result.job_id, None)
                if job is not None:
                    self.out.append(self._fact(job, result, now))

        def get_finished(*args: Any, **kwargs: Any) -> Any:
            results = original(*args, **kwargs)
            if results:
                note(results)
            return results

        return get_finished

    def _fact(self, job: _Job, result: Any, now: int) -> Fact:
        end = now
        if result.transfer_time is not None:
            end = min(now, job.submitted + int(result.transfer_time * 1e9))
        return Fact(
            rank=self.rank, ranks=self.ranks, tier=self.tier, direction=job.direction,
            key=str(result.job_id), request=self._requests.pop(result.job_id, ""),
            start=job.submitted, end=end,
            # What a failed job has moved is of no use to anybody, and mostly not known.
            bytes=int(result.transfer_size or 0) if result.success else 0,
            outcome="ok" if result.success else "failed",
            # Upstream's own results do not say where and why; ours do (offload_failures.py).
            phase="" if result.success else getattr(result, "phase", "move"),
            reason="" if result.success else getattr(result, "reason", "unknown"),
        )  # fmt: skip
