"""A peer whose pulls keep failing is left alone, and tried again with one real request."""

import time

import pytest

from kvctl_connector.quarantine import FAILURES, LIMIT, Quarantine


class Clock:
    def __init__(self) -> None:
        self.now = 1

    def monotonic_ns(self) -> int:
        return self.now

    def pass_by(self, seconds: float) -> None:
        self.now += int(seconds * 1e9)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "monotonic_ns", clock.monotonic_ns)
    return clock


def fail(quarantine: Quarantine, times: int = FAILURES) -> bool | None:
    return [quarantine.ended("p", well=False) for _ in range(times)][-1]


def test_a_peer_that_keeps_failing_goes_in(clock: Clock) -> None:
    quarantine = Quarantine(10)
    assert fail(quarantine, FAILURES - 1) is None
    assert quarantine.admits("p")
    assert fail(quarantine, 1) is True
    assert not quarantine.admits("p")
    assert quarantine.admits("another")


def test_failures_in_a_row_only(clock: Clock) -> None:
    quarantine = Quarantine(10)
    fail(quarantine, FAILURES - 1)
    assert quarantine.ended("p", well=True) is None
    fail(quarantine, FAILURES - 1)
    assert quarantine.admits("p")


def test_after_the_back_off_one_real_request_is_let_through(clock: Clock) -> None:
    quarantine = Quarantine(10)
    fail(quarantine)
    clock.pass_by(10)
    assert quarantine.admits("p")
    assert not quarantine.admits("p"), "one"
    assert quarantine.ended("p", well=True) is False
    assert quarantine.admits("p")


def test_a_trial_that_fails_doubles_the_back_off(clock: Clock) -> None:
    quarantine = Quarantine(10)
    fail(quarantine)
    clock.pass_by(10)
    assert quarantine.admits("p")
    assert quarantine.ended("p", well=False) is None, "it was in already"
    clock.pass_by(19)
    assert not quarantine.admits("p")
    clock.pass_by(1)
    assert quarantine.admits("p")


def test_a_trial_of_which_nothing_is_heard_is_followed_by_another(clock: Clock) -> None:
    quarantine = Quarantine(10)
    fail(quarantine)
    clock.pass_by(10)
    assert quarantine.admits("p")
    clock.pass_by(20)
    assert quarantine.admits("p")


def test_pulls_from_before_do_not_lengthen_it(clock: Clock) -> None:
    quarantine = Quarantine(10)
    fail(quarantine)
    fail(quarantine, 20)
    clock.pass_by(10)
    assert quarantine.admits("p")


def test_the_back_off_does_not_grow_for_ever(clock: Clock) -> None:
    quarantine = Quarantine(10)
    fail(quarantine)
    for _ in range(50):
        clock.pass_by(320)
        assert quarantine.admits("p")
        quarantine.ended("p", well=False)
    clock.pass_by(320)
    assert quarantine.admits("p")


def test_switched_off(clock: Clock) -> None:
    quarantine = Quarantine(0)
    assert fail(quarantine, 100) is None
    assert quarantine.admits("p")


def test_bounded(clock: Clock) -> None:
    quarantine = Quarantine(10)
    for number in range(2 * LIMIT):
        quarantine.ended(str(number), well=False)
    assert len(quarantine._records) == LIMIT
