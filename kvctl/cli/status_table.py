"""``kvctl status`` for people: one small table for each question, and none without an answer."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table
from rich.text import Text

from kvctl.cli.progress import COLOURS
from kvctl.cli.status_report import Engine, Process, Report
from kvctl.errors import UnreachableError
from kvctl.sources.snapshot import Distribution, EngineSnapshot
from kvctl.units import format_bytes, format_rate, format_seconds

_VERDICTS = {"ready": "green", "degraded": "yellow", "unreachable": "red"}
_NOTHING = "-"


def blocks(report: Report, *, wide: bool) -> Iterator[Table | Text]:
    """What is printed, with an empty line between each two."""
    yield _headline(report)
    yield _processes(report, wide=wide)
    readable = [
        (engine.name, engine.seen)
        for engine in report.engines
        if isinstance(engine.seen, EngineSnapshot)
    ]
    tables = [_transfers(readable), _waits(readable), _failures(readable), _tiers(readable)]
    if wide:
        tables += [_prompt_tokens(readable), _choices(readable), _connectors(readable)]
    tables.append(_dropped(readable))
    for table in tables:
        if table.row_count:
            yield table
    if problems := list(_problems(report)):
        yield Text("\n".join(problems))


def _problems(report: Report) -> Iterator[str]:
    for process in report.processes:
        if process.phase == "failed" and process.record.cause:
            yield f"{process.record.name} failed: {process.record.cause}"
    for engine in report.engines:
        told = engine.record.phase == "failed" and engine.record.cause
        if isinstance(engine.seen, UnreachableError) and not told:
            yield f"{engine.name} cannot be read: {engine.seen}"


def _headline(report: Report) -> Text:
    text = Text(f"{report.state.name} is ")
    text.append(report.verdict, style=_VERDICTS[report.verdict])
    text.append(f": {report.state.model}" if report.state.model else "")
    return text


def _processes(report: Report, *, wide: bool) -> Table:
    wanted = ["PROCESS", "ROLE", "PHASE", "UP", "FEED", "RELAY"]
    table = _table(*wanted, *(["PID", "URL"] if wide else []))
    by_process: dict[str, list[Engine]] = {}
    for engine in report.engines:
        by_process.setdefault(engine.record.name, []).append(engine)
    for each in report.processes:
        if each.record.kind != "relay" or wide:
            cells = _process_cells(each, by_process.get(each.record.name, []))
            more = [str(each.record.pid or _NOTHING), each.record.url or _NOTHING] if wide else []
            table.add_row(*cells, *more)
    return table


def _process_cells(process: Process, engines: list[Engine]) -> list[str | Text]:
    record = process.record
    reachable = [isinstance(engine.seen, EngineSnapshot) for engine in engines]
    if not engines:
        feed = _NOTHING
    elif all(reachable):
        feed = "open"
    else:
        feed = f"{sum(reachable)} of {len(engines)}" if any(reachable) else "unreachable"
    relays = sorted({engine.relay for engine in engines})
    return [
        record.name,
        record.role or record.kind,
        Text(process.phase, style=COLOURS.get(process.phase, "")),
        _NOTHING if process.uptime is None else format_seconds(round(process.uptime)),
        feed,
        ", ".join(relays) or _NOTHING,
    ]


def _transfers(engines: list[tuple[str, EngineSnapshot]]) -> Table:
    table = _table(
        "TRANSFERS", "TIER", "DIRECTION", "#OK", "#FAILED", "#NOW", "#BYTES", "#SPEED", "#P50",
        "#P99",
    )  # fmt: skip
    for name, seen in engines:
        for each in seen.transfers:
            speed = _NOTHING if each.bandwidth is None else format_rate(each.bandwidth)
            table.add_row(
                name,
                each.tier,
                each.direction,
                str(each.ok),
                str(each.not_ok),
                str(each.inflight),
                format_bytes(each.bytes) if each.bytes else _NOTHING,
                speed,
                *_quantiles(each.duration),
            )
    return table


def _waits(engines: list[tuple[str, EngineSnapshot]]) -> Table:
    table = _table("WAITS", "TIER", "OUTCOME", "#COUNT", "#P50", "#P99")
    for name, seen in engines:
        for each in seen.waits:
            count = str(each.duration.count)
            table.add_row(name, each.tier, each.outcome, count, *_quantiles(each.duration))
        for state, count_now in seen.waiting.items():
            if count_now:
                table.add_row(name, state, "waits now", str(count_now), _NOTHING, _NOTHING)
        for reason, count_held in seen.held.items():
            if count_held:
                table.add_row(
                    name, "blocks", f"held: {reason}", str(count_held), _NOTHING, _NOTHING
                )
    return table


def _failures(engines: list[tuple[str, EngineSnapshot]]) -> Table:
    table = _table("FAILURES", "TIER", "DIRECTION", "REASON", "PHASE", "PEER", "#COUNT")
    for name, seen in engines:
        for each in seen.failures:
            words = (each.tier, each.direction, each.reason, each.phase, each.peer)
            table.add_row(name, *(word or _NOTHING for word in words), str(each.count))
        for peer in seen.quarantined:
            table.add_row(name, "peer", "recv", "left alone now", _NOTHING, peer, _NOTHING)
    return table


def _tiers(engines: list[tuple[str, EngineSnapshot]]) -> Table:
    table = _table("TIERS", "TIER", "#USED", "#CAPACITY", "#FULL")
    for name, seen in engines:
        for each in seen.tiers:
            known = each.used is not None and each.capacity
            full = f"{100 * each.used / each.capacity:.0f} %" if known else _NOTHING  # type: ignore[operator]
            sizes = (each.used, each.capacity)
            cells = (_NOTHING if size is None else format_bytes(size) for size in sizes)
            table.add_row(name, each.tier, *cells, full)
    return table


def _prompt_tokens(engines: list[tuple[str, EngineSnapshot]]) -> Table:
    table = _table("PROMPT TOKENS", "FROM", "#COUNT")
    for name, seen in engines:
        for source, count in seen.prompt_tokens.items():
            table.add_row(name, source, str(count))
    return table


def _choices(engines: list[tuple[str, EngineSnapshot]]) -> Table:
    table = _table("TIER CHOICES", "TIER", "WHY", "#COUNT")
    for name, seen in engines:
        for each in seen.choices:
            table.add_row(name, each.tier, each.why, str(each.count))
    return table


def _connectors(engines: list[tuple[str, EngineSnapshot]]) -> Table:
    table = _table("CONNECTOR", "INSTANCE", "DETAILS")
    for name, seen in engines:
        details = " ".join(f"{key}={value}" for key, value in seen.connector.items())
        table.add_row(name, seen.instance, details or _NOTHING)
    return table


def _dropped(engines: list[tuple[str, EngineSnapshot]]) -> Table:
    table = _table("TELEMETRY DROPPED", "SINK", "CAUSE", "#COUNT")
    for name, seen in engines:
        for each in seen.dropped:
            table.add_row(name, each.sink, each.cause, str(each.count))
    return table


def _quantiles(duration: Distribution) -> Iterator[str]:
    for share in (0.5, 0.99):
        value = duration.quantile(share)
        yield _NOTHING if value is None else format_seconds(value)


def _table(*titles: str) -> Table:
    """Columns of words, and of figures (``#``), which stand to the right."""
    table = Table(box=None, pad_edge=False)
    for title in titles:
        justify = "right" if title.startswith("#") else "left"
        table.add_column(title.removeprefix("#"), justify=justify, no_wrap=True)  # type: ignore[arg-type]
    return table
