"""The host tier's worker in the form that vLLM up to 0.24.0 asks for: a handler a direction.

vLLM registers each handler for the kinds of source and destination that it copies between, and
asks all of them for what has finished (v1/kv_offload/worker/worker.py 0.20.2 to 0.24.0).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from vllm.v1.kv_offload.cpu.spec import CPULoadStoreSpec, GPULoadStoreSpec
from vllm.v1.kv_offload.worker.worker import OffloadingHandler

from .host_memory import HostMemoryWorker

Kinds = dict[int, tuple[str, str]]  # job → kinds of its source and its destination


def handlers(worker: HostMemoryWorker) -> Iterator[tuple[type, type, HostMemoryHandler]]:
    """Two handlers over one worker, each with the kinds of its source and its destination."""
    kinds: Kinds = {}
    yield GPULoadStoreSpec, CPULoadStoreSpec, HostMemoryHandler(worker, worker.submit_store, kinds)
    yield CPULoadStoreSpec, GPULoadStoreSpec, HostMemoryHandler(worker, worker.submit_load, kinds)


class HostMemoryHandler(OffloadingHandler):
    """One direction.

    What has finished, whichever of the two vLLM asks first tells for both.

    Args:
        submit: starts a job in this direction.
        kinds: of the jobs of both directions that have not finished.
    """

    def __init__(
        self, worker: HostMemoryWorker, submit: Callable[[int, Any, Any], bool], kinds: Kinds
    ) -> None:
        self._worker = worker
        self._submit = submit
        self._kinds = kinds

    def transfer_async(self, job_id: int, spec: tuple[Any, Any]) -> bool:
        source, destination = spec
        self._kinds[job_id] = (source.medium(), destination.medium())
        return self._submit(job_id, source, destination)

    def get_finished(self) -> list[Any]:
        # The kinds are what vLLM counts bytes and times by.
        return [
            dataclasses.replace(result, transfer_type=self._kinds.pop(result.job_id))
            for result in self._worker.get_finished()
        ]

    def wait(self, job_ids: set[int]) -> None:
        self._worker.wait(job_ids)

    def shutdown(self) -> None:
        self._worker.shutdown()
