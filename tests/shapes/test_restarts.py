"""Engines that are killed in the middle of things, and come back on the same ports."""

from __future__ import annotations

import os
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from disorder import Taking, stopped
from layouts import PLAIN, shaped
from pair import START, Pair, kill_session, session_of, wait_for

from kvctl.demo.compare import Comparison

pytestmark = pytest.mark.shapes

plain = shaped(PLAIN)


@contextmanager
def started_again(pair: Pair, name: str) -> Iterator[None]:
    """The same command in the same environment, as whoever supervises it would."""
    process = Path("/proc") / str(pair.record(name)["pid"])
    command = (process / "cmdline").read_bytes().split(b"\0")[:-1]
    environ = dict(
        entry.split(b"=", 1)
        for entry in (process / "environ").read_bytes().split(b"\0")
        if b"=" in entry
    )
    kill_session(pair.record(name)["pid"])
    again = subprocess.Popen(
        command, env=environ, start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        wait_for(lambda: healthy(pair.record(name)["url"]), f"{name} does not start again", START)
        yield
    finally:
        for pid in session_of(again.pid):
            os.kill(pid, signal.SIGKILL)
        again.wait(30)


def healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def long(pair: Pair) -> list[int]:
    return sorted(range(len(pair.prompts)), key=lambda prompt: -len(pair.prompts[prompt]))


@plain
def test_prefill_killed_in_the_middle_of_a_read_and_started_again(pair: Pair) -> None:
    first, second, third = long(pair)[:3]
    assert pair.ask(third).difference is None  # they know each other
    offer = pair.offer(first)
    with stopped(pair, "prefill-0"):
        taking = Taking(pair, first, offer)
        wait_for(lambda: pair.seen("decode-0").waiting["remote_kv"], "nothing is read")
        with started_again(pair, "prefill-0"):
            taking.join(pair.deadline)
            assert isinstance(taking.answer, Comparison), taking.answer
            assert taking.answer.difference is None
            before = pair.settled("decode-0").transfers_of("peer", "recv")
            assert not pair.seen("decode-0").held["abort"]
            assert pair.take(second, pair.offer(second)).difference is None
            after = pair.settled("decode-0").transfers_of("peer", "recv")
            assert after.ok == before.ok + 1, "from the new one"


@plain
def test_without_prefill_decode_answers_from_its_own(pair: Pair) -> None:
    for prompt in long(pair)[:3]:
        assert pair.take(prompt, None).difference is None
