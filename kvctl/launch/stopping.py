"""Ending what a launch started, in order, and leaving nothing behind.

One code path: the supervisor ends its own run with it, and ``kvctl stop`` does where no
supervisor is left. It works on what the state says, never on names of programs, and touches
only processes whose pid and start time are those that were noted.

Routers first, so that no request comes in; then engines, which drain; then their relays, which
export what is left once the feed has closed.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvctl.launch import procfs, shared_memory
from kvctl.launch.process import BOOT_PHASES, MARK, enter
from kvctl.launch.procfs import Identity
from kvctl.launch.sockets import remove_stale
from kvctl.launch.state import ENDED, ProcessRecord

ROUTER_TIMEOUT = 10.0  # s; at most an engine's
BOOT_TIMEOUT = 10.0  # s for an engine that was never ready; at most an engine's
RELAY_TIMEOUT = 15.0  # s: a relay waits up to 10 s for the end of its feed, then exports
LEFTOVER_TIMEOUT = 4.0  # s that the rest of a tree gets after its first process has ended
KILL_TIMEOUT = 10.0  # s after which a killed process that is still there is given up on
STEP = 0.05  # s


@dataclass
class Swept:
    """What was left behind and is removed, and what had to stay."""

    removed: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)


async def stop(
    records: Sequence[ProcessRecord],
    *,
    engine_timeout: float,
    hurry: asyncio.Event | None = None,
    changed: Callable[[], None] = lambda: None,
) -> list[Identity]:
    """Ends the processes of these records and all that belongs to them.

    Args:
        engine_timeout: seconds that an engine gets after SIGTERM, before SIGKILL.
        hurry: once set, everything is killed at once.
        changed: called whenever a record has changed.

    Returns:
        Processes that did not end even so (they hang in the kernel).
    """
    hurry = hurry or asyncio.Event()
    left: list[Identity] = []
    for stage in range(3):
        due = [record for record in records if _stage(record) == stage]
        for found in await asyncio.gather(
            *(end(each, _patience(each, engine_timeout), hurry, changed) for each in due)
        ):
            left += found
    return left


def _stage(record: ProcessRecord) -> int:
    # A kind that this version does not know stands in front of the engines, like a router.
    return {"engine": 1, "relay": 2}.get(record.kind, 0)


def _patience(record: ProcessRecord, engine_timeout: float) -> float:
    """Seconds between SIGTERM and SIGKILL."""
    if record.kind == "relay":
        return RELAY_TIMEOUT
    if record.kind == "engine" and record.phase not in BOOT_PHASES:
        return engine_timeout
    # Nothing to drain. vLLM may hang in its own teardown when the signal comes while it boots.
    return min(BOOT_TIMEOUT if record.kind == "engine" else ROUTER_TIMEOUT, engine_timeout)


async def end(
    record: ProcessRecord, timeout: float, hurry: asyncio.Event, changed: Callable[[], None]
) -> list[Identity]:
    """SIGTERM to one process, SIGKILL to its session when the time is over; see `stop`."""
    leader = record.identity

    def members() -> set[Identity]:
        return procfs.session_members(leader, record.members, procfs.processes())

    if not members():
        if record.phase not in ENDED:
            enter(record, "exited")
            changed()
        return []
    if record.phase not in ENDED:
        enter(record, "stopping")
        changed()
    deadline = time.monotonic() + timeout
    killed = False
    if procfs.send(leader, signal.SIGTERM):
        await _until(lambda: not procfs.lives(leader), deadline, hurry)
        killed = procfs.lives(leader)
    if not killed:
        rest = min(deadline, time.monotonic() + LEFTOVER_TIMEOUT)
        await _until(lambda: not members(), rest, hurry)
    left = await _kill(members)
    if record.phase not in ENDED:
        enter(record, "killed" if killed else "exited")
    if not left:
        record.members = []
    changed()
    return sorted(left)


async def _until(done: Callable[[], bool], deadline: float, hurry: asyncio.Event) -> None:
    while not done() and time.monotonic() < deadline and not hurry.is_set():
        await asyncio.sleep(STEP)


async def _kill(members: Callable[[], set[Identity]]) -> set[Identity]:
    """SIGKILL, again and again as long as members turn up; returns those that stay."""
    deadline = time.monotonic() + KILL_TIMEOUT
    while (left := members()) and time.monotonic() < deadline:
        for identity in left:
            procfs.send(identity, signal.SIGKILL)
        await asyncio.sleep(STEP)
    return left


def strays(folder: Path) -> list[ProcessRecord]:
    """Processes that carry the mark of this run's folder, as records, one a session.

    Finds what the state does not know: all of it when the state file is broken, else what has
    left its session. vLLM's own processes overwrite their environment with their title, but not
    the one that was started first, and the others are in its session.
    """
    prefix = f"{folder}:"
    found: dict[tuple[str, str, int], ProcessRecord] = {}
    seen = procfs.processes()
    for process in seen.values():
        value = procfs.environment(process.pid).get(MARK, "")
        if process.dead or not value.startswith(prefix):
            continue
        kind, _, name = value.removeprefix(prefix).partition(":")
        leader = seen.get(process.session, process)
        # A session that somebody else leads (a shell that was given the mark) is not ours as a
        # whole: then only the process itself counts.
        if procfs.environment(leader.pid).get(MARK) != value:
            leader = process
        key = (kind, name, leader.pid)
        record = found.setdefault(
            key, ProcessRecord(name, kind, pid=leader.pid, started=leader.started, phase="ready")
        )
        record.members.append(process.identity)
    return list(found.values())


def sweep(records: Iterable[ProcessRecord]) -> Swept:
    """Removes the shared-memory files and feed sockets of processes that have ended.

    Never a file that a process still has, nor a socket that somebody listens on. A record keeps
    what could not be removed, for the next time.
    """
    swept = Swept()
    for record in records:
        if any(map(procfs.lives, {record.identity, *record.members})):
            continue
        gone, kept = shared_memory.remove_unused(record.shm, since=record.started)
        record.shm = kept
        swept.removed += [f"/dev/shm/{segment.name}" for segment in gone]
        swept.kept += [f"/dev/shm/{segment.name}" for segment in kept]
        if record.kind == "engine":
            swept.removed += [feed for feed in record.feeds if remove_stale(Path(feed))]
    return swept
