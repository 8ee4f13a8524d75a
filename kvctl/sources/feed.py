"""Engines of this machine, read through their feeds."""

from __future__ import annotations

import os
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import msgspec

from kvctl.errors import UnreachableError
from kvctl.sources.snapshot import EngineSnapshot
from kvctl.sources.sums import clean, snapshot_of
from kvctl_connector.feed_client import FeedClient, FeedClosedError, FeedError, Key
from kvctl_connector.wire import Choice, Hello, Item, Series, Transfer, Wait

_RETRY = 0.5  # seconds between attempts to reach a feed that is not there
_AT_ONCE = 16  # feeds read at the same time


def read_snapshot(path: str, *, timeout: float = 2.0) -> EngineSnapshot:
    """What the engine behind that feed says right now.

    Args:
        timeout: seconds.

    Raises:
        UnreachableError: there is no feed, it may not be read, or it says nothing in time.
    """
    try:
        client = FeedClient(path)
        try:
            hello = client.wait_synced(timeout)
            return snapshot_of(hello, client.sums.values(), up=True)
        finally:
            client.close()
    except FeedError as error:
        raise UnreachableError(clean(str(error))) from error


def read_snapshots(
    paths: Iterable[str], *, timeout: float = 2.0
) -> dict[str, EngineSnapshot | UnreachableError]:
    """The same for several feeds at once: one that hangs does not delay the others."""

    def read(path: str) -> EngineSnapshot | UnreachableError:
        try:
            return read_snapshot(path, timeout=timeout)
        except UnreachableError as error:
            return error

    distinct = list(dict.fromkeys(paths))
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="feed") as pool:
        return dict(zip(distinct, pool.map(read, distinct), strict=True))


class SeenTransfer(NamedTuple):
    """A transfer that ended, and the name of the engine that reported it."""

    engine: str
    transfer: Transfer


class SeenWait(NamedTuple):
    """A wait for KV that ended, and the name of the engine that reported it."""

    engine: str
    wait: Wait


class SeenChoice(NamedTuple):
    """A choice of tier, and the name of the engine that made it."""

    engine: str
    choice: Choice


class _Reading:
    """One feed of a `Watch`."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.client: FeedClient | None = None
        self.hello: Hello | None = None
        self.sums: dict[Key, Series] = {}  # the client's own, changed under the watch's lock
        self.problem: str | None = f"{path}: not tried yet"
        self.missed = 0  # on earlier connections
        self.retry_at = 0.0  # monotonic seconds


class Watch:
    """Follows several feeds in one thread until it is closed, and collects what they report.

    What ended or was chosen before a feed was reached is not seen; the sums are always complete.
    A feed that is not there, or went away, is tried again until the end.

    Args:
        paths: of the feeds.
        limit: transfers, waits and choices that are kept, of each; older ones are dropped and
            counted.
    """

    def __init__(self, paths: Iterable[str | os.PathLike[str]], *, limit: int = 100_000) -> None:
        distinct = dict.fromkeys(os.fspath(path) for path in paths)
        self._readings = [_Reading(path) for path in distinct]
        self._transfers: deque[SeenTransfer] = deque(maxlen=limit)
        self._waits: deque[SeenWait] = deque(maxlen=limit)
        self._choices: deque[SeenChoice] = deque(maxlen=limit)
        self._forgotten = 0
        self._changed = threading.Condition()
        self._selector = selectors.DefaultSelector()
        self._end_reader, self._end_writer = os.pipe()
        self._selector.register(self._end_reader, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._follow, name="kvctl-watch", daemon=True)
        self._thread.start()

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the thread and the connections. What was collected stays."""
        if self._thread.is_alive():
            os.write(self._end_writer, b"!")
            self._thread.join()
            os.close(self._end_writer)

    def transfers(self) -> list[SeenTransfer]:
        """The transfers reported so far, in the order of arrival."""
        with self._changed:
            return list(self._transfers)

    def waits(self) -> list[SeenWait]:
        """The waits reported so far, in the order of arrival."""
        with self._changed:
            return list(self._waits)

    def choices(self) -> list[SeenChoice]:
        """The choices of a tier reported so far, in the order of arrival."""
        with self._changed:
            return list(self._choices)

    def lost(self) -> int:
        """How much was reported and is not kept: over the limit, or missed."""
        with self._changed:
            missed = sum(
                reading.missed + (reading.client.missed if reading.client else 0)
                for reading in self._readings
            )
            return self._forgotten + missed

    def snapshots(self) -> dict[str, EngineSnapshot]:
        """The newest sums of every feed that was ever reached, by path."""
        with self._changed:
            return {
                reading.path: snapshot_of(
                    reading.hello, reading.sums.values(), up=reading.problem is None
                )
                for reading in self._readings
                if reading.hello is not None
            }

    def problems(self) -> dict[str, str]:
        """Why a feed cannot be read right now, by path; empty when all are followed."""
        with self._changed:
            return {reading.path: reading.problem for reading in self._readings if reading.problem}

    def wait_for(self, condition: Callable[[], object], timeout: float) -> bool:
        """Waits up to `timeout` seconds for the condition; it is asked again after every change."""
        with self._changed:
            return bool(self._changed.wait_for(condition, timeout))

    def _follow(self) -> None:
        while True:
            with self._changed:
                self._connect_missing()
                self._changed.notify_all()
            for key, _ in self._selector.select(self._until_retry()):
                if key.data is None:
                    self._release()
                    return
                with self._changed:
                    self._receive(key.data)
                    self._changed.notify_all()

    def _until_retry(self) -> float | None:
        due = [reading.retry_at for reading in self._readings if reading.client is None]
        return max(0.0, min(due) - time.monotonic()) if due else None

    def _connect_missing(self) -> None:
        now = time.monotonic()
        for reading in self._readings:
            if reading.client is None and now >= reading.retry_at:
                reading.retry_at = now + _RETRY
                try:
                    reading.client = FeedClient(reading.path)
                except FeedError as error:
                    reading.problem = clean(str(error))
                    continue
                reading.problem = f"{reading.path}: the engine has said nothing yet"
                self._selector.register(reading.client, selectors.EVENT_READ, reading)

    def _receive(self, reading: _Reading) -> None:
        client = reading.client
        assert client is not None
        try:
            items = client.receive()
        except FeedError as error:
            reading.problem = clean(str(error))
            reading.missed += client.missed
            self._selector.unregister(client)
            client.close()
            reading.client = None
            # What ended is tried again soon, what cannot be read will not be readable soon.
            wait = _RETRY if isinstance(error, FeedClosedError) else 20 * _RETRY
            reading.retry_at = time.monotonic() + wait
            return
        if client.synced and client.hello is not None:
            reading.hello = client.hello
            reading.sums = client.sums
            reading.problem = None
            for item in items:
                self._keep(clean(client.hello.name), item)

    def _keep(self, engine: str, item: Item) -> None:
        request = clean(item.request)
        if isinstance(item, Transfer):
            self._forgotten += len(self._transfers) == self._transfers.maxlen
            item = msgspec.structs.replace(item, request=request, peer=clean(item.peer))
            self._transfers.append(SeenTransfer(engine, item))
        elif isinstance(item, Choice):
            self._forgotten += len(self._choices) == self._choices.maxlen
            item = msgspec.structs.replace(item, request=request)
            self._choices.append(SeenChoice(engine, item))
        else:
            self._forgotten += len(self._waits) == self._waits.maxlen
            item = msgspec.structs.replace(item, request=request)
            self._waits.append(SeenWait(engine, item))

    def _release(self) -> None:
        for reading in self._readings:
            if reading.client is not None:
                reading.missed += reading.client.missed
                reading.client.close()
                reading.client = None
        self._selector.close()
        os.close(self._end_reader)
