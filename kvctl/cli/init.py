"""``kvctl init``: a topology file to begin with, fitting this machine."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from kvctl.cli.selection import FileOption, select
from kvctl.errors import UnreachableError, UsageError


def init(
    context: typer.Context,
    file: FileOption = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
) -> None:
    """Write a commented topology file for this machine; -f - prints it.

    Finds the engine environment, the GPUs, a free block of ports, and sizes the host tier to
    the memory that is free. Look at the model before you launch it.
    """
    target = select(context, file=file).file_or_default
    if target != "-" and os.path.lexists(target) and not force:
        raise UsageError(f"{target} exists", hint="--force replaces it; -f names another file")

    from kvctl.demo.cache import cache_dir
    from kvctl.engine.environment import find
    from kvctl.topology.starter import setting_here, starter

    try:
        environment = find()
    except UnreachableError as error:
        environment = None
        print(f"kvctl: {error}\n  the file is written for when there is one", file=sys.stderr)
    tiny = next(iter(sorted(cache_dir().glob("tiny-model-*/config.json"))), None)
    text = starter(setting_here(environment, model=tiny.parent if tiny else None))
    if target == "-":
        print(text, end="")
        return
    _write(Path(target), text, replace=force)
    print(f"wrote {target}; check its model, then: kvctl launch -f {target}")


def _write(target: Path, text: str, *, replace: bool) -> None:
    """Writes the file whole or not at all."""
    try:
        if not replace:
            with target.open("x", encoding="utf-8") as file:
                file.write(text)
            return
        fresh = target.with_name(f".{target.name}.{os.getpid()}")
        fresh.write_text(text, encoding="utf-8")
        fresh.replace(target)
    except FileExistsError as error:
        raise UsageError(f"{target} exists", hint="--force replaces it") from error
    except OSError as error:
        raise UsageError(f"{target} cannot be written: {error.strerror}") from error
