"""A peer whose pulls keep failing is left alone for a while, then tried with one real request."""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass

from .bounded import trim

FAILURES = 3  # in a row, before a peer is left alone
LIMIT = 256  # peers remembered
_LONGEST = 32  # times the first back-off
_SECOND = 1_000_000_000  # ns


@dataclass
class _Record:
    """`until`: ns of `time.monotonic_ns`; 0 while the peer is not in quarantine."""

    failures: int = 0
    rounds: int = 0
    until: int = 0
    trial: bool = False


class Quarantine:
    """Which peers may be asked.

    Args:
        back_off: seconds until the first trial; doubles with each trial that fails. 0: never.
    """

    def __init__(self, back_off: float) -> None:
        self._back_off = int(back_off * _SECOND)
        self._records: OrderedDict[str, _Record] = OrderedDict()

    def admits(self, peer: str) -> bool:
        """Whether a request may pull from this peer now; of a trial, the first one that asks."""
        record = self._records.get(peer)
        if record is None or not record.until:
            return True
        now = time.monotonic_ns()
        if now < record.until:
            return False
        # Whatever becomes of the trial, even nothing: the next one comes a back-off later.
        record.trial = True
        record.until = now + self._wait(record.rounds)
        return True

    def ended(self, peer: str, *, well: bool) -> bool | None:
        """A pull from this peer has ended.

        Returns:
            True: the peer goes into quarantine now. False: it leaves it. None: no change.
        """
        record = self._records.get(peer)
        if well:
            self._records.pop(peer, None)
            return False if record is not None and record.until else None
        if not self._back_off or not peer:
            return None
        if record is None:
            record = self._records[peer] = _Record()
            trim(self._records, LIMIT)
        record.failures += 1
        if record.until and not record.trial:
            return None  # a pull from before the quarantine
        if record.failures < FAILURES:
            return None
        first = not record.until
        record.trial = False
        record.until = time.monotonic_ns() + self._wait(record.rounds)
        record.rounds += 1
        return True if first else None

    def _wait(self, rounds: int) -> int:
        return self._back_off * min(1 << rounds, _LONGEST)
