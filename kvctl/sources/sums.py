"""From the sums of a feed to a snapshot."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from kvctl.sources.snapshot import (
    Choices,
    Distribution,
    Dropped,
    EngineSnapshot,
    Failures,
    Tier,
    Transfers,
    Waits,
)
from kvctl_connector import semconv
from kvctl_connector.wire import Hello, Series

_LONGEST = 200  # characters of one attribute value that are shown


def snapshot_of(hello: Hello, sums: Iterable[Series], *, up: bool) -> EngineSnapshot:
    """Everything that the feed says, as one value. What it does not know, it leaves out."""
    by_metric: dict[str, list[Series]] = {}
    for series in sums:
        by_metric.setdefault(series.metric, []).append(series)

    def of(metric: semconv.Metric) -> list[Series]:
        return by_metric.get(metric.name, [])

    return EngineSnapshot(
        instance=clean(hello.instance),
        name=clean(hello.name),
        role=clean(hello.role),
        pid=hello.pid,
        incarnation=clean(hello.incarnation),
        since=hello.started / 1e9,
        up=up,
        topology=clean(hello.resource.get(semconv.RESOURCE_TOPOLOGY, "")),
        model=clean(hello.resource.get(semconv.RESOURCE_MODEL, "")),
        connector=_connector(of(semconv.CONNECTOR_INFO)),
        transfers=tuple(
            _transfers(
                of(semconv.TRANSFER_COUNT),
                of(semconv.TRANSFER_BYTES),
                of(semconv.TRANSFER_DURATION),
                of(semconv.TRANSFER_INFLIGHT),
            )
        ),
        waits=tuple(
            Waits(_value(one, semconv.TIER), _value(one, semconv.OUTCOME), found)
            for one in of(semconv.REQUEST_WAIT)
            if (found := _distribution(semconv.REQUEST_WAIT, one)).count
        ),
        failures=tuple(_failures(of(semconv.TRANSFER_FAILURES))),
        tiers=tuple(_tiers(of(semconv.TIER_USED), of(semconv.TIER_CAPACITY))),
        waiting=_by(semconv.STATE, of(semconv.REQUEST_WAITING)),
        prompt_tokens=_by(semconv.SOURCE, of(semconv.PROMPT_TOKENS)),
        choices=tuple(
            Choices(_value(one, semconv.TIER), _value(one, semconv.WHY), round(one.value))
            for one in of(semconv.TIER_CHOICES)
        ),
        held=_by(semconv.REASON, of(semconv.BLOCKS_HELD)),
        quarantined=tuple(
            _value(one, semconv.PEER) for one in of(semconv.PEER_QUARANTINED) if one.value
        ),
        dropped=tuple(
            Dropped(_value(one, semconv.SINK), _value(one, semconv.CAUSE), round(one.value))
            for one in of(semconv.TELEMETRY_DROPPED)
            if one.value
        ),
    )


def clean(text: str) -> str:
    """Text of an engine, fit for a terminal: no control characters, not endless."""
    if not text.isprintable():
        text = "".join(letter if letter.isprintable() else "\ufffd" for letter in text)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def _value(series: Series, attribute: str) -> str:
    return clean(series.attributes.get(attribute, ""))


def _by(attribute: str, found: list[Series]) -> dict[str, int]:
    return {_value(series, attribute): round(series.value) for series in found}


def _connector(found: list[Series]) -> Mapping[str, str]:
    holds = (one for one in found if one.value)  # 0: until the workers had told what they miss
    return {clean(key): clean(value) for one in holds for key, value in one.attributes.items()}


def _distribution(metric: semconv.Metric, series: Series) -> Distribution:
    counts = tuple(series.buckets or ())
    if len(counts) != len(metric.buckets) + 1:  # an engine with other buckets than ours
        return Distribution()
    return Distribution(metric.buckets, counts, series.value)


def _transfers(
    counts: list[Series], moved: list[Series], durations: list[Series], inflight: list[Series]
) -> Iterator[Transfers]:
    def path(series: Series) -> tuple[str, str]:
        return _value(series, semconv.TIER), _value(series, semconv.DIRECTION)

    def ok(series: Series) -> bool:
        return _value(series, semconv.OUTCOME) == "ok"

    for tier, direction in sorted(set(map(path, [*counts, *inflight])), key=_as_listed):
        here = (tier, direction)
        outcomes: dict[str, int] = {}
        for series in counts:  # one for each peer
            if path(series) == here:
                outcome = _value(series, semconv.OUTCOME)
                outcomes[outcome] = outcomes.get(outcome, 0) + round(series.value)
        took = [series for series in durations if path(series) == here and ok(series)]
        found = Transfers(
            tier,
            direction,
            outcomes,
            bytes=round(sum(one.value for one in moved if path(one) == here and ok(one))),
            duration=_distribution(semconv.TRANSFER_DURATION, took[0]) if took else Distribution(),
            inflight=round(sum(one.value for one in inflight if path(one) == here)),
        )
        if found.counts or found.inflight:
            yield found


def _as_listed(path: tuple[str, str]) -> tuple[int, int, tuple[str, str]]:
    """Sorts as the vocabularies do, and what they do not know after them."""
    tiers, directions = [*semconv.TIERS, path[0]], [*semconv.DIRECTIONS, path[1]]
    return tiers.index(path[0]), directions.index(path[1]), path


def _failures(found: list[Series]) -> Iterator[Failures]:
    for one in found:
        if one.value:  # they start at 0, so that a rate sees the first one
            yield Failures(
                _value(one, semconv.TIER),
                _value(one, semconv.DIRECTION),
                _value(one, semconv.PHASE),
                _value(one, semconv.REASON),
                _value(one, semconv.PEER),
                round(one.value),
            )


def _tiers(used: list[Series], capacity: list[Series]) -> Iterator[Tier]:
    holds = _by(semconv.TIER, used)
    can_hold = _by(semconv.TIER, capacity)
    for tier in dict.fromkeys([*holds, *can_hold]):
        yield Tier(tier, holds.get(tier), can_hold.get(tier))
