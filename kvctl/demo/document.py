"""The report as JSON. `VERSION` grows when a field changes its meaning or goes away."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from kvctl import __version__
from kvctl.demo.report import Checked, Movement, Report, Timing, Waiting
from kvctl.demo.run import Outcome
from kvctl.demo.traffic import Exchange

VERSION = 1


def document(outcome: Outcome, report: Report, *, kept: bool) -> dict[str, Any]:
    """Everything that the table shows, unrounded: seconds, bytes, bytes per second."""
    problems = report.problems()
    return {
        "version": VERSION,
        "ok": not problems,
        "problems": problems,
        "kvctl": __version__,
        "engine": {
            "python": str(outcome.engine.python),
            "vllm": outcome.engine.vllm,
            "nixl": outcome.engine.nixl,
            "platform": outcome.engine.platform,
        },
        "requests": {
            "planned": report.planned,
            "sent": report.sent,
            "answered": len(report.checked),
            "failed": [_failed(each) for each in report.failed],
            **_timing(report.latency),
        },
        "answers": {
            "compared": len(report.checked),
            "equal": len(report.checked) - len(report.different),
            "tokens": sum(each.comparison.compared for each in report.checked),
            "near_ties": report.near_ties,
            "largest_deviation": report.deviation,
            "bound": report.bound,
            "different": [_different(each) for each in report.different],
        },
        "transfers": [_movement(each) for each in report.movements],
        "waits": [_waiting(each) for each in report.waits],
        "failures": [asdict(each) for each in report.failures],
        "missing_from_percentiles": report.lost,
        "seconds": outcome.seconds,
        "kept": kept,
    }


def _timing(timing: Timing | None) -> dict[str, float | None]:
    return {
        "p50_seconds": timing.p50 if timing else None,
        "p99_seconds": timing.p99 if timing else None,
    }


def _movement(each: Movement) -> dict[str, Any]:
    return {
        "engine": each.engine,
        "tier": each.tier,
        "direction": each.direction,
        "count": each.count,
        # Of a send only the reader knows it.
        "bytes": None if each.direction == "send" else each.bytes,
        "bytes_per_second": each.bytes_per_second,
        **_timing(each.timing),
        "not_ok": each.not_ok,
    }


def _waiting(each: Waiting) -> dict[str, Any]:
    return {
        "engine": each.engine,
        "tier": each.tier,
        "count": each.count,
        **_timing(each.timing),
        "not_ok": each.not_ok,
    }


def _failed(each: Exchange) -> dict[str, Any]:
    return {
        "prompt": each.visit.prompt,
        "again": each.visit.again,
        "seconds": each.seconds,
        "why": each.failure,
    }


def _different(each: Checked) -> dict[str, Any]:
    difference = each.comparison.difference
    assert difference is not None
    return {
        "prompt": each.exchange.visit.prompt,
        "again": each.exchange.visit.again,
        **asdict(difference),
    }
