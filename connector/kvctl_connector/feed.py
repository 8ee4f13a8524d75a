"""The feed: one thread that tells local readers what the recorder holds.

A unix socket, read-only: whoever connects gets a `wire.Hello`, everything, and then changes.
The thread only accepts and sends, never blocks on a reader, and disconnects one that is too
slow. Without readers it sleeps. Readers are the same uid, or root.
"""

from __future__ import annotations

import os
import selectors
import socket
import struct
import threading
import time
from contextlib import suppress
from pathlib import Path

from . import semconv
from .guard import logger
from .paths import RuntimeDirError, ensure_runtime_dir
from .recorder import Cell, Recorder
from .wire import Delta, Hello, frame

INTERVAL = 0.05  # seconds between two messages to a reader while things change
MAX_READERS = 8
MAX_PENDING = 4 * 1024 * 1024  # bytes a reader may be behind before it is disconnected


class Feed:
    """Serves one recorder on one socket.

    Args:
        recorder: what is told.
        hello: who is speaking.
        path: of the socket, in the runtime folder.
    """

    def __init__(self, recorder: Recorder, hello: Hello, path: Path) -> None:
        self.path = path
        self._recorder = recorder
        self._hello = frame(hello)
        self._selector = selectors.DefaultSelector()
        self._pending: dict[socket.socket, bytearray] = {}
        self._listener: socket.socket | None = None
        self._inode = 0
        self._stop_reader, self._stop_writer = socket.socketpair()
        self._thread = threading.Thread(target=self._serve, name="kvctl-feed", daemon=True)
        self._slow = Cell(semconv.TELEMETRY_DROPPED, ("feed", "slow_reader"))

    def start(self) -> bool:
        """Binds the socket and starts the thread; False, with one warning, where it cannot."""
        try:
            ensure_runtime_dir()
            self._listener = self._bind()
        except (OSError, RuntimeDirError) as error:
            logger.warning(
                "kvctl: no feed at %s (%s): the engine runs on, kvctl status and the relay "
                "will not see it",
                self.path,
                error,
            )
            return False
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._stop_reader, selectors.EVENT_READ)
        self._thread.start()
        return True

    def close(self) -> None:
        """Ends the thread and removes the socket. The last changes are sent first."""
        if self._thread.is_alive():
            self._stop_writer.send(b"x")
            self._thread.join(timeout=2)
        with suppress(OSError):
            if self._listener is not None and self.path.stat().st_ino == self._inode:
                self.path.unlink()

    def _bind(self) -> socket.socket:
        """Binds under a temporary name and renames, so that nobody meets an open socket."""
        if _answers(self.path):
            raise OSError("another engine is serving this path")
        temporary = self.path.with_name(f".{os.getpid()}")  # no longer than the path itself
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(str(temporary))
            temporary.chmod(0o600)
            listener.listen(MAX_READERS)
            temporary.rename(self.path)
        except OSError:
            listener.close()
            temporary.unlink(missing_ok=True)
            raise
        self._inode = self.path.stat().st_ino
        listener.setblocking(False)
        return listener

    def _serve(self) -> None:
        stopping = False
        while not stopping:
            timeout = INTERVAL if self._pending else None
            for key, _ in self._selector.select(timeout):
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj is self._stop_reader:
                    stopping = True
                else:
                    self._watch_hangup(key.fileobj)  # type: ignore[arg-type]
            if self._pending:
                self._tell_changes()
        for reader in list(self._pending):
            self._drop(reader)
        if self._listener is not None:
            self._listener.close()

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            reader, _ = self._listener.accept()
        except OSError:
            return
        reader.setblocking(False)
        if len(self._pending) >= MAX_READERS or not _allowed(reader):
            reader.close()
            return
        if not self._pending:
            self._recorder.take_items()  # from before anybody listened
        self._tell_changes()  # the others' state is now that of the full message
        series = [*self._recorder.everything(), self._slow.series()]
        everything = Delta(time=time.time_ns(), series=series, full=True)
        self._selector.register(reader, selectors.EVENT_READ)
        self._pending[reader] = bytearray(self._hello + frame(everything))
        self._send(reader)

    def _tell_changes(self) -> None:
        series = self._recorder.take_changes()
        if self._slow.dirty:
            self._slow.dirty = False
            series.append(self._slow.series())
        items = self._recorder.take_items()
        message = frame(Delta(time=time.time_ns(), series=series, items=items))
        for reader in list(self._pending):
            if series or items:
                self._pending[reader] += message
            self._send(reader)

    def _send(self, reader: socket.socket) -> None:
        pending = self._pending[reader]
        try:
            while pending:
                del pending[: reader.send(pending)]
        except BlockingIOError:
            if len(pending) > MAX_PENDING:
                self._slow.value += 1
                self._slow.dirty = True
                self._drop(reader)
        except OSError:
            self._drop(reader)

    def _watch_hangup(self, reader: socket.socket) -> None:
        """The protocol is read-only: what a reader sends is thrown away, its end is its end."""
        try:
            if not reader.recv(1024):
                self._drop(reader)
        except BlockingIOError:
            return
        except OSError:
            self._drop(reader)

    def _drop(self, reader: socket.socket) -> None:
        self._pending.pop(reader, None)
        with suppress(KeyError, ValueError):
            self._selector.unregister(reader)
        reader.close()


def _answers(path: Path) -> bool:
    """Whether somebody serves the socket; a stale one refuses and may be replaced."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1)
        try:
            probe.connect(str(path))
        except OSError:
            return False
        return True


def _allowed(reader: socket.socket) -> bool:
    """Same uid or root. Source: unix(7), SO_PEERCRED: pid, uid, gid as three ints."""
    _, uid, _ = struct.unpack("3i", reader.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return uid in (0, os.getuid())
