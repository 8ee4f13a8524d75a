"""What ``kvctl status`` found: the record of a launch joined with what its engines say."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from kvctl.cli.progress import actual_phase
from kvctl.errors import Exit, UnreachableError
from kvctl.launch.state import ProcessRecord, RunState
from kvctl.sources.feed import read_snapshots
from kvctl.sources.snapshot import Distribution, EngineSnapshot

JSON_VERSION = 1

Verdict = Literal["ready", "degraded", "unreachable"]
Relay = Literal["alive", "gone", "none"]


@dataclass(frozen=True)
class Process:
    """One recorded process, as it is right now.

    Attributes:
        phase: of the record; ``gone`` where nobody was left to write that it has ended.
        uptime: seconds since it was started; None while it does not live.
    """

    record: ProcessRecord
    phase: str
    alive: bool
    uptime: float | None

    @property
    def over(self) -> str | None:
        """Why nothing is to be heard from it any more; None for one that lives or waits."""
        cause = f": {self.record.cause}" if self.record.cause else ""
        code = self.record.exit_code
        stories = {
            "exited": "it has exited" + (f" with exit code {code}" if code else ""),
            "failed": f"it has failed{cause}",
            "killed": "it was killed, since it did not end in time",
            "gone": "it has exited, and no supervisor was left to see why",
            "not started": "it was not started",
        }
        return stories.get(self.phase)


@dataclass(frozen=True)
class Engine:
    """One engine core: an instance has one per data-parallel rank.

    Attributes:
        name: of the instance, with the rank where it has several.
        relay: whether the process that exports this feed lives; ``none``: there is to be none.
        seen: what it says, or why it could not be read.
    """

    name: str
    record: ProcessRecord
    feed: str
    relay: Relay
    seen: EngineSnapshot | UnreachableError


@dataclass(frozen=True)
class Report:
    """One look at one topology.

    Attributes:
        taken: Unix time in s.
    """

    state: RunState
    processes: tuple[Process, ...]
    engines: tuple[Engine, ...]
    taken: float

    @property
    def verdict(self) -> Verdict:
        """``ready``: everything is ready, can be read, and is exported where it should be."""
        readable = [isinstance(engine.seen, EngineSnapshot) for engine in self.engines]
        if not any(readable):
            return "unreachable"
        if (
            all(readable)
            and all(each.alive for each in self.processes)
            and all(each.phase == "ready" for each in self.processes if each.record.url)
            and all(engine.relay != "gone" for engine in self.engines)
        ):
            return "ready"
        return "degraded"

    @property
    def exit_code(self) -> Exit:
        """Of the command."""
        codes = {"ready": Exit.OK, "degraded": Exit.FINDINGS, "unreachable": Exit.UNREACHABLE}
        return codes[self.verdict]

    def facts(self) -> dict[str, Any]:
        """For JSON and YAML. Seconds, bytes and Unix times in seconds."""
        return {
            "version": JSON_VERSION,
            "name": self.state.name,
            "verdict": self.verdict,
            "taken_at": self.taken,
            "model": self.state.model,
            "file": self.state.file,
            "started_at": self.state.started_at,
            "processes": [
                {
                    "name": each.record.name,
                    "kind": each.record.kind,
                    "role": each.record.role,
                    "phase": each.phase,
                    "cause": each.record.cause,
                    "pid": each.record.pid or None,
                    "uptime_seconds": each.uptime,
                    "url": each.record.url,
                }
                for each in self.processes
            ],
            "engines": [_engine_facts(engine) for engine in self.engines],
        }


def look(state: RunState) -> Report:
    """Looks at the processes of a launch, and reads every engine's feed."""
    now = time.time()
    living = {record.name for record in state.living()}
    processes = tuple(_process(state, record, living, now) for record in state.processes)
    engines = [each for each in processes if each.record.kind == "engine"]
    seen = read_snapshots(feed for each in engines if not each.over for feed in each.record.feeds)
    relays = {
        feed: each.alive
        for each in processes
        if each.record.kind == "relay"
        for feed in each.record.feeds
    }
    return Report(state, processes, tuple(_engines(engines, seen, relays)), now)


def _process(state: RunState, record: ProcessRecord, living: set[str], now: float) -> Process:
    alive = record.name in living
    phase = actual_phase(state, record, living)
    uptime = max(0.0, now - record.started_at) if alive and record.started_at else None
    return Process(record, phase, alive, uptime)


def _engines(
    processes: list[Process],
    seen: dict[str, EngineSnapshot | UnreachableError],
    relays: dict[str, bool],
) -> Iterator[Engine]:
    for each in processes:
        record = each.record
        for rank, feed in enumerate(record.feeds):
            name = record.name if len(record.feeds) == 1 else f"{record.name}:{rank}"
            relay: Relay = "none" if feed not in relays else "alive" if relays[feed] else "gone"
            story = each.over
            said = UnreachableError(story) if story else seen[feed]
            yield Engine(name, record, feed, relay, said)


def _engine_facts(engine: Engine) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "name": engine.name,
        "role": engine.record.role,
        "feed": engine.feed,
        "relay": engine.relay,
        "reachable": isinstance(engine.seen, EngineSnapshot),
        "problem": None,
    }
    if isinstance(engine.seen, UnreachableError):
        return facts | {"problem": str(engine.seen)}
    seen = engine.seen
    return facts | {
        "instance": seen.instance,
        "since": seen.since,
        "connector": dict(seen.connector),
        "transfers": [
            {
                "tier": each.tier,
                "direction": each.direction,
                "outcomes": dict(each.counts),
                "inflight": each.inflight,
                "bytes": each.bytes,
                "bytes_per_second": each.bandwidth,
                **_quantiles(each.duration),
            }
            for each in seen.transfers
        ],
        "waits": [
            {
                "tier": each.tier,
                "outcome": each.outcome,
                "count": each.duration.count,
                **_quantiles(each.duration),
            }
            for each in seen.waits
        ],
        "waiting": dict(seen.waiting),
        "failures": [vars(each) for each in seen.failures],
        "tiers": [
            {"tier": each.tier, "used_bytes": each.used, "capacity_bytes": each.capacity}
            for each in seen.tiers
        ],
        "prompt_tokens": dict(seen.prompt_tokens),
        "tier_choices": [vars(each) for each in seen.choices],
        "blocks_held": dict(seen.held),
        "quarantined_peers": list(seen.quarantined),
        "dropped": [vars(each) for each in seen.dropped],
    }


def _quantiles(duration: Distribution) -> dict[str, float | None]:
    return {"p50_seconds": duration.quantile(0.5), "p99_seconds": duration.quantile(0.99)}
