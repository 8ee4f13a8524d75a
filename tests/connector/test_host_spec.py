"""The host tier's spec as the installed vLLM asks for it: a worker, or a handler a direction."""

import inspect
from collections import deque
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from host_caches import PAGE, CPULoadStoreSpec, device, make_caches, pages
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

from kvctl_connector.host_memory import HostMemorySpec
from kvctl_connector.offload_probe import OffloadProbe

# By vLLM's own source: up to 0.24.0, up to 0.28.0, and later.
HANDLERS = hasattr(CPUOffloadingSpec, "get_handlers")
CHUNKS = "self.num_chunks" in inspect.getsource(CPUOffloadingSpec)
NAMES = ("num_chunks" if CHUNKS else "num_blocks",
         "block_size_factor" if HANDLERS else "blocks_per_chunk")  # fmt: skip


@pytest.fixture
def spec() -> Iterator[HostMemorySpec]:
    """Four chunks of two blocks, as vLLM's constructor would have worked it out."""
    made = object.__new__(HostMemorySpec)
    for name, value in zip(NAMES, (4, 2), strict=True):
        setattr(made, name, value)
    yield made
    made.get_worker(None).shutdown()


def connector_worker(spec: HostMemorySpec, caches: Any) -> Any:
    """What vLLM's OffloadingConnector has in a worker once the caches are registered."""
    if not HANDLERS:
        return SimpleNamespace(worker=spec.get_worker(caches), spec=spec)
    from vllm.v1.kv_offload.worker.worker import OffloadingWorker

    worker = OffloadingWorker()
    for source, destination, handler in spec.get_handlers(caches):
        worker.register_handler(source, destination, handler)
    return SimpleNamespace(worker=worker, spec=spec, _jobs={})


def submit(worker: Any, job: int, source: Any, destination: Any) -> None:
    if HANDLERS:
        assert worker.transfer_async(job, (source, destination))
    elif isinstance(destination, CPULoadStoreSpec):
        assert worker.submit_store(job, source, destination)
    else:
        assert worker.submit_load(job, source, destination)


def test_blocks_come_back_through_what_vllm_calls(spec: HostMemorySpec) -> None:
    caches = make_caches(groups=[[0, 1]])
    worker = connector_worker(spec, caches).worker
    rows = CPULoadStoreSpec([3, 1])
    submit(worker, 1, device([4, 5, 6, 7]), rows)
    submit(worker, 2, rows, device([10, 11, 12, 13]))
    worker.wait({1, 2})
    stored, loaded = worker.get_finished()

    assert pages(caches, 0, [10, 11, 12, 13]) == [4, 5, 6, 7]
    assert (stored.job_id, stored.success, stored.transfer_size) == (1, True, 8 * PAGE)
    assert (loaded.job_id, loaded.success, loaded.transfer_size) == (2, True, 8 * PAGE)
    assert worker.get_finished() == []
    if HANDLERS:  # vLLM counts by them
        assert stored.transfer_type == ("GPU", "CPU")
        assert loaded.transfer_type == ("CPU", "GPU")


def test_the_capacity_is_what_vllm_worked_out(spec: HostMemorySpec) -> None:
    worker = connector_worker(spec, make_caches(tensors=1, groups=[[0]])).worker
    submit(worker, 1, device([1, 2]), CPULoadStoreSpec([3]))
    submit(worker, 2, device([1, 2]), CPULoadStoreSpec([4]))
    worker.wait({1, 2})
    assert [result.success for result in worker.get_finished()] == [True, False]


def test_the_probe_sees_both_directions(spec: HostMemorySpec) -> None:
    probe = OffloadProbe("host", 0, 1, out := deque())
    child = connector_worker(spec, make_caches(groups=[[0, 1]]))
    probe.install(child)
    assert probe.missing == []
    if HANDLERS:
        child._jobs.update({1: ("a", True), 2: ("b", False)})  # vLLM 0.20.2 knows it there
    else:
        jobs = {1: SimpleNamespace(req_id="a"), 2: SimpleNamespace(req_id="b")}
        probe.announce(jobs)
    submit(child.worker, 1, device([4, 5]), CPULoadStoreSpec([0]))
    submit(child.worker, 2, CPULoadStoreSpec([0]), device([6, 7]))
    child.worker.wait({1, 2})
    child.worker.get_finished()
    assert [(fact.direction, fact.request, fact.key, fact.bytes) for fact in out] == [
        ("store", "a", "1", 4 * PAGE), ("load", "b", "2", 4 * PAGE),
    ]  # fmt: skip
