"""``kvctl stop``: through the supervisor where one lives, else straight from the state file."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from kvctl.errors import InstanceError, UsageError
from kvctl.launch import procfs, requests, stopping
from kvctl.launch.choice import read_copy, traces
from kvctl.launch.lock import RunLock, holder, take
from kvctl.launch.procfs import Identity
from kvctl.launch.state import (
    DEFAULT_STOP_TIMEOUT,
    ENDED,
    ProcessRecord,
    RunState,
    StateError,
    load,
    run_folder,
    save,
    state_path,
    survey,
)
from kvctl.launch.stopping import KILL_TIMEOUT, LEFTOVER_TIMEOUT, RELAY_TIMEOUT, ROUTER_TIMEOUT
from kvctl.launch.supervisor import Watcher

POLL = 0.1  # s between two looks at what another process does
# What a supervisor may need beyond the time that engines get.
MARGIN = ROUTER_TIMEOUT + RELAY_TIMEOUT + LEFTOVER_TIMEOUT + 2 * KILL_TIMEOUT


@dataclass
class Ended:
    """What a stop did.

    Attributes:
        stopped: names of what was running and is not any more.
        removed, kept: files that dead processes had left, and those that somebody still has.
        kept_state: where a broken state file was put.
    """

    stopped: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    kept_state: Path | None = None


def stop_run(state: RunState, names: list[str], watcher: Watcher) -> Ended:
    """Stops a run, or single instances of it with their relays.

    Args:
        names: instances; empty means everything.

    Raises:
        UsageError: an instance of that name is not in the run.
        InstanceError: something does not end.
    """
    wanted = _with_relays(state, names)
    running = [record.name for record in state.living() if record.name in wanted]
    if state.supervised():
        if names:
            _ask(state, sorted(wanted), watcher)
        else:
            _end_supervisor(state.name, state.supervisor, state.stop_timeout, watcher)
    # What is still there now had no supervisor, or one that did not manage.
    fresh = load(state.name) or state
    if fresh.supervised():
        return Ended(stopped=running)
    ended = _stop_directly(state.name, wanted if names else None, watcher)
    ended.stopped = sorted({*ended.stopped, *running})
    return ended


def sweep_ended(watcher: Watcher) -> list[Ended]:
    """Clears up after runs that have ended and left something, or whose end nobody wrote down.

    Raises:
        InstanceError: another process took the lock of such a run meanwhile.
    """
    unfinished = [
        state
        for state in survey()[0]
        if (state.phase not in ("stopped", "failed") or any(each.shm for each in state.processes))
        and not holder(state.name)  # else it is being launched, or stopped, right now
    ]
    return [stop_run(state, [], watcher) for state in unfinished]


def stop_broken(error: StateError, watcher: Watcher) -> Ended:
    """Stops what can be found of a run whose state file cannot be read; keeps that file.

    Its supervisor knows everything, where it lives. Else the copy that is written with the
    state file is used, and the mark that processes carry in their environment.

    Raises:
        StateError: the file cannot be put aside.
        InstanceError: something does not end.
    """
    name = error.name
    path = state_path(name)
    running = traces(name)
    aside = _free_name(path)
    try:
        path.replace(aside)
    except OSError:
        raise error from None
    if supervisor := holder(name):
        _end_supervisor(name, supervisor, DEFAULT_STOP_TIMEOUT, watcher)
    copy = read_copy(name) or RunState(name=name, run_id="", processes=[])
    if load(name) is None:
        with _Held(name):
            save(copy)
    ended = _stop_directly(name, None, watcher)
    ended.stopped = sorted({*ended.stopped, *running})
    ended.kept_state = aside
    return ended


def _free_name(path: Path) -> Path:
    """A name for a broken file that overwrites no earlier one."""
    number = 1
    while (aside := path.with_name(f"{path.name}.broken-{number}")).exists():
        number += 1
    return aside


def _with_relays(state: RunState, names: list[str]) -> set[str]:
    """The named instances and, of engines, the relays that read their feeds; all without names.

    Raises:
        UsageError: a name is not in the run.
    """
    known = {record.name: record for record in state.processes}
    if unknown := [name for name in names if name not in known]:
        hint = f"it has: {', '.join(known)}"
        if state.name in unknown:
            hint = f"to stop the whole topology: kvctl stop -p {state.name}"
        raise UsageError(f"{state.name} has no instance {', '.join(unknown)}", hint=hint)
    if not names:
        return set(known)
    feeds = {feed for name in names for feed in known[name].feeds}
    relays = {
        each.name for each in state.processes if each.kind == "relay" and feeds & set(each.feeds)
    }
    return {*names, *relays}


def _ask(state: RunState, names: list[str], watcher: Watcher) -> None:
    """Asks the supervisor to stop instances, and waits until they have ended."""
    requests.ask_stop(run_folder(state.name), names)
    deadline = time.monotonic() + state.stop_timeout + MARGIN
    while time.monotonic() < deadline:
        now = load(state.name)
        if now is None or not now.supervised():
            return
        watcher(now)
        if all(each.phase in ENDED for each in now.processes if each.name in names):
            return
        time.sleep(POLL)
    raise InstanceError(
        f"the supervisor of {state.name} does not stop {', '.join(names)}",
        hint=f"stop everything: kvctl stop -p {state.name}",
    )


def _end_supervisor(name: str, supervisor: Identity, stop_timeout: float, watcher: Watcher) -> None:
    """Lets the supervisor stop its run; kills it when it does not get done."""

    def show() -> None:
        try:
            if now := load(name):
                watcher(now)
        except StateError:
            pass

    procfs.send(supervisor, signal.SIGTERM)
    if not _wait(lambda: not procfs.lives(supervisor), stop_timeout + MARGIN, show):
        procfs.send(supervisor, signal.SIGKILL)
        _wait(lambda: not procfs.lives(supervisor), KILL_TIMEOUT)
    show()


def _wait(
    done: Callable[[], bool], timeout: float, meanwhile: Callable[[], None] = lambda: None
) -> bool:
    deadline = time.monotonic() + timeout
    while not done():
        if time.monotonic() > deadline:
            return False
        meanwhile()
        time.sleep(POLL)
    return True


class _Held:
    """The lock of a run, waited for: another kvctl may be at the same work."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock: RunLock | None = None

    def __enter__(self) -> None:
        def taken() -> bool:
            self._lock = take(self._name)
            return self._lock is not None

        if not _wait(taken, MARGIN):
            raise InstanceError(
                f"another process holds the lock of {self._name}",
                hint=f"try again when it has ended; the lock: {run_folder(self._name) / 'lock'}",
            )

    def __exit__(self, *_: object) -> None:
        if self._lock:
            self._lock.release()


def _stop_directly(name: str, wanted: set[str] | None, watcher: Watcher) -> Ended:
    """Stops processes of a run that has no supervisor, and removes what dead ones have left.

    Args:
        wanted: names; None means everything, with what only the environment's mark can find.
    """
    with _Held(name):
        state = load(name)
        if state is None:
            return Ended()
        here = state.same_boot()
        records = [
            each for each in state.processes if here and (wanted is None or each.name in wanted)
        ]
        running = [record.name for record in state.living() if record in records]
        extra: list[ProcessRecord] = []

        def changed() -> None:
            save(state)
            watcher(state)

        async def work() -> list[Identity]:
            patience = state.stop_timeout
            left = await stopping.stop(records, engine_timeout=patience, changed=changed)
            if wanted is None:
                extra.extend(stopping.strays(run_folder(name)))
                left += await stopping.stop(extra, engine_timeout=patience)
            return left

        left = asyncio.run(work())
        swept = stopping.sweep(records)
        if wanted is None and not left:
            state.phase = "failed" if state.cause else "stopped"
        save(state)
        watcher(state)
    if left:
        pids = ", ".join(str(identity.pid) for identity in left)
        raise InstanceError(
            f"{name}: these processes do not end, not even by SIGKILL: {pids}",
            hint="they hang in the kernel (ps -o stat,wchan PID), often on a device or a disk",
        )
    stopped = sorted({*running, *(record.name for record in extra)})
    return Ended(stopped=stopped, removed=swept.removed, kept=swept.kept)
