"""A host-memory tier for vLLM's CPU platform, as an offloading spec.

vLLM's own offload workers refuse the CPU platform ("only supported on CUDA-alike and XPU GPUs",
v1/kv_offload/cpu/spec.py 0.32.0). This spec keeps upstream's manager, so lookups, eviction and
capacity are the real ones, and copies between the KV cache and host buffers in a thread of its
own. Configured on the OffloadingConnector child: ``"spec_name": "HostMemorySpec",
"spec_module_path": "kvctl_connector.host_memory"``.

What vLLM asks a spec for differs: one worker for both directions from 0.26.0 on, a handler for
each direction before (host_handlers.py). Both copy in the same way, here.
"""

from __future__ import annotations

import errno
import functools
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

from .offload_failures import Ended

try:
    from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
except ImportError:  # up to vLLM 0.24.0
    from vllm.v1.kv_offload.worker.worker import TransferResult

    OffloadingWorker = object


@dataclass(frozen=True)
class _Job:
    number: int
    copy: Callable[[], int]  # returns the bytes it moved
    bytes: int  # that it has to move


class HostMemoryWorker(OffloadingWorker):
    """Copies blocks between the KV cache and host memory, in order, in one thread.

    The engine's step only enqueues and collects. The thread inherits the cores of the worker's
    main thread, which are not those that run the model.

    Args:
        kv_caches: ``CanonicalKVCaches``: tensors of shape (blocks, page bytes), int8, and per KV
            group the tensors that hold it.
        chunks: capacity, in chunks of `blocks_per_chunk` blocks.
    """

    def __init__(self, kv_caches: Any, chunks: int, blocks_per_chunk: int) -> None:
        self._device = [cache.tensor.numpy() for cache in kv_caches.tensors]
        self._host = [
            np.empty((chunks * blocks_per_chunk, pages.shape[1]), pages.dtype)
            for pages in self._device
        ]
        for rows in self._host:
            rows.fill(0)  # touched here, so that no store pays for the first use of a page
        groups = kv_caches.group_data_refs
        self._tensors_of_group = [
            sorted({ref.tensor_idx for ref in group})
            if len(groups) > 1
            else list(range(len(self._device)))
            for group in groups
        ]
        self._blocks_per_chunk = blocks_per_chunk
        self._jobs: deque[_Job] = deque()
        self._unfinished: set[int] = set()
        self._results: list[TransferResult | Ended] = []
        self._changed = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="kvctl-host-memory", daemon=True)
        self._thread.start()

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """KV cache → host memory. The forward that wrote the blocks is over: upstream submits
        stores one step late (OFF/worker.py 0.32.0, prepare_store_kv)."""
        copy = functools.partial(self._copy, src_spec, dst_spec, to_host=True)
        return self._submit(_Job(job_id, copy, self._size(src_spec)))

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, **_: Any) -> bool:
        """Host memory → KV cache."""
        copy = functools.partial(self._copy, dst_spec, src_spec, to_host=False)
        return self._submit(_Job(job_id, copy, self._size(dst_spec)))

    def get_finished(self) -> list[TransferResult | Ended]:
        """The jobs that ended since the last call; a failed one says why."""
        if not self._results:
            return []
        with self._changed:
            finished, self._results = self._results, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Blocks until the jobs have ended: their blocks are about to be used again."""
        with self._changed:
            self._changed.wait_for(lambda: self._unfinished.isdisjoint(job_ids))

    def shutdown(self) -> None:
        """Ends the thread after the copies that were submitted."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join(timeout=10)

    def _submit(self, job: _Job) -> bool:
        with self._changed:
            self._jobs.append(job)
            self._unfinished.add(job.number)
            self._changed.notify_all()
        return True

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._stopping)
                if not self._jobs:
                    return
                job = self._jobs.popleft()
            result = self._do(job)
            with self._changed:
                self._results.append(result)
                self._unfinished.discard(job.number)
                self._changed.notify_all()

    def _do(self, job: _Job) -> TransferResult | Ended:
        """One copy; a failed one is told as such and not tried again."""
        began = time.perf_counter()
        try:
            moved = job.copy()
            if moved != job.bytes:
                raise OSError(errno.EIO, f"{moved} of {job.bytes} bytes were copied")
        except Exception as error:
            return Ended.failed(job.number, error)
        return TransferResult(
            job_id=job.number,
            success=True,
            transfer_size=moved,
            transfer_time=time.perf_counter() - began,
        )

    def _size(self, device: Any) -> int:
        """Bytes of the blocks of a ``GPULoadStoreSpec``."""
        return sum(
            count * self._device[tensor].shape[1]
            for group, count in enumerate(device.group_sizes)
            for tensor in self._tensors_of_group[group]
        )

    def _copy(self, device: Any, host: Any, *, to_host: bool) -> int:
        """Copies the blocks of a ``GPULoadStoreSpec`` to or from the chunks of its counterpart."""
        moved = 0
        for group, (blocks, rows) in enumerate(self._rows(device, host)):
            for tensor in self._tensors_of_group[group]:
                pages, stored = self._device[tensor], self._host[tensor]
                for block, row, count in _runs(blocks, rows):
                    here, there = pages[block : block + count], stored[row : row + count]
                    if len(here) != count or len(there) != count:
                        # A slice past the end is short, and numpy would copy nothing, silently.
                        raise IndexError(f"blocks {block}+{count} or rows {row}+{count}")
                    if to_host:
                        there[:] = here
                    else:
                        here[:] = there
                    moved += here.nbytes
        return moved

    def _rows(self, device: Any, host: Any) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Per KV group: the blocks, and the host row of each.

        A chunk holds ``blocks_per_chunk`` rows; a group may begin inside its first chunk
        (``block_indices``, v1/kv_offload/base.py, GPULoadStoreSpec).
        """
        size = self._blocks_per_chunk
        blocks, chunks = np.asarray(device.block_ids), np.asarray(host.block_ids)
        first_block = first_chunk = 0
        for count, index in zip(device.group_sizes, device.block_indices, strict=True):
            offset = index % size
            used = -(-(offset + count) // size) if count else 0
            steps = np.arange(offset, offset + count)
            own = chunks[first_chunk : first_chunk + used]
            rows = own[steps // size] * size + steps % size if count else steps
            yield blocks[first_block : first_block + count], rows
            first_block += count
            first_chunk += used


def _runs(blocks: np.ndarray, rows: np.ndarray) -> Iterator[tuple[int, int, int]]:
    """(first block, first row, length) of the stretches that are consecutive on both sides."""
    if not len(blocks):
        return
    breaks = np.flatnonzero((np.diff(blocks) != 1) | (np.diff(rows) != 1)) + 1
    starts = [0, *breaks.tolist(), len(blocks)]
    for start, end in itertools.pairwise(starts):
        yield int(blocks[start]), int(rows[start]), end - start


class HostMemorySpec(CPUOffloadingSpec):
    """Upstream's CPU offloading spec, with a worker that runs without an accelerator."""

    worker_class = HostMemoryWorker
    _worker: HostMemoryWorker | None = None

    def get_worker(self, kv_caches: Any) -> HostMemoryWorker:
        """The worker that copies; one per process."""
        if self._worker is None:
            # Chunks are called blocks up to 0.28.0, and their size a factor up to 0.24.0.
            chunks = self.num_chunks if hasattr(self, "num_chunks") else self.num_blocks
            size = getattr(self, "blocks_per_chunk", None) or self.block_size_factor
            self._worker = self.worker_class(kv_caches, chunks, size)
        return self._worker

    def get_handlers(self, kv_caches: Any) -> Iterator[tuple[type, type, Any]]:
        """The same as two handlers, each with the kinds of its source and its destination."""
        from .host_handlers import handlers

        return handlers(self.get_worker(kv_caches))
