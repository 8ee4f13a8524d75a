"""Which launch a command means that names none, and what lives of one that cannot be read."""

from __future__ import annotations

from kvctl.errors import UsageError
from kvctl.launch.lock import holder
from kvctl.launch.state import (
    RunState,
    StateError,
    backup_path,
    choose,
    decode,
    run_folder,
    survey,
)
from kvctl.launch.stopping import strays


class NothingRunsError(UsageError):
    """No name was given, nothing runs, and there is not just one launch that ran before."""

    def __init__(self, before: list[str]) -> None:
        self.before = before
        if before:
            message = f"nothing runs; launched before: {', '.join(before)}"
            super().__init__(message, hint="to look at one of them, name it: -p NAME")
        else:
            super().__init__("nothing was launched here", hint="start with: kvctl launch -f FILE")


def only_run() -> RunState:
    """The launch that is meant where none is named: the only one that runs, else the only one.

    One whose state file is broken runs as far as anybody can tell if something of it is found.

    Raises:
        UsageError: several run; lists them.
        NothingRunsError: nothing runs, and none or more than one ran before.
        StateError: the one that is meant has a broken state file.
    """
    readable, broken = survey()
    running = {state.name: state.name for state in readable if state.running()}
    running |= {error.name: _label(error.name) for error in broken if traces(error.name)}
    known = {state.name: state.name for state in readable}
    known |= {error.name: _label(error.name) for error in broken}
    found = running or known
    if len(found) == 1:
        return choose(*found)
    labels = [found[name] for name in sorted(found)]
    if not running:
        raise NothingRunsError(labels)
    raise UsageError(
        f"several topologies run: {', '.join(labels)}", hint="say which one with -p NAME"
    )


def _label(broken: str) -> str:
    return f"{broken} (its state file cannot be read)"


def read_copy(name: str) -> RunState | None:
    """The copy that is written with the state file; None where it cannot be read either."""
    path = backup_path(name)
    try:
        return decode(path.read_bytes(), path)
    except (OSError, StateError):
        return None


def traces(name: str) -> list[str]:
    """What lives of a run whose state file is broken, as far as it can be found.

    Names of its processes, by the copy of the state file and by the mark in their environment;
    where there are none, its supervisor, if one holds the lock.
    """
    copy = read_copy(name)
    living = {record.name for record in (copy.living() if copy else [])}
    living |= {record.name for record in strays(run_folder(name))}
    return sorted(living) or (["supervisor"] if holder(name) else [])
