"""``kvctl completion``: the script that makes a shell complete kvctl's commands and options."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

Shell = Literal["bash", "zsh", "fish"]


def completion(
    shell: Annotated[Shell, typer.Argument(help="The shell that will run the script.")],
) -> None:
    """Print the completion script of a shell; for bash: source <(kvctl completion bash)."""
    from typer.completion import get_completion_script  # type: ignore[attr-defined]

    print(get_completion_script(prog_name="kvctl", complete_var="_KVCTL_COMPLETE", shell=shell))
