"""The connector class over the installed vLLM, with fake children in place of NIXL and offload."""

import inspect
import time
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import base, multi_connector

from kvctl_connector import connector as connector_module
from kvctl_connector.composed import Composition
from kvctl_connector.connector import Metadata, MultiConnector, WorkerMetadata
from kvctl_connector.facts import Fact
from kvctl_connector.lease import Lease
from kvctl_connector.nixl_probe import NixlProbe
from kvctl_connector.scheduler_half import SchedulerHalf
from kvctl_connector.speeds import Speeds
from kvctl_connector.tier_choice import TierChoice

FACT = Fact(0, 1, "peer", "recv", "r", "r", 1, 2, 3, "ok")


class FakeChild:
    """One child; a test sets what it answers."""

    def __init__(self) -> None:
        self.matched: tuple[int | None, bool] = (0, False)
        self.results = base.KVConnectorTransferResults()
        self.allocated: list[tuple[str, int]] = []
        self.connector_scheduler = SimpleNamespace(_current_batch_allocated_block_ids=set())
        self.worker_meta: Any = None
        self.events: list[str] = []
        self.seen: list[dict[str, Any]] = []

    def get_num_new_matched_tokens(self, request: Any, computed: int) -> tuple[int | None, bool]:
        return self.matched

    def update_state_after_alloc(self, request: Any, blocks: Any, tokens: int) -> None:
        self.allocated.append((request.request_id, tokens))

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        return SimpleNamespace(store_jobs={})

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set()

    def on_new_request(self, request: Any) -> None:
        self.seen.append(dict(request.kv_transfer_params))

    def bind_connector_metadata(self, metadata: Any) -> None: ...

    def get_transfer_results(self, finished: set[str]) -> Any:
        return self.results

    def build_connector_worker_meta(self) -> Any:
        return self.worker_meta

    def take_events(self) -> list[str]:
        return self.events


class RecordingHalf:
    """Stands for the scheduler half and remembers what it was told; it chooses like the real one,
    over the fake children, the first of which pulls."""

    loads = SchedulerHalf.loads

    def __init__(self, children: list[FakeChild]) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.arrivals = SimpleNamespace(take_leases=dict)
        self.choice = TierChoice(
            children, ["peer", *["host"] * (len(children) - 1)], speeds=Speeds(),
            bytes_per_token=1, block=128, composition=None, lookup_deadline=0,
        )  # fmt: skip

    def choose(self, request: Any, computed: int) -> Any:
        return self.choice.choose(request, computed)

    def give_up_overdue(self) -> dict[str, Any]:
        return {}

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: self.calls.append((name, *args, *kwargs.values()))


def make_connector(children: int = 2, *, worker: bool = False) -> Any:
    made: Any = object.__new__(MultiConnector)
    made._connectors = [FakeChild() for _ in range(children)]
    made._requests_to_connector = {}
    made._extra_async_saves = {}
    made._connector_metadata = None
    made._choices, made._new_loads = {}, {}
    made._composes = made._chooses = True
    made._begin(1)
    made._scheduler_half = None if worker else RecordingHalf(made._connectors)
    made._worker_half = None
    if worker:
        half: Any = connector_module.WorkerHalf([], [], 0, 1, 500)
        half._children = made._connectors
        half._nixl[0] = NixlProbe(0, 1)  # the first child is the one that pulls
        made._worker_half = half
    return made


def make_request(name: str = "r") -> Any:
    return SimpleNamespace(request_id=name, kv_transfer_params=None)


def make_blocks(*numbers: int) -> Any:
    return SimpleNamespace(blocks=([SimpleNamespace(block_id=number) for number in numbers],))


def step(made: Any) -> Any:
    return made.build_connector_meta(SimpleNamespace(scheduled_new_reqs=[]))


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


def test_a_load_is_announced_with_the_child_that_was_chosen() -> None:
    made = make_connector()
    made._connectors[1].matched = (256, True)

    assert made.get_num_new_matched_tokens(make_request(), 0) == (256, True)
    made.update_state_after_alloc(make_request(), make_blocks(1, 2), 256)
    meta = step(made)

    assert isinstance(meta, Metadata)
    assert meta.loads == {"r": (1,)}
    assert made._connectors[1].allocated == [("r", 256)]
    assert made._connectors[0].allocated == [("r", 0)]
    (admitted,) = (call for call in made._scheduler_half.calls if call[0] == "admitted")
    assert {child: tokens for child, (tokens, _) in admitted[3].items()} == {1: 256}
    assert not hasattr(step(made), "loads"), "announced once"


def test_the_second_allocation_without_tokens_announces_nothing() -> None:
    made = make_connector()
    made._connectors[0].matched = (128, True)
    made.get_num_new_matched_tokens(make_request(), 0)
    made.update_state_after_alloc(make_request(), make_blocks(1), 128)
    step(made)
    made.update_state_after_alloc(make_request(), make_blocks(1), 0)
    assert not hasattr(step(made), "loads")


def test_a_synchronous_load_is_never_awaited() -> None:
    made = make_connector()
    made._connectors[1].matched = (128, False)
    made.get_num_new_matched_tokens(make_request(), 0)
    made.update_state_after_alloc(make_request(), make_blocks(1), 128)
    assert not hasattr(step(made), "loads")


def test_a_choice_does_not_outlive_a_query_that_found_nothing() -> None:
    made = make_connector()
    made._connectors[0].matched = (128, True)
    made.get_num_new_matched_tokens(make_request(), 0)
    made._connectors[0].matched = (0, False)
    made.get_num_new_matched_tokens(make_request(), 0)
    made.update_state_after_alloc(make_request(), make_blocks(1), 0)
    assert made._requests_to_connector == {}


def test_the_offload_child_learns_which_blocks_another_child_will_write() -> None:
    made = make_connector()
    made._connectors[0].matched = (256, True)
    made.get_num_new_matched_tokens(make_request(), 0)
    made.update_state_after_alloc(make_request(), make_blocks(7, 9), 256)
    told = [
        child.connector_scheduler._current_batch_allocated_block_ids for child in made._connectors
    ]
    assert told == [set(), {7, 9}]


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


def test_events_are_a_list_so_that_none_is_false() -> None:
    made = make_connector()
    assert made.take_events() == []
    made._connectors[1].events = ["stored"]
    assert made.take_events() == ["stored"]


def test_switched_off_it_is_stock(monkeypatch: pytest.MonkeyPatch) -> None:
    made = make_connector()
    made._scheduler_half, made._composes = None, False
    made._connectors[0].matched = (128, True)
    assert made.get_num_new_matched_tokens(make_request(), 0) == (128, True)
    made.update_state_after_alloc(make_request(), make_blocks(1), 128)
    assert type(step(made)) is multi_connector.MultiKVConnectorMetadata
    assert made._new_loads == {}


# Two tiers at once


class FakeBlocks:
    def __init__(self, blocks: Any) -> None:
        self.blocks = blocks


def fresh_blocks(count: int) -> FakeBlocks:
    return FakeBlocks(
        ([SimpleNamespace(block_id=n, block_hash=None, is_null=False) for n in range(count)],)
    )


def plan_composed(made: Any) -> Any:
    """The peer offers 1000 tokens, host memory the first 384 of them, and both are taken."""
    nixl, host = made._connectors
    nixl.matched, host.matched = (1000, True), (384, True)
    host.connector_scheduler.config = SimpleNamespace(kv_group_configs=(object(),))
    made._scheduler_half.choice = TierChoice(
        made._connectors, ["peer", "host"], speeds=Speeds(), bytes_per_token=1, block=128,
        composition=Composition(made._connectors, (128,), always=True), lookup_deadline=0,
    )  # fmt: skip
    request = SimpleNamespace(
        request_id="r",
        prompt_token_ids=[0] * 1000,
        kv_transfer_params={"do_remote_prefill": True, "remote_block_ids": [list(range(8))]},
    )
    assert made.get_num_new_matched_tokens(request, 0) == (1000, True)
    return request


def test_a_composed_load_is_announced_with_both_children() -> None:
    made = make_connector()
    request = plan_composed(made)
    shown: dict[int, Any] = {}
    for index, child in enumerate(made._connectors):
        child.update_state_after_alloc = lambda _, blocks, tokens, index=index: shown.update(
            {index: (tokens, [block.block_hash is not None for block in blocks.blocks[0]])}
        )
    made.update_state_after_alloc(request, fresh_blocks(8), 1000)
    assert set(step(made).loads["r"]) == {0, 1}
    assert shown == {0: (616, [True] * 3 + [False] * 5), 1: (384, [False] * 8)}


def test_vllm_may_take_fewer_tokens_than_it_was_told() -> None:
    made = make_connector()
    request = plan_composed(made)
    made.update_state_after_alloc(request, fresh_blocks(7), 896)
    assert step(made).loads == {"r": (0,)}
    assert [child.allocated for child in made._connectors] == [[("r", 896)], [("r", 0)]]


def test_groups_of_a_composed_load_are_those_that_both_load() -> None:
    made = make_connector()
    request = plan_composed(made)
    for child, groups in zip(made._connectors, [(0, 1, 2), (0, 2)], strict=True):
        child.get_loaded_kv_cache_group_ids = lambda _, groups=groups: groups
    assert made.get_loaded_kv_cache_group_ids(request) == (0, 2)


def test_groups_of_a_request_that_nobody_loads() -> None:
    """D16: upstream raises KeyError."""
    assert make_connector().get_loaded_kv_cache_group_ids(make_request()) == ()


def test_hits_of_a_composed_load_are_counted_by_source() -> None:
    made = make_connector()
    request = plan_composed(made)
    for child, source in zip(made._connectors, ["remote", "cpu"], strict=True):
        child.get_external_cache_hit_sources = lambda _, n, source=source: {source: n}
    made.update_state_after_alloc(request, fresh_blocks(8), 1000)
    assert made.get_external_cache_hit_sources(request, 1000) == {"remote": 616, "cpu": 384}


def test_a_composed_load_is_no_load_that_the_next_step_waits_for() -> None:
    made = make_connector()
    request = plan_composed(made)
    batch = {"r", "other"}
    made._connectors[1].connector_scheduler._current_batch_sync_loads = batch
    made.update_state_after_alloc(request, fresh_blocks(8), 1000)
    assert batch == {"other"}


# Upstream's way


@pytest.mark.parametrize("composes", [True, False], ids=["tier_policy upstream", "mode observe"])
def test_upstreams_order(composes: bool) -> None:
    made = make_connector()
    made._composes, made._chooses = composes, False
    first, second = made._connectors
    first.matched, second.matched = (128, True), (1000, True)
    assert made.get_num_new_matched_tokens(make_request(), 0) == (128, True)
    made.update_state_after_alloc(make_request(), make_blocks(5), 128)
    assert step(made).loads == {"r": (0,)}, "known, to tell strays"
    told = second.connector_scheduler._current_batch_allocated_block_ids
    assert told == ({5} if composes else set())
    second.matched = (None, False)
    assert made.get_num_new_matched_tokens(make_request(), 0) == (None, False)


def test_upstreams_order_records_what_it_passes_over() -> None:
    made = make_connector()
    made._composes = made._chooses = False
    made._hear_offers()
    first, second = made._connectors
    first.matched, second.matched = (128, True), (1000, True)
    made.get_num_new_matched_tokens(make_request(), 0)
    assert made._choices["r"].offers == ((128, True), (1000, True))
    first.matched, second.matched = (None, False), (1000, True)
    made.get_num_new_matched_tokens(make_request(), 0)
    assert made._choices["r"].offers == ((None, False), None), "the second one was not asked"


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
