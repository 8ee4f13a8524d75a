"""`kv_load_failure_policy: fail`: whatever load fails, the client is told so; and nothing else."""

from __future__ import annotations

import http.client
import os
import signal
import urllib.error
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from disorder import Taking, nothing_is_left, stopped
from late_read import late_read
from layouts import FAILING, shaped
from misbehaviour import FAIL, LOADS_HANG
from pair import Pair, kill_session, wait_for, worker_of

pytestmark = pytest.mark.shapes

failing = shaped(FAILING)


@contextmanager
def told_of_the_failure() -> Iterator[None]:
    """The client gets an error, which it can tell from an answer."""
    with pytest.raises(urllib.error.HTTPError) as caught:
        yield
    assert caught.value.code == 500


def in_host_memory_alone(pair: Pair) -> int:
    """Has prefill store a prompt, and use all its blocks for others."""
    prompt = max(range(12), key=lambda each: len(pair.prompts[each]))
    pair.compute(prompt)
    pair.settled("prefill-0")
    pair.use_up_prefills_cache()
    pair.settled("prefill-0")
    return prompt


@failing
def test_a_copy_that_fails(pair: Pair) -> None:
    prompt = in_host_memory_alone(pair)
    (pair.flags / FAIL["load"]).write_text("EIO")
    with told_of_the_failure():
        pair.compute(prompt)
    assert not (pair.flags / FAIL["load"]).exists()
    assert pair.ask(prompt).difference is None, "the next one is computed"


@failing
def test_a_copy_that_hangs(pair: Pair) -> None:
    prompt = in_host_memory_alone(pair)
    with pair.flag(LOADS_HANG), told_of_the_failure():
        pair.compute(prompt)
    assert pair.ask(prompt).difference is None
    nothing_is_left(pair)


@failing
def test_a_peer_that_hangs(pair: Pair) -> None:
    assert pair.ask(0).difference is None  # they know each other
    pair.forget_on_decode()
    offer = pair.offer(1)
    with stopped(pair, "prefill-0"), told_of_the_failure():
        pair.take(1, offer)
    nothing_is_left(pair)


@failing
def test_a_read_that_came_too_late(pair: Pair) -> None:
    pair.forget_on_decode()
    before = pair.refused("lease_expired")
    with told_of_the_failure():
        late_read(pair, 2)
    assert pair.refused("lease_expired") > before
    assert pair.ask(2).difference is None
    nothing_is_left(pair)


@failing
def test_decode_killed_in_the_middle_of_a_read(pair: Pair) -> None:
    """Its client is told, and prefill has its blocks back when the lease is over."""
    first, second = 3, 4
    offer = pair.offer(first)
    worker = worker_of(pair.record("decode-0")["pid"])
    os.kill(worker, signal.SIGSTOP)
    taking = Taking(pair, first, offer)
    wait_for(lambda: pair.seen("decode-0").waiting["remote_kv"], "nothing is read")
    kill_session(pair.record("decode-0")["pid"])
    taking.join(pair.deadline)
    assert isinstance(taking.answer, OSError | http.client.HTTPException), taking.answer

    def is_held() -> int:
        return pair.seen("prefill-0").transfers_of("peer", "send").inflight

    wait_for(lambda: not is_held(), "prefill keeps the blocks", FAILING.lease + 10)
    pair.compute(second)
