"""What the demo found: figures derived from the engines' feeds, and the verdict.

Counts and bytes are the engines' own sums, which are complete; percentiles are exact, from the
single transfers and waits that the feeds reported. Nothing here is assumed: what did not happen
is missing from the report, and the verdict says so.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvctl.demo.compare import Comparison
from kvctl.demo.traffic import Exchange
from kvctl.sources.feed import SeenTransfer, SeenWait
from kvctl.sources.snapshot import EngineSnapshot
from kvctl_connector.semconv import DIRECTIONS, TIERS

# The tiers and directions that the demo must see at work, and how it names what is missing.
_MUST_MOVE = (
    ("peer", "recv", "no KV came from prefill to decode over NIXL"),
    ("host", "store", "no KV was stored in host memory"),
    ("host", "load", "no KV came back from host memory"),
)


@dataclass(frozen=True)
class Timing:
    """Exact percentiles of the times that were seen, in seconds.

    Attributes:
        count: how many times they are made of.
    """

    count: int
    p50: float
    p99: float


@dataclass(frozen=True)
class Movement:
    """KV that one engine moved between two tiers in one direction.

    Attributes:
        count, bytes: of the transfers that ended well.
        not_ok: how many ended otherwise.
        bytes_per_second: bytes by the time that the transfers took, one after the other.
        timing: None when no single one was seen.
    """

    engine: str
    tier: str
    direction: str
    count: int
    bytes: int
    not_ok: int
    bytes_per_second: float | None
    timing: Timing | None


@dataclass(frozen=True)
class Waiting:
    """Requests of one engine that waited for KV of one tier."""

    engine: str
    tier: str
    count: int
    not_ok: int
    timing: Timing | None


@dataclass(frozen=True)
class Failure:
    """Transfers that failed for one reason."""

    engine: str
    tier: str
    direction: str
    phase: str
    reason: str
    count: int


@dataclass(frozen=True)
class Checked:
    """One answered request and how its answer compares."""

    exchange: Exchange
    comparison: Comparison


@dataclass(frozen=True)
class Report:
    """Everything that the demo shows.

    Attributes:
        planned, sent: requests that were to be sent, and that were.
        failed: those without an answer.
        checked: those with one.
        bound: how far logprobs of equal answers may lie apart.
        lost: transfers and waits that a feed reported and that were not seen singly.
        unread: feeds that could not be read, and why.
    """

    planned: int
    sent: int
    failed: tuple[Exchange, ...]
    checked: tuple[Checked, ...]
    bound: float
    latency: Timing | None
    movements: tuple[Movement, ...]
    waits: tuple[Waiting, ...]
    failures: tuple[Failure, ...]
    lost: int
    unread: tuple[str, ...]

    @property
    def different(self) -> list[Checked]:
        """The answers that are not equal to the reference."""
        return [each for each in self.checked if each.comparison.difference]

    @property
    def near_ties(self) -> int:
        """Answers that were compared only up to a near tie."""
        return sum(each.comparison.near_tie for each in self.checked)

    @property
    def deviation(self) -> float:
        """The largest difference of two logprobs that was seen."""
        return max((each.comparison.deviation for each in self.checked), default=0.0)

    def moved(self, tier: str, direction: str) -> int:
        """Bytes that all engines together moved that way."""
        return sum(
            each.bytes
            for each in self.movements
            if (each.tier, each.direction) == (tier, direction)
        )

    def problems(self) -> list[str]:
        """Why the demo did not succeed; empty when it did."""
        found = [f"a feed cannot be read: {why}" for why in self.unread]
        found += [why for tier, way, why in _MUST_MOVE if not self.moved(tier, way)]
        if self.failed:
            found.append(f"{len(self.failed)} of {self.sent} requests got no answer")
        if unsent := self.planned - self.sent:
            found.append(f"{unsent} of {self.planned} requests were not sent any more")
        if wrong := len(self.different):
            found.append(f"{wrong} of {len(self.checked)} answers differ from the reference")
        return found


def make_report(
    *,
    planned: int,
    exchanges: Sequence[Exchange],
    comparisons: Mapping[int, Comparison],
    bound: float,
    snapshots: Iterable[EngineSnapshot],
    transfers: Iterable[SeenTransfer],
    waits: Iterable[SeenWait],
    lost: int,
    unread: Iterable[str],
) -> Report:
    """Puts together what was sent, what came back, and what the engines say.

    Args:
        planned: requests that were to be sent.
        comparisons: by position in `exchanges`; of those with an answer.
    """
    engines = sorted(snapshots, key=lambda engine: (engine.role != "prefill", engine.name))
    seen_transfers, seen_waits = list(transfers), list(waits)
    return Report(
        planned=planned,
        sent=len(exchanges),
        failed=tuple(each for each in exchanges if each.answer is None),
        checked=tuple(
            Checked(exchanges[index], comparison) for index, comparison in comparisons.items()
        ),
        bound=bound,
        latency=timing_of([each.seconds for each in exchanges if each.answer]),
        movements=tuple(
            sorted(
                (each for engine in engines for each in _movements(engine, seen_transfers)),
                key=lambda each: (_place(TIERS, each.tier), _place(DIRECTIONS, each.direction)),
            )
        ),
        waits=tuple(
            sorted(
                (each for engine in engines for each in _waits(engine, seen_waits)),
                key=lambda each: _place(TIERS, each.tier),
            )
        ),
        failures=tuple(failure for engine in engines for failure in _failures(engine)),
        lost=lost,
        unread=tuple(unread),
    )


def _place(order: Sequence[str], name: str) -> int:
    """Where a name stands in a vocabulary; what a newer engine has added comes last."""
    return order.index(name) if name in order else len(order)


def timing_of(seconds: Sequence[float]) -> Timing | None:
    """Percentiles by nearest rank: each is one of the values."""
    if not seconds:
        return None
    ordered = sorted(seconds)

    def rank(share: float) -> float:
        return ordered[math.ceil(share * len(ordered)) - 1]

    return Timing(len(ordered), rank(0.5), rank(0.99))


def _movements(engine: EngineSnapshot, seen: Sequence[SeenTransfer]) -> list[Movement]:
    found = []
    for moved in engine.transfers:
        if not sum(moved.counts.values()):
            continue
        # Of a send only the reader knows when it began and what it moved.
        durations = [
            (each.transfer.end - each.transfer.start) / 1e9
            for each in seen
            if (each.engine, each.transfer.tier, each.transfer.direction, each.transfer.outcome)
            == (engine.name, moved.tier, moved.direction, "ok")
            and moved.direction != "send"
        ]
        found.append(
            Movement(
                engine=engine.name,
                tier=moved.tier,
                direction=moved.direction,
                count=moved.ok,
                bytes=moved.bytes,
                not_ok=moved.not_ok,
                bytes_per_second=moved.bandwidth,
                timing=timing_of(durations),
            )
        )
    return found


def _waits(engine: EngineSnapshot, seen: Sequence[SeenWait]) -> list[Waiting]:
    found = []
    for tier in dict.fromkeys(wait.tier for wait in engine.waits):
        of_tier = [wait for wait in engine.waits if wait.tier == tier]
        count = sum(wait.duration.count for wait in of_tier)
        if count:
            durations = [
                (each.wait.end - each.wait.start) / 1e9
                for each in seen
                if (each.engine, each.wait.tier) == (engine.name, tier)
            ]
            ok = sum(wait.duration.count for wait in of_tier if wait.outcome == "ok")
            found.append(Waiting(engine.name, tier, count, count - ok, timing_of(durations)))
    return found


def _failures(engine: EngineSnapshot) -> list[Failure]:
    return [
        Failure(engine.name, each.tier, each.direction, each.phase, each.reason, each.count)
        for each in engine.failures
        if each.count
    ]
