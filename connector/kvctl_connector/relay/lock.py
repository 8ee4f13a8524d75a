"""One relay per engine: a lock on a file named by the engine's incarnation."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path

_log = logging.getLogger("kvctl.relay")
_PLAIN = re.compile(r"[A-Za-z0-9_-]{1,64}")


def lock_path(folder: Path, incarnation: str) -> Path:
    """Where the lock of that engine process's life is, next to its feed."""
    if not _PLAIN.fullmatch(incarnation):  # it came over a socket and becomes a file name
        incarnation = hashlib.sha256(incarnation.encode()).hexdigest()[:32]
    return folder / f"{incarnation}.relay.lock"


@contextlib.contextmanager
def held(path: Path) -> Iterator[bool]:
    """Tries to take the lock; True while it is ours, False when another process has it.

    It ends with its holder, however that ended, so a killed relay is never in the way. Where the
    file cannot be written, there is no lock, and that is said.
    """
    try:
        descriptor = _take(path)
    except OSError as error:
        # A sidecar may see the folder of the sockets read-only.
        _log.warning("cannot lock %s (%s): a second relay would not notice", path, error.strerror)
        yield True
        return
    if descriptor is None:
        yield False
        return
    try:
        yield True
    finally:
        path.unlink(missing_ok=True)  # while it is still locked: nobody else's is removed
        os.close(descriptor)


def _take(path: Path) -> int | None:
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        if _is_still(path, descriptor):
            return descriptor
        os.close(descriptor)  # its last holder removed the file between our two calls


def _is_still(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False
