"""Where the feed's sockets live. Engine, relay and command line compute the same paths.

The folder is ``KVCTL_RUNTIME_DIR``, else ``$XDG_RUNTIME_DIR/kvctl``, else ``kvctl-<uid>`` in the
system's temporary folder. It is ours alone (mode 0700), or it is not used.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from pathlib import Path

RUNTIME_DIR = "KVCTL_RUNTIME_DIR"
MAX_SOCKET_PATH = 107  # bytes: sizeof(sockaddr_un.sun_path) is 108 on Linux, unix(7)


class RuntimeDirError(Exception):
    """The runtime folder cannot be used, and why."""


def runtime_dir() -> Path:
    """The folder of the sockets; it need not exist."""
    if chosen := os.environ.get(RUNTIME_DIR):
        return Path(chosen)
    if xdg := os.environ.get("XDG_RUNTIME_DIR"):
        return Path(xdg) / "kvctl"
    return Path(tempfile.gettempdir()) / f"kvctl-{os.getuid()}"


def ensure_runtime_dir() -> Path:
    """Makes the folder where it is missing, and checks that nobody else can write to it.

    Raises:
        RuntimeDirError: it cannot be made, is a link, or belongs to somebody else.
    """
    folder = runtime_dir()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise RuntimeDirError(f"{folder}: {error.strerror}") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise RuntimeDirError(f"{folder} is not a folder of uid {os.getuid()}; set {RUNTIME_DIR}")
    if found.st_mode & 0o077:
        folder.chmod(0o700)
    return folder


def feed_path(topology: str, instance: str, rank: int, folder: Path | None = None) -> Path:
    """The socket of one engine: ``<topology>.<instance>.<data-parallel rank>.sock``.

    Names have no dots, so two topologies never share one. Where the path would pass
    `MAX_SOCKET_PATH` bytes, a hash stands for the name.
    """
    folder = folder or runtime_dir()
    name = f"{topology}.{instance}.{rank}"
    path = folder / f"{name}.sock"
    if len(os.fsencode(path)) > MAX_SOCKET_PATH:
        path = folder / f"{hashlib.sha256(name.encode()).hexdigest()[:16]}.sock"
    return path
