"""The connector class over the installed vLLM, with fake children in place of NIXL and offload."""

import inspect
import time
from types import SimpleNamespace
from typing import Any

import pytest
from fake_connector import make_blocks, make_connector, make_request, step
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import base, multi_connector

from kvctl_connector import connector as connector_module
from kvctl_connector.config import ConfigError
from kvctl_connector.connector import Metadata, MultiConnector, WorkerMetadata
from kvctl_connector.facts import Fact
from kvctl_connector.lease import Lease

FACT = Fact(0, 1, "peer", "recv", "r", "r", 1, 2, 3, "ok")


def test_the_name_and_the_module_are_what_vllm_looks_up() -> None:
    config = SimpleNamespace(
        kv_connector="MultiConnector", kv_connector_module_path="kvctl_connector.connector"
    )
    assert KVConnectorFactory.get_connector_class(config) is MultiConnector
    assert MultiConnector.__name__ == "MultiConnector"
    assert issubclass(MultiConnector, multi_connector.MultiConnector)


@pytest.mark.parametrize("name", ["KvctlConnector", "NixlConnector", "OffloadingConnector"])
def test_another_name_stops_at_once_and_prints_the_right_json(name: str) -> None:
    config = SimpleNamespace(
        kv_connector=name, kv_connector_module_path="kvctl_connector.connector"
    )
    with pytest.raises(AttributeError) as raised:
        KVConnectorFactory.get_connector_class(config)
    told = str(raised.value.__cause__)
    assert f"configured as {name!r}" in told
    assert (
        '"kv_connector": "MultiConnector", "kv_connector_module_path": "kvctl_connector.connector"'
    ) in told


def test_overridden_methods_keep_the_parameters_of_the_installed_release() -> None:
    for name, ours in vars(MultiConnector).items():
        theirs = getattr(multi_connector.MultiConnector, name, None)
        if not inspect.isfunction(ours) or not inspect.isfunction(theirs):
            continue
        expected = [p.name for p in inspect.signature(theirs).parameters.values()]
        assert [p.name for p in inspect.signature(ours).parameters.values()] == expected, name


def test_nothing_completes_but_what_was_announced() -> None:
    made = make_connector(worker=True)
    loader, other = made._connectors
    loader.results = base.KVConnectorTransferResults(finished_recving={"r", "stranger"})
    other.results = base.KVConnectorTransferResults(finished_recving={"r"})
    made.bind_connector_metadata(Metadata(metadata=(None, None), loads={"r": (0,)}))

    results = made.get_transfer_results(set())

    assert results.finished_recving == {"r"}
    assert made.build_connector_worker_meta().strays == 2
    assert made.get_transfer_results(set()).finished_recving == set()


def test_a_failed_load_is_reported_received_and_failed() -> None:
    made = make_connector(worker=True)
    made._connectors[0].results = base.KVConnectorTransferResults(
        finished_recving={"r"}, failed_recving={"r"}
    )
    made.bind_connector_metadata(Metadata(metadata=(None, None), loads={"r": (0,)}))
    results = made.get_transfer_results(set())
    assert (results.finished_recving, results.failed_recving) == ({"r"}, {"r"})


def with_a_late_pull() -> Any:
    """A worker whose pull of "r", in two KV groups, has ended too late, that of "s" in time."""
    made = make_connector(worker=True)
    made._connectors[0].results = base.KVConnectorTransferResults(finished_recving={"r", "s"})
    made._connectors[0].get_finished = lambda finished: (None, {"r", "s"})
    plans = {
        "r": SimpleNamespace(local_block_ids=([4, 5], [6])),
        "s": SimpleNamespace(local_block_ids=([7], [])),
    }
    now = time.time_ns()
    leases = {"r": Lease("p-r", now - 1, 0), "s": Lease("p-s", now + 60 * 10**9, 0)}
    made.bind_connector_metadata(
        Metadata(
            metadata=(SimpleNamespace(reqs_to_recv=plans), None),
            loads={"r": (0,), "s": (0,)},
            leases=leases,
        )
    )
    return made


def test_a_pull_that_ended_too_late_is_failed_without_naming_blocks() -> None:
    """Named blocks kill the scheduler of a model with several KV groups."""
    made = with_a_late_pull()

    results = made.get_transfer_results(set())

    assert results.finished_recving == {"r", "s"}
    assert results.failed_recving == {"r"}
    assert made.get_block_ids_with_load_errors() == set()
    outcomes = {f.request: f.outcome for f in made.build_connector_worker_meta().facts}
    assert outcomes == {"r": "expired", "s": "ok"}


def test_releases_that_know_no_failed_request_are_told_its_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connector_module, "FAILS_REQUESTS", False)
    made = with_a_late_pull()
    made._connectors[1].get_finished = lambda finished: (None, None)

    assert made.get_finished(set()) == (None, {"r", "s"})

    assert made.get_block_ids_with_load_errors() == {4, 5, 6}
    assert made.get_block_ids_with_load_errors() == set(), "told once"


def test_an_offer_is_judged_before_any_child_sees_it() -> None:
    made = make_connector()
    made._scheduler_half.arrived = lambda request: request.kv_transfer_params.update(refused=True)
    made.on_new_request(SimpleNamespace(request_id="r", kv_transfer_params={}))
    assert [child.seen for child in made._connectors] == [[{"refused": True}]] * 2


def test_releases_that_ask_the_older_question_are_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connector_module, "FAILS_REQUESTS", False)
    made = make_connector(worker=True)
    loader, other = made._connectors
    loader.get_finished = lambda finished: ({"sent"}, {"r", "stranger"})
    other.get_finished = lambda finished: (None, None)
    made.bind_connector_metadata(
        Metadata(metadata=(None, None), loads={"r": (0,)}, saves={"sent": (0,)})
    )

    assert made.get_finished(set()) == ({"sent"}, {"r"})


def test_worker_metadata_is_none_when_there_is_nothing_to_say() -> None:
    assert make_connector(worker=True).build_connector_worker_meta() is None


def test_facts_ride_with_a_slot_for_every_child() -> None:
    made = make_connector(worker=True)
    made._worker_half._out.append(FACT)
    meta = made.build_connector_worker_meta()
    assert (meta.metadata, meta.facts) == ((None, None), [FACT])
    assert made.build_connector_worker_meta() is None


def test_what_was_handed_over_is_never_touched_again() -> None:
    """An engine in one process takes the object itself, and reads it a step later."""
    made = make_connector(worker=True)
    half = made._worker_half
    half._out.append(FACT)
    half._nixl[0].missing.append("hook")
    first = made.build_connector_worker_meta()

    half._out.append(FACT._replace(key="later"))
    half._nixl[0].missing.append("later")
    second = made.build_connector_worker_meta()
    joined = first.aggregate(second)

    assert (first.facts, first.missing) == ([FACT], ["hook"])
    assert joined.facts == [*first.facts, *second.facts]
    assert joined.facts is not first.facts


def test_what_a_step_was_told_is_never_touched_again() -> None:
    """The same the other way: the workers of such an engine are handed the scheduler's object."""
    made = make_connector()
    made._connectors[1].matched = (256, True)
    made.get_num_new_matched_tokens(make_request(), 0)
    made.update_state_after_alloc(make_request(), make_blocks(1, 2), 256)
    told = step(made)
    worker = make_connector(worker=True)
    worker.bind_connector_metadata(told)
    worker._connectors[1].results = base.KVConnectorTransferResults(finished_recving={"r"})

    assert worker.get_transfer_results(set()).finished_recving == {"r"}
    made.get_num_new_matched_tokens(make_request("s"), 0)
    made.update_state_after_alloc(make_request("s"), make_blocks(3, 4), 256)
    step(made)

    assert told.loads == {"r": (1,)}


def test_ranks_are_aggregated_whatever_each_had_to_say() -> None:
    quiet = WorkerMetadata(metadata=(None, None))
    busy = WorkerMetadata(metadata=(None, None), facts=[FACT], strays=2, missing=["hook"])
    for joined in (quiet.aggregate(busy), busy.aggregate(quiet)):
        assert isinstance(joined, WorkerMetadata)
        assert (joined.facts, joined.strays, joined.missing) == ([FACT], 2, ["hook"])


def test_a_request_that_ends_before_it_was_queried_is_judged_first() -> None:
    """vLLM 0.20.2 has nothing that comes earlier, and NIXL acts on what it is told here."""
    made, request = make_connector(), make_request()
    told: list[list[str]] = []

    def finish(request: Any, blocks: list[int]) -> tuple[bool, None]:
        told.append([name for name, *_ in made._scheduler_half.calls])
        return False, None

    for child in made._connectors:
        child.request_finished = finish
    assert made.request_finished(request, [1]) == (False, None)
    assert told == [["arrived"]] * 2


def test_a_release_that_names_stores_by_request() -> None:
    """vLLM 0.20.2 numbers its jobs in the workers only."""
    made = make_connector()
    for child in made._connectors:
        child.build_connector_meta = lambda _: SimpleNamespace(reqs_to_store={"r": ()})
    step(made)
    told = [call for call in made._scheduler_half.calls if call[0] == "announced"]
    assert told == [("announced", 0, {"r": ()}), ("announced", 1, {"r": ()})]


@pytest.mark.parametrize(
    ("child", "extra", "tier"),
    [
        ("NixlConnector", None, "peer"),
        ("NixlPushConnector", {}, "peer"),
        ("SimpleCPUOffloadConnector", None, "host"),
        ("OffloadingConnector", {"spec_name": "TieringOffloadingSpec"}, "host"),
        ("OffloadingConnector", {"spec_name": "SharedStorageOffloadingSpec"}, "disk"),
    ],
)
def test_which_tier_a_child_serves(child: str, extra: Any, tier: str) -> None:
    made = type(child, (), {})()
    config = SimpleNamespace(kv_connector_extra_config=extra)
    assert connector_module._tier(made, config) == tier


@pytest.mark.parametrize("holds", [True, False])
def test_an_idle_engine_goes_on_stepping_until_loads_that_were_given_up_have_ended(
    holds: bool,
) -> None:
    made = make_connector()
    made._scheduler_half.waits = SimpleNamespace(holds=holds)
    for child in made._connectors:
        child.has_pending_push_work = lambda: False  # type: ignore[attr-defined]
    assert made.has_pending_push_work() is holds


def test_what_never_ran_is_not_stored_when_it_ends() -> None:
    """Of that vLLM 0.26.0's engine dies (D22)."""
    made = make_connector()
    group = SimpleNamespace(block_ids=[], next_stored_chunk_idx=0, offload_keys=[1, 2, 3])
    states = {"r": SimpleNamespace(group_states=(group,))}
    made._connectors[1].connector_scheduler._req_status = states
    made._aggregate_request_finished(make_request(), lambda child: (False, None))
    assert group.next_stored_chunk_idx == 3


def test_events_are_a_list_so_that_none_is_false() -> None:
    made = make_connector()
    assert made.take_events() == []
    made._connectors[1].events = ["stored"]
    assert made.take_events() == ["stored"]


@pytest.mark.parametrize(("value", "off"), [("", False), ("off", True)])
def test_the_switch(monkeypatch: pytest.MonkeyPatch, value: str, off: bool) -> None:
    monkeypatch.setenv("KVCTL_CONNECTOR", value)
    assert connector_module._switched_off() is off


def test_a_switch_that_is_misspelled_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCTL_CONNECTOR", "OFF")
    with pytest.raises(ConfigError, match='"OFF"; write "off"'):
        connector_module._switched_off()


def test_switched_off_it_is_stock(monkeypatch: pytest.MonkeyPatch) -> None:
    made = make_connector()
    made._scheduler_half, made._composes = None, False
    made._connectors[0].matched = (128, True)
    assert made.get_num_new_matched_tokens(make_request(), 0) == (128, True)
    made.update_state_after_alloc(make_request(), make_blocks(1), 128)
    assert type(step(made)) is multi_connector.MultiKVConnectorMetadata
    assert made._new_loads == {}


def test_in_observe_mode_every_report_passes() -> None:
    made = make_connector(worker=True)
    made._composes, made._worker_half._observes = False, True
    made._connectors[0].results = base.KVConnectorTransferResults(finished_recving={"r"})
    plans = {"r": SimpleNamespace(local_block_ids=([4],))}
    made.bind_connector_metadata(
        Metadata(
            metadata=(SimpleNamespace(reqs_to_recv=plans), None),
            leases={"r": Lease("p-r", time.time_ns() - 1, 0)},
        )
    )
    results = made.get_transfer_results(set())
    assert (results.finished_recving, results.failed_recving) == ({"r"}, set())
    assert made.get_block_ids_with_load_errors() == set()
    (fact,) = made.build_connector_worker_meta().facts
    assert fact.outcome == "expired", "but what it was is told"
