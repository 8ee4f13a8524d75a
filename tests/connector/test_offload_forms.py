"""Failed jobs in the forms that other releases, managers and specs give them: fakes, each of one
form (the real ones of the installed release are in test_offload_failures.py)."""

import errno
from collections import deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvctl_connector.facts import Fact
from kvctl_connector.metadata import WorkerMetadata
from kvctl_connector.offload_failures import Ended, FailedJob, OffloadFailures, reason_of
from kvctl_connector.offload_index import OffloadIndex
from kvctl_connector.offload_probe import OffloadProbe


class FakeOffloadWorker:
    """A worker of 0.26.0 and later; `failing` raise, `results` are what it reports next."""

    def __init__(self) -> None:
        self.results: list[Any] = []
        self.failing: set[str] = set()
        self.waited: list[set[int]] = []

    def submit_store(self, job_id: int, src: Any, dst: Any) -> bool:
        self._may_fail("submit_store")
        return True

    def submit_load(self, job_id: int, src: Any, dst: Any, expedited: bool = False) -> bool:
        self._may_fail("submit_load")
        return True

    def get_finished(self) -> list[Any]:
        self._may_fail("get_finished")
        results, self.results = self.results, []
        return results

    def wait(self, job_ids: set[int]) -> None:
        self.waited.append(job_ids)
        self._may_fail("wait")

    def _may_fail(self, name: str) -> None:
        if name in self.failing:
            raise OSError(errno.EIO, name)


class FakeHandlers:
    """A worker up to 0.24.0 (v1/kv_offload/worker/worker.py): one submit for both directions."""

    def __init__(self) -> None:
        self.results: list[Any] = []

    def transfer_async(self, job_id: int, spec: tuple[Any, Any]) -> bool:
        return True

    def get_finished(self) -> list[Any]:
        results, self.results = self.results, []
        return results

    def wait(self, job_ids: set[int]) -> None: ...


def blocks(*numbers: int) -> Any:
    return SimpleNamespace(block_ids=np.array(numbers))


def make(
    worker: Any, *, by_block: bool = True, **known: Any
) -> tuple[OffloadFailures, Any, deque[Fact]]:
    out: deque[Fact] = deque()
    child = SimpleNamespace(worker=worker, spec=SimpleNamespace(), **known)
    failures = OffloadFailures(1, by_block=by_block)
    failures.install(child, between=OffloadProbe("host", 0, 1, out).install)
    return failures, child, out


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(errno.EIO, ""), "io_error"),
        (OSError(errno.ENOSPC, ""), "no_space"),
        (OSError(errno.EDQUOT, ""), "no_space"),
        (TimeoutError(), "io_error"),
        (ValueError(), "unknown"),
    ],
)
def test_reasons(error: Exception, reason: str) -> None:
    assert reason_of(error) == reason


def test_upstream_is_told_that_a_failed_job_has_ended_and_we_that_it_failed() -> None:
    failures, child, out = make(FakeOffloadWorker(), _load_jobs={2: "r"})
    assert child.worker.submit_store(1, blocks(3), blocks(0))
    assert child.worker.submit_load(2, blocks(0), blocks(4, 5))
    child.worker.results[:] = [Ended(1, success=False), Ended(2, success=False)]

    results = child.worker.get_finished()

    assert [(r.job_id, r.success, r.transfer_size) for r in results] == [
        (1, True, None), (2, True, None),
    ]  # fmt: skip
    assert failures.take_failed() == {FailedJob(1, True, 1), FailedJob(1, False, 2)}
    assert failures.take_blocks() == {4, 5}
    assert failures.failed_of({"r", "s"}) == {"r"}
    assert [(fact.direction, fact.outcome) for fact in out] == [
        ("store", "failed"), ("load", "failed"),
    ]  # fmt: skip
    told = (failures.take_failed(), failures.take_blocks(), failures.failed_of({"r"}))
    assert told == (set(), set(), set()), "told once"


def test_what_succeeded_passes_untouched() -> None:
    failures, child, _ = make(FakeOffloadWorker(), _load_jobs={})
    child.worker.submit_store(1, blocks(3), blocks(0))
    result = Ended(1, transfer_size=10)
    child.worker.results.append(result)
    assert child.worker.get_finished()[0] is result
    assert not failures._jobs
    assert child.worker.get_finished() == []


def test_a_model_of_several_groups_is_told_by_request_alone() -> None:
    """The scheduler of 0.30.0 and later raises when it is told blocks then."""
    failures, child, _ = make(FakeOffloadWorker(), by_block=False, _load_jobs={2: "r"})
    child.worker.submit_load(2, blocks(0), blocks(4, 5))
    child.worker.results.append(Ended(2, success=False))
    child.worker.get_finished()
    assert (failures.failed_of({"r"}), failures.take_blocks()) == ({"r"}, set())


def test_a_load_within_the_step_has_no_request_to_fail_only_blocks() -> None:
    """0.33.0, sync_load_budget_bytes: its request runs in this very step."""
    worker = FakeOffloadWorker()
    worker.failing = {"submit_load"}
    failures, child, _ = make(worker, by_block=False, _load_jobs={2: None})
    assert child.worker.submit_load(2, blocks(0), blocks(4), expedited=True)
    child.worker.wait({2})
    assert child.worker.waited == [set()], "it never began"
    assert child.worker.get_finished()[0].success
    assert failures.take_blocks() == {4}


def test_when_waiting_fails_the_jobs_count_as_failed_once_they_have_ended() -> None:
    worker = FakeOffloadWorker()
    failures, child, out = make(worker, _load_jobs={})
    child.worker.submit_store(1, blocks(3), blocks(0))
    worker.failing = {"wait"}
    child.worker.wait({1, 99})
    assert failures.take_failed() == set(), "it may be copying still"
    worker.results = [Ended(1, transfer_size=10)]
    assert [result.success for result in child.worker.get_finished()] == [True]
    assert failures.take_failed() == {FailedJob(1, True, 1)}
    assert [(fact.outcome, fact.reason) for fact in out] == [("failed", "io_error")]


def test_when_waiting_for_a_load_within_the_step_fails_the_forward_must_not_run() -> None:
    worker = FakeOffloadWorker()
    _, child, _ = make(worker, _load_jobs={2: None})
    child.worker.submit_load(2, blocks(0), blocks(4))
    worker.failing = {"wait"}
    with pytest.raises(OSError, match="wait"):
        child.worker.wait({2})


@pytest.mark.parametrize(
    ("known", "store", "load"),
    [
        # 0.22.1, 0.24.0: jobs are numbered by the scheduler.
        ({"_load_jobs": {2: "r"}}, FailedJob(1, True, 1), FailedJob(1, False, 2)),
        # 0.20.2: by each worker for itself, and the scheduler knows requests.
        ({"_jobs": {1: ("q", True), 2: ("r", False)}}, FailedJob(1, True, "q"),
         FailedJob(1, False, "r")),
    ],
)  # fmt: skip
def test_before_0_26_0(known: Any, store: FailedJob, load: FailedJob) -> None:
    worker = FakeHandlers()
    failures, child, _ = make(worker, **known)
    child.worker.transfer_async(1, (blocks(3), blocks(0)))
    child.worker.transfer_async(2, (blocks(0), blocks(4, 5)))
    worker.results = [Ended(1, success=False), Ended(2, success=False)]
    assert [result.success for result in child.worker.get_finished()] == [True, True]
    assert failures.take_failed() == {store, load}
    assert failures.failed_of({"r"}) == {"r"}
    assert failures.take_blocks() == {4, 5}


def test_where_jobs_have_no_requests_upstreams_assertion_stays() -> None:
    worker = FakeOffloadWorker()
    failures, child, _ = make(worker)
    worker.results = [Ended(1, success=False)]
    assert [result.success for result in child.worker.get_finished()] == [False]
    assert failures.missing == ["offload_failures"]


def test_the_failures_of_all_ranks_arrive_in_the_step_they_were_told_in() -> None:
    quiet = WorkerMetadata(metadata=(None, None))
    one, other = (
        WorkerMetadata(metadata=(None, None), failed={FailedJob(1, True, number)})
        for number in (1, 2)
    )
    assert quiet.aggregate(one).failed == one.aggregate(quiet).failed == one.failed
    assert one.aggregate(other).failed == one.failed | other.failed


# The scheduler's side.


class FakeManager:
    """A manager of several tiers, or of somebody else: no pool that we know the form of."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def complete_store(self, keys: Any, context: Any, success: bool = True) -> None:
        self.calls.append(("stored" if success else "not stored", sorted(keys)))

    def complete_load(self, keys: Any, context: Any) -> None:
        self.calls.append(("loaded", sorted(keys)))

    def lookup(self, key: Any, context: Any) -> str:
        return "hit"


def test_a_manager_of_unknown_form_never_hits_what_could_not_be_read_until_stored_anew() -> None:
    manager = FakeManager()
    jobs = {1: SimpleNamespace(keys={"a", "b"})}
    index = OffloadIndex(SimpleNamespace(manager=manager, _jobs=jobs))
    index.failed(FailedJob(0, False, 1))
    index.failed(FailedJob(0, False, 2))  # forgotten by a reset of the cache
    manager.complete_load({"a", "b"}, None)
    assert [manager.lookup(key, None) == "hit" for key in "abc"] == [False, False, True]
    manager.complete_store({"a"}, None)
    assert [manager.lookup(key, None) == "hit" for key in "abc"] == [True, False, True]
    assert manager.calls == [("loaded", ["a", "b"]), ("stored", ["a"])]


def test_each_job_is_completed_by_one_call() -> None:
    """A manager of several tiers counts them (v1/kv_offload/tiering/manager.py)."""
    manager = FakeManager()
    jobs = {1: SimpleNamespace(keys={"a", "b"}), 2: SimpleNamespace(keys={"c"})}
    index = OffloadIndex(SimpleNamespace(manager=manager, _jobs=jobs))
    index.failed(FailedJob(0, True, 1))
    index.failed(FailedJob(0, True, 1))  # by another rank
    manager.complete_store({"c"}, None)
    manager.complete_store({"a", "b"}, None)
    assert manager.calls == [("stored", ["c"]), ("not stored", ["a", "b"])]
    manager.complete_store({"a", "b"}, None)
    assert manager.calls[-1] == ("stored", ["a", "b"]), "remembered for one completion"


def test_where_a_manager_cannot_be_told_the_engine_ends_when_a_store_fails() -> None:
    class FakeOldManager(FakeManager):
        def complete_store(self, keys: Any, context: Any) -> None:
            raise AssertionError("it must not be indexed")

    jobs = {1: SimpleNamespace(keys={"a"})}
    index = OffloadIndex(SimpleNamespace(manager=FakeOldManager(), _jobs=jobs))
    assert index.missing == ["offload_store_failure"]
    with pytest.raises(RuntimeError, match="FakeOldManager"):
        index.failed(FailedJob(0, True, 1))
    index.failed(FailedJob(0, False, 1))  # a load is no matter of its


def test_in_0_20_2_a_request_stands_for_its_stores() -> None:
    class FakeManager0202(FakeManager):
        def complete_store(self, keys: Any, success: bool = True) -> None:
            super().complete_store(keys, None, success)

    manager = FakeManager0202()
    being_stored = {"q": {"a"}, "preempted": {"x"}}
    scheduler = SimpleNamespace(
        manager=manager, _reqs_being_stored=being_stored, _reqs_being_loaded={"r": {"b"}}
    )
    index = OffloadIndex(scheduler)
    index.failed(FailedJob(0, True, "q"))
    index.failed(FailedJob(0, False, "r"))
    manager.complete_store(being_stored.pop("q"))
    # In the step that asks the workers to finish these, so nobody knows.
    manager.complete_store(being_stored["preempted"])
    assert manager.calls == [("not stored", ["a"]), ("not stored", ["x"])]
    assert manager.lookup("b", None) != "hit"


def test_a_child_without_such_a_manager_is_left_alone() -> None:
    assert OffloadIndex.find(SimpleNamespace(connector_scheduler=SimpleNamespace())) is None
    assert OffloadIndex.find(SimpleNamespace()) is None
