"""Sockets that dead processes have left in the file system."""

from __future__ import annotations

import socket
import stat
from pathlib import Path


def remove_stale(path: Path) -> bool:
    """Removes a Unix socket that nobody listens on any more; True if it was one."""
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            return False
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
            probe.connect(str(path))
    except ConnectionRefusedError:
        path.unlink(missing_ok=True)
        return True
    except OSError:
        return False  # not there, not ours, or so busy that it lives
    return False
