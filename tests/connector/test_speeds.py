"""What the choice of a tier goes by."""

import pytest

from kvctl_connector.speeds import LIMIT, Speeds


def test_unknown_until_measured() -> None:
    assert Speeds().of("peer", "recv", "p") is None


def test_bytes_per_second_of_each_peer() -> None:
    speeds = Speeds()
    speeds.add("peer", "recv", "p", 1000, 0.5)
    speeds.add("peer", "recv", "q", 1000, 2.0)
    assert speeds.of("peer", "recv", "p") == 2000
    assert speeds.of("peer", "recv", "q") == 500


def test_large_transfers_count_for_more_than_small_ones() -> None:
    speeds = Speeds()
    speeds.add("peer", "recv", "p", 100, 1.0)  # mostly polling
    speeds.add("peer", "recv", "p", 1_000_000, 1.0)
    assert speeds.of("peer", "recv", "p") == pytest.approx((90 + 1_000_000) / 1.9)


def test_what_was_measured_lately_counts_for_more() -> None:
    speeds = Speeds()
    for _ in range(100):
        speeds.add("host", "load", "", 1000, 1.0)
    for _ in range(100):
        speeds.add("host", "load", "", 1000, 0.1)
    assert speeds.of("host", "load") == pytest.approx(10_000, rel=0.01)


def test_stores_tell_the_speed_of_host_loads_until_the_first_load() -> None:
    speeds = Speeds()
    speeds.add("host", "store", "", 1000, 1.0)
    assert speeds.of("host", "load") == 1000
    speeds.add("host", "load", "", 1000, 0.5)
    assert speeds.of("host", "load") == 2000


def test_stores_tell_nothing_about_loads_from_disk() -> None:
    speeds = Speeds()
    speeds.add("disk", "store", "", 1000, 1.0)
    assert speeds.of("disk", "load") is None


def test_a_transport_that_does_not_say_teaches_nothing() -> None:
    speeds = Speeds()
    speeds.add("peer", "recv", "p", 0, 1.0)
    speeds.add("peer", "recv", "p", 1000, 0.0)
    assert speeds.of("peer", "recv", "p") is None


def test_bounded() -> None:
    speeds = Speeds()
    for number in range(2 * LIMIT):
        speeds.add("peer", "recv", str(number), 1, 1.0)
    assert len(speeds._averages) == LIMIT
