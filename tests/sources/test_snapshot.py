"""Snapshots: the figures that a person reads, made from sums."""

from __future__ import annotations

import pytest
from fake_feed import STARTED, counter, histogram, make_hello

from kvctl.sources.snapshot import Distribution, Dropped, Failures, Tier
from kvctl.sources.sums import snapshot_of
from kvctl_connector import semconv
from kvctl_connector.wire import Series

RECV = {"tier": "peer", "direction": "recv"}


def snapshot(*series: Series):
    return snapshot_of(make_hello(), series, up=True)


def test_it_says_who_the_engine_is():
    info = counter(semconv.CONNECTOR_INFO, 1, version="0.1.0", vllm="0.32.0", mode="compose")
    found = snapshot(info)
    assert (found.name, found.role, found.topology, found.model) == (
        "prefill-0",
        "prefill",
        "demo",
        "tiny",
    )
    assert found.since == STARTED / 1e9
    assert found.connector == {"version": "0.1.0", "vllm": "0.32.0", "mode": "compose"}


def test_transfers_are_summed_over_peers_and_told_by_outcome():
    found = snapshot(
        counter(semconv.TRANSFER_COUNT, 3, **RECV, outcome="ok", peer="a"),
        counter(semconv.TRANSFER_COUNT, 2, **RECV, outcome="ok", peer="b"),
        counter(semconv.TRANSFER_COUNT, 1, **RECV, outcome="failed", peer="b"),
        counter(semconv.TRANSFER_BYTES, 3000, **RECV, outcome="ok", peer="a"),
        counter(semconv.TRANSFER_BYTES, 1000, **RECV, outcome="ok", peer="b"),
        counter(semconv.TRANSFER_BYTES, 77, **RECV, outcome="failed", peer="b"),
        histogram(semconv.TRANSFER_DURATION, [0.002] * 5, **RECV, outcome="ok"),
        histogram(semconv.TRANSFER_DURATION, [9.0], **RECV, outcome="failed"),
        counter(semconv.TRANSFER_INFLIGHT, 2, **RECV),
    ).transfers_of("peer", "recv")
    assert (found.ok, found.not_ok, found.bytes, found.inflight) == (5, 1, 4000, 2)
    assert found.duration.count == 5
    assert found.bandwidth == pytest.approx(400_000)


def test_transfers_are_listed_by_tier_and_direction():
    seen = [("tape", "x"), ("host", "store"), ("host", "load"), ("peer", "send")]
    found = snapshot(
        *(
            counter(semconv.TRANSFER_COUNT, 1, tier=tier, direction=direction, outcome="ok")
            for tier, direction in seen
        )
    ).transfers
    assert [(one.tier, one.direction) for one in found] == [
        ("peer", "send"),
        ("host", "load"),
        ("host", "store"),
        ("tape", "x"),
    ]


def test_what_never_happened_is_not_listed():
    found = snapshot(
        counter(semconv.TRANSFER_FAILURES, 0, tier="peer", reason="unknown"),
        counter(semconv.TRANSFER_INFLIGHT, 0, **RECV),
        counter(semconv.TELEMETRY_DROPPED, 0, sink="feed", cause="slow_reader"),
    )
    assert (found.failures, found.transfers, found.dropped) == ((), (), ())
    assert found.transfers_of("peer", "recv").ok == 0


def test_failures_tiers_and_drops():
    found = snapshot(
        counter(
            semconv.TRANSFER_FAILURES, 2, **RECV, phase="handshake", reason="remote_gone", peer="a"
        ),
        counter(semconv.TIER_USED, 10, tier="host"),
        counter(semconv.TIER_CAPACITY, 40, tier="host"),
        counter(semconv.TELEMETRY_DROPPED, 3, sink="feed", cause="slow_reader"),
        counter(semconv.REQUEST_WAITING, 1, state="remote_kv"),
        counter(semconv.PROMPT_TOKENS, 512, source="peer"),
    )
    assert found.failures == (Failures("peer", "recv", "handshake", "remote_gone", "a", 2),)
    assert found.tiers == (Tier("host", 10, 40),)
    assert found.dropped == (Dropped("feed", "slow_reader", 3),)
    assert found.waiting == {"remote_kv": 1}
    assert found.prompt_tokens == {"peer": 512}


def test_waits_carry_their_distribution():
    wait = histogram(semconv.REQUEST_WAIT, [0.02, 0.02], tier="peer", outcome="ok")
    never = histogram(semconv.REQUEST_WAIT, [], tier="host", outcome="ok")
    (found,) = snapshot(wait, never).waits
    assert (found.tier, found.outcome, found.duration.count) == ("peer", "ok", 2)


def test_control_characters_do_not_reach_the_terminal():
    hello = make_hello(name="\x1b[31mred\x07")
    found = snapshot_of(hello, [counter(semconv.PROMPT_TOKENS, 1, source="a\r\nb")], up=True)
    assert found.name == "\ufffd[31mred\ufffd"
    assert list(found.prompt_tokens) == ["a\ufffd\ufffdb"]


def test_buckets_of_another_version_are_left_out():
    odd = Series(semconv.TRANSFER_DURATION.name, {**RECV, "outcome": "ok"}, 1.0, [1, 2])
    count = counter(semconv.TRANSFER_COUNT, 3, **RECV, outcome="ok")
    found = snapshot(odd, count).transfers_of("peer", "recv")
    assert found.ok == 3 and found.duration.count == 0 and found.bandwidth is None


@pytest.mark.parametrize(
    ("counts", "share", "expected"),
    [
        ((0, 0, 0), 0.5, None),
        ((4, 0, 0), 0.5, 0.5),  # half of the first bucket, which begins at 0
        ((0, 10, 0), 0.99, 1.99),
        ((1, 1, 0), 0.5, 1.0),
        ((1, 0, 1), 0.99, 2.0),  # beyond the last bound nothing is known
        ((0, 5, 0), 0.0, 1.0),
    ],
)
def test_quantiles_are_those_of_prometheus(counts, share, expected):
    assert Distribution((1.0, 2.0), counts).quantile(share) == pytest.approx(expected)
