"""The lease guard: when a pull has ended in time, and when it is not to be believed."""

import time
from types import SimpleNamespace

import pytest

from kvctl_connector import lease as lease_module
from kvctl_connector.lease import Grace, Lease, LeaseGuard

SECOND = 1_000_000_000
MARGIN = SECOND // 2
START = 1_000 * SECOND


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    now = SimpleNamespace(ns=START)
    monkeypatch.setattr(lease_module.time, "time_ns", lambda: now.ns)
    return now


@pytest.fixture
def guard(clock: SimpleNamespace) -> LeaseGuard:
    """Request ``r``, ``p-1`` on prefill: six seconds, four more by each heartbeat."""
    guard = LeaseGuard(MARGIN)
    guard.granted({"r": Lease("p-1", START + 6 * SECOND, 4 * SECOND)})
    return guard


def test_a_pull_that_ends_in_time_passes(guard: LeaseGuard, clock: SimpleNamespace) -> None:
    clock.ns += 5 * SECOND
    assert guard.ended("r") == 0


def test_the_margin_counts(guard: LeaseGuard, clock: SimpleNamespace) -> None:
    clock.ns += 6 * SECOND - MARGIN + 1
    assert guard.ended("r") == 1


def test_a_late_pull_is_late_by_what_it_missed(guard: LeaseGuard, clock: SimpleNamespace) -> None:
    clock.ns += 9 * SECOND
    assert guard.ended("r") == 3 * SECOND + MARGIN


def test_a_heartbeat_extends_from_its_sending(guard: LeaseGuard, clock: SimpleNamespace) -> None:
    guard.heartbeat_sent(b"HB:other,p-1", START + 4 * SECOND)
    clock.ns += 7 * SECOND
    assert guard.ended("r") == 0


def test_a_heartbeat_never_shortens(guard: LeaseGuard, clock: SimpleNamespace) -> None:
    guard.heartbeat_sent(b"HB:p-1", START + SECOND)  # 1 + 4 is before 6
    clock.ns += 5 * SECOND + MARGIN - 1
    assert guard.ended("r") == 0


def test_a_heartbeat_after_the_end_raises_nothing_from_the_dead(
    guard: LeaseGuard, clock: SimpleNamespace
) -> None:
    guard.heartbeat_sent(b"HB:p-1", START + 6 * SECOND)
    clock.ns += 7 * SECOND
    assert guard.ended("r") > 0


def test_heartbeats_chain(guard: LeaseGuard, clock: SimpleNamespace) -> None:
    for second in range(1, 60):
        guard.heartbeat_sent(b"HB:p-1", START + second * SECOND)
    clock.ns += 62 * SECOND
    assert guard.ended("r") == 0


def test_a_gap_in_the_chain_ends_it(guard: LeaseGuard, clock: SimpleNamespace) -> None:
    for second in (1, 2, 8, 9, 10):
        guard.heartbeat_sent(b"HB:p-1", START + second * SECOND)
    clock.ns += 11 * SECOND
    assert guard.ended("r") > 0


def test_an_unknown_pull_cannot_be_judged(guard: LeaseGuard) -> None:
    assert guard.ended("unknown") == 0
    guard.heartbeat_sent(b"HB:unknown", START)
    guard.heartbeat_sent(b"HB:\xff\xfe", START)


def test_ended_requests_are_forgotten(guard: LeaseGuard, clock: SimpleNamespace) -> None:
    clock.ns += 9 * SECOND
    guard.forget("r")
    assert guard.ended("r") == 0
    assert not guard._by_remote


def test_memory_is_bounded(clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_module, "LIMIT", 10)
    guard = LeaseGuard(MARGIN)
    for number in range(100):
        guard.granted({f"r{number}": Lease(f"p{number}", START, SECOND)})
    assert len(guard._by_request) == len(guard._by_remote) == 10


# Prefill's side


def test_an_expired_lease_gets_one_second_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill was stopped for longer than the lease: the heartbeats sent meanwhile come first."""
    now = 100.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    leases = {"stopped": 90.0, "held": 130.0}
    grace = Grace(leases)

    grace.notifications_read()
    assert leases == {"stopped": 101.0, "held": 130.0}

    now = 100.5
    leases["stopped"] = 106.0  # the heartbeat has been read, and NIXL extends the lease
    grace.notifications_read()
    now = 107.0
    grace.notifications_read()
    assert leases["stopped"] == 108.0, "another end, another look"
    now = 109.0
    grace.notifications_read()
    assert leases["stopped"] == 108.0, "reaped now"
    leases.clear()
    grace.notifications_read()
    assert grace._given == {}
