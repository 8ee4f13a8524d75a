"""Who still reads a finished request's blocks (D9, D10, D11)."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from fake_children import build
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.outputs import KVConnectorOutput

from kvctl_connector import saves
from kvctl_connector.connector import Metadata, WorkerMetadata
from kvctl_connector.saves import OwnReports, SaveMap

REQUEST = SimpleNamespace(request_id="r", kv_transfer_params=None)


def end(scheduler: Any) -> Metadata:
    """A request ends; what the workers are told in the next step."""
    scheduler.request_finished(REQUEST, [1, 2])
    meta = scheduler.build_connector_meta(SimpleNamespace(scheduled_new_reqs=[]))
    assert isinstance(meta, Metadata)
    return meta


def sent(worker: Any) -> set[str]:
    """What one worker reports in a step, asked as the installed release asks."""
    if hasattr(KVConnectorBase_V1, "get_transfer_results"):
        return set(worker.get_transfer_results(set()).finished_sending)
    return set(worker.get_finished(set())[0] or ())


@pytest.fixture
def pair(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Scheduler and worker halves of an engine with two children that save."""
    monkeypatch.setenv("KVCTL_RUNTIME_DIR", str(tmp_path))
    scheduler = build("FakeConnector", "FakeConnector")
    worker = build("FakeConnector", "FakeConnector", worker=True)
    for child in scheduler._connectors:
        child.ended = (True, None)
    yield scheduler, worker
    scheduler.shutdown()


def test_blocks_are_freed_when_the_last_child_has_saved(pair: Any) -> None:
    scheduler, worker = pair
    worker.bind_connector_metadata(end(scheduler))
    worker._connectors[1].sent = {"r"}
    assert sent(worker) == set()
    worker._connectors[0].sent = {"r"}
    assert sent(worker) == {"r"}
    assert sent(worker) == set(), "once"


def test_a_report_before_its_announcement_frees_nothing(pair: Any) -> None:
    scheduler, worker = pair
    worker._connectors[0].sent = {"r"}
    assert sent(worker) == set(), "upstream frees the blocks here (D10)"
    worker.bind_connector_metadata(end(scheduler))
    assert sent(worker) == set(), "the other child still copies"
    worker._connectors[1].sent = {"r"}
    assert sent(worker) == {"r"}


def test_all_reports_before_the_announcement_free_with_it(pair: Any) -> None:
    scheduler, worker = pair
    for child in worker._connectors:
        child.sent = {"r"}
    assert sent(worker) == set()
    worker.bind_connector_metadata(end(scheduler))
    assert sent(worker) == {"r"}


def test_a_child_that_repeats_itself_counts_once(pair: Any) -> None:
    scheduler, worker = pair
    worker.bind_connector_metadata(end(scheduler))
    for _ in range(2):
        worker._connectors[0].sent = {"r"}
        assert sent(worker) == set()


def test_an_accepted_tail_is_waited_for(pair: Any) -> None:
    scheduler, worker = pair
    store = scheduler._connectors[1]
    store.ended, store.takes_tails = (False, None), True
    assert scheduler.register_finished_partial_tail(REQUEST, ([1],), [(0, 0, 1)]) is True
    meta = end(scheduler)
    assert meta.saves == {"r": (0, 1)}, "upstream waits for the sender alone (D11)"
    worker.bind_connector_metadata(meta)
    worker._connectors[0].sent = {"r"}
    assert sent(worker) == set()
    worker._connectors[1].sent = {"r"}
    assert sent(worker) == {"r"}


def test_a_tail_that_nobody_takes_holds_nothing(pair: Any) -> None:
    scheduler, _ = pair
    assert scheduler.register_finished_partial_tail(REQUEST, ([1],), []) is False
    for child in scheduler._connectors:
        child.ended = (False, None)
    assert scheduler.request_finished(REQUEST, [1]) == (False, None)
    assert scheduler._take_saves() == {}


def test_early_reports_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saves, "LIMIT", 10)
    table = SaveMap()
    table.report(0, [f"r{i}" for i in range(30)])
    table.expect({"r29": (0,), "r0": (0,)})
    assert table.take() == {"r29"}


def test_observing_counts_as_upstream_does(pair: Any) -> None:
    scheduler, worker = pair
    scheduler._composes = worker._composes = False
    scheduler.request_finished(REQUEST, [1])
    worker.bind_connector_metadata(
        scheduler.build_connector_meta(SimpleNamespace(scheduled_new_reqs=[]))
    )
    for expected in (set(), {"r"}):
        worker._connectors[0].sent = {"r"}
        assert sent(worker) == expected


# Of each child alone: for an offload connector that completes its stores by request (D9).


def test_a_childs_own_saves_are_complete_when_all_ranks_have_reported() -> None:
    reports = OwnReports(ranks=2)
    assert reports.add([(1, "r"), (1, "s")]) == {}
    assert reports.add([(1, "r")]) == {1: {"r"}}
    assert reports.add([(1, "r"), (1, "r")]) == {1: {"r"}}, "a later request of that name"


def by_name(child: Any) -> None:
    """Makes a child look like the OffloadingConnector of 0.20.2."""
    child.connector_scheduler = SimpleNamespace(_reqs_being_stored={})


def test_an_offload_child_hears_of_its_own_saves_before_the_peer_has_read(pair: Any) -> None:
    scheduler, _ = pair
    nixl, offload = scheduler._connectors
    by_name(offload)
    output = KVConnectorOutput(
        kv_connector_worker_meta=WorkerMetadata(metadata=(None, None), own_saves=[(1, "r")])
    )

    scheduler.update_connector_output(output)
    assert nixl.outputs[-1][2] is None
    assert offload.outputs[-1][2] == {"r"}

    output = KVConnectorOutput(finished_sending={"r"})
    scheduler.update_connector_output(output)
    assert nixl.outputs[-1][2] == {"r"}
    assert offload.outputs[-1][2] is None, "told once"
    assert output.finished_sending == {"r"}, "vLLM still reads it"


def test_workers_ship_the_own_saves_of_such_a_child_only(pair: Any) -> None:
    _, worker = pair
    by_name(worker._connectors[1])
    for child in worker._connectors:
        child.sent = {"r"}
    assert sent(worker) == set()
    assert worker.build_connector_worker_meta().own_saves == [(1, "r")]
    assert worker.build_connector_worker_meta() is None


@pytest.mark.parametrize("attribute", ["_reqs_being_stored", "_current_batch_store_jobs"])
def test_who_completes_stores_by_request_is_seen_by_what_it_has(
    attribute: str,
) -> None:
    child = SimpleNamespace(connector_scheduler=SimpleNamespace(**{attribute: {}}))
    assert saves.saves_by_name(child) is (attribute == "_reqs_being_stored")


def test_the_installed_offload_connector_is_recognized() -> None:
    """Where its scheduler half pops `_reqs_being_stored`, its worker half has the counterpart."""
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading import scheduler, worker

    def names(function: Callable[..., Any]) -> set[str]:
        return set(function.__code__.co_names)

    constructors = (
        scheduler.OffloadingConnectorScheduler.__init__,
        worker.OffloadingConnectorWorker.__init__,
    )
    by_request = "finished_sending" in names(
        scheduler.OffloadingConnectorScheduler.update_connector_output
    )
    has = [
        "_reqs_being_stored" in names(constructors[0]),
        "_finished_reqs_waiting_for_store" in names(constructors[1]),
    ]
    assert has == [by_request, by_request]
