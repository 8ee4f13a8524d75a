"""What clients and operators do in the middle of things: hang up, overfill, reset."""

import contextlib
import http.client
import json
import threading
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from disorder import nothing_is_left, stopped
from misbehaviour import SLOW_COPIES
from pair import Pair, wait_for

from kvctl.demo.compare import Comparison

pytestmark = pytest.mark.engine

SHORT = 40  # tokens: less than one block


@pytest.fixture(scope="module")
def long(pair: Pair) -> list[int]:
    """Prompts of six blocks and more, longest first."""
    first = sorted(range(12), key=lambda prompt: -len(pair.prompts[prompt]))
    return [prompt for prompt in first if len(pair.prompts[prompt]) >= 6 * 128]


@contextmanager
def asked(pair: Pair, prompt: int, offer: Any, *, tokens: int = 8) -> Iterator[None]:
    """A client that asks decode, and hangs up at the end of the block."""
    body = pair.body(pair.prompts[prompt], offer, max_tokens=tokens)
    address = urllib.parse.urlsplit(pair.decode_url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=60)
    with contextlib.closing(connection):
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        yield


def test_a_client_that_hangs_up_before_the_pull(pair: Pair, long: list[int]) -> None:
    pair.forget_on_decode()
    with asked(pair, long[0], pair.offer(long[0])):
        pass
    nothing_is_left(pair)
    assert pair.ask(long[0]).difference is None


def test_a_client_that_hangs_up_during_the_pull(pair: Pair, long: list[int]) -> None:
    pair.forget_on_decode()
    offer = pair.offer(long[1])
    with stopped(pair, "prefill-0"):
        with asked(pair, long[1], offer):
            wait_for(lambda: pair.seen("decode-0").waiting["remote_kv"], "nothing is pulled")
        wait_for(lambda: pair.seen("decode-0").held["abort"], "its blocks are not held")
    nothing_is_left(pair)
    assert pair.ask(long[1]).difference is None


def test_a_client_that_hangs_up_after_the_pull(pair: Pair, long: list[int]) -> None:
    pair.forget_on_decode()
    before = pair.settled("decode-0").transfers_of("peer", "recv")
    with asked(pair, long[2], pair.offer(long[2]), tokens=400):
        wait_for(
            lambda: pair.seen("decode-0").transfers_of("peer", "recv").ok > before.ok,
            "nothing was pulled",
        )
    nothing_is_left(pair)
    assert pair.ask(long[2]).difference is None


def test_preemption_while_stores_are_in_flight(pair: Pair, long: list[int]) -> None:
    """Three long prompts that grow out of the device cache, while every copy takes its time."""
    pair.forget_on_decode()
    before = preemptions(pair)
    answers: list[tuple[int, Comparison]] = []

    def ask(prompt: int) -> None:
        answers.append((prompt, pair.take(prompt, None, max_tokens=300)))

    with pair.flag(SLOW_COPIES):
        asking = [threading.Thread(target=ask, args=[prompt]) for prompt in long[-3:]]
        for each in asking:
            each.start()
        for each in asking:
            each.join(120)
    assert preemptions(pair) > before, "there was room for all"
    assert len(answers) == 3
    assert [each for each in answers if each[1].difference is not None] == []
    nothing_is_left(pair)


def preemptions(pair: Pair) -> float:
    with urllib.request.urlopen(f"{pair.decode_url}/metrics", timeout=10) as response:
        lines = response.read().decode().splitlines()
    (line,) = (line for line in lines if line.startswith("vllm:num_preemptions_total"))
    return float(line.rpartition(" ")[2])


def test_a_reset_of_the_caches_in_the_middle_of_a_pull(pair: Pair, long: list[int]) -> None:
    pair.forget_on_decode()
    offer = pair.offer(long[0])
    answers: list[Comparison] = []
    asking = threading.Thread(target=lambda: answers.append(pair.take(long[0], offer)))
    with stopped(pair, "prefill-0"):
        asking.start()
        wait_for(lambda: pair.seen("decode-0").waiting["remote_kv"], "nothing is pulled")
        assert not pair.reset_on_decode(host=True), "blocks are in use"
    asking.join(60)
    (compared,) = answers
    assert compared.difference is None
    pair.forget_on_decode()
    assert pair.ask(long[0]).difference is None


def test_a_prompt_shorter_than_a_block(pair: Pair) -> None:
    (short,) = (n for n, prompt in enumerate(pair.prompts) if len(prompt) == SHORT)
    pair.forget_on_decode()
    before = pair.settled("decode-0").transfers_of("peer", "recv")
    assert pair.ask(short).difference is None
    assert pair.settled("decode-0").transfers_of("peer", "recv").ok == before.ok + 1
