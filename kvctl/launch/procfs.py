"""What /proc says about processes: who lives, who belongs to whom; and signals that hit no other.

A process is named by its pid *and* its start time (clock ticks after boot, field 22 of
``/proc/PID/stat``, see proc(5)): the kernel reuses a pid, never the pair within one boot.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

PROC = Path("/proc")


class Identity(NamedTuple):
    """One process, for good: its pid and its start time in clock ticks after boot."""

    pid: int
    started: int


class Stat(NamedTuple):
    """The fields of ``/proc/PID/stat`` that matter here."""

    pid: int
    state: str
    parent: int
    session: int
    started: int

    @property
    def identity(self) -> Identity:
        return Identity(self.pid, self.started)

    @property
    def dead(self) -> bool:
        """A zombie: ended, but not yet collected by its parent."""
        return self.state in "ZXx"


def read_stat(pid: int) -> Stat | None:
    """The process with that pid right now; None where there is none."""
    try:
        text = (PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return None
    # The second field is the command in parentheses, and may contain blanks and parentheses.
    fields = text.rpartition(")")[2].split()
    if len(fields) < 20:
        return None
    return Stat(pid, fields[0], int(fields[1]), int(fields[3]), int(fields[19]))


def identify(pid: int) -> Identity | None:
    """Pid and start time of a process that exists, a zombie included."""
    stat = read_stat(pid)
    return stat.identity if stat else None


def lives(identity: Identity) -> bool:
    """True while that very process runs; False for a reused pid and for a zombie."""
    stat = read_stat(identity.pid)
    return stat is not None and stat.started == identity.started and not stat.dead


def pids() -> list[int]:
    """The pid of every process that can be seen."""
    return [int(entry.name) for entry in PROC.iterdir() if entry.name.isdigit()]


def processes() -> dict[int, Stat]:
    """Every process that can be seen, by pid."""
    return {pid: stat for pid in pids() if (stat := read_stat(pid))}


def session_members(
    leader: Identity, remembered: Iterable[Identity], seen: Mapping[int, Stat]
) -> set[Identity]:
    """The living processes of the session that `leader` began, among those in `seen`.

    The kernel gives a session's number to nobody else while a member of it exists. So when the
    leader or a remembered member is still there and in it, everything in it is ours. When none
    is, a session of that number is somebody else's, and only the remembered members count.
    """
    known = [
        stat
        for identity in {leader, *remembered}
        if (stat := seen.get(identity.pid)) and stat.started == identity.started
    ]
    ours = {stat.identity for stat in known if not stat.dead}
    if any(stat.session == leader.pid for stat in known):
        ours |= {
            stat.identity for stat in seen.values() if stat.session == leader.pid and not stat.dead
        }
    return ours


def send(identity: Identity, signum: signal.Signals) -> bool:
    """Sends a signal to that very process, never to one that got its pid later.

    Returns:
        False when it is gone, or is not ours to signal.
    """
    try:
        handle = os.pidfd_open(identity.pid)
    except ProcessLookupError:
        return False
    except OSError:  # a kernel or sandbox without pidfd: check, then send
        return lives(identity) and _kill(identity.pid, signum)
    try:
        # The handle is held: from here on the pid cannot pass to another process unnoticed.
        if not lives(identity):
            return False
        signal.pidfd_send_signal(handle, signum)
    except (ProcessLookupError, PermissionError):
        return False
    finally:
        os.close(handle)
    return True


def _kill(pid: int, signum: signal.Signals) -> bool:
    try:
        os.kill(pid, signum)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def environment(pid: int) -> dict[str, str]:
    """The environment that a process was started with; empty where it cannot be read.

    A process that changes its title may have overwritten it: absence proves nothing.
    """
    try:
        raw = (PROC / str(pid) / "environ").read_bytes()
    except OSError:
        return {}
    pairs = (os.fsdecode(item).partition("=") for item in raw.split(b"\0") if item)
    return {key: value for key, _, value in pairs}


def command(pid: int) -> str:
    """The command line of a process, for messages; empty where it cannot be read."""
    try:
        raw = (PROC / str(pid) / "cmdline").read_bytes()
    except OSError:
        return ""
    return os.fsdecode(raw.rstrip(b"\0")).replace("\0", " ")


def boot_id() -> str:
    """Random id of this boot: pids and start times mean nothing in another one."""
    try:
        return (PROC / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
