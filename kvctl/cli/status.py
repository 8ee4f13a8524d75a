"""``kvctl status``: one look at a running topology, from its processes to its transfers."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from kvctl.cli.running import chosen_run
from kvctl.cli.selection import FileOption, NameOption, select
from kvctl.errors import UsageError

if TYPE_CHECKING:
    from kvctl.cli.status_report import Report

FORMATS = ("table", "wide", "json", "yaml")


def status(
    context: typer.Context,
    file: FileOption = None,
    name: NameOption = None,
    output: Annotated[
        str, typer.Option("--output", "-o", metavar="table|wide|json|yaml")
    ] = "table",
    as_json: Annotated[bool, typer.Option("--json", help="Same as -o json.")] = False,
) -> int:
    """Show what a topology does: its processes, and every engine's transfers and tiers.

    Exits with 0 when everything is ready and can be read, 1 when something is not, 3 when
    nothing could be read.
    """
    output = "json" if as_json else output
    if output not in FORMATS:
        raise UsageError(f"-o {output}: there is {', '.join(FORMATS)}")
    from kvctl.cli.status_report import look

    report = look(chosen_run(select(context, file=file, name=name)))
    _print(report, output)
    return report.exit_code


def _print(report: Report, output: str) -> None:
    if output == "json":
        import json

        print(json.dumps(report.facts(), indent=2))
    elif output == "yaml":
        import yaml

        print(yaml.safe_dump(report.facts(), sort_keys=False, allow_unicode=True), end="")
    else:
        from rich.console import Console

        from kvctl.cli.status_table import blocks

        # Piped output is as wide as it needs to be: grep and awk want one line each.
        console = Console(
            width=None if sys.stdout.isatty() else 400, highlight=False, markup=False, emoji=False
        )
        for number, block in enumerate(blocks(report, wide=output == "wide")):
            if number:
                console.print()
            console.print(block)
