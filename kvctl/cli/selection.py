"""``-f FILE`` and ``-p NAME``: which topology a command means, before or after the command."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from kvctl.errors import UsageError

DEFAULT_FILE = "kvctl.yaml"

FileOption = Annotated[
    str | None,
    typer.Option("--file", "-f", metavar="FILE", help="Topology file; - is stdin or stdout."),
]
FileArgument = Annotated[
    str | None, typer.Argument(metavar="[FILE]", help="Topology file, same as -f.")
]
NameOption = Annotated[
    str | None,
    typer.Option("--name", "-p", metavar="NAME", help="Name of a running topology."),
]


@dataclass(frozen=True)
class Selection:
    """What the command line selects. Both may be None: then a default applies."""

    file: str | None
    name: str | None

    @property
    def file_or_default(self) -> str:
        """The chosen file, else ``./kvctl.yaml``."""
        return self.file or DEFAULT_FILE


def select(
    context: typer.Context,
    *,
    file: str | None = None,
    positional: str | None = None,
    name: str | None = None,
) -> Selection:
    """Joins what stands before the command with what stands after it.

    Raises:
        UsageError: two different files, or two different names, were given.
    """
    before: Selection = context.obj or Selection(None, None)
    return Selection(
        file=_one("file", before.file, file, positional), name=_one("name", before.name, name)
    )


def _one(what: str, *given: str | None) -> str | None:
    distinct = sorted({value for value in given if value is not None})
    if len(distinct) > 1:
        raise UsageError(f"more than one {what} was given: {', '.join(distinct)}", hint="give one")
    return distinct[0] if distinct else None
