"""From a plan to a run: the lock, the checks, the first state, and the supervisor.

The supervisor runs in this process, or, detached, in a forked child with a session of its own;
then this process only follows the state file until everything is ready.
"""

from __future__ import annotations

import os
import secrets
import signal
import sys
import time
import traceback
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING

from kvctl import __version__
from kvctl.errors import Exit, InstanceError, KvctlError
from kvctl.launch import procfs, requests, stopping
from kvctl.launch.diagnosis import describe_exit
from kvctl.launch.lock import RunLock, take
from kvctl.launch.offer_key import lay_offer_key, offer_key_path
from kvctl.launch.preflight import check
from kvctl.launch.process import RUN_ID
from kvctl.launch.state import RunState, load, log_path, run_folder, save
from kvctl.launch.supervisor import Watcher, supervise

if TYPE_CHECKING:
    from kvctl.topology.plan import Plan

SUPERVISOR_LOG = "supervisor.log"
FOLLOW = 0.1  # s between two looks at the state of a detached run


def launch(
    plan: Plan, *, text: str, detach: bool, watcher: Watcher, log_watcher: Callable[[], Watcher]
) -> int:
    """Runs a plan; returns the exit code.

    In the foreground until it is stopped; detached until everything is ready.

    Args:
        text: the topology file, kept beside the state.
        watcher: shows progress here.
        log_watcher: makes what shows progress in the log of a detached supervisor.

    Raises:
        PreflightError: it was not begun.
        KvctlError: it failed, and everything that was started has been stopped.
    """
    lock = take(plan.name)
    try:
        state = _first_state(plan, lock, text)
        assert lock  # the checks let no second launch pass
        if detach:
            return _detached(plan.name, lambda: _fork(plan, state, lock, log_watcher), watcher)
        code = supervise(plan, state, watcher)
    finally:
        if lock:
            lock.release()
    return _outcome(state, code)


def _first_state(plan: Plan, lock: RunLock | None, text: str) -> RunState:
    previous = load(plan.name)
    if lock and previous and not previous.running():
        # Shared memory that a dead engine left would be forgotten with its state.
        stopping.sweep(previous.processes if previous.same_boot() else [])
    check(plan, locked=lock is not None, previous=previous)
    folder = run_folder(plan.name)
    requests.clear(folder)
    if plan.offer_key == offer_key_path(plan.name):
        lay_offer_key(plan.offer_key)
    (folder / "topology.yaml").write_text(text)
    state = RunState(
        name=plan.name,
        run_id=os.environ.get(RUN_ID) or secrets.token_hex(8),
        processes=[],
        kvctl_version=__version__,
        file=plan.file,
        model=plan.model,
        boot=procfs.boot_id(),
        started_at=time.time(),
        stop_timeout=plan.stop_timeout,
    )
    save(state)
    return state


def _outcome(state: RunState, code: int) -> int:
    """The exit code, or the error that the run ended with."""
    if state.cause and code not in (Exit.INTERRUPTED, Exit.TERMINATED):
        error = KvctlError(state.cause, hint=state.hint)
        error.exit_code = Exit(code) if code in list(Exit) else Exit.FAILED
        raise error
    return code


def _fork(plan: Plan, state: RunState, lock: RunLock, log_watcher: Callable[[], Watcher]) -> int:
    """Starts the supervisor in a child with a session and a log of its own; returns its pid."""
    log = log_path(plan.name, SUPERVISOR_LOG)
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:
        return child
    code: int = Exit.BUG
    try:
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, signal.SIG_DFL)
        os.setsid()
        if log.exists():
            log.replace(log.with_name(f"{log.name}.1"))
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for descriptor, target in ((nothing, 0), (output, 1), (output, 2)):
            os.dup2(descriptor, target)
        lock.keep_only()
        lock.sign()
        code = supervise(plan, state, log_watcher())
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # Not back into the caller's code: that is the parent's to go on with.
        os._exit(code)


def _detached(name: str, fork: Callable[[], int], watcher: Watcher) -> int:
    """Shows a detached launch until it is ready or has ended. Ctrl-C here stops it there."""
    asked: list[int] = []
    child = 0

    def pass_on(signum: int, _frame: FrameType | None) -> None:
        asked.append(signum)
        if child:
            os.kill(child, signal.SIGTERM)  # our own child, not collected yet: the pid is its

    before = {signum: signal.signal(signum, pass_on) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        child = fork()
        if asked:
            os.kill(child, signal.SIGTERM)
        status = _follow(name, child, watcher, asked)
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
    if asked:
        return 128 + asked[0]
    if status is None:
        return Exit.OK
    code = os.waitstatus_to_exitcode(status)
    state = load(name)
    if state is None or code < 0 or (code and not state.cause):
        raise InstanceError(
            f"the supervisor of {name} ended unexpectedly ({describe_exit(code)})",
            hint=f"see {log_path(name, SUPERVISOR_LOG)}; "
            f"kvctl stop -p {name} ends what it left behind",
        )
    return _outcome(state, code)


def _follow(name: str, child: int, watcher: Watcher, asked: list[int]) -> int | None:
    """Shows the state of a launch; returns the wait status of its supervisor, None when ready."""
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        state = load(name)
        if state:
            watcher(state)
            if state.phase == "running" and not ended and not asked:
                return None
        if ended:
            return status
        time.sleep(FOLLOW)
