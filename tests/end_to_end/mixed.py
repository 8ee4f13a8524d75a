"""Requests of every kind at once, as a bad day brings them, each answer compared."""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import threading
import urllib.parse
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from pair import Pair

from kvctl.demo.compare import Comparison
from kvctl.demo.traffic import RequestError

# How often each kind comes, in parts of a hundred.
KINDS = {
    "through the router": 50,
    "its own offer": 16,
    "another prompt's offer": 8,
    "an offer used twice": 8,
    "no offer": 8,
    "hangs up": 6,
    "prefill alone": 4,
}
_PATIENCE = 120.0  # seconds: a lease, a deadline and a recompute, on a busy machine


def branching_prompts(count: int, block: int, longest: int, seed: int = 5) -> list[list[int]]:
    """Token ids of `count` prompts that share beginnings of whole blocks, as chats do.

    One of them is shorter than a block; the lengths of the others end anywhere in one.
    """
    source = random.Random(seed)
    prompts = [source.choices(range(256), k=block // 2)]
    stems: list[list[int]] = []
    while len(prompts) < count:
        if len(prompts) % 4 == 1:
            stems.append(source.choices(range(256), k=longest - block))
        stem = source.choice(stems[-3:])
        shared = source.randrange(0, len(stem) // block) * block
        rest = source.randrange(1, longest - shared)
        prompts.append(stem[:shared] + source.choices(range(256), k=rest))
    return prompts


@dataclass
class Tally:
    """What came of them."""

    asked: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    deviation: float = 0.0


def run_mixed(
    pair: Pair, count: int, clients: int, seed: int = 1, told: Callable[[Tally], None] | None = None
) -> Tally:
    """Sends so many requests, `clients` at a time.

    Args:
        told: called after each answer, from the clients' threads, one at a time.
    """
    source = random.Random(seed)
    tally = Tally()
    lock = threading.Lock()

    def one(number: int, kind: str, prompt: int, other: int, pause: float) -> None:
        try:
            compared = _ASK[kind](pair, prompt, other, pause)
            trouble = ""
        except Exception as error:
            compared, trouble = [], f"{type(error).__name__}: {error}"
        with lock:
            tally.asked[kind] += 1
            if trouble:
                tally.failed.append(f"{number} {kind}, prompt {prompt}: {trouble}")
            for each in compared:
                tally.deviation = max(tally.deviation, each.deviation)
                if each.difference is not None:
                    tally.wrong.append(f"{number} {kind}, prompt {prompt}: {each.difference}")
            if told is not None:
                told(tally)

    with ThreadPoolExecutor(clients) as pool:
        for number in range(count):
            (kind,) = source.choices(list(KINDS), list(KINDS.values()))
            prompt, other = source.sample(range(len(pair.prompts)), 2)
            pool.submit(one, number, kind, prompt, other, source.uniform(0, 0.4))
    return tally


def _through_the_router(pair: Pair, prompt: int, _: int, __: float) -> list[Comparison]:
    """A server that stood still closes its idle connections, which the router may be using just
    then: as any client, this one asks again."""
    try:
        return [pair.ask(prompt)]
    except RequestError as error:
        if "Connection reset" not in str(error) and "connection closed" not in str(error):
            raise
        return [pair.ask(prompt)]


def _twice(pair: Pair, prompt: int, other: int, _: float) -> list[Comparison]:
    offer = pair.offer(prompt)
    first = pair.take(prompt, dict(offer))
    pair.compute(other)
    return [first, pair.take(prompt, dict(offer))]


def _hang_up(pair: Pair, prompt: int, _: int, pause: float) -> list[Comparison]:
    """Asks decode, and is gone before, during or after its pull."""
    body = json.dumps(pair.body(pair.prompts[prompt], pair.offer(prompt)))
    address = urllib.parse.urlsplit(pair.decode_url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=_PATIENCE)
    with contextlib.closing(connection):
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        threading.Event().wait(pause)
    return []


def _alone(pair: Pair, prompt: int, _: int, __: float) -> list[Comparison]:
    pair.compute(prompt)
    return []


_ASK: dict[str, Callable[[Pair, int, int, float], list[Comparison]]] = {
    "through the router": _through_the_router,
    "its own offer": lambda pair, prompt, _, __: [pair.take(prompt, pair.offer(prompt))],
    "another prompt's offer": lambda pair, prompt, other, _: [pair.take(prompt, pair.offer(other))],
    "an offer used twice": _twice,
    "no offer": lambda pair, prompt, _, __: [pair.take(prompt, None)],
    "hangs up": _hang_up,
    "prefill alone": _alone,
}
