"""Stores and loads of a real offload child that fail, under vLLM's real scheduler.

Each test makes one job fail at one moment; the fake model finds every block that is taken for
computed and was not written.
"""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from failing_tier import FAULTS, HELD, Fault
from fake_model_engine import BLOCK, FakeModelEngine

from kvctl_connector.offload_failures import OffloadFailures
from kvctl_connector.offload_index import OffloadIndex

PROMPT = list(range(100))  # six full blocks
CHUNKS = len(PROMPT) // BLOCK
REASONS = {
    "EIO": ("move", "io_error"),
    "ENOSPC": ("move", "no_space"),
    "short": ("move", "io_error"),
    "exception": ("move", "unknown"),
    "refused": ("post", "unknown"),
    "raises": ("post", "io_error"),
}


@pytest.fixture
def make_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    monkeypatch.setenv("KVCTL_RUNTIME_DIR", str(tmp_path / "run"))
    FAULTS.clear()
    engines: list[FakeModelEngine] = []

    def make(**options: Any) -> FakeModelEngine:
        engines.append(FakeModelEngine(tmp_path, **options))
        return engines[-1]

    yield make
    for held in HELD.values():
        held.set()
    HELD.clear()
    for engine in engines:
        engine.close()
    left = FAULTS[:]
    FAULTS.clear()
    assert not left, "what was planted did not happen"


def indexed(engine: FakeModelEngine) -> int:
    """Chunks in the tier's index, those being written included."""
    policy = engine.manager._policy
    return len(policy.chunks if hasattr(policy, "chunks") else policy.blocks)


def loads(engine: FakeModelEngine) -> int:
    return int(engine.copier().loads)


def stored_events(engine: FakeModelEngine) -> list[Any]:
    return [e for e in engine.events if type(e).__name__ == "BlockStored" and e.medium == "CPU"]


def failure(engine: FakeModelEngine) -> Any:
    (fact,) = (fact for fact in engine.facts if fact.outcome != "ok")
    return fact


@pytest.mark.parametrize("how", REASONS)
def test_what_a_failed_store_did_not_write_is_never_hit(make_engine: Any, how: str) -> None:
    engine = make_engine()
    FAULTS.append(Fault("store", how))

    engine.answer("first", PROMPT)
    engine.evict()

    assert indexed(engine) == 0
    assert stored_events(engine) == []
    assert engine.offload._events_tracker._pending_event_metadata == {}
    fact = failure(engine)
    assert (fact.direction, fact.phase, fact.reason, fact.bytes) == ("store", *REASONS[how], 0)
    assert fact.request == "first"
    engine.answer("second", PROMPT)
    assert loads(engine) == 0
    assert engine.wrong == []
    # The tier itself goes on: what the second one has stored, the third one loads.
    engine.evict()
    assert len(stored_events(engine)) >= 1
    engine.answer("third", PROMPT)
    assert loads(engine) == 1
    assert engine.wrong == []
    assert engine.finished == dict.fromkeys(("first", "second", "third"), "length")


@pytest.mark.parametrize("how", REASONS)
def test_a_failed_load_is_recomputed_in_the_step_that_completes_it(
    make_engine: Any, how: str
) -> None:
    engine = make_engine()
    engine.answer("first", PROMPT)
    engine.evict()
    FAULTS.append(Fault("load", how))

    engine.answer("second", PROMPT)

    (told,) = (told for told in engine.seen if "second" in (told.finished_recving or ()))
    if hasattr(told, "failed_recving"):
        assert told.failed_recving == {"second"}
    else:  # up to 0.28.0 its blocks have to tell
        assert len(told.invalid_block_ids) == CHUNKS
        assert sum(len(told.invalid_block_ids) for told in engine.seen) == CHUNKS
    assert engine.wrong == []
    assert engine.finished["second"] == "length"
    fact = failure(engine)
    assert (fact.direction, fact.phase, fact.reason, fact.bytes) == ("load", *REASONS[how], 0)
    assert loads(engine) == 1, "it was loaded again"


def test_what_could_not_be_read_is_stored_anew(make_engine: Any) -> None:
    engine = make_engine()
    engine.answer("first", PROMPT)
    engine.evict()
    FAULTS.append(Fault("load", "EIO"))
    engine.answer("second", PROMPT)
    removed = [e for e in engine.events if type(e).__name__ == "BlockRemoved" and e.medium == "CPU"]
    assert sum(len(event.block_hashes) for event in removed) == CHUNKS

    engine.evict()
    engine.answer("third", PROMPT)  # computes, and stores
    engine.evict()
    before = loads(engine)
    engine.answer("fourth", PROMPT)

    assert loads(engine) == before + 1
    assert engine.wrong == []
    assert not engine.connector._indexes[0]._unreadable


@pytest.mark.parametrize("tier_policy", ["fastest", "upstream"])
def test_a_load_that_fails_whenever_it_is_tried_does_not_hold_its_request_for_ever(
    make_engine: Any, tier_policy: str
) -> None:
    engine = make_engine(tier_policy=tier_policy)
    engine.answer("first", PROMPT)
    engine.evict()
    always = Fault("load", "EIO", times=1000)
    FAULTS.append(always)
    for name in ("second", "third", "fourth"):  # the third one stores it again
        engine.answer(name, PROMPT)
        engine.evict()
    FAULTS.remove(always)
    assert engine.wrong == []
    assert set(engine.finished.values()) == {"length"}
    assert loads(engine) <= 3


def test_with_the_policy_fail_the_client_gets_an_error_and_the_blocks_are_free(
    make_engine: Any,
) -> None:
    engine = make_engine(policy="fail")
    engine.answer("first", PROMPT)
    engine.evict()
    pool = engine.scheduler.kv_cache_manager.block_pool
    free = pool.get_num_free_blocks()
    FAULTS.append(Fault("load", "EIO"))
    engine.add("second", PROMPT)
    engine.add("other", [9] * 40)
    engine.step_until(lambda: len(engine.finished) == 3, "they have not ended")
    engine.settle()
    assert engine.finished == {"first": "length", "second": "error", "other": "length"}
    assert engine.wrong == []
    assert pool.get_num_free_blocks() == free


@pytest.mark.parametrize("rank", [0, 1])
def test_of_two_ranks_one_fails_to_store_long_before_the_other_is_done(
    make_engine: Any, rank: int
) -> None:
    engine = make_engine(ranks=2)
    HELD[1 - rank] = threading.Event()
    FAULTS.append(Fault("store", "EIO", rank=rank))
    engine.add("first", PROMPT)
    engine.step_until(lambda: "first" in engine.finished, "it has not ended")
    engine.step_until(lambda: told_failed(engine), "the failure was not told")
    for _ in range(5):
        engine.step()
    assert indexed(engine) == CHUNKS, "the other rank still writes into these rows"
    assert engine.scheduler.kv_cache_manager.reset_prefix_cache()
    engine.add("second", PROMPT)
    for _ in range(5):
        engine.step()
    assert loads(engine) == 0

    HELD.pop(1 - rank).set()
    engine.step_until(lambda: "second" in engine.finished, "it has not ended")

    assert (loads(engine), engine.wrong) == (0, [])
    fact = failure(engine)
    assert (fact.rank, fact.reason) == (rank, "io_error")


@pytest.mark.parametrize("rank", [0, 1])
def test_of_two_ranks_one_fails_to_load_long_before_the_other_is_done(
    make_engine: Any, rank: int
) -> None:
    engine = make_engine(ranks=2)
    engine.answer("first", PROMPT)
    engine.evict()
    HELD[1 - rank] = threading.Event()
    FAULTS.append(Fault("load", "EIO", rank=rank))
    engine.add("second", PROMPT)
    engine.step_until(lambda: told_failed(engine), "the failure was not told")
    for _ in range(5):
        engine.step()
    assert "second" not in engine.finished, "the other rank still writes into its blocks"

    HELD.pop(1 - rank).set()
    engine.step_until(lambda: "second" in engine.finished, "it has not ended")
    engine.settle()

    assert engine.wrong == []
    assert engine.finished["second"] == "length"
    assert [engine.copier(each).loads for each in (0, 1)] == [1, 1]


def told_failed(engine: FakeModelEngine) -> bool:
    return any(getattr(told.kv_connector_worker_meta, "failed", ()) for told in engine.seen)


def test_a_request_that_waits_for_what_is_being_stored_computes_it_when_that_fails(
    make_engine: Any,
) -> None:
    engine = make_engine()
    HELD[0] = threading.Event()
    FAULTS.append(Fault("store", "EIO"))
    engine.answer("first", PROMPT)
    assert engine.scheduler.kv_cache_manager.reset_prefix_cache()
    engine.add("second", PROMPT)
    for _ in range(5):
        engine.step()
    HELD.pop(0).set()
    engine.step_until(lambda: "second" in engine.finished, "it waits for ever")
    assert (loads(engine), engine.wrong) == (0, [])


def test_a_lost_report_is_made_up_for_by_the_next_one(make_engine: Any) -> None:
    engine = make_engine()
    FAULTS.append(Fault("store", "lost report", times=3))
    engine.answer("first", PROMPT)
    engine.evict()
    FAULTS.append(Fault("load", "lost report", times=3))
    engine.answer("second", PROMPT)
    assert (loads(engine), engine.wrong) == (1, [])


def test_a_tier_that_is_full_for_a_long_time_leaves_nothing_behind(make_engine: Any) -> None:
    engine = make_engine()
    always = Fault("store", "ENOSPC", times=1000)
    FAULTS.append(always)
    for number in range(12):
        engine.answer(f"r{number}", [number * 7 % 250] * 60)
    engine.settle()
    FAULTS.remove(always)
    index = engine.connector._indexes[0]
    (failures,) = engine.workers[0]._worker_half._failures.values()
    assert (indexed(engine), len(index._unwritten), len(failures._jobs)) == (0, 0, 0)
    assert engine.offload._events_tracker._pending_event_metadata == {}
    unit = "chunks" if hasattr(engine.manager, "_num_chunks") else "blocks"  # up to 0.28.0
    free = getattr(engine.manager, f"_get_num_free_{unit}")()
    assert free == getattr(engine.manager, f"_num_{unit}")
    assert sum(fact.reason == "no_space" for fact in engine.facts) >= 12


def test_a_reset_of_the_cache_forgets_what_has_failed(make_engine: Any) -> None:
    engine = make_engine(ranks=2)
    HELD[0] = threading.Event()
    FAULTS.append(Fault("store", "EIO", rank=1))
    engine.answer("first", PROMPT)
    engine.step_until(lambda: told_failed(engine), "the failure was not told")
    index = engine.connector._indexes[0]
    assert index._unwritten
    HELD.pop(0).set()
    engine.connector.reset_cache()
    assert not index._unwritten
    engine.settle()
    assert engine.scheduler.kv_cache_manager.reset_prefix_cache()
    engine.answer("second", PROMPT)
    engine.evict()
    engine.answer("third", PROMPT)
    assert (loads(engine), engine.wrong) == (1, [])


# What happens without it.


@pytest.mark.parametrize("direction", ["store", "load"])
def test_upstream_dies_of_it(
    make_engine: Any, monkeypatch: pytest.MonkeyPatch, direction: str
) -> None:
    def only_the_probe(self: OffloadFailures, worker: Any, between: Any) -> None:
        between(worker)

    monkeypatch.setattr(OffloadFailures, "install", only_the_probe)
    engine = make_engine()
    if direction == "load":
        engine.answer("first", PROMPT)
        engine.evict()
    FAULTS.append(Fault(direction, "EIO"))
    engine.add("second", PROMPT)
    with pytest.raises(AssertionError) as raised:
        engine.step_until(lambda: False, "nothing happened")
    assert raised.traceback[-1].path.as_posix().endswith("offloading/worker.py")


def test_a_failed_store_that_is_only_hidden_is_answered_wrong(
    make_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OffloadIndex, "failed", lambda self, job: None)
    engine = make_engine()
    FAULTS.append(Fault("store", "EIO"))
    engine.answer("first", PROMPT)
    engine.evict()
    engine.answer("second", PROMPT)
    assert engine.wrong != []


def test_a_failed_load_that_is_only_hidden_is_answered_wrong(
    make_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OffloadFailures, "failed_of", lambda self, received: set())
    monkeypatch.setattr(OffloadFailures, "take_blocks", lambda self: set())
    engine = make_engine()
    engine.answer("first", PROMPT)
    engine.evict()
    FAULTS.append(Fault("load", "EIO"))
    engine.answer("second", PROMPT)
    assert engine.wrong != []


def test_a_broken_chunk_that_stays_in_the_index_is_loaded_again_and_again(
    make_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only where a failed request is queried again (0.30.0 and later)."""
    told = OffloadIndex.failed

    def stores_only(self: OffloadIndex, job: Any) -> None:
        if job.store:
            told(self, job)

    monkeypatch.setattr(OffloadIndex, "failed", stores_only)
    engine = make_engine(tier_policy="upstream")  # ours asks no tier twice for one request
    engine.answer("first", PROMPT)
    engine.evict()
    FAULTS.append(Fault("load", "EIO", times=5))
    engine.answer("second", PROMPT)
    if hasattr(engine.seen[0], "failed_recving"):
        assert loads(engine) == 6
    FAULTS.clear()
