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
    from kvctl.launch.ending import stop_broken, stop_run
    from kvctl.launch.state import StateError

    progress = Progress(sys.stderr, plain=True)
    try:
        state = chosen_run(select(context, file=file, name=name))
    except StateError as error:
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
    if ended.removed:
        print(f"removed what was left behind: {', '.join(ended.removed)}")
    if ended.kept:
        print(f"left alone, since a process may still use it: {', '.join(ended.kept)}")
