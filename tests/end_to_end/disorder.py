"""Engines that stand still, and the proof that nothing is left behind."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pair import Pair, session_of, wait_for

from kvctl.demo.compare import Comparison


@contextmanager
def stopped(pair: Pair, name: str) -> Iterator[None]:
    """An engine whose processes all stand still."""
    pids = session_of(pair.record(name)["pid"])
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in session_of(pair.record(name)["pid"]):
            os.kill(pid, signal.SIGCONT)


def nothing_is_left(pair: Pair) -> None:
    """No transfer in flight, no request waiting, no block held: on either side."""

    def quiet() -> bool:
        seen = [pair.seen(name) for name in ("prefill-0", "decode-0")]
        return not any(
            any(each.inflight for each in one.transfers)
            or any(one.waiting.values())
            or any(one.held.values())
            for one in seen
        )

    wait_for(quiet, "something is left behind", 90)


class Taking(threading.Thread):
    """A client of decode, and what it got."""

    def __init__(self, pair: Pair, prompt: int, offer: dict[str, Any]) -> None:
        super().__init__()
        self._ask = lambda: pair.take(prompt, offer)
        self.answer: Comparison | Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            self.answer = self._ask()
        except Exception as error:
            self.answer = error
