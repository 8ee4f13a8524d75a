"""How fast each tier and peer has been: what the choice of a tier goes by."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from .bounded import trim

# Weight that all earlier transfers keep when a new one is added. Bytes and seconds are averaged
# apart, so a large transfer counts for more than a small one, whose time is mostly polling.
_KEEP = 0.9
LIMIT = 256  # tiers and peers remembered

# A copy to host memory runs over the same link as the copy back, so until the first load its
# stores tell the speed. Of a disk they tell nothing: they end in the page cache.
_TELLING = {"recv": ("recv",), "load": ("load", "store")}
_NOT_TOLD_BY_STORES = ("disk",)


@dataclass
class _Average:
    bytes: float = 0.0
    seconds: float = 0.0


class Speeds:
    """Exponentially weighted bytes per second, by tier, direction and peer."""

    def __init__(self) -> None:
        self._averages: OrderedDict[tuple[str, str, str], _Average] = OrderedDict()

    def add(self, tier: str, direction: str, peer: str, size: int, seconds: float) -> None:
        """Learns from one transfer that ended well: `size` bytes in `seconds`."""
        if size <= 0 or seconds <= 0:
            return  # the transport did not say
        key = (tier, direction, peer)
        average = self._averages.get(key)
        if average is None:
            average = self._averages[key] = _Average()
            trim(self._averages, LIMIT)
        average.bytes = average.bytes * _KEEP + size
        average.seconds = average.seconds * _KEEP + seconds

    def of(self, tier: str, direction: str, peer: str = "") -> float | None:
        """Bytes per second; None while nothing tells it."""
        for told_by in _TELLING[direction]:
            if told_by == "store" and tier in _NOT_TOLD_BY_STORES:
                continue
            if (average := self._averages.get((tier, told_by, peer))) is not None:
                return average.bytes / average.seconds
        return None
