"""``kvctl version``: kvctl's own, and what it would start."""

from __future__ import annotations

import platform
import sys
from typing import Annotated

import typer

from kvctl import __version__

JSON_VERSION = 1


def version(
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
    engine: Annotated[
        str | None, typer.Option("--engine", metavar="PYTHON", help="Look at this environment.")
    ] = None,
) -> None:
    """Show the versions of kvctl and of the engine environment that it finds."""
    import json

    from kvctl.engine.environment import find
    from kvctl.errors import UnreachableError

    facts: dict[str, str | None] = {
        "kvctl": __version__,
        "python": platform.python_version(),
        "engine": None,
        "vllm": None,
        "nixl": None,
        "platform": None,
        "router": None,
    }
    try:
        found = find(engine)
    except UnreachableError as error:
        if engine is not None:
            raise
        print(f"no engine environment: {error.message}", file=sys.stderr)
    else:
        facts |= {
            "engine": str(found.python),
            "vllm": found.vllm,
            "nixl": found.nixl,
            "platform": found.platform,
            "router": str(found.router) if found.router else None,
        }
    if as_json:
        print(json.dumps({"version": JSON_VERSION, **facts}))
    else:
        for name, value in facts.items():
            print(f"{name:<9} {value or '-'}")
