"""What a worker tells the scheduler half: stamped where it happened, carried by vLLM's own
per-step worker metadata, joined there over ranks.

Facts are plain tuples: they are pickled between processes, and in a single-process engine they
are handed over by reference and never touched again.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple


class Fact(NamedTuple):
    """One rank's share of one transfer that ended. Times are Unix ns (``time.time_ns``).

    Attributes:
        rank: of the worker.
        ranks: how many ranks will report this transfer; it is complete when all have.
        key: what the ranks' shares have in common: request id or job number.
        bytes: moved by this rank; 0 where the transport did not say.
        peer: engine id of the other side, known only after a handshake.
        phase, reason: of ``semconv``, set when `outcome` is not ``ok``.
    """

    rank: int
    ranks: int
    tier: str
    direction: str
    key: str
    request: str
    start: int
    end: int
    bytes: int
    outcome: str
    peer: str = ""
    phase: str = ""
    reason: str = ""


_WORST_FIRST = ("failed", "expired", "aborted", "ok")


class Joiner:
    """Joins the facts of all ranks into one per transfer.

    Bounded: a transfer whose ranks never all report (one of them died) is dropped when `limit`
    others have opened since.
    """

    def __init__(self, limit: int = 4096) -> None:
        self._open: OrderedDict[tuple[str, str, str], list[Fact]] = OrderedDict()
        self._limit = limit
        self.dropped = 0

    def add(self, fact: Fact) -> Fact | None:
        """Takes one rank's share; the whole transfer once the last rank has reported."""
        if fact.ranks <= 1:
            return fact
        key = (fact.tier, fact.direction, fact.key)
        shares = self._open.setdefault(key, [])
        shares.append(fact)
        if len(shares) < fact.ranks:
            if len(self._open) > self._limit:
                self._open.popitem(last=False)
                self.dropped += 1
            return None
        del self._open[key]
        return join(shares)


def join(shares: list[Fact]) -> Fact:
    """First post to last completion, the sum of the bytes, the worst outcome and its reason.

    A rank that moved nothing has no times of its own (``start`` 0) and does not stretch it.
    """
    worst = min(shares, key=lambda share: _WORST_FIRST.index(share.outcome))
    return worst._replace(
        ranks=1,
        start=min((share.start for share in shares if share.start), default=0),
        end=max(share.end for share in shares),
        bytes=sum(share.bytes for share in shares),
        peer=next((share.peer for share in shares if share.peer), ""),
    )
