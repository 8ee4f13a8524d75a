"""The engine's bookkeeping: plain cumulative sums and one bounded outbox.

Written by one thread, the engine core's. Read by one thread, the feed's, without a lock: a
series is marked dirty *after* it was changed, and the reader clears the mark *before* it copies,
so a change that races with a copy is sent again with the next one. Nothing here blocks, does I/O
or grows: series and outbox are bounded, and what does not fit is counted.
"""

from __future__ import annotations

import bisect
from collections import deque
from typing import Any

import msgspec

from . import semconv
from .semconv import Kind, Metric
from .wire import Item, Series, encode_item

MAX_SERIES = 256  # a plain pair needs fewer than 150
OUTBOX = 4096  # items kept until the feed takes them


class Cell:
    """One metric with one attribute set, and its sums."""

    __slots__ = ("attributes", "buckets", "dirty", "metric", "value")

    def __init__(self, metric: Metric, values: tuple[str, ...]) -> None:
        self.metric = metric
        self.attributes = {
            name: value for name, value in zip(metric.attributes, values, strict=True) if value
        }
        self.value = 0.0
        self.buckets = [0] * (len(metric.buckets) + 1) if metric.kind is Kind.HISTOGRAM else None
        self.dirty = False

    def series(self) -> Series:
        """A copy for the wire."""
        buckets = list(self.buckets) if self.buckets is not None else None
        return Series(self.metric.name, self.attributes, self.value, buckets)


class Recorder:
    """Cumulative sums by metric and attribute values.

    Attribute values are given in the order of ``Metric.attributes``; an empty string leaves the
    attribute out.
    """

    def __init__(self) -> None:
        self._cells: dict[tuple[Any, ...], Cell] = {}
        self._dirty: deque[Cell] = deque()
        self._seq = 0
        self._peers: set[str] = set()
        self.outbox: deque[Item] = deque(maxlen=OUTBOX)
        self._overflow = Cell(semconv.TELEMETRY_DROPPED, ("recorder", "series_limit"))

    def add(self, metric: Metric, amount: float, *values: str) -> None:
        """Adds to a counter; with amount 0 it makes the series appear."""
        cell = self._cell(metric, values)
        cell.value += amount
        self._touch(cell)

    def set(self, metric: Metric, value: float, *values: str) -> None:
        """Sets a gauge."""
        cell = self._cell(metric, values)
        if cell.value != value:
            cell.value = value
            self._touch(cell)

    def observe(self, metric: Metric, value: float, *values: str) -> None:
        """Adds one observation to a histogram."""
        cell = self._cell(metric, values)
        if cell.buckets is not None:
            # Upper bounds are inclusive: OpenTelemetry metrics data model, "Histogram".
            cell.buckets[bisect.bisect_left(metric.buckets, value)] += 1
        cell.value += value
        self._touch(cell)

    def put(self, item: Item) -> None:
        """Hands a single happening to the feed. Its `seq` is set here."""
        self._seq += 1
        item.seq = self._seq
        self.outbox.append(item)

    def peer(self, engine_id: str) -> str:
        """A peer as a label: itself while there are at most `semconv.MAX_PEERS`, else other."""
        if not engine_id or engine_id in self._peers:
            return engine_id
        if len(self._peers) < semconv.MAX_PEERS:
            self._peers.add(engine_id)
            return engine_id
        return semconv.OTHER_PEER

    # For the feed's thread.

    def take_changes(self) -> list[Series]:
        """Copies of the series that changed since the last call."""
        changed = []
        while self._dirty:
            cell = self._dirty.popleft()
            cell.dirty = False
            changed.append(cell.series())
        return changed

    def take_items(self) -> list[msgspec.Raw]:
        """The items put since the last call, packed for the wire."""
        packed = []
        while self.outbox:
            packed.append(encode_item(self.outbox.popleft()))
        return packed

    def everything(self) -> list[Series]:
        """Copies of all series."""
        # list() of a dict's values runs without giving up the interpreter lock.
        return [cell.series() for cell in list(self._cells.values())]

    def _cell(self, metric: Metric, values: tuple[str, ...]) -> Cell:
        key = (metric.name, *values)
        cell = self._cells.get(key)
        if cell is None:
            if len(self._cells) >= MAX_SERIES:
                self._overflow.value += 1
                self._cells.setdefault((self._overflow.metric.name, "overflow"), self._overflow)
                self._touch(self._overflow)
                return Cell(metric, values)  # takes the value and is forgotten
            cell = self._cells[key] = Cell(metric, values)
            self._touch(cell)
        return cell

    def _touch(self, cell: Cell) -> None:
        if not cell.dirty:
            cell.dirty = True
            self._dirty.append(cell)
