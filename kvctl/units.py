"""Bytes, durations and rates: from what people write, and to what people read."""

from __future__ import annotations

import re

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kKMGTP]?)(i?)B?\s*")
_DURATION_PART = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)")
_DURATION_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_POWERS = "KMGTP"


def parse_size(text: str | int) -> int:
    """``"64GiB"`` → bytes. ``GiB`` is 1024³, ``GB`` is 1000³; a plain integer is bytes.

    Raises:
        ValueError: the text is no size.
    """
    if isinstance(text, bool):
        raise ValueError("a size is a number with a unit, for example 64GiB")
    if isinstance(text, int):
        number, power, base = float(text), 0, 1
    else:
        match = _SIZE.fullmatch(text)
        if match is None or (match[3] and not match[2]):
            raise ValueError(f"{text!r} is not a size; write for example 64GiB, 500MB or 1048576")
        number, base = float(match[1]), 1024 if match[3] else 1000
        power = _POWERS.index(match[2].upper()) + 1 if match[2] else 0
    if number < 0:
        raise ValueError("a size cannot be negative")
    return round(number * float(base**power))


def parse_duration(text: str | int | float) -> float:
    """``"30s"``, ``"1m30s"``, ``"250ms"`` → seconds; a plain number is seconds.

    Raises:
        ValueError: the text is no duration.
    """
    if isinstance(text, bool):
        raise ValueError("a duration is a number with a unit, for example 30s")
    if isinstance(text, int | float):
        if text < 0:
            raise ValueError("a duration cannot be negative")
        return float(text)
    compact = text.strip()
    parts = _DURATION_PART.findall(compact)
    if not parts or _DURATION_PART.sub("", compact).strip():
        raise ValueError(f"{text!r} is not a duration; write for example 30s, 250ms or 1m30s")
    return sum(float(number) * _DURATION_UNITS[unit] for number, unit in parts)


def format_bytes(count: float) -> str:
    """``1536`` → ``"1.5 KiB"``: three digits, binary units."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024 or unit == "TiB":
            return f"{value:.0f} B" if unit == "B" else f"{value:.3g} {unit}"
        value /= 1024
    raise AssertionError("unreachable")


def format_seconds(seconds: float) -> str:
    """``0.0021`` → ``"2.1 ms"``: three digits, the unit that fits; from a minute on ``"1m30s"``."""
    if seconds >= 60:
        minutes, rest = divmod(round(seconds), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{rest:02}s"
    if seconds >= 1:
        return f"{seconds:.3g} s"
    if seconds >= 1e-3:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds * 1e6:.3g} µs" if seconds else "0 s"


def format_rate(bytes_per_second: float) -> str:
    """Bandwidth in the unit that NIC and GPU data sheets use: ``"12.5 GB/s"``."""
    value = float(bytes_per_second)
    for unit in ("B/s", "kB/s", "MB/s", "GB/s"):
        if value < 1000 or unit == "GB/s":
            return f"{value:.3g} {unit}"
        value /= 1000
    raise AssertionError("unreachable")
