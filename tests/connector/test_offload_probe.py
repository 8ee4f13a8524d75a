"""The probe on a fake offload worker: the real one needs an engine (tests/end_to_end)."""

from collections import deque
from types import SimpleNamespace
from typing import Any

from kvctl_connector.facts import Fact
from kvctl_connector.offload_probe import OffloadProbe


class FakeOffloadWorker:
    def __init__(self) -> None:
        self.results: list[Any] = []

    def submit_store(self, job_id: int, src: Any, dst: Any) -> bool:
        return True

    def submit_load(self, job_id: int, src: Any, dst: Any, expedited: bool = False) -> bool:
        return True

    def get_finished(self) -> list[Any]:
        return self.results

    def wait(self, job_ids: set[int]) -> str:
        return "untouched"


def make_result(job: int, **changes: Any) -> Any:
    known = {"job_id": job, "success": True, "transfer_size": 100, "transfer_time": 0.0}
    return SimpleNamespace(**(known | changes))


def make_probe(**spec: Any) -> tuple[OffloadProbe, Any, deque[Fact]]:
    out: deque[Fact] = deque()
    child = SimpleNamespace(worker=FakeOffloadWorker(), spec=SimpleNamespace(**spec))
    probe = OffloadProbe("host", 0, 2, out)
    probe.install(child)
    return probe, child, out


def test_jobs_become_facts_with_their_requests() -> None:
    probe, child, out = make_probe()
    probe.announce({1: SimpleNamespace(req_id="a"), 2: SimpleNamespace(req_id="b")})
    assert child.worker.submit_store(1, "src", "dst")
    assert child.worker.submit_load(2, "src", "dst", expedited=True)
    child.worker._kvctl_original.results = [make_result(1), make_result(2, transfer_size=7)]

    assert len(child.worker.get_finished()) == 2

    store, load = out
    assert (store.direction, store.request, store.bytes, store.key) == ("store", "a", 100, "1")
    assert (load.direction, load.request, load.bytes, load.ranks) == ("load", "b", 7, 2)
    assert store.outcome == load.outcome == "ok"


def test_the_time_of_the_copy_counts_not_the_poll_that_noticed_it() -> None:
    _, child, out = make_probe()
    child.worker.submit_store(1, "src", "dst")
    child.worker._kvctl_original.results = [make_result(1, transfer_time=1e-9)]
    child.worker.get_finished()
    assert out[0].end - out[0].start == 1


def test_a_failed_job_says_so() -> None:
    _, child, out = make_probe()
    child.worker.submit_load(1, "src", "dst")
    child.worker._kvctl_original.results = [make_result(1, success=False, transfer_size=None)]
    child.worker.get_finished()
    told = (out[0].outcome, out[0].phase, out[0].reason, out[0].bytes)
    assert told == ("failed", "move", "unknown", 0)


def test_where_one_rank_copies_for_all_its_report_is_complete() -> None:
    probe, _, _ = make_probe(replicated_layout=True)
    assert probe.ranks == 1


def test_other_methods_are_untouched_and_a_missing_hook_is_named() -> None:
    _, child, _ = make_probe()
    assert child.worker.wait({1}) == "untouched"
    probe = OffloadProbe("host", 0, 1, deque())
    probe.install(SimpleNamespace(worker=None))
    assert probe.missing == ["offload_worker"]
