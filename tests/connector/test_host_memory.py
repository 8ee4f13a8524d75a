"""The host tier's worker on real vLLM structures, without an engine."""

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from host_caches import PAGE, CPULoadStoreSpec, device, make_caches, pages

from kvctl_connector.host_memory import HostMemoryWorker


@pytest.fixture
def make_worker() -> Iterator[Any]:
    workers: list[HostMemoryWorker] = []

    def make(caches: Any, *, chunks: int = 8, blocks_per_chunk: int = 1) -> HostMemoryWorker:
        workers.append(HostMemoryWorker(caches, chunks, blocks_per_chunk))
        return workers[-1]

    yield make
    for worker in workers:
        worker.shutdown()


def run(worker: HostMemoryWorker, job: int) -> Any:
    worker.wait({job})
    (result,) = worker.get_finished()
    assert result.job_id == job
    return result


@pytest.mark.parametrize("blocks", [[3], [4, 5, 6], [9, 2, 7], [1, 2, 9, 10, 4]])
def test_blocks_come_back_as_they_were(make_worker: Any, blocks: list[int]) -> None:
    caches = make_caches(groups=[[0, 1]])
    worker = make_worker(caches)
    rows = [5, 0, 6, 7, 2][: len(blocks)]
    worker.submit_store(1, device(blocks), CPULoadStoreSpec(rows))
    stored = run(worker, 1)
    assert (stored.success, stored.transfer_size) == (True, 2 * PAGE * len(blocks))
    for cache in caches.tensors:
        cache.tensor.zero_()

    elsewhere = [block + 5 for block in blocks]
    worker.submit_load(2, CPULoadStoreSpec(rows), device(elsewhere), expedited=False)
    assert run(worker, 2).success

    assert pages(caches, 0, elsewhere) == blocks
    assert pages(caches, 1, elsewhere) == [16 + block for block in blocks]
    untouched = sorted(set(range(16)) - set(elsewhere))
    assert pages(caches, 0, untouched) == [0] * len(untouched)


def test_a_load_that_begins_inside_a_chunk(make_worker: Any) -> None:
    caches = make_caches(tensors=1, groups=[[0]])
    worker = make_worker(caches, blocks_per_chunk=3)
    worker.submit_store(1, device([0, 1, 2, 3, 4, 5]), CPULoadStoreSpec([6, 1]))
    run(worker, 1)

    # Blocks 2 to 4 of the request: the last row of the first chunk, two of the second.
    worker.submit_load(2, CPULoadStoreSpec([6, 1]), device([13, 14, 15], first=[2]))
    run(worker, 2)

    assert pages(caches, 0, [13, 14, 15]) == [2, 3, 4]


def test_groups_touch_their_own_tensors_only(make_worker: Any) -> None:
    caches = make_caches(groups=[[0], [1]])
    worker = make_worker(caches)
    both = device([1, 2, 7], sizes=[2, 1])
    worker.submit_store(1, both, CPULoadStoreSpec([0, 1, 2]))
    assert run(worker, 1).transfer_size == 3 * PAGE
    worker.submit_load(2, CPULoadStoreSpec([0, 1, 2]), device([11, 12, 13], sizes=[2, 1]))
    run(worker, 2)

    assert pages(caches, 0, [11, 12, 13]) == [1, 2, 13]
    assert pages(caches, 1, [11, 12, 13]) == [16 + 11, 16 + 12, 16 + 7]


def test_a_group_may_be_empty(make_worker: Any) -> None:
    caches = make_caches(groups=[[0], [1]])
    worker = make_worker(caches)
    worker.submit_store(1, device([4], sizes=[0, 1]), CPULoadStoreSpec([3]))
    assert run(worker, 1).transfer_size == PAGE


def test_jobs_run_in_order_and_wait_covers_only_what_it_is_asked_for(make_worker: Any) -> None:
    caches = make_caches(tensors=1, groups=[[0]])
    worker = make_worker(caches)
    for job in range(20):
        worker.submit_store(job, device([job % 16]), CPULoadStoreSpec([0]))
    worker.wait({3})
    worker.wait(set(range(20)))
    assert [result.job_id for result in worker.get_finished()] == list(range(20))
    assert worker.get_finished() == []
    worker.submit_load(20, CPULoadStoreSpec([0]), device([8]))
    run(worker, 20)
    assert pages(caches, 0, [8]) == [3]  # the last store was of block 19 % 16


def test_a_copy_that_cannot_be_done_is_reported_and_the_next_one_runs(make_worker: Any) -> None:
    worker = make_worker(make_caches(groups=[[0, 1]]), chunks=2)
    worker.submit_store(1, device([0]), CPULoadStoreSpec([99]))
    failed = run(worker, 1)
    assert (failed.success, failed.transfer_size) == (False, None)
    worker.submit_store(2, device([0]), CPULoadStoreSpec([1]))
    assert run(worker, 2).success


def test_shutdown_finishes_what_was_submitted_and_ends_the_thread() -> None:
    worker = HostMemoryWorker(make_caches(groups=[[0, 1]]), 8, 1)
    for job in range(50):
        worker.submit_store(job, device([1, 2]), CPULoadStoreSpec([1, 2]))
    worker.shutdown()
    assert len(worker.get_finished()) == 50
    assert "kvctl-host-memory" not in {thread.name for thread in threading.enumerate()}


def test_rows_of_chunks_match_a_plain_loop(make_worker: Any) -> None:
    random = np.random.default_rng(7)
    for _ in range(200):
        size = int(random.integers(1, 5))
        counts = [int(n) for n in random.integers(0, 6, size=2)]
        first = [int(n) for n in random.integers(0, 9, size=2)]
        used = [-(-(f % size + n) // size) if n else 0 for f, n in zip(first, counts, strict=True)]
        chunks = random.permutation(40)[: sum(used)].tolist()
        blocks = list(range(sum(counts)))
        expected = []
        for group, (count, index) in enumerate(zip(counts, first, strict=True)):
            own = chunks[sum(used[:group]) :]
            expected += [
                own[(index % size + i) // size] * size + (index % size + i) % size
                for i in range(count)
            ]
        worker = make_worker(make_caches(groups=[[0], [1]]), chunks=1, blocks_per_chunk=size)
        rows = worker._rows(device(blocks, sizes=counts, first=first), CPULoadStoreSpec(chunks))
        assert [row for _, group in rows for row in group.tolist()] == expected
        worker.shutdown()
