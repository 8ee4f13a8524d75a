"""The report as a person reads it: one table, then what is wrong or what to do next."""

from __future__ import annotations

from collections.abc import Sequence

from kvctl.demo.model import SERVED_NAME
from kvctl.demo.pair import Pair
from kvctl.demo.report import Checked, Failure, Movement, Report, Timing, Waiting
from kvctl.demo.setting import DEADLINE
from kvctl.demo.topology_file import NAME
from kvctl.units import format_bytes, format_rate, format_seconds

# With usual values the table fits into 80 columns.
HEADER = ("", "engine", "count", "bytes", "rate", "p50", "p99", "not ok")
LEFT = 2  # columns that are aligned to the left
UNKNOWN = "–"

_TIERS = {"peer": "NIXL", "host": "host", "disk": "disk"}
_DIRECTIONS = {"recv": "received", "send": "sent", "store": "stored", "load": "reloaded"}


def rows(report: Report) -> list[tuple[str, ...]]:
    """The table's rows, one text a column of `HEADER`."""
    failed = len(report.failed)
    wrong = len(report.different)
    checked, equal = len(report.checked), len(report.checked) - wrong
    return [
        *(_movement(each) for each in report.movements),
        *(_waiting(each) for each in report.waits),
        (
            "requests",
            "router",
            f"{checked}",
            "",
            "",
            *_timing(report.latency),
            f"{failed}",
        ),
        ("answers equal", "", f"{equal}", "", "", "", "", f"{wrong}"),
    ]


def aligned(lines: Sequence[Sequence[str]]) -> str:
    """Rows as plain text in columns."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    texts = []
    for line in lines:
        cells = (
            cell.ljust(width) if index < LEFT else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        texts.append("  ".join(cells).rstrip())
    return "\n".join(texts)


def remarks(report: Report) -> list[str]:
    """What the table has no column for: how answers were compared, and every failure."""
    tokens = sum(each.comparison.compared for each in report.checked)
    compared = (
        f"compared: {tokens} tokens and the logprobs of their candidates; the largest difference "
        f"is {report.deviation:.1e}, {report.bound:.0e} is allowed"
    )
    found = [compared]
    if report.near_ties:
        found.append(f"{report.near_ties} answers were compared up to a near tie only")
    found += [_failure(each) for each in report.failures]
    if report.lost:
        found.append(f"{report.lost} transfers or waits are missing from p50 and p99")
    return found


def verdict(report: Report) -> str:
    """Whether it worked; where it did not, why, with the first example of each kind."""
    problems = report.problems()
    if not problems:
        return "KV moved both ways, and every answer is the one of a single engine."
    lines = ["The demo did not work:", *(f"- {problem}" for problem in problems)]
    if report.failed:
        first = report.failed[0]
        lines.append(f"  first without an answer: prompt {first.visit.prompt}: {first.failure}")
        lines.append(f"  (each request has {format_seconds(DEADLINE)})")
    if report.different:
        lines.append(f"  first that differs: {_difference(report.different[0])}")
    lines.append(f"The engines' logs say more: kvctl logs -p {NAME}")
    return "\n".join(lines)


def next_steps(pair: Pair) -> str:
    """What to try with the pair that was left running."""
    return "\n".join(
        (
            "The pair is left running. Next:",
            f"  kvctl status -p {NAME}          what its engines have moved",
            f"  kvctl logs -p {NAME} -f         what they say",
            f"  curl {pair.url}/v1/completions \\",
            "    -H 'Content-Type: application/json' \\",
            f'    -d \'{{"model": "{SERVED_NAME}", "prompt": "Hello", "max_tokens": 8}}\'',
            f"  kvctl config -f {pair.file}",
            f"  kvctl stop -p {NAME}            ends it",
        )
    )


def _movement(each: Movement) -> tuple[str, ...]:
    what = f"{_TIERS.get(each.tier, each.tier)}, {_DIRECTIONS.get(each.direction, each.direction)}"
    # How much was sent only the reader knows, and says.
    size = UNKNOWN if each.direction == "send" else format_bytes(each.bytes)
    rate = format_rate(each.bytes_per_second) if each.bytes_per_second else UNKNOWN
    return (what, each.engine, f"{each.count}", size, rate, *_timing(each.timing), f"{each.not_ok}")


def _waiting(each: Waiting) -> tuple[str, ...]:
    what = f"waits for {_TIERS.get(each.tier, each.tier)}"
    return (what, each.engine, f"{each.count}", "", "", *_timing(each.timing), f"{each.not_ok}")


def _timing(timing: Timing | None) -> tuple[str, str]:
    if timing is None:
        return UNKNOWN, UNKNOWN
    return format_seconds(timing.p50), format_seconds(timing.p99)


def _failure(each: Failure) -> str:
    what = f"{_TIERS.get(each.tier, each.tier)} {each.direction}"
    where = f" in phase {each.phase}" if each.phase else ""
    return f"failed: {each.count} × {what} on {each.engine}, {each.reason}{where}"


def _difference(each: Checked) -> str:
    difference = each.comparison.difference
    assert difference is not None
    visit = each.exchange.visit
    again = ", sent again" if visit.again else ""
    return (
        f"prompt {visit.prompt}{again}, token {difference.position}: "
        f"expected {_candidate(difference.expected_token, difference.expected_logprob)}, "
        f"got {_candidate(difference.token, difference.logprob)}"
    )


def _candidate(token: int | None, logprob: float | None) -> str:
    return "no token" if token is None else f"id {token} with logprob {logprob:.6f}"
