"""Transfers that ended: the ranks' facts joined, counted, and measured for the choice of a tier."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Container, Iterable, Iterator

from . import semconv
from .bounded import trim
from .facts import Fact, Joiner
from .host_tier import HostTier
from .recorder import Recorder
from .speeds import Speeds
from .wire import Transfer

LIMIT = 65_536  # offers remembered at once


class Transfers:
    """The transfers of one engine, from the facts that its workers stamped.

    Args:
        host_tier: for its occupancy; None: it does not say.
    """

    def __init__(self, recorder: Recorder, host_tier: HostTier | None) -> None:
        self._recorder = recorder
        self._host_tier = host_tier
        self._joiner = Joiner()
        self._sends: OrderedDict[str, int] = OrderedDict()
        self._stores: dict[str, set[int | str]] = {}  # by tier
        self.speeds = Speeds()

    @property
    def dropped(self) -> int:
        """Transfers of which a rank never told its share."""
        return self._joiner.dropped

    def announced(self, tier: str, stores: Iterable[int | str]) -> None:
        """Stores that a tier's workers are about to be given, by the job's number.

        vLLM 0.20.2 numbers them in the workers only: there by request.
        """
        inflight = self._stores.setdefault(tier, set())
        inflight.update(stores)
        self._recorder.set(semconv.TRANSFER_INFLIGHT, len(inflight), tier, "store")

    def offered(self, request: str) -> None:
        """This request's blocks are held for another engine to read."""
        self._sends[request] = time.time_ns()
        trim(self._sends, LIMIT)
        self._recorder.set(semconv.TRANSFER_INFLIGHT, len(self._sends), "peer", "send")

    def ended(self, shares: Iterable[Fact], awaited: Container[str]) -> Iterator[Fact]:
        """Records each transfer whose last rank has reported, and yields it.

        Args:
            awaited: requests whose loads have not been given up. A pull that nobody waited for
                any more, since its peer hung or its client left, tells no speed to choose by.
        """
        for share in shares:
            fact = self._joiner.add(share)
            if fact is not None:
                self._record(fact)
                wanted = fact.direction != "recv" or fact.request in awaited
                if fact.outcome == "ok" and fact.start and wanted:
                    seconds = (fact.end - fact.start) / 1e9
                    self.speeds.add(fact.tier, fact.direction, fact.peer, fact.bytes, seconds)
                yield fact

    def _record(self, fact: Fact) -> None:
        recorder = self._recorder
        peer = recorder.peer(fact.peer)
        labels = (fact.tier, fact.direction, fact.outcome)
        recorder.add(semconv.TRANSFER_COUNT, 1, *labels, peer)
        start = fact.start or self._sends.get(fact.request, 0) or fact.end
        seconds = (fact.end - start) / 1e9
        if fact.direction == "send":
            # How much was read, and when the read began, only the reader knows.
            self._sends.pop(fact.request, None)
            recorder.set(semconv.TRANSFER_INFLIGHT, len(self._sends), "peer", "send")
        else:
            recorder.add(semconv.TRANSFER_BYTES, fact.bytes, *labels, peer)
            recorder.observe(semconv.TRANSFER_SIZE, fact.bytes, *labels)
            recorder.observe(semconv.TRANSFER_DURATION, seconds, *labels)
        if fact.outcome != "ok":
            recorder.add(
                semconv.TRANSFER_FAILURES, 1,
                fact.tier, fact.direction, fact.phase, fact.reason, peer,
            )  # fmt: skip
        if fact.direction == "store":
            inflight = self._stores.setdefault(fact.tier, set())
            inflight -= {int(fact.key), fact.request}
            recorder.set(semconv.TRANSFER_INFLIGHT, len(inflight), fact.tier, "store")
        if fact.tier == "host" and self._host_tier is not None:
            recorder.set(semconv.TIER_USED, self._host_tier.used, "host")
        recorder.put(
            Transfer(
                seq=0, tier=fact.tier, direction=fact.direction, outcome=fact.outcome,
                request=fact.request, start=start, end=fact.end, bytes=fact.bytes,
                peer=peer, phase=fact.phase, reason=fact.reason,
            )
        )  # fmt: skip
