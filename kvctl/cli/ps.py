"""``kvctl ps``: what was launched, and what became of it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvctl.cli.running import chosen_name
from kvctl.cli.selection import FileOption, NameOption, select
from kvctl.errors import Exit, UsageError

if TYPE_CHECKING:
    from kvctl.launch.state import ProcessRecord, RunState

JSON_VERSION = 1


def ps(
    context: typer.Context,
    file: FileOption = None,
    name: NameOption = None,
    everything: Annotated[
        bool, typer.Option("--all", "-a", help="Also topologies that do not run any more.")
    ] = False,
    output: Annotated[str, typer.Option("--output", "-o", metavar="table|json")] = "table",
    as_json: Annotated[bool, typer.Option("--json", help="Same as -o json.")] = False,
) -> int:
    """List the processes of launched topologies.

    Exits with 3 when the state file of one cannot be read; the others are listed all the same.
    """
    if output not in ("table", "json"):
        raise UsageError(f"-o {output}: there is table and json")
    from kvctl.launch.state import StateError, choose, survey

    wanted = chosen_name(select(context, file=file, name=name))
    broken: list[StateError] = []
    if wanted is not None:
        runs = [choose(wanted)]
    else:
        known, broken = survey()
        runs = [state for state in known if everything or state.running()]
    for error in broken:
        print(f"kvctl: {error}", file=sys.stderr)
    if as_json or output == "json":
        import json

        print(json.dumps({"version": JSON_VERSION, "runs": list(map(_facts, runs))}, indent=2))
    elif runs:
        _print_table(runs)
    elif not broken:
        more = "; kvctl ps -a shows what ran before" if known else ""
        print(f"nothing runs{more}", file=sys.stderr)
    return Exit.UNREACHABLE if broken else Exit.OK


def _facts(state: RunState) -> dict[str, Any]:
    from kvctl.cli.progress import actual_phase

    living = {record.name for record in state.living()}
    return {
        "name": state.name,
        "phase": state.phase if state.running() else _ended_phase(state),
        "supervised": state.supervised(),
        "run_id": state.run_id,
        "kvctl_version": state.kvctl_version,
        "file": state.file,
        "model": state.model,
        "started_at": state.started_at,
        "cause": state.cause,
        "processes": [
            {
                "name": record.name,
                "kind": record.kind,
                "role": record.role,
                "phase": actual_phase(state, record, living),
                "pid": record.pid or None,
                "since": record.since,
                "started_at": record.started_at or None,
                "exit_code": record.exit_code,
                "cause": record.cause,
                "hint": record.hint,
                "url": record.url,
                "ports": record.ports,
                "log": str(_log(state, record)),
            }
            for record in state.processes
        ],
    }


def _ended_phase(state: RunState) -> str:
    return state.phase if state.phase in ("stopped", "failed") else "gone"


def _log(state: RunState, record: ProcessRecord) -> Any:
    from kvctl.launch.state import log_path

    return log_path(state.name, record.log)


def _print_table(runs: list[RunState]) -> None:
    import time

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from kvctl.cli.progress import COLOURS, actual_phase
    from kvctl.launch.state import ENDED
    from kvctl.units import format_seconds

    table = Table(box=None, pad_edge=False)
    for title in ("TOPOLOGY", "NAME", "ROLE", "PHASE", "SINCE", "PID", "PORTS"):
        table.add_column(title, no_wrap=True)
    notes = []
    for state in runs:
        living = {record.name for record in state.living()}
        for record in state.processes:
            phase = actual_phase(state, record, living)
            shown = phase
            if record.phase in ENDED and record.exit_code:
                shown += f" ({record.exit_code})"
            ports = ", ".join(f"{port} {what}" for what, port in record.ports.items())
            table.add_row(
                state.name,
                record.name,
                record.role or record.kind,
                Text(shown, style=COLOURS.get(phase, "")),
                format_seconds(max(0, round(time.time() - record.since))),
                str(record.pid or "-"),
                ports or "-",
            )
            if record.phase == "failed" and record.cause:
                parts = (
                    f"{record.name}: {record.cause}",
                    record.hint,
                    f"its log: {_log(state, record)}",
                )
                notes.append("\n  ".join(part for part in parts if part))
        if living and not state.supervised():
            notes.append(
                f"{state.name} has no supervisor any more; kvctl stop -p {state.name} ends it"
            )
    # Piped output is as wide as it needs to be: grep and awk want one line a process.
    Console(width=None if sys.stdout.isatty() else 400).print(table)
    for note in notes:
        print(note)
