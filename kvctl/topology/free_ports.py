"""A block of ports that nothing listens on, for a file that is about to be written."""

from __future__ import annotations

import socket
from pathlib import Path

from kvctl.errors import UnreachableError
from kvctl.topology.layout import LOOPBACK, STEP

FIRST = 8100
LAST = 60_000
APART = 100


def free_base(engines: int = 2, *, ephemeral: int | None = None) -> int:
    """A value for ``ports.base``: every port of the block can be bound on loopback right now.

    Args:
        engines: how many, of one data-parallel rank each.
        ephemeral: first port that the kernel gives to outgoing connections; None: as it is set.
            Blocks lie below it, or anywhere where it leaves no room.

    Raises:
        UnreachableError: there is no such block.
    """
    size = STEP * (1 + engines)
    first_ephemeral = _first_ephemeral() if ephemeral is None else ephemeral
    end = first_ephemeral if first_ephemeral >= FIRST + size else LAST
    for base in range(FIRST, end - size + 1, APART):
        if all(_free(port) for port in range(base, base + size)):
            return base
    raise UnreachableError(
        f"no block of {size} free ports between {FIRST} and {end}", hint="end what listens there"
    )


def _first_ephemeral() -> int:
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 32_768


def _free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
    return True
