"""One launch of a name at a time: a flock on the run's lock file, held for a supervisor's life.

The kernel gives the lock back when its holder ends, however that happens. The file's content
names the holder, so that it can be found even when the state file is broken.
"""

from __future__ import annotations

import fcntl
import os

from kvctl.errors import UnreachableError
from kvctl.launch import procfs
from kvctl.launch.procfs import Identity
from kvctl.launch.state import STATE_DIR, run_folder


class RunLock:
    """The lock of one topology, taken. A forked child shares it."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def sign(self) -> None:
        """Writes into the file that this process is the holder."""
        me = procfs.identify(os.getpid())
        if me:
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, f"{me.pid} {me.started}\n".encode(), 0)

    def keep_only(self) -> None:
        """Closes every file but the lock and the standard ones.

        For a supervisor in the background: a file that its caller had open (another lock, the
        end of a pipe) would stay open for as long as the topology runs.
        """
        os.closerange(3, self._descriptor)
        os.closerange(self._descriptor + 1, os.sysconf("SC_OPEN_MAX"))

    def release(self) -> None:
        """Closes the file. The lock is free when the last process that shares it has done so."""
        os.close(self._descriptor)


def take(name: str) -> RunLock | None:
    """The lock of a topology, or None when another process holds it.

    Raises:
        UnreachableError: the run's folder cannot be written.
    """
    path = run_folder(name) / "lock"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise UnreachableError(
            f"the run's folder cannot be written: {path}: {error.strerror}",
            hint=f"set {STATE_DIR} to a folder that can be written",
        ) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    lock = RunLock(descriptor)
    lock.sign()
    return lock


def holder(name: str) -> Identity | None:
    """Who holds the lock of a topology; None when nobody does, or it cannot be told."""
    path = run_folder(name) / "lock"
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        # The content alone proves nothing: whoever held the lock last may live on without it.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return None
    except BlockingIOError:
        pass
    finally:
        os.close(descriptor)
    try:
        pid, started = path.read_text().split()
        identity = Identity(int(pid), int(started))
    except (OSError, ValueError):
        return None
    return identity if procfs.lives(identity) else None
