"""A host tier that fails: upstream's engine dies of any of these; ours answers right and counts."""

import pytest
from misbehaviour import FAIL
from pair import STOP, Pair, session_of, wait_for

from kvctl.demo.compare import Answer, compare
from kvctl.demo.prompts import make_prompts
from kvctl.demo.setting import CPU_BOUND, DEADLINE
from kvctl.demo.traffic import ask
from kvctl.sources.snapshot import Transfers

pytestmark = pytest.mark.engine

LONG = 700  # tokens: several blocks of 128
FRESH = [prompt for prompt in make_prompts(24, seed=31) if len(prompt) > LONG][:8]
OTHERS = range(12)
REASONS = {"EIO": "io_error", "ENOSPC": "no_space", "short": "io_error", "exception": "unknown"}


@pytest.fixture(autouse=True, scope="module")
def the_same_engines(pair: Pair) -> object:
    """No engine ends in any of these tests."""
    before = [each["pid"] for each in pair.records() if each["kind"] == "engine"]
    yield
    assert all(session_of(pid) for pid in before)
    assert [each["pid"] for each in pair.records() if each["kind"] == "engine"] == before


def answer(pair: Pair, prompt: list[int]) -> Answer:
    """Of prefill itself: what it has stored and loads is then what it answers from."""
    return ask(pair.prefill_url, prompt, model=pair.model, deadline=DEADLINE)


def same(first: Answer, again: Answer) -> bool:
    return compare(first, again, bound=CPU_BOUND).difference is None


def evict(pair: Pair) -> None:
    """Other prompts use prefill's device cache up."""
    for prompt in OTHERS:
        if len(pair.prompts[prompt]) > LONG:
            pair.compute(prompt)
    pair.settled("prefill-0")


def plant(pair: Pair, direction: str, how: str) -> None:
    pair.settled("prefill-0")
    pair.settled("decode-0")
    (pair.flags / FAIL[direction]).write_text(how)


def wait_until_failed(pair: Pair, direction: str, before: int) -> None:
    assert not (pair.flags / FAIL[direction]).exists(), f"there was no {direction}"
    wait_for(lambda: failed(pair, direction) == before + 1, "not counted as failed", STOP)


def host(pair: Pair, direction: str) -> Transfers:
    return pair.settled("prefill-0").transfers_of("host", direction)


def failed(pair: Pair, direction: str) -> int:
    return host(pair, direction).counts.get("failed", 0)


def counted(pair: Pair, direction: str, reason: str) -> int:
    failures = pair.settled("prefill-0").failures
    return sum(
        each.count
        for each in failures
        if (each.tier, each.direction, each.reason) == ("host", direction, reason)
    )


@pytest.mark.parametrize("how", REASONS)
def test_a_store_that_fails(pair: Pair, how: str) -> None:
    prompt = FRESH[list(REASONS).index(how)]
    before, reason = failed(pair, "store"), counted(pair, "store", REASONS[how])
    plant(pair, "store", how)

    first = answer(pair, prompt)

    wait_until_failed(pair, "store", before)
    assert counted(pair, "store", REASONS[how]) == reason + 1
    evict(pair)
    loads = host(pair, "load").ok
    assert same(first, answer(pair, prompt))
    assert host(pair, "load").ok == loads, "it was answered from what nobody wrote"
    # By now the second answer has stored it.
    evict(pair)
    loads = host(pair, "load").ok
    assert same(first, answer(pair, prompt))
    assert host(pair, "load").ok == loads + 1


@pytest.mark.parametrize("how", REASONS)
def test_a_load_that_fails(pair: Pair, how: str) -> None:
    prompt = FRESH[4 + list(REASONS).index(how)]
    first = answer(pair, prompt)
    evict(pair)
    before, reason = failed(pair, "load"), counted(pair, "load", REASONS[how])
    plant(pair, "load", how)

    again = answer(pair, prompt)

    assert same(first, again)
    wait_until_failed(pair, "load", before)
    assert counted(pair, "load", REASONS[how]) == reason + 1


def test_through_the_router(pair: Pair) -> None:
    evict(pair)
    pair.forget_on_decode()  # so that it is prefill that loads
    # Stored by now, and no longer in prefill's device cache.
    prompt = next(each for each in OTHERS if len(pair.prompts[each]) > LONG)
    before = failed(pair, "load")
    plant(pair, "load", "EIO")
    assert pair.ask(prompt).difference is None
    wait_until_failed(pair, "load", before)
