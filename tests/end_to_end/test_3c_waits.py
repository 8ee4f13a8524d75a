"""Prefill hangs in the middle of a pull: what is answered without it, and what stays reserved."""

import os
import signal
import threading
import time

import pytest
from pair import Pair, session_of, wait_for

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
    pair.forget_on_decode()
    offers = [pair.offer(prompt) for prompt in prompts]
    hanging = session_of(pair.record("prefill-0")["pid"])
    answers: list[Comparison] = []
    asking = [
        threading.Thread(target=lambda pair_=each: answers.append(pair.take(*pair_)))
        for each in zip(prompts, offers, strict=True)
    ]
    before = pair.settled("decode-0")
    started = time.monotonic()
    for pid in hanging:
        os.kill(pid, signal.SIGSTOP)
    try:
        for each in asking:
            each.start()
        for each in asking:
            each.join(DEADLINE + 20)
        assert len(answers) == len(prompts), "answered while prefill hangs"
        assert time.monotonic() - started > DEADLINE - 1
        assert [each.difference for each in answers] == [None] * len(prompts)
        stopped = pair.seen("decode-0")
        assert given_up(stopped) == given_up(before) + len(prompts)
        assert stopped.held["abort"] >= len(prompts)
        assert stopped.quarantined
    finally:
        for pid in hanging:
            os.kill(pid, signal.SIGCONT)
    wait_for(lambda: pair.seen("decode-0").held["abort"] == 0, "blocks are still held", 60)

    refused = pair.refused("peer_quarantined")
    time.sleep(BACK_OFF)
    wait_for(
        lambda: pair.ask(prompts[0]).difference is None and not pair.seen("decode-0").quarantined,
        "prefill is still in quarantine", 90,
    )  # fmt: skip
    assert pair.refused("peer_quarantined") >= refused


def test_afterwards_pulls_are_in_time(pair: Pair) -> None:
    pair.forget_on_decode()
    before = pair.settled("decode-0").transfers_of("peer", "recv")
    longest = max(range(12), key=lambda prompt: len(pair.prompts[prompt]))
    assert pair.ask(longest).difference is None
    assert pair.settled("decode-0").transfers_of("peer", "recv").ok == before.ok + 1
