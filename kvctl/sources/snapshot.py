"""What is known about one engine at one moment: frozen values, whatever they were read from.

Seconds, bytes and Unix times in seconds. Strings hold no control characters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Distribution:
    """Observations, counted in buckets.

    Attributes:
        bounds: upper bounds of the buckets, ascending; the last bucket has none.
        counts: observations per bucket, one more than `bounds`.
        total: the sum of all observations.
    """

    bounds: tuple[float, ...] = ()
    counts: tuple[int, ...] = (0,)
    total: float = 0.0

    @property
    def count(self) -> int:
        """How many observations."""
        return sum(self.counts)

    def quantile(self, share: float) -> float | None:
        """The value below which `share` (0 to 1) of the observations lie; None without any.

        Interpolated within its bucket as Prometheus' ``histogram_quantile`` does it, so that
        boards and command line agree; in the last bucket it is that bucket's lower bound.
        """
        if not self.count or not self.bounds:
            return None
        rank = share * self.count
        below = 0
        lower = 0.0
        for upper, count in zip(self.bounds, self.counts, strict=False):
            if count and below + count >= rank:
                return lower + (upper - lower) * max(0.0, rank - below) / count
            below += count
            lower = upper
        return self.bounds[-1]


@dataclass(frozen=True)
class Transfers:
    """The transfers between two tiers in one direction.

    Attributes:
        counts: how many ended, by outcome.
        bytes: moved by those that ended well.
        duration: seconds of those that ended well. Of ``send`` nothing is known here: when a read
            began, and what it moved, only the reader knows.
        inflight: announced and not ended.
    """

    tier: str
    direction: str
    counts: Mapping[str, int] = field(default_factory=dict)
    bytes: int = 0
    duration: Distribution = Distribution()
    inflight: int = 0

    @property
    def ok(self) -> int:
        """How many ended well."""
        return self.counts.get("ok", 0)

    @property
    def not_ok(self) -> int:
        """How many ended otherwise."""
        return sum(self.counts.values()) - self.ok

    @property
    def bandwidth(self) -> float | None:
        """Bytes per second of one transfer, on average, large ones weighing more."""
        return self.bytes / self.duration.total if self.duration.total else None


@dataclass(frozen=True)
class Waits:
    """Requests that waited for KV of one tier, with one outcome; in seconds."""

    tier: str
    outcome: str
    duration: Distribution


@dataclass(frozen=True)
class Failures:
    """Transfers that failed for one reason. `phase` and `peer` are empty when unknown."""

    tier: str
    direction: str
    phase: str
    reason: str
    peer: str
    count: int


@dataclass(frozen=True)
class Choices:
    """Requests that were offered KV, by the tier that was taken, and why."""

    tier: str
    why: str
    count: int


@dataclass(frozen=True)
class Tier:
    """What one tier holds and can hold, in bytes. None: the engine does not say."""

    tier: str
    used: int | None = None
    capacity: int | None = None


@dataclass(frozen=True)
class Dropped:
    """Telemetry that was lost on its way into one sink."""

    sink: str
    cause: str
    count: int


@dataclass(frozen=True)
class EngineSnapshot:
    """One engine.

    Attributes:
        instance: engine id and data-parallel rank.
        name: what its topology calls it, or the engine id.
        incarnation: random id of this life of the engine.
        up: whether its feed was open when this was read.
        since: when its sums began at zero.
        connector: versions, children and mode of its connector.
        waiting: requests that wait for KV right now, by state.
        prompt_tokens: by where their KV came from.
        choices: which tiers requests were loaded from, of those that were offered.
        held: blocks that stay reserved though their request goes on without them, by reason.
        quarantined: peers that are left alone since their pulls keep failing.
    """

    instance: str
    name: str
    role: str
    pid: int
    incarnation: str
    since: float
    up: bool = True
    topology: str = ""
    model: str = ""
    connector: Mapping[str, str] = field(default_factory=dict)
    transfers: tuple[Transfers, ...] = ()
    waits: tuple[Waits, ...] = ()
    failures: tuple[Failures, ...] = ()
    tiers: tuple[Tier, ...] = ()
    waiting: Mapping[str, int] = field(default_factory=dict)
    prompt_tokens: Mapping[str, int] = field(default_factory=dict)
    choices: tuple[Choices, ...] = ()
    held: Mapping[str, int] = field(default_factory=dict)
    quarantined: tuple[str, ...] = ()
    dropped: tuple[Dropped, ...] = ()

    def transfers_of(self, tier: str, direction: str) -> Transfers:
        """The transfers of that tier and direction; empty ones if there were none."""
        for found in self.transfers:
            if (found.tier, found.direction) == (tier, direction):
                return found
        return Transfers(tier, direction)
