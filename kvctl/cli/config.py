"""``kvctl config``: the topology as it was understood, or the schema of the file."""

from __future__ import annotations

from typing import Annotated

import typer

from kvctl.cli.selection import FileArgument, FileOption, select
from kvctl.errors import UsageError

FORMATS = ("yaml", "json")


def config(
    context: typer.Context,
    positional: FileArgument = None,
    file: FileOption = None,
    output: Annotated[str, typer.Option("--output", "-o", metavar="yaml|json")] = "yaml",
    as_json: Annotated[bool, typer.Option("--json", help="Same as -o json.")] = False,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON schema of the file instead.")
    ] = False,
) -> None:
    """Check a topology file and print it resolved: defaults filled in, units normalised.

    What may be a secret and came from the environment stays a reference. The output is a
    topology file that means the same.
    """
    output = "json" if as_json else output
    if output not in FORMATS:
        raise UsageError(f"-o {output}: there is {' and '.join(FORMATS)}")
    if schema:
        import json

        from kvctl.topology.schema import schema as file_schema

        print(json.dumps(file_schema(), indent=2))
        return
    from kvctl.topology.load import load

    topology = load(select(context, file=file, positional=positional).file_or_default)
    from kvctl.topology.resolved import as_data, as_yaml

    if output == "json":
        import json

        print(json.dumps(as_data(topology), indent=2, ensure_ascii=False))
    else:
        print(as_yaml(topology), end="")
