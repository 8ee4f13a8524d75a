"""A bad day: requests of every kind at once, while engines stand still and copies fail."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from disorder import nothing_is_left
from layouts import MIXED, shaped
from misbehaviour import FAIL, SLOW_COPIES
from mixed import Tally, run_mixed
from pair import Pair, session_of, worker_of

pytestmark = pytest.mark.shapes

mixed_prompts = shaped(MIXED)
COUNT = 1000


@contextmanager
def faults(pair: Pair) -> Iterator[Counter[str]]:
    """One fault after the other until the end of the block; how often each came."""
    over = threading.Event()
    source = random.Random(7)
    done: Counter[str] = Counter()

    def stand_still(pids: list[int], seconds: float) -> None:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        over.wait(seconds)
        for pid in pids:
            os.kill(pid, signal.SIGCONT)

    def decode_late() -> None:
        stand_still([worker_of(pair.record("decode-0")["pid"])], MIXED.lease + 2)

    def prefill_still() -> None:
        stand_still(session_of(pair.record("prefill-0")["pid"]), MIXED.lease + 2)

    def copies_fail() -> None:
        for direction in ("store", "load"):
            (pair.flags / FAIL[direction]).write_text(source.choice(["EIO", "ENOSPC", "short"]))

    def copies_slow() -> None:
        with pair.flag(SLOW_COPIES):
            over.wait(3)

    def inflict() -> None:
        kinds = [decode_late, copies_fail, prefill_still, copies_slow]
        while not over.wait(10):
            kind = kinds[sum(done.values()) % len(kinds)]
            kind()
            done[kind.__name__] += 1

    thread = threading.Thread(target=inflict)
    thread.start()
    try:
        yield done
    finally:
        over.set()
        thread.join()
        for name in FAIL.values():
            (pair.flags / name).unlink(missing_ok=True)


def progress(tally: Tally) -> None:
    if not sum(tally.asked.values()) % 100:
        print(f"{time.strftime('%H:%M:%S')} {sum(tally.asked.values())} {tally.wrong[:1]}")


@mixed_prompts
def test_a_thousand_mixed_requests_while_things_fail(pair: Pair) -> None:
    with faults(pair) as inflicted:
        tally = run_mixed(pair, COUNT, clients=8, told=progress)
    print(tally.asked, inflicted, f"largest deviation {tally.deviation:.1e}", *tally.failed)

    assert tally.wrong == []
    assert tally.failed == []
    assert min(inflicted.values(), default=0) >= 1 and len(inflicted) == 4
    decode = pair.seen("decode-0")
    chosen: Counter[str] = Counter()
    for each in decode.choices:
        chosen[each.tier] += each.count
    print(chosen)
    assert chosen["composed"] >= 100
    assert min(chosen["peer"], chosen["host"]) >= 20
    reasons = {each.reason for each in decode.failures}
    assert {"offer_mismatch", "offer_reused", "lease_expired"} <= reasons
    nothing_is_left(pair)


@mixed_prompts
def test_eviction_races_a_load(pair: Pair) -> None:
    """A slow load, and stores that must evict to have room, from a tier that is full."""
    prompt = max(range(len(pair.prompts)), key=lambda each: len(pair.prompts[each]))
    pair.compute(prompt)
    pair.settled("prefill-0")
    pair.forget_on_prefill()
    before = pair.settled("prefill-0")
    assert all(tier.used == tier.capacity for tier in before.tiers)

    with pair.flag(SLOW_COPIES), ThreadPoolExecutor(4) as pool:
        offered = pool.submit(pair.offer, prompt)
        for other in range(len(pair.prompts)):
            if other != prompt:
                pool.submit(pair.compute, other)

    after = pair.settled("prefill-0")
    for direction in ("load", "store"):
        moved = [seen.transfers_of("host", direction).bytes for seen in (before, after)]
        assert moved[1] > moved[0], direction
    pair.forget_on_decode()
    assert pair.take(prompt, offered.result()).difference is None


@mixed_prompts
def test_two_hundred_requests_at_once(pair: Pair) -> None:
    pair.deadline = 300.0  # for all of them, on two cores
    tally = run_mixed(pair, 200, clients=200, seed=2)
    print(tally.asked, *tally.failed)
    assert sum(tally.asked.values()) == 200
    assert tally.wrong == []
    assert tally.failed == []
    nothing_is_left(pair)
