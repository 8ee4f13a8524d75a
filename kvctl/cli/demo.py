"""``kvctl demo``: real KV between two real engines, and proof that it is the right KV."""

from __future__ import annotations

import signal
import sys
from types import FrameType
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from kvctl.errors import Exit

if TYPE_CHECKING:
    from kvctl.demo.report import Report


def demo(
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the figures as JSON; progress goes to stderr.")
    ] = False,
    keep: Annotated[
        bool, typer.Option("--keep", help="Leave the pair running, and say what to try next.")
    ] = False,
    prompts: Annotated[
        int | None, typer.Option(metavar="N", help="Distinct prompts; half of them come twice.")
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(metavar="PYTHON", help="Python of the environment that has vLLM and NIXL."),
    ] = None,
) -> int:
    """Run prefill, decode and a router on a tiny model, and check every answer.

    The answers of one plain engine are the reference. Then a pair is started as kvctl launch
    does it, with a device cache so small that KV has to leave it for host memory and come back.
    Exit code 0 only if KV moved over NIXL, to host memory and back, and every answer has the
    reference's tokens and logprobs.
    """
    from kvctl.cli.demo_progress import DemoProgress
    from kvctl.demo.prompts import DEFAULT_COUNT
    from kvctl.demo.run import run

    for signum in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signum) != signal.SIG_IGN:  # nohup
            signal.signal(signum, _terminate)
    outcome = run(
        count=DEFAULT_COUNT if prompts is None else prompts,
        engine=engine,
        keep=keep,
        display=DemoProgress(sys.stderr),
    )
    if outcome.report is None or outcome.pair is None:
        return outcome.code
    if as_json:
        import json

        from kvctl.demo.document import document

        print(json.dumps(document(outcome, outcome.report, kept=keep), indent=2))
    else:
        _print(outcome.report)
    if keep:
        from kvctl.demo.table import next_steps

        print(f"\n{next_steps(outcome.pair)}", file=sys.stderr if as_json else sys.stdout)
    return Exit.FINDINGS if outcome.report.problems() else Exit.OK


def _terminate(signum: int, _frame: FrameType | None) -> NoReturn:
    # As an exception, so that whatever runs at this moment is ended on the way out.
    sys.exit(128 + signum)


def _print(report: Report) -> None:
    from kvctl.demo import table

    rows = table.rows(report)
    if sys.stdout.isatty():
        _print_coloured(report, rows)
    else:
        print(table.aligned([table.HEADER, *rows]))
        print("\n".join(["", *table.remarks(report), "", table.verdict(report)]))


def _print_coloured(report: Report, rows: list[tuple[str, ...]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from kvctl.demo import table

    console = Console(highlight=False)
    grid = Table(box=None, pad_edge=False)
    for index, title in enumerate(table.HEADER):
        grid.add_column(title, justify="left" if index < table.LEFT else "right", no_wrap=True)
    for row in rows:
        failed = row[-1] != "0"
        grid.add_row(*row[:-1], Text(row[-1], style="bold red" if failed else ""))
    console.print(grid)
    console.print()
    for remark in table.remarks(report):
        console.print(Text(remark))
    style = "bold red" if report.problems() else "bold green"
    console.print(Text(f"\n{table.verdict(report)}", style=style))
