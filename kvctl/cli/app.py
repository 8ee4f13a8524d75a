"""The ``kvctl`` command: its commands, and the one place that turns an error into an exit code.

Start-up is kept light (``kvctl --help`` answers in under 0.3 s): a command's module imports at
its top only what its signature needs; pydantic, msgspec and the like are imported inside.
"""

from __future__ import annotations

import os
import sys
import traceback
from typing import Annotated

import typer

from kvctl import __version__
from kvctl.cli.completion import completion
from kvctl.cli.config import config
from kvctl.cli.demo import demo
from kvctl.cli.init import init
from kvctl.cli.launch import launch
from kvctl.cli.logs import logs
from kvctl.cli.ps import ps
from kvctl.cli.selection import FileOption, NameOption, Selection
from kvctl.cli.status import status
from kvctl.cli.stop import stop
from kvctl.cli.version import version
from kvctl.errors import Exit, KvctlError

app = typer.Typer(
    name="kvctl",
    help="Run vLLM with a split KV cache: prefill and decode joined by NIXL, blocks offloaded.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvctl {__version__}")
        raise typer.Exit


@app.callback()
def root(
    context: typer.Context,
    file: FileOption = None,
    name: NameOption = None,
    _: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it and exit.")
    ] = False,
) -> None:
    context.obj = Selection(file=file, name=name)


app.command()(init)
app.command()(config)
app.command()(launch)
app.command("up", hidden=True)(launch)
app.command()(stop)
app.command("down", hidden=True)(stop)
app.command()(ps)
app.command()(status)
app.command()(logs)
app.command()(demo)
app.command()(version)
app.command()(completion)


def main() -> None:
    """Runs the command line and exits with a code of `kvctl.errors.Exit`."""
    try:
        code = app(standalone_mode=False)
        sys.stdout.flush()
    except KvctlError as error:
        sys.exit(_complain(error.message, error.hint, error.exit_code))
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(Exit.INTERRUPTED)
    except BrokenPipeError:
        # The reader of our output went away (kvctl … | head): nothing to say, and nobody to say
        # it to. Python would complain again when it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(Exit.OK)
    except Exception as error:
        if (usage := _usage_message(error)) is not None:
            if not usage:
                sys.exit(Exit.USAGE)  # a bare `kvctl` has printed its help
            sys.exit(_complain(usage, "see kvctl --help", Exit.USAGE))
        traceback.print_exc()
        _complain("this is a bug in kvctl", "please report it with the lines above", Exit.BUG)
        sys.exit(Exit.BUG)
    sys.exit(code or Exit.OK)


def _complain(message: str, hint: str | None, code: Exit) -> Exit:
    print(f"kvctl: {message}", file=sys.stderr)
    if hint:
        print(f"  {hint}", file=sys.stderr)
    return code


def _usage_message(error: Exception) -> str | None:
    """The text of an error of the argument parser; None for any other exception."""
    format_message = getattr(error, "format_message", None)
    if getattr(error, "exit_code", None) == Exit.USAGE and callable(format_message):
        return str(format_message())
    return None
