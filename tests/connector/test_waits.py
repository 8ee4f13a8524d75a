"""Parked requests, their deadline, and the blocks that stay reserved when it has passed."""

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.block_pool import BlockPool

from kvctl_connector.completion import CompletionMap, GivenUp, Released
from kvctl_connector.recorder import Recorder
from kvctl_connector.waits import Part, Waits

PEER = (Part(0, "peer", 256),)


class Clock:
    """Unix time that a test moves."""

    def __init__(self) -> None:
        self.now = 1_000_000_000_000

    def time_ns(self) -> int:
        return self.now

    def monotonic_ns(self) -> int:
        return self.now

    def pass_by(self, seconds: float) -> None:
        self.now += int(seconds * 1e9)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    clock = Clock()
    monkeypatch.setattr(time, "time_ns", clock.time_ns)
    monkeypatch.setattr(time, "monotonic_ns", clock.monotonic_ns)
    yield clock


@pytest.fixture
def pool() -> BlockPool:
    """vLLM's own, of eight blocks; one of them is its padding block."""
    return BlockPool(num_gpu_blocks=8, enable_caching=True, hash_block_size=128)


def make_waits(
    pool: BlockPool | None, *, ranks: int = 1, deadline: float = 5, lets_go: bool = False
) -> Waits:
    waits = Waits(
        Recorder(), ranks, deadline, ("peer", "host"), let_go=lambda child, request: lets_go
    )
    waits.block_pool = pool
    return waits


def take(pool: BlockPool, count: int) -> Any:
    return SimpleNamespace(blocks=(pool.get_new_blocks(count),))


def held(waits: Waits) -> float:
    found = [s for s in waits._recorder.everything() if s.metric == "kvctl.blocks.held"]
    return found[0].value if found else 0


def failures(waits: Waits) -> dict[str, float]:
    return {
        series.attributes["reason"]: series.value
        for series in waits._recorder.everything()
        if series.metric == "kvctl.transfer.failures"
    }


def test_within_the_deadline_nothing_is_given_up(clock: Clock, pool: BlockPool) -> None:
    waits = make_waits(pool)
    waits.begin("r", PEER, take(pool, 2))
    clock.pass_by(4.9)
    assert waits.give_up_overdue() == {}
    assert "r" in waits


def test_blocks_stay_reserved_until_every_rank_has_ended(clock: Clock, pool: BlockPool) -> None:
    waits = make_waits(pool, ranks=2)
    blocks = take(pool, 3)
    before = pool.get_num_free_blocks()
    waits.begin("r", PEER, blocks)
    clock.pass_by(5.1)

    assert waits.give_up_overdue() == {"r": GivenUp(1, (0,), ("peer",))}
    assert waits.give_up_overdue() == {}, "once"
    pool.free_blocks(blocks.blocks[0])  # vLLM has the request recomputed in other blocks
    assert pool.get_num_free_blocks() == before, "nobody gets them"
    assert held(waits) == 3
    assert waits.holds, "so the engine must go on stepping"
    assert failures(waits) == {"wait_deadline": 1}

    waits.loads_ended([1])
    assert pool.get_num_free_blocks() == before, "one of two ranks"
    waits.loads_ended([1])
    assert pool.get_num_free_blocks() == before + 3
    assert held(waits) == 0
    assert not waits.holds


def test_cached_blocks_and_padding_are_nobodys_to_reserve(clock: Clock, pool: BlockPool) -> None:
    waits = make_waits(pool)
    cached, padding, fresh = (
        SimpleNamespace(block_hash=b"h", is_null=False, ref_cnt=1),
        SimpleNamespace(block_hash=None, is_null=True, ref_cnt=0),
        SimpleNamespace(block_hash=None, is_null=False, ref_cnt=1),
    )
    waits.begin("r", PEER, SimpleNamespace(blocks=([cached, padding, fresh],)))
    clock.pass_by(6)
    waits.give_up_overdue()
    assert [cached.ref_cnt, padding.ref_cnt, fresh.ref_cnt] == [1, 0, 2]


def test_only_the_overdue_ones(clock: Clock, pool: BlockPool) -> None:
    waits = make_waits(pool)
    waits.begin("old", PEER, take(pool, 1))
    clock.pass_by(3)
    waits.begin("young", PEER, take(pool, 1))
    clock.pass_by(3)
    assert list(waits.give_up_overdue()) == ["old"]
    assert "young" in waits


def test_a_load_that_its_child_cannot_let_go_is_waited_for(clock: Clock, pool: BlockPool) -> None:
    waits = make_waits(pool, lets_go=False)
    waits.begin("composed", (Part(1, "host", 128), Part(0, "peer", 256)), take(pool, 2))
    waits.begin("local", (Part(1, "host", 128),), take(pool, 1))
    waits.begin("pulled", PEER, take(pool, 1))
    clock.pass_by(6)
    assert list(waits.give_up_overdue()) == ["pulled"]
    waits.part_ended("composed", "host", "ok")
    assert waits.give_up_overdue()["composed"].tiers == ("peer",)
    assert "local" in waits


def test_a_load_that_its_child_lets_go_is_given_up(clock: Clock, pool: BlockPool) -> None:
    waits = make_waits(pool, lets_go=True)
    waits.begin("composed", (Part(1, "host", 128), Part(0, "peer", 256)), take(pool, 2))
    waits.begin("local", (Part(1, "host", 128),), take(pool, 1))
    waits.part_ended("composed", "peer", "ok")
    clock.pass_by(6)
    overdue = waits.give_up_overdue()
    assert overdue == {
        "composed": GivenUp(1, (1, 0), ("host",)),
        "local": GivenUp(2, (1,), ("host",)),
    }
    assert held(waits) == 3
    assert failures(waits) == {"wait_deadline": 2}


def test_the_worst_part_is_the_outcome_whenever_it_ended(pool: BlockPool) -> None:
    waits = make_waits(pool)
    parts = (Part(1, "host", 128), Part(0, "peer", 256))
    waits.begin("r", parts, take(pool, 2))
    waits.part_ended("r", "peer", "failed")
    waits.part_ended("r", "host", "ok")
    assert waits.end("r") == (), "no tokens came of it"
    waits.begin("s", parts, take(pool, 2))
    waits.part_ended("s", "host", "ok")
    assert waits.end("s") == parts


@pytest.mark.parametrize("without", ["a deadline", "a pool"])
def test_without_either_it_waits_for_ever(clock: Clock, pool: BlockPool, without: str) -> None:
    waits = make_waits(pool, deadline=0) if without == "a deadline" else make_waits(None)
    waits.begin("r", PEER, take(pool, 1))
    clock.pass_by(1000)
    assert waits.give_up_overdue() == {}


def test_blocks_of_an_aborted_request_are_held_until_its_load_is_complete(
    pool: BlockPool,
) -> None:
    waits = make_waits(pool)
    waits.begin("r", PEER, take(pool, 2))
    waits.abort("r")
    assert held(waits) == 2, "vLLM keeps them itself"
    waits.end("r")
    assert held(waits) == 0


# The worker's side


def given_up(completion: CompletionMap) -> Released:
    released = Released()
    completion.release_given_up(released)
    return released


def report(completion: CompletionMap, child: int, *requests: str) -> Released:
    released = Released()
    completion.report(child, requests, (), released)
    return released


def test_a_load_that_is_given_up_is_released_as_failed_at_once() -> None:
    completion = CompletionMap()
    completion.expect({"r": (0, 1)})
    completion.give_up({"r": GivenUp(7, (0, 1))})
    assert given_up(completion) == Released({"r"}, {"r"})
    assert given_up(completion) == Released()


def test_its_end_is_told_once_the_last_child_has_reported_and_completes_nothing() -> None:
    completion = CompletionMap()
    completion.expect({"r": (0, 1)})
    completion.give_up({"r": GivenUp(7, (0, 1))})
    given_up(completion)
    assert report(completion, 0, "r") == Released()
    assert completion.take_ended() == []
    assert report(completion, 1, "r") == Released()
    assert completion.take_ended() == [7]
    assert completion.take_ended() == []
    assert completion.strays == 0


def test_a_child_that_had_reported_before_is_not_waited_for() -> None:
    completion = CompletionMap()
    completion.expect({"r": (0, 1)})
    report(completion, 1, "r")
    completion.give_up({"r": GivenUp(7, (0, 1))})
    report(completion, 0, "r")
    assert completion.take_ended() == [7]


def test_a_load_that_was_complete_before_the_news_came_has_ended() -> None:
    completion = CompletionMap()
    completion.expect({"r": (0,)})
    report(completion, 0, "r")
    completion.give_up({"r": GivenUp(7, (0,))})
    assert completion.take_ended() == [7]
    assert given_up(completion) == Released()


def test_the_next_load_of_the_same_request_is_another_one() -> None:
    """From another tier, since the one that was given up is not asked again."""
    completion = CompletionMap()
    completion.expect({"r": (0,)})
    completion.give_up({"r": GivenUp(7, (0,))})
    given_up(completion)
    completion.expect({"r": (1,)})
    assert report(completion, 0, "r") == Released(), "the end of the first"
    assert completion.take_ended() == [7]
    assert report(completion, 1, "r") == Released({"r"}, set())
