"""``kvctl launch``: prefill, decode and router from one file, wired, in order, supervised."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvctl.cli.selection import FileArgument, FileOption, NameOption, Selection, select
from kvctl.errors import UnreachableError, UsageError

if TYPE_CHECKING:
    from kvctl.launch.state import RunState
    from kvctl.topology.plan import Plan


def launch(
    context: typer.Context,
    positional: FileArgument = None,
    file: FileOption = None,
    name: NameOption = None,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Return when all is ready; run in background.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan as commands and do nothing.")
    ] = False,
    timeout: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="How long an instance may take to get ready: 5m."),
    ] = None,
    node: Annotated[
        str | None, typer.Option(metavar="NAME", help="Run this node's part of the topology.")
    ] = None,
) -> int:
    """Start a topology and supervise it, until Ctrl-C or, with -d, until kvctl stop.

    Returns when everything has ended; with -d when everything is ready. If anything fails on
    the way, everything that was started is stopped again.
    """
    selection = select(context, file=file, positional=positional, name=name)
    from kvctl.topology.load import read

    text = read(selection.file_or_default)  # once: it is kept beside the state
    if dry_run:
        from kvctl.launch.connector_copy import connector_path, source_path
        from kvctl.topology.render import commands

        path = connector_path()
        plan = _plan(selection, text, node=node, timeout=timeout, connector=path)
        print(commands(plan, connector_source=source_path(), connector_path=path))
        return 0

    from kvctl.cli.progress import Progress
    from kvctl.launch.connector_copy import lay_connector
    from kvctl.launch.launching import launch as run

    plan = _plan(selection, text, node=node, timeout=timeout, connector=lay_connector())
    progress = Progress(sys.stderr)
    said: list[str] = []

    def watch(state: RunState) -> None:
        progress(state)
        if state.phase == "running" and not said:
            progress.close(state)
            said.append(state.run_id)
            # Whoever read our output may be gone: that must not end what runs.
            with contextlib.suppress(OSError):
                print(_summary(state, detach), flush=True)

    try:
        return run(
            plan,
            text=text,
            detach=detach,
            watcher=watch,
            log_watcher=lambda: Progress(sys.stdout, plain=True, stamp=True),
        )
    finally:
        progress.close()


def _plan(
    selection: Selection, text: str, *, node: str | None, timeout: str | None, connector: Path
) -> Plan:
    from dataclasses import replace

    from kvctl.engine.environment import find
    from kvctl.launch.offer_key import offer_key_path
    from kvctl.topology.load import load
    from kvctl.topology.plan import make_plan
    from kvctl.units import parse_duration

    topology = load(selection.file_or_default, text=text)
    if selection.name not in (None, topology.name):
        raise UsageError(
            f"the file's name is {topology.name}, not {selection.name}",
            hint="leave -p out, or change `name:` in the file",
        )
    try:
        engine = find(topology.engine.python)
    except UnreachableError as error:
        if topology.engine.python is None:
            raise
        place = topology.place("engine", "python")
        raise UnreachableError(f"{place}: {error.message}", hint=error.hint) from error
    plan = make_plan(
        topology,
        engine=engine,
        connector_path=connector,
        offer_key=offer_key_path(topology.name),
        node=node,
    )
    if timeout is None:
        return plan
    try:
        return replace(plan, start_timeout=parse_duration(timeout))
    except ValueError as error:
        raise UsageError(f"--timeout: {error}") from error


def _summary(state: RunState, detach: bool) -> str:
    """What runs, where to send requests, and what to do next."""
    router = next((each.url for each in state.processes if each.kind == "router"), None)
    names = [each.name for each in state.processes if each.phase == "ready"]
    lines = [f"{state.name} is ready: {', '.join(names)}"]
    if router:
        lines.append(f"requests go to {router}/v1")
    if detach:
        lines.append(
            f"see it: kvctl ps -p {state.name}, kvctl logs -p {state.name} -f; "
            f"end it: kvctl stop -p {state.name}"
        )
    else:
        lines.append("Ctrl-C stops it")
    return "\n".join(lines)
