"""A plan as commands that a person could paste, one for each process.

What came from the environment stands there as its reference, in double quotes: the shell that
the commands are pasted into fills it in, and no secret is printed.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from kvctl.topology.plan import Plan, Process
from kvctl.topology.text import quoted_for_shell

_BREAK = " \\\n  "


def commands(plan: Plan, *, connector_source: Path, connector_path: Path) -> str:
    """The commands in the order in which they belong, with comments that say what each is.

    Args:
        connector_source: the package ``kvctl_connector`` of kvctl's own environment.
        connector_path: the folder that the engines find a copy of it in.
    """
    engines = sum(process.kind == "engine" for process in plan.processes)
    key = shlex.quote(str(plan.offer_key))
    where = f" on node {plan.node}" if plan.node else ""
    lines = [
        f"# {plan.name}{where}, from {plan.file}: {engines} engines of {plan.engine.python}.",
        "# Each command stays in the foreground: give it a terminal of its own. Start the router",
        "# when every engine answers on /health.",
        "",
        "# The connector, alone in a folder that the engines have on their PYTHONPATH:",
        f"mkdir -p {shlex.quote(str(connector_path))}",
        f"cp -r {shlex.quote(str(connector_source))} {shlex.quote(str(connector_path))}/",
        "",
        "# The key by which prefill signs what it offers, once:",
        f"mkdir -p {shlex.quote(str(plan.offer_key.parent))}",
        f"test -e {key} || (umask 077; head -c 32 /dev/urandom | base64 > {key})",
    ]
    for process in plan.processes:
        lines += ["", f"# {_title(process)}", _command(process)]
    return "\n".join(lines)


def _title(process: Process) -> str:
    what = f"{process.role} {process.kind}" if process.role else process.kind
    if process.url is None:
        return f"{process.name}: {what}"
    ports = ", ".join(f"{name} {port}" for name, port in process.ports.items())
    return f"{process.name}: {what}, {process.url}; ports: {ports}"


def _command(process: Process) -> str:
    words = [f"{name}={quoted_for_shell(value)}" for name, value in process.env.items()]
    return _BREAK.join([*words, *_lines([quoted_for_shell(word) for word in process.argv])])


def _lines(argv: list[str]) -> list[str]:
    """What is run, then each flag with its values."""
    lines: list[list[str]] = [[]]
    for position, word in enumerate(argv):
        if word.startswith("--") and position:
            lines.append([])
        lines[-1].append(word)
    return [" ".join(line) for line in lines]
