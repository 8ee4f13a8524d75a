"""The files in /dev/shm that an engine uses, and their removal once nobody has them any more.

vLLM's message rings (some 400 MiB an engine) stay behind when its processes are killed. They
carry no name that says whose they are, so they are noted while the engine lives, from what its
processes have mapped or open. Only files that came into being after the engine was started are
noted: weights that an operator keeps in /dev/shm are mapped too, and are not ours.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from kvctl.launch.procfs import PROC, processes, read_stat

SHM = Path("/dev/shm")
EXIT_LOOK, EXIT_LOOKS = 0.05, 4  # s and number of looks in which a process may end


class Segment(NamedTuple):
    """One file in /dev/shm; the inode tells it from a later one of the same name."""

    name: str
    inode: int


def present() -> set[Segment]:
    """The regular files directly in /dev/shm, where shm_open(3) puts them."""
    found = set()
    try:
        with os.scandir(SHM) as entries:
            for entry in entries:
                if entry.is_file(follow_symlinks=False):
                    found.add(Segment(entry.name, entry.inode()))
    except OSError:
        return set()
    return found


def inodes_in_use(pid: int) -> set[int]:
    """The files of /dev/shm that a process has mapped or open, by inode.

    Not by name: sem_open(3) maps a file under a temporary name, then links it to its own.

    Raises:
        OSError: the process is gone, or may not be looked at.
    """
    prefix = f"{SHM}/"
    found = set()
    with (PROC / str(pid) / "maps").open(errors="surrogateescape") as maps:
        for line in maps:
            # address permissions offset device inode path, see proc(5)
            fields = line.split(maxsplit=5)
            if len(fields) == 6 and fields[5].startswith(prefix):
                found.add(int(fields[4]))
    for descriptor in (PROC / str(pid) / "fd").iterdir():
        try:
            if os.readlink(descriptor).startswith(prefix):  # noqa: PTH115 - many, so cheaply
                found.add(descriptor.stat().st_ino)
        except OSError:
            continue  # closed meanwhile
    return found


def used_by(pids: Iterable[int], among: set[Segment]) -> set[Segment]:
    """Those of `among` that one of the processes has; processes that cannot be read are passed."""
    inodes: set[int] = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            inodes |= inodes_in_use(pid)
    return {segment for segment in among if segment.inode in inodes}


def remove_unused(
    segments: Iterable[Segment], *, since: int
) -> tuple[list[Segment], list[Segment]]:
    """Removes those files that no process has any more.

    A process that cannot be looked at counts as having a file, if it was started after the
    engine and could open it: one of the file's own uid, and any other where the file's mode
    lets others write. (An agent that hides its memory and ran before is not what holds a ring.)

    Args:
        since: start of the engine that used them, in clock ticks after boot.

    Returns:
        What was removed, and what is still there.
    """
    there = present()
    wanted = {
        segment: info for segment in segments if segment in there and (info := _info(segment))
    }
    if not wanted:
        return [], []
    used, hidden = _everybody(since)
    removed, kept = [], []
    for segment, info in sorted(wanted.items()):
        shared = info.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if segment.inode in used or info.st_uid in hidden or (shared and hidden):
            kept.append(segment)
        elif _unlink(segment):
            removed.append(segment)
        else:
            kept.append(segment)
    return removed, kept


def _everybody(since: int) -> tuple[set[int], set[int]]:
    """The inodes that processes use, and the uids (not root) of those that cannot be looked at."""
    used: set[int] = set()
    closed: set[int] = set()
    for pid, process in processes().items():
        try:
            used |= inodes_in_use(pid)
        except PermissionError:
            if process.started >= since and not process.dead:
                closed.add(pid)
        except OSError:
            continue  # gone meanwhile
    # A process that is just ending has no memory any more, and is closed to everybody but root.
    for _ in range(EXIT_LOOKS):
        closed = {pid for pid in closed if (now := read_stat(pid)) and not now.dead}
        if closed:
            time.sleep(EXIT_LOOK)
    return used, set().union(*map(_owner, closed)) - {0}


def _info(segment: Segment) -> os.stat_result | None:
    try:
        return (SHM / segment.name).lstat()
    except OSError:
        return None


def _owner(pid: int) -> set[int]:
    try:
        return {(PROC / str(pid)).stat().st_uid}
    except OSError:
        return set()


def _unlink(segment: Segment) -> bool:
    info = _info(segment)
    if info is None or info.st_ino != segment.inode:
        return False
    try:
        (SHM / segment.name).unlink()
    except OSError:
        return False
    return True
