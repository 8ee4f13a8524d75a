"""What children give and are told through the wrapper (D1, D5, D6, D7, D12, D14, D15, D18)."""

import pickle
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_children import (
    FakeConnector,
    FakeHandshake,
    FakeStats,
    build,
    entry,
    make_config,
)
from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_events import AllBlocksCleared, KVConnectorKVEvents
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1 import multi_connector
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, supports_hma
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlConnector
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.distributed.kv_transfer.kv_connector.v1.simple_cpu_offload_connector import (
    SimpleCPUOffloadConnector,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from kvctl_connector import guard
from kvctl_connector.connector import MultiConnector
from kvctl_connector.forwarding import PromMetrics, registered

REQUEST = SimpleNamespace(request_id="r", kv_transfer_params=None)
TWO = ("FakeConnector", "FakePpAwareConnector")


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCTL_RUNTIME_DIR", str(tmp_path))


@pytest.fixture
def scheduler() -> Iterator[Any]:
    made = build(*TWO)
    yield made
    made.shutdown()


@pytest.fixture
def worker() -> Any:
    return build(*TWO, worker=True)


class FakeEvents(KVConnectorKVEvents):  # type: ignore[misc]
    """Events of one child, and of how many workers."""

    def __init__(self, *events: Any) -> None:
        self.events, self.workers = list(events), 1

    def add_events(self, events: list[Any]) -> None:
        self.events += events

    def aggregate(self) -> "FakeEvents":
        return self

    def increment_workers(self, count: int = 1) -> None:
        self.workers += count

    def get_all_events(self) -> list[Any]:
        return self.events

    def get_number_of_workers(self) -> int:
        return self.workers

    def clear_events(self) -> None:
        self.events, self.workers = [], 1


# D1: events of the workers' side


def events_seen(scheduler: Any, events: Any) -> list[Any]:
    scheduler.update_connector_output(KVConnectorOutput(kv_cache_events=events))
    return [
        None if (seen := child.outputs[-1][1]) is None else (seen.events, seen.workers)
        for child in scheduler._connectors
    ]


@pytest.mark.parametrize("whose", [(), (0,), (1,), (0, 1)])
def test_each_child_gets_its_own_events(
    scheduler: Any, worker: Any, whose: tuple[int, ...]
) -> None:
    for index in whose:
        worker._connectors[index].events = FakeEvents(index)
    collected = worker.get_kv_connector_kv_cache_events()
    assert (collected is None) is (not whose)
    expected = [([index], 1) if index in whose else None for index in range(2)]
    assert events_seen(scheduler, pickle.loads(pickle.dumps(collected))) == expected


def test_ranks_are_joined_child_by_child_by_vllms_own_aggregator(
    scheduler: Any, worker: Any
) -> None:
    outputs = []
    for rank, whose in enumerate([(0,), (0, 1), ()]):
        for index, child in enumerate(worker._connectors):
            child.events = FakeEvents((index, rank)) if index in whose else None
        told = KVConnectorOutput(kv_cache_events=worker.get_kv_connector_kv_cache_events())
        outputs.append(ModelRunnerOutput(req_ids=[], req_id_to_index={}, kv_connector_output=told))
    joined = KVOutputAggregator(expected_finished_count=3).aggregate(outputs)
    assert events_seen(scheduler, joined.kv_connector_output.kv_cache_events) == [
        ([(0, 0), (0, 1)], 2),
        ([(1, 1)], 1),
    ]


def test_an_output_is_left_as_it_was(scheduler: Any) -> None:
    events = FakeEvents(AllBlocksCleared())
    output = KVConnectorOutput(kv_cache_events=events, finished_sending={"r"})
    scheduler.update_connector_output(output)
    assert (output.kv_cache_events, output.finished_sending) == (events, {"r"})
    assert output.kv_connector_worker_meta is None
    assert scheduler._connectors[0].outputs[-1][1] is events, "of a child that is not ours: to all"


# D5: a child's own engine id


@pytest.mark.parametrize(
    ("engine", "expected"),
    [("engine", ["engine", "own"]), ("engine_dp3", ["engine_dp3", "own_dp3"])],
)
def test_a_child_has_its_own_engine_id(engine: str, expected: list[str]) -> None:
    config = make_config(entry("FakeConnector"), entry("FakeConnector", engine_id="own"))
    config.kv_transfer_config.engine_id = engine
    made = MultiConnector._get_connector_classes_and_configs(config)
    assert [child.kv_transfer_config.engine_id for _, child in made] == expected
    children = config.kv_transfer_config.kv_connector_extra_config["connectors"]
    assert children[1]["engine_id"] == "own", "the configuration itself is not changed"
    with pytest.raises(TypeError):
        multi_connector.MultiConnector._get_connector_classes_and_configs(config)


# D6: handshakes


def shake(scheduler: Any, by_rank: dict[Any, Any]) -> list[Any]:
    """What the engine core hands to the scheduler's side, and what reaches each child."""
    stages = hasattr(KVConnectorBase_V1, "set_xfer_handshake_metadata_pp_aware")
    content = by_rank if stages else {tensor: given for (_, tensor), given in by_rank.items()}
    setter = "set_xfer_handshake_metadata" + ("_pp_aware" if stages else "")
    getattr(scheduler, setter)(pickle.loads(pickle.dumps(content)))
    return [
        {rank: given.of for rank, given in child.told.get("handshakes", {}).items()}
        for child in scheduler._connectors
    ]


def test_handshakes_reach_the_child_that_made_them(scheduler: Any, worker: Any) -> None:
    assert worker.get_handshake_metadata() is None
    worker._connectors[1].handshake = FakeHandshake("second")
    told = worker.get_handshake_metadata()
    first, second = shake(scheduler, {(0, 0): told, (1, 0): told})
    assert first == {}
    assert set(second.values()) == {"second"}


def test_two_children_shake_hands_each_with_its_own(scheduler: Any, worker: Any) -> None:
    for child, name in zip(worker._connectors, ("first", "second"), strict=True):
        child.handshake = FakeHandshake(name)
    told = worker.get_handshake_metadata()
    assert [set(heard.values()) for heard in shake(scheduler, {(0, 0): told})] == [
        {"first"},
        {"second"},
    ]


def test_no_handshakes_are_told_to_all_as_upstream_does(scheduler: Any) -> None:
    shake(scheduler, {})
    assert [child.told["handshakes"] for child in scheduler._connectors] == [{}, {}]


def test_a_child_that_makes_handshakes_and_knows_no_stages_still_refuses_them(
    scheduler: Any, worker: Any
) -> None:
    worker._connectors[0].handshake = FakeHandshake("first")
    told = worker.get_handshake_metadata()
    if not hasattr(KVConnectorBase_V1, "set_xfer_handshake_metadata_pp_aware"):
        assert shake(scheduler, {(0, 0): told}) == [{0: "first"}, {}]  # 0.22.1 has no stages
        return
    with pytest.raises(ValueError, match=r"(?i)pp"):
        shake(scheduler, {(0, 0): told, (1, 0): told})


# D7


def test_every_child_gets_the_block_pool(scheduler: Any) -> None:
    scheduler.bind_gpu_block_pool("pool")
    assert [child.told["pool"] for child in scheduler._connectors] == ["pool", "pool"]


def test_the_wrapper_knows_groups_where_upstreams_does() -> None:
    """On 0.20.2 it does not, and vLLM itself refuses a connector that does not (factory.py:58)."""
    upstreams = multi_connector.MultiConnector
    knows = hasattr(upstreams, "request_finished_all_groups")
    assert (supports_hma(upstreams), supports_hma(MultiConnector)) == (knows, knows)


# D12: statistics


def test_statistics_of_a_class_that_nobody_can_look_up_are_not_shipped(worker: Any) -> None:
    known, stranger = worker._connectors
    known.stats = FakeStats(data={"sum": 1})
    stranger.stats = FakeStats(data={"sum": 2})
    stranger.__class__ = type("Stranger", (type(stranger),), {})
    assert set(worker.get_kv_connector_stats().data) == {"FakeConnector"}
    known.stats = None
    assert worker.get_kv_connector_stats() is None
    assert not registered("Stranger")


def test_children_of_one_class_add_up() -> None:
    made = build("FakeConnector", "FakeConnector", worker=True)
    for child in made._connectors:
        child.stats = FakeStats(data={"sum": 2})
    assert made.get_kv_connector_stats().data["FakeConnector"].data == {"sum": 4}


class FakeProm:
    """Prometheus metrics of one child."""

    def __init__(self, *, breaks: bool = False) -> None:
        self.seen: list[Any] = []
        self.breaks = breaks

    def observe(self, stats: Any, engine_idx: int = 0) -> None:
        if self.breaks:
            raise KeyError("a name that this release does not know")
        self.seen.append((stats, engine_idx))


def test_no_statistics_can_end_the_api_server() -> None:
    good, bad = FakeProm(), FakeProm(breaks=True)
    metrics = object.__new__(PromMetrics)
    metrics._prom_metrics = {"Bad": bad, "Good": good}
    shipped: Any = {"sum": 1} if hasattr(FakeStats, "to_dict") else {"data": {"sum": 1}}
    before = guard.failures.get("PromMetrics._observe_child", 0)

    metrics.observe({"Unknown": shipped, "Bad": shipped, "Good": shipped}, 3)
    assert good.seen == [({"sum": 1}, 3)]
    assert guard.failures["PromMetrics._observe_child"] == before + 1

    metrics.observe({"Good": FakeStats(data={"sum": 2})}, 0)  # an engine in one process
    assert good.seen[-1] == ({"sum": 2}, 0)


def test_the_api_server_gets_these_metrics() -> None:
    types = {cls: cls for cls in (Counter, Gauge, Histogram)}
    made = MultiConnector.build_prom_metrics(make_config(entry("FakeConnector")), types, [], {})
    assert type(made) is PromMetrics


# D14, D15, D18


@pytest.mark.parametrize("children", [(True, False), (True, True)])
def test_divergent_hybrid_hits_need_all_children(
    children: tuple[bool, ...], monkeypatch: pytest.MonkeyPatch, scheduler: Any
) -> None:
    if not hasattr(KVConnectorBase_V1, "supports_divergent_local_hybrid_hits"):
        assert not hasattr(MultiConnector, "supports_divergent_local_hybrid_hits")  # 0.26.0
        return
    monkeypatch.setattr(
        FakeConnector,
        "supports_divergent_local_hybrid_hits",
        property(lambda self: children[self is not scheduler._connectors[0]]),
    )
    assert scheduler.supports_divergent_local_hybrid_hits is all(children)


def test_two_children_return_params_and_the_first_wins_a_clash(scheduler: Any) -> None:
    first, second = scheduler._connectors
    first.ended = (True, {"peer": 1, "both": "first"})
    second.ended = (False, {"host": 2, "both": "second"})
    held, params = scheduler.request_finished(REQUEST, [1])
    assert held is True
    assert {k: params[k] for k in ("peer", "host", "both")} == {
        "peer": 1,
        "host": 2,
        "both": "first",
    }


def test_no_child_has_scheduler_statistics_where_vllm_drops_them(scheduler: Any) -> None:
    """Up to 0.22.1 vLLM drops those of the scheduler's side in a step without any of workers."""
    scheduler._connectors[0].stats = FakeStats(data={"sum": 1})
    assert set(scheduler.get_kv_connector_stats().data) == {"FakeConnector"}
    if hasattr(KVConnectorBase_V1, "has_pending_push_work"):
        return  # from 0.24.0 on it keeps them
    for cls, half in (
        (NixlConnector, "connector_worker"),
        (OffloadingConnector, "connector_worker"),
        (SimpleCPUOffloadConnector, "worker_handler"),
    ):
        child = object.__new__(cls)
        setattr(child, half, None)
        assert child.get_kv_connector_stats() is None


# Item 5: graphs and layouts


def test_nixl_and_offload_keep_full_cuda_graphs() -> None:
    children = [entry("NixlConnector"), entry("OffloadingConnector")]
    assert MultiConnector.requires_piecewise_for_cudagraph({"connectors": children}) is False


def test_a_child_that_needs_piecewise_graphs_gets_them() -> None:
    children = [entry("NixlConnector"), entry("FakePiecewiseConnector")]
    assert MultiConnector.requires_piecewise_for_cudagraph({"connectors": children}) is True


def test_cross_layer_blocks_reach_all_children_and_the_probes(
    worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not hasattr(KVConnectorBase_V1, "register_cross_layers_kv_cache"):
        # Gone from 0.30.0 on: the wrapper of 0.28.0 in few words.
        monkeypatch.setattr(
            multi_connector.MultiConnector,
            "register_cross_layers_kv_cache",
            lambda self, *args: [c.register_cross_layers_kv_cache(*args) for c in self._connectors],
            raising=False,
        )
    found: list[bool] = []
    monkeypatch.setattr(worker._worker_half, "caches_registered", lambda: found.append(True))
    worker.register_cross_layers_kv_cache("cache", None)
    assert [child.told["cross layers"] for child in worker._connectors] == ["cache", "cache"]
    assert found == [True]


@pytest.mark.parametrize("children", [(True, False), (True, True)])
def test_cross_layer_blocks_need_all_children(
    children: tuple[bool, ...], worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not hasattr(KVConnectorBase_V1, "prefer_cross_layer_blocks"):
        assert not hasattr(MultiConnector, "prefer_cross_layer_blocks")  # gone from 0.30.0 on
        return
    monkeypatch.setattr(
        FakeConnector,
        "prefer_cross_layer_blocks",
        property(lambda self: children[self is not worker._connectors[0]]),
    )
    assert worker.prefer_cross_layer_blocks is all(children)
