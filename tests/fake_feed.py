"""A stand-in for an engine's feed, built from the wire format alone.

For what a real recorder would not send: another major, garbage, unknown series. It also stands in
where a test is about the reader only.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from kvctl_connector import semconv
from kvctl_connector.wire import (
    PROTOCOL_MAJOR,
    PROTOCOL_MINOR,
    Delta,
    Hello,
    Item,
    Series,
    Transfer,
    Wait,
    encode_item,
    frame,
)

STARTED = 1_700_000_000_000_000_000


def make_hello(**changes: Any) -> Hello:
    values: dict[str, Any] = {
        "protocol": (PROTOCOL_MAJOR, PROTOCOL_MINOR),
        "incarnation": "0123456789abcdef",
        "started": STARTED,
        "instance": "demo-prefill-0",
        "name": "prefill-0",
        "role": "prefill",
        "pid": 4242,
        "resource": {semconv.RESOURCE_TOPOLOGY: "demo", semconv.RESOURCE_MODEL: "tiny"},
    }
    return Hello(**{**values, **changes})


def counter(metric: semconv.Metric, value: float, **attributes: str) -> Series:
    return Series(metric.name, attributes, value)


def histogram(metric: semconv.Metric, values: list[float], **attributes: str) -> Series:
    buckets = [0] * (len(metric.buckets) + 1)
    for value in values:
        buckets[sum(bound < value for bound in metric.buckets)] += 1
    return Series(metric.name, attributes, sum(values), buckets)


def make_transfer(seq: int, **changes: Any) -> Transfer:
    values: dict[str, Any] = {
        "seq": seq,
        "tier": "peer",
        "direction": "recv",
        "outcome": "ok",
        "request": "request-1",
        "start": STARTED,
        "end": STARTED + 2_000_000,
        "bytes": 4096,
    }
    return Transfer(**{**values, **changes})


def make_wait(seq: int, **changes: Any) -> Wait:
    values: dict[str, Any] = {
        "seq": seq,
        "tier": "peer",
        "outcome": "ok",
        "request": "request-1",
        "start": STARTED,
        "end": STARTED + 3_000_000,
    }
    return Wait(**{**values, **changes})


class FakeFeed:
    """Serves one feed. `greeting` replaces the frames that a new reader gets first."""

    def __init__(self, path: Path, hello: Hello, greeting: bytes | None = None) -> None:
        self.path = path
        self.hello = hello
        self.greeting = greeting
        self.greeted = threading.Event()  # a reader connected and got the greeting
        self._series: dict[Any, Series] = {}
        self._readers: list[socket.socket] = []
        self._lock = threading.Lock()
        self._listener = socket.socket(socket.AF_UNIX)
        path.unlink(missing_ok=True)
        self._listener.bind(str(path))
        self._listener.listen(8)
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def publish(self, *series: Series, items: list[Item | msgspec.Raw] | None = None) -> None:
        """Sends changed series and items to every reader, and keeps the series for new ones."""
        packed = [i if isinstance(i, msgspec.Raw) else encode_item(i) for i in items or []]
        with self._lock:
            for one in series:
                self._series[one.metric, tuple(sorted(one.attributes.items()))] = one
            self._send(frame(Delta(time.time_ns(), list(series), packed)))

    def say(self, data: bytes) -> None:
        """Sends any bytes."""
        with self._lock:
            self._send(data)

    def drop_readers(self) -> None:
        """Ends the connections and goes on listening, as for a reader that is too slow."""
        with self._lock:
            for reader in self._readers:
                reader.close()
            self._readers.clear()

    def close(self) -> None:
        """Ends as a killed engine does: connections reset, the socket's file left behind."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(10)
        self.drop_readers()

    def _accept(self) -> None:
        while True:
            try:
                reader, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                everything = Delta(time.time_ns(), list(self._series.values()), full=True)
                greeting = self.greeting
                if greeting is None:
                    greeting = frame(self.hello) + frame(everything)
                self._readers.append(reader)
                reader.sendall(greeting)
                self.greeted.set()

    def _send(self, data: bytes) -> None:
        for reader in list(self._readers):
            try:
                reader.sendall(data)
            except OSError:
                self._readers.remove(reader)


@contextlib.contextmanager
def fake_feed(path: Path, *, greeting: bytes | None = None, **hello: Any) -> Iterator[FakeFeed]:
    feed = FakeFeed(path, make_hello(**hello), greeting)
    try:
        yield feed
    finally:
        feed.close()
