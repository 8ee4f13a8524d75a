"""Which ports are taken, and by whom."""

from __future__ import annotations

import contextlib
import errno
import socket

from kvctl.launch.procfs import PROC, command, pids

_LISTEN = "0A"  # state of a listening socket in /proc/net/tcp, see include/net/tcp_states.h


def refusal(host: str, port: int) -> int | None:
    """The error number with which binding to that port fails right now; None when it is free."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As servers do: a port whose last connections merely fade out counts as free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error.errno or errno.EIO
        except OverflowError:
            return errno.EINVAL
    return None


def owner(port: int) -> str | None:
    """``"pid 4711 (nginx: master process)"``: who listens on that port, where /proc tells."""
    inodes = _listening(port)
    if not inodes:
        return None
    for pid in pids():
        try:
            descriptors = list((PROC / str(pid) / "fd").iterdir())
        except OSError:
            continue  # gone, or somebody else's
        for descriptor in descriptors:
            with contextlib.suppress(OSError):
                if str(descriptor.readlink()) in inodes:
                    return f"pid {pid} ({command(pid)[:60] or 'unknown'})"
    return None


def _listening(port: int) -> set[str]:
    """The sockets that listen on a port, as /proc/PID/fd names them."""
    found = set()
    for table in ("net/tcp", "net/tcp6"):
        with contextlib.suppress(OSError):
            for line in (PROC / table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                    found.add(f"socket:[{fields[9]}]")
    return found
