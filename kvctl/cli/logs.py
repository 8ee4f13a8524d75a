"""``kvctl logs``: what the processes of a launch have written, and what they go on writing."""

from __future__ import annotations

import heapq
import os
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from kvctl.cli.running import chosen_run
from kvctl.cli.selection import NameOption, select
from kvctl.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvctl.launch.log_lines import Tail
    from kvctl.launch.state import RunState

SUPERVISOR = "supervisor"
POLL = 0.2  # s between two looks at the files
COLOURS = (36, 33, 32, 35, 34, 31)  # of the names, by turns


def logs(
    context: typer.Context,
    instances: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="Instances; default: all.")
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what comes.")] = False,
    tail: Annotated[
        int | None, typer.Option("--tail", "-n", min=0, metavar="N", help="Last lines of each.")
    ] = None,
    since: Annotated[
        str | None, typer.Option(metavar="TIME", help="Only what is younger: 5m.")
    ] = None,
    file: Annotated[
        str | None, typer.Option("--file", metavar="FILE", help="Topology file.")
    ] = None,
    name: NameOption = None,
) -> None:
    """Show the logs of a topology's instances; "supervisor" is kvctl's own.

    The log of the launch before is kept beside each, with the ending .1.
    """
    from kvctl.launch.log_lines import Tail

    state = chosen_run(select(context, file=file, name=name))
    paths = _paths(state, instances or [])
    oldest = _oldest(since)
    show = _Printer(list(paths))
    tails = {each: Tail(path, from_end=True) for each, path in paths.items()} if follow else {}
    stories = [
        _story(each, path, tail, oldest, tails[each].offset if follow else None)
        for each, path in paths.items()
    ]
    # By time where several are shown; the order within a log stays.
    for _, each, line in heapq.merge(*stories, key=lambda entry: entry[0]):
        show(each, line)
    sys.stdout.flush()
    if follow:
        _follow(state.name, tails, show)


def _paths(state: RunState, wanted: list[str]) -> dict[str, Path]:
    from kvctl.launch.launching import SUPERVISOR_LOG
    from kvctl.launch.state import log_path

    known = {each.name: log_path(state.name, each.log) for each in state.processes if each.log}
    all_known = {**known, SUPERVISOR: log_path(state.name, SUPERVISOR_LOG)}
    if unknown := [each for each in wanted if each not in all_known]:
        raise UsageError(
            f"{state.name} has no instance {', '.join(unknown)}", hint=f"it has: {', '.join(known)}"
        )
    return {each: all_known[each] for each in wanted} or known


def _oldest(since: str | None) -> float | None:
    """``5m`` → the Unix time five minutes ago."""
    import time

    from kvctl.units import parse_duration

    if since is None:
        return None
    try:
        return time.time() - parse_duration(since)
    except ValueError as error:
        raise UsageError(f"--since: {error}") from error


def _story(
    instance: str, path: Path, tail: int | None, oldest: float | None, end: int | None
) -> Iterator[tuple[float, str, str]]:
    """(time, instance, line) of what is in a log so far; a line without a time has the last one."""
    from kvctl.launch.log_lines import history, parse

    time = 0.0
    for line in history(path, tail=tail, end=end):
        time = parse(line).time or time
        # A log's times are whole seconds. A log without any is shown whole.
        if oldest is None or not time or time >= int(oldest):
            yield time, instance, line


def _follow(name: str, tails: dict[str, Tail], show: _Printer) -> None:
    """Prints what comes, until the run has ended and all is said, or until Ctrl-C."""
    import time

    from kvctl.launch.state import load

    while True:
        state = load(name)
        ended = state is None or not state.running()
        said = False
        for instance, tail in tails.items():
            for line in tail.lines():
                show(instance, line)
                said = True
        sys.stdout.flush()
        if ended and not said:
            return
        time.sleep(POLL)


class _Printer:
    """Prints lines, each after its instance's name when there are several."""

    def __init__(self, names: list[str]) -> None:
        self._terminal = sys.stdout.isatty()
        self._colours = self._terminal and "NO_COLOR" not in os.environ
        width = max(map(len, names), default=0)
        self._prefix = {name: f"{name:<{width}} | " if len(names) > 1 else "" for name in names}
        if self._colours:
            for number, name in enumerate(names):
                colour = COLOURS[number % len(COLOURS)]
                self._prefix[name] = f"\x1b[{colour}m{self._prefix[name]}\x1b[0m"

    def __call__(self, name: str, line: str) -> None:
        from kvctl.launch.log_lines import clean

        print(self._prefix[name] + clean(line, colours=self._colours))
