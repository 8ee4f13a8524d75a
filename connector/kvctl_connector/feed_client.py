"""A reader of the feed: connects, keeps the newest sums, hands out the items.

Used by the relay and by the tool. It starts no thread and never waits unless asked to: whoever
owns it waits until `FeedClient.fileno` is readable and calls `FeedClient.receive`.
"""

from __future__ import annotations

import os
import select
import socket
import stat
import time
from pathlib import Path
from typing import Union

from .wire import Delta, Hello, Item, ProtocolError, Series, Unframer, items_of

_CHUNK = 256 * 1024  # bytes taken from the socket at once

Key = tuple[str, tuple[tuple[str, str], ...]]


class FeedError(Exception):
    """The feed cannot be read. The message is for the operator; later is no better than now."""


class FeedUnavailableError(FeedError):
    """Nobody to read from, yet or any more; trying again later may help."""


class FeedClosedError(FeedUnavailableError):
    """The engine closed the feed: it ended, was killed, or dropped a reader that was too slow."""


def key_of(series: Series) -> Key:
    """What tells one series from another: its metric and its attributes."""
    return series.metric, tuple(sorted(series.attributes.items()))


class FeedClient:
    """One connection to one engine's feed.

    Attributes:
        path: of the socket.
        hello: who is speaking; None until it has said so.
        sums: every series, newest values. A series is replaced, never changed, so a shallow copy
            is a consistent picture, also from another thread.
        synced: whether every series has arrived once.
        missed: items that the engine numbered but that never reached this connection.

    Raises:
        FeedUnavailableError: no such socket, or nobody listens on it.
        FeedError: it may not be opened, or it is no socket.
    """

    def __init__(self, path: Union[str, os.PathLike[str]]) -> None:  # noqa: UP007
        self.path = os.fspath(path)
        self.hello: Hello | None = None
        self.sums: dict[Key, Series] = {}
        self.synced = False
        self.missed = 0
        self._taken = 0  # items received, known to this version or not
        self._offset: int | None = None  # sequence number minus items received, at the beginning
        self._unframer = Unframer()
        self._socket = _connect(self.path)

    def fileno(self) -> int:
        """For select: readable when `receive` has something to do."""
        return self._socket.fileno()

    def close(self) -> None:
        """Ends the connection. The engine notices at its next message."""
        self._socket.close()

    def receive(self) -> list[Item]:
        """Takes what has arrived, without waiting, and returns the items that came with it.

        Raises:
            FeedClosedError: the engine closed the feed; `sums` keeps the last values.
            FeedError: what arrived is not a feed that this version can read.
        """
        try:
            data = self._socket.recv(_CHUNK)
        except BlockingIOError:
            return []
        except OSError as error:  # a reset connection
            raise FeedClosedError(f"{self.path}: the connection broke: {error.strerror}") from error
        if not data:
            raise FeedClosedError(f"{self.path}: the engine closed its feed")
        items: list[Item] = []
        try:
            for message in self._unframer.feed(data):
                if isinstance(message, Hello):
                    self.hello = message
                else:
                    items += self._take(message)
        except ProtocolError as error:
            raise FeedError(f"{self.path}: {error}") from error
        return items

    def wait_synced(self, timeout: float) -> Hello:
        """Waits until the engine has said who it is and every series has arrived.

        Args:
            timeout: seconds.

        Raises:
            FeedUnavailableError: it did not within the time, or closed the feed.
            FeedError: see `receive`.
        """
        deadline = time.monotonic() + timeout
        while self.hello is None or not self.synced:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise FeedUnavailableError(
                    f"{self.path}: the engine accepted the connection and said nothing for "
                    f"{timeout:.3g} s: it is suspended, overloaded or has too many readers"
                )
            if select.select([self], [], [], remaining)[0]:
                self.receive()
        return self.hello

    def _take(self, delta: Delta) -> list[Item]:
        if self.hello is None:
            raise ProtocolError("the first message does not say who is speaking")
        changed = {key_of(series): series for series in delta.series}
        if delta.full:
            self.sums = changed
            self.synced = True
        else:
            self.sums.update(changed)
        items = items_of(delta)
        self._taken += len(delta.items)
        if items:
            offset = items[-1].seq - self._taken
            if self._offset is None:
                self._offset = offset
            self.missed = max(self.missed, offset - self._offset)
        return items


def _connect(path: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.setblocking(False)
    try:
        # On a unix socket this succeeds or fails at once: there is no handshake to wait for.
        connection.connect(path)
    except OSError as error:
        connection.close()
        raise _explained(path, error) from error
    return connection


def _explained(path: str, error: OSError) -> FeedError:
    if isinstance(error, FileNotFoundError):
        return FeedUnavailableError(
            f"{path}: there is no such socket: the engine has not come that far, "
            "or runs without its feed (its log says so)"
        )
    if isinstance(error, ConnectionRefusedError):
        if not _is_socket(path):
            return FeedError(f"{path} is not a socket")
        return FeedUnavailableError(f"{path}: nobody listens there: the engine is gone")
    if isinstance(error, BlockingIOError):
        return FeedUnavailableError(f"{path}: the engine does not accept connections right now")
    if isinstance(error, PermissionError):
        return FeedError(f"{path}: permission denied: only the engine's user and root may read it")
    return FeedError(f"{path}: {error.strerror or error}")


def _is_socket(path: str) -> bool:
    try:
        return stat.S_ISSOCK(Path(path).stat().st_mode)
    except OSError:
        return False
