"""What the demo makes once and uses again: its model, and the reference answers.

``$KVCTL_CACHE_DIR``, else ``$XDG_CACHE_HOME/kvctl``, else ``~/.cache/kvctl``. An entry is named
by a hash of everything it was made from, so it never has to be checked whether it is still right,
and it appears under its name only when it is complete.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kvctl.errors import UnreachableError

CACHE_DIR = "KVCTL_CACHE_DIR"


def cache_dir() -> Path:
    """The folder of everything that can be made again; it need not exist."""
    if chosen := os.environ.get(CACHE_DIR):
        return Path(chosen).absolute()
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg) / "kvctl"
    return Path.home() / ".cache/kvctl"


def key_of(content: Any) -> str:
    """A name for what is made from `content`, which JSON must be able to express."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def entry(kind: str, key: str, make: Callable[[Path], None]) -> Path:
    """The folder ``<kind>-<key>`` of the cache; `make` fills it the first time.

    Two that ask at once: one makes it, the other waits. A folder that an interrupted `make` left
    half filled has another name, and is removed by the next that tries.

    Raises:
        UnreachableError: the cache cannot be written.
    """
    folder = cache_dir() / f"{kind}-{key}"
    if folder.is_dir():
        return folder
    partial = folder.with_name(f".{folder.name}.partial")
    with _cannot_write(folder.parent):
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = partial.with_suffix(".lock").open("w")
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            with _cannot_write(folder.parent):
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir()
                make(partial)
                partial.rename(folder)
    return folder


@contextlib.contextmanager
def _cannot_write(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UnreachableError(
            f"the cache cannot be written: {folder}: {error.strerror or error}",
            hint=f"free space there, or set {CACHE_DIR} to a folder that can be written",
        ) from error
