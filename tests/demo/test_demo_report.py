from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from kvctl.demo.compare import Answer, Comparison, Difference
from kvctl.demo.document import document
from kvctl.demo.pair import Pair
from kvctl.demo.prompts import Visit
from kvctl.demo.report import Report, Timing, make_report, timing_of
from kvctl.demo.run import Outcome
from kvctl.demo.table import HEADER, aligned, next_steps, remarks, rows, verdict
from kvctl.demo.traffic import Exchange
from kvctl.engine.environment import EngineEnvironment
from kvctl.sources.feed import SeenTransfer, SeenWait
from kvctl.sources.snapshot import Distribution, EngineSnapshot, Failures, Transfers, Waits
from kvctl_connector.wire import Transfer, Wait

SECOND = 10**9
ANSWER = Answer((1,), (-0.5,), ({1: -0.5},))
EQUAL = Comparison(None, 8, 2e-6)
WRONG = Comparison(Difference(3, 52, 156, -2.48, -2.87), 4, 0.39)


def make_exchange(prompt: int = 0, **changes: Any) -> Exchange:
    values: dict[str, Any] = {
        "visit": Visit(prompt, again=False),
        "seconds": 0.5,
        "answer": ANSWER,
        "failure": None,
    }
    return Exchange(**{**values, **changes})


def moved(tier: str, direction: str, count: int, size: int, **outcomes: int) -> Transfers:
    duration = Distribution((1.0,), (count, 0), total=0.5 * count)
    return Transfers(tier, direction, {"ok": count, **outcomes}, size, duration)


def make_engine(name: str, *transfers: Transfers, **changes: Any) -> EngineSnapshot:
    return EngineSnapshot(
        instance=f"{name}:0",
        name=name,
        role=name.partition("-")[0],
        pid=1,
        incarnation="x",
        since=0.0,
        transfers=transfers,
        **changes,
    )


PREFILL = make_engine(
    "prefill-0",
    moved("host", "store", 4, 4000),
    moved("host", "load", 2, 2000),
    moved("peer", "send", 3, 0, expired=1),
    failures=(Failures("peer", "send", "notify", "lease_expired", "", 1),),
    waits=(Waits("host", "ok", Distribution((1.0,), (2, 0), 0.4)),),
)
DECODE = make_engine(
    "decode-0",
    moved("peer", "recv", 4, 8000),
    waits=(
        Waits("peer", "ok", Distribution((1.0,), (3, 0), 0.4)),
        Waits("peer", "failed", Distribution((1.0,), (1, 0), 0.4)),
    ),
)


def seen(engine: str, tier: str, direction: str, *seconds: float) -> list[SeenTransfer]:
    return [
        SeenTransfer(
            engine,
            Transfer(
                seq=index, tier=tier, direction=direction, outcome="ok", request="r",
                start=SECOND, end=SECOND + round(duration * SECOND), bytes=10,
            ),
        )
        for index, duration in enumerate(seconds)
    ]  # fmt: skip


def make(**changes: Any) -> Report:
    values: dict[str, Any] = {
        "planned": 2,
        "exchanges": [make_exchange(0), make_exchange(1)],
        "comparisons": {0: EQUAL, 1: EQUAL},
        "bound": 1e-4,
        "snapshots": [DECODE, PREFILL],
        "transfers": seen("decode-0", "peer", "recv", 0.1, 0.2, 0.3, 2.0),
        "waits": [
            SeenWait("decode-0", Wait(0, "peer", "ok", "r", SECOND, 3 * SECOND)),
        ],
        "lost": 0,
        "unread": [],
    }
    return make_report(**{**values, **changes})


def test_a_run_in_which_all_went_well_has_no_problem() -> None:
    report = make()
    assert report.problems() == []
    assert "every answer is the one of a single engine" in verdict(report)
    assert report.deviation == 2e-6


def test_counts_and_bytes_are_the_engines_sums_and_percentiles_those_of_the_transfers() -> None:
    movements = {(each.engine, each.tier, each.direction): each for each in make().movements}
    pulled = movements["decode-0", "peer", "recv"]
    assert (pulled.count, pulled.bytes, pulled.not_ok) == (4, 8000, 0)
    assert pulled.bytes_per_second == pytest.approx(8000 / 2.0)
    assert pulled.timing == Timing(4, pytest.approx(0.2), pytest.approx(2.0))
    assert movements["prefill-0", "host", "store"].timing is None
    assert movements["prefill-0", "peer", "send"].not_ok == 1


def test_waits_count_every_outcome_and_name_the_ones_that_failed() -> None:
    waits = {(each.engine, each.tier): each for each in make().waits}
    pulled = waits["decode-0", "peer"]
    assert (pulled.count, pulled.not_ok) == (4, 1)
    assert pulled.timing == Timing(1, 2.0, 2.0)


@pytest.mark.parametrize(
    ("engine", "tier", "direction", "says"),
    [
        ("decode-0", "peer", "recv", "over NIXL"),
        ("prefill-0", "host", "store", "was stored"),
        ("prefill-0", "host", "load", "came back"),
    ],
)
def test_a_tier_that_moved_nothing_is_a_problem(
    engine: str, tier: str, direction: str, says: str
) -> None:
    snapshots = [
        make_engine(
            each.name,
            *(
                one
                for one in each.transfers
                if (each.name, one.tier, one.direction) != (engine, tier, direction)
            ),
        )
        for each in (PREFILL, DECODE)
    ]
    (problem,) = make(snapshots=snapshots).problems()
    assert says in problem


def test_transfers_that_all_failed_have_moved_nothing() -> None:
    decode = make_engine("decode-0", moved("peer", "recv", 0, 0, failed=4))
    report = make(snapshots=[PREFILL, decode])
    assert any("over NIXL" in problem for problem in report.problems())
    assert next(each.not_ok for each in report.movements if each.engine == "decode-0") == 4


def test_a_request_without_an_answer_is_a_problem_with_its_cause() -> None:
    failed = make_exchange(1, answer=None, failure="HTTP 500: no")
    report = make(exchanges=[make_exchange(0), failed], comparisons={0: EQUAL})
    assert report.problems() == ["1 of 2 requests got no answer"]
    assert "prompt 1: HTTP 500: no" in verdict(report)


def test_requests_that_were_not_sent_any_more_are_a_problem_too() -> None:
    report = make(exchanges=[make_exchange(0)], comparisons={0: EQUAL})
    assert report.problems() == ["1 of 2 requests were not sent any more"]


def test_a_wrong_answer_is_shown_with_what_was_expected() -> None:
    exchanges = [make_exchange(0), make_exchange(7, visit=Visit(7, again=True))]
    report = make(exchanges=exchanges, comparisons={0: EQUAL, 1: WRONG})
    assert report.problems() == ["1 of 2 answers differ from the reference"]
    text = verdict(report)
    assert "prompt 7, sent again, token 3" in text
    assert "expected id 52 with logprob -2.480000, got id 156 with logprob -2.870000" in text


def test_a_feed_that_cannot_be_read_is_a_problem() -> None:
    assert make(unread=["x.sock: the engine is gone"]).problems() == [
        "a feed cannot be read: x.sock: the engine is gone"
    ]


def test_failures_lost_reports_and_near_ties_are_said() -> None:
    tie = Comparison(None, 3, 1e-6, near_tie=True)
    report = make(lost=3, comparisons={0: EQUAL, 1: tie})
    text = "\n".join(remarks(report))
    assert "1 × NIXL send on prefill-0, lease_expired in phase notify" in text
    assert "3 transfers or waits are missing" in text
    assert "1 answers were compared up to a near tie" in text
    assert "11 tokens" in text
    assert report.problems() == []


def test_the_table_shows_nixl_first_and_the_requests_last() -> None:
    table = rows(make())
    assert all(len(row) == len(HEADER) for row in table)
    assert [row[0] for row in table] == [
        "NIXL, received",
        "NIXL, sent",
        "host, reloaded",
        "host, stored",
        "waits for NIXL",
        "waits for host",
        "requests",
        "answers equal",
    ]
    received = table[0]
    assert received == (
        "NIXL, received", "decode-0", "4", "7.81 KiB", "4 kB/s", "200 ms", "2 s", "0",
    )  # fmt: skip
    assert table[1][3:7] == ("–", "–", "–", "–")


def test_the_table_fits_into_80_columns() -> None:
    prefill = make_engine(
        "prefill-0", Transfers("host", "load", {"ok": 1234}, 2**30, Distribution((), (1234,), 9.9))
    )
    table = aligned([HEADER, *rows(make(snapshots=[prefill]))])
    assert max(map(len, table.splitlines())) < 80


def test_plain_text_is_aligned() -> None:
    assert aligned([("", "x", "n"), ("long name", "y", "100")]) == (
        "           x    n\nlong name  y  100"
    )


def test_the_document_is_json_and_says_the_same() -> None:
    engine = EngineEnvironment(Path("/e/bin/python"), "0.32.0+cpu", "1.5.1", "cpu", None)
    wrong = make(comparisons={0: EQUAL, 1: WRONG})
    found = json.loads(json.dumps(document(Outcome(engine), wrong, kept=True)))
    assert (found["version"], found["ok"], found["kept"]) == (1, False, True)
    assert found["answers"]["different"][0]["expected_token"] == 52
    assert found["requests"]["answered"] == found["requests"]["sent"] == 2
    received = next(each for each in found["transfers"] if each["direction"] == "recv")
    assert received["bytes"] == 8000
    assert received["p99_seconds"] == pytest.approx(2.0)
    sent = next(each for each in found["transfers"] if each["direction"] == "send")
    assert sent["bytes"] is None


@pytest.mark.parametrize(
    ("values", "p50", "p99"),
    [([3.0], 3.0, 3.0), ([1.0, 2.0], 1.0, 2.0), ([float(n) for n in range(1, 201)], 100, 198)],
)
def test_percentiles_are_exact(values: list[float], p50: float, p99: float) -> None:
    assert timing_of(values) == Timing(len(values), p50, p99)
    assert timing_of([]) is None


def test_what_to_try_next_can_be_pasted() -> None:
    text = next_steps(Pair(Path("/s/demo/kvctl.yaml"), "http://127.0.0.1:8100", ()))
    curl = text[text.index("curl") : text.index("kvctl config")].replace("\\\n", " ")
    words = shlex.split(curl)
    assert words[:2] == ["curl", "http://127.0.0.1:8100/v1/completions"]
    assert json.loads(words[words.index("-d") + 1])["model"] == "tiny"
    assert "kvctl stop -p demo" in text
    assert max(map(len, text.splitlines())) < 80
