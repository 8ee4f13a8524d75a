"""Engines that stand still, and the proof that nothing is left behind."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from pair import Pair, session_of, wait_for


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
