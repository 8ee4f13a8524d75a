"""A peer or a tier hangs in the middle of a load: what is answered without it, and what stays
reserved."""

import threading
import time

import pytest
from disorder import stopped
from misbehaviour import LOADS_HANG
from pair import Pair, wait_for

from kvctl.demo.compare import Comparison
from kvctl.sources.snapshot import EngineSnapshot

pytestmark = pytest.mark.engine

DEADLINE = 14.0  # seconds, the pair's wait_deadline
BACK_OFF = 10.0


def given_up(snapshot: EngineSnapshot) -> int:
    return sum(each.count for each in snapshot.failures if each.reason == "wait_deadline")


def test_prefill_hangs(pair: Pair) -> None:
    """Every request is answered by the deadline, and the blocks that prefill may still write stay
    reserved until its reads have ended. By then it is in quarantine, which one request ends."""
    prompts = sorted(range(12), key=lambda prompt: len(pair.prompts[prompt]))[1:4]
    assert pair.ask(prompts[0]).difference is None  # they know each other
    pair.forget_on_decode()
    offers = [pair.offer(prompt) for prompt in prompts]
    answers: list[Comparison] = []
    asking = [
        threading.Thread(target=lambda pair_=each: answers.append(pair.take(*pair_)))
        for each in zip(prompts, offers, strict=True)
    ]
    before = pair.settled("decode-0")
    started = time.monotonic()
    with stopped(pair, "prefill-0"):
        for each in asking:
            each.start()
        for each in asking:
            each.join(DEADLINE + 20)
        assert len(answers) == len(prompts), "answered while prefill hangs"
        assert time.monotonic() - started > DEADLINE - 1
        assert [each.difference for each in answers] == [None] * len(prompts)
        meanwhile = pair.seen("decode-0")
        assert given_up(meanwhile) == given_up(before) + len(prompts)
        assert meanwhile.held["abort"] >= len(prompts)
        assert meanwhile.quarantined
    wait_for(lambda: pair.seen("decode-0").held["abort"] == 0, "blocks are still held", 60)

    refused = pair.refused("peer_quarantined")
    time.sleep(BACK_OFF)
    wait_for(
        lambda: pair.ask(prompts[0]).difference is None and not pair.seen("decode-0").quarantined,
        "prefill is still in quarantine", 90,
    )  # fmt: skip
    assert pair.refused("peer_quarantined") >= refused


def test_a_load_from_host_memory_hangs(pair: Pair) -> None:
    """As on a file system that is gone: answered by the deadline, in other blocks."""
    prompt = max(range(12), key=lambda each: len(pair.prompts[each]))
    pair.compute(prompt)  # prefill stores it
    pair.settled("prefill-0")
    pair.use_up_prefills_cache()
    before = pair.settled("prefill-0")
    with pair.flag(LOADS_HANG):
        started = time.monotonic()
        offer = pair.offer(prompt)
        assert time.monotonic() - started > DEADLINE - 1
        meanwhile = pair.seen("prefill-0")
        assert given_up(meanwhile) == given_up(before) + 1
        assert meanwhile.held["abort"] > 0
    pair.forget_on_decode()
    assert pair.take(prompt, offer).difference is None
    wait_for(lambda: pair.seen("prefill-0").held["abort"] == 0, "blocks are still held", 60)
    after = pair.settled("prefill-0").transfers_of("host", "load")
    assert after.not_ok == before.transfers_of("host", "load").not_ok, "it ended well, unused"


def test_afterwards_pulls_are_in_time(pair: Pair) -> None:
    pair.forget_on_decode()
    before = pair.settled("decode-0").transfers_of("peer", "recv")
    longest = max(range(12), key=lambda prompt: len(pair.prompts[prompt]))
    assert pair.ask(longest).difference is None
    assert pair.settled("decode-0").transfers_of("peer", "recv").ok == before.ok + 1
