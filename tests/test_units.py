import pytest

from kvctl.units import format_bytes, format_rate, format_seconds, parse_duration, parse_size


@pytest.mark.parametrize(
    ("text", "count"),
    [("64GiB", 64 << 30), ("500MB", 500_000_000), ("1.5 KiB", 1536), (4096, 4096), ("7", 7)],
)
def test_sizes(text: str | int, count: int) -> None:
    assert parse_size(text) == count


@pytest.mark.parametrize("text", ["64 gigs", "GiB", "-1GiB", "1iB", "", True])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="size"):
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "seconds"), [("30s", 30), ("250ms", 0.25), ("1m30s", 90), (5, 5), ("1h 5m", 3900)]
)
def test_durations(text: str | int, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["30", "s", "5 parsecs", "-3s", True])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(ValueError, match="duration"):
        parse_duration(text)


def test_numbers_for_people() -> None:
    assert format_bytes(1536) == "1.5 KiB"
    assert format_bytes(17) == "17 B"
    assert format_seconds(0.0021) == "2.1 ms"
    assert format_seconds(90) == "1m30s"
    assert format_seconds(7320) == "2h02m"
    assert format_rate(12_500_000_000) == "12.5 GB/s"
