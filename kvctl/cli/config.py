"""``kvctl config``: the topology as it was understood, or the schema of the file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from kvctl.cli.selection import FileArgument, FileOption, NameOption, Selection, select
from kvctl.errors import UnreachableError, UsageError

if TYPE_CHECKING:
    from kvctl.topology.models import Topology

FORMATS = ("yaml", "json")


def config(
    context: typer.Context,
    positional: FileArgument = None,
    file: FileOption = None,
    name: NameOption = None,
    output: Annotated[str, typer.Option("--output", "-o", metavar="yaml|json")] = "yaml",
    as_json: Annotated[bool, typer.Option("--json", help="Same as -o json.")] = False,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON schema of the file instead.")
    ] = False,
) -> None:
    """Check a topology file and print it resolved: defaults filled in, units normalised.

    With -p NAME: the file as it was when NAME was launched. What may be a secret and came from
    the environment stays a reference. The output is a topology file that means the same.
    """
    output = "json" if as_json else output
    if output not in FORMATS:
        raise UsageError(f"-o {output}: there is {' and '.join(FORMATS)}")
    if schema:
        import json

        from kvctl.topology.schema import schema as file_schema

        print(json.dumps(file_schema(), indent=2))
        return
    topology = _load(select(context, file=file, positional=positional, name=name))
    from kvctl.topology.resolved import as_data, as_yaml

    if output == "json":
        import json

        print(json.dumps(as_data(topology), indent=2, ensure_ascii=False))
    else:
        print(as_yaml(topology), end="")


def _load(selection: Selection) -> Topology:
    """The file that is selected, or the one that a named topology was launched from."""
    from kvctl.topology.load import load

    if selection.file or not selection.name:
        return load(selection.file_or_default)
    from kvctl.launch.state import choose, run_folder

    state = choose(selection.name)
    kept = run_folder(state.name) / "topology.yaml"
    try:
        text = kept.read_text()
    except OSError as error:
        raise UnreachableError(
            f"the file that {state.name} was launched from was not kept: {kept}: {error.strerror}",
            hint=f"name it: -f {state.file}",
        ) from error
    return load(state.file, text=text)  # relative paths count from where it lay
