"""Which launch a command means: by name, by file, or the only one that runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvctl.cli.selection import Selection

if TYPE_CHECKING:
    from kvctl.launch.state import RunState


def chosen_name(selection: Selection) -> str | None:
    """The name that the command line gives, taken from the file where one is given instead.

    Raises:
        UsageError: the file cannot be read or is no topology.
    """
    if selection.name or not selection.file:
        return selection.name
    from kvctl.topology.load import load

    return load(selection.file).name


def chosen_run(selection: Selection) -> RunState:
    """The launch that is meant, see `kvctl.launch.state.choose` and `kvctl.launch.choice`."""
    name = chosen_name(selection)
    if name is not None:
        from kvctl.launch.state import choose

        return choose(name)
    from kvctl.launch.choice import only_run

    return only_run()
