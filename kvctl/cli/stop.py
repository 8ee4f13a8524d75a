"""``kvctl stop``: ends what a launch started, and only that."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from kvctl.cli.running import chosen_run
from kvctl.cli.selection import FileOption, NameOption, select

if TYPE_CHECKING:
    from kvctl.launch.ending import Ended


def stop(
    context: typer.Context,
    instances: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME]...", help="Instances; without any, everything."),
    ] = None,
    file: FileOption = None,
    name: NameOption = None,
) -> None:
    """Stop a topology, or single instances of it.

    Routers end first, then engines, which drain, then their telemetry is exported. What takes
    too long is killed. Files in /dev/shm that dead engines have left are removed.
    """
    from kvctl.cli.progress import Progress
    from kvctl.launch.choice import NothingRunsError
    from kvctl.launch.ending import stop_broken, stop_run, sweep_ended
    from kvctl.launch.state import StateError

    progress = Progress(sys.stderr, plain=True)
    try:
        state = chosen_run(select(context, file=file, name=name))
    except NothingRunsError as error:
        before = f"; launched before: {', '.join(error.before)}" if error.before else ""
        print(f"nothing runs{before}")
        for ended in sweep_ended(progress):
            _report_left(ended)
        return
    except StateError as error:
        if instances:
            raise  # which instance is which can only be told by the file
        _report(error.name, stop_broken(error, progress))
        return
    progress.known(state)
    _report(state.name, stop_run(state, instances or [], progress))


def _report(name: str, ended: Ended) -> None:
    if ended.kept_state:
        print(f"{name}: its state file could not be read and is now {ended.kept_state}")
    if ended.stopped:
        print(f"{name}: stopped {', '.join(ended.stopped)}")
    else:
        print(f"{name} is not running")
    _report_left(ended)


def _report_left(ended: Ended) -> None:
    if ended.removed:
        print(f"removed what was left behind: {', '.join(ended.removed)}")
    if ended.kept:
        print(f"left alone, since a process may still use it: {', '.join(ended.kept)}")
