"""Writes the generated table of docs/releases.md from the snapshots and tables here.

python tests/releases/releases_table.py
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import sources
from handled import BASE, HANDLED, OURS, UPSTREAM
from signatures import committed
from test_contract import interface
from test_overlay import LATER, LATER_UNIT_TESTS, UNIT_TESTS

DOCUMENT = Path(__file__).parents[2] / "docs/releases.md"
BEGIN, END = "<!-- releases: generated -->", "<!-- end of releases -->"


def rows() -> str:
    """One row a release."""
    lines = [
        "| vLLM | interface members: ours / vLLM's wrapper / base class | run on its Python |",
        "|---|---|---|",
    ]
    for version in sources.RELEASES:
        members = interface(committed(version))
        who = Counter(HANDLED[member][0] for member in members)
        counts = f"{who[OURS]} / {who[UPSTREAM]} / {who[BASE]}"
        lines.append(f"| {version} | {len(members)}: {counts} | {_run(version)} |")
    return "\n".join(lines)


def _run(version: str) -> str:
    files = len(UNIT_TESTS) + (len(LATER_UNIT_TESTS) if version in LATER else 0)
    return f"contract checks, {files} files of unit tests"


def refreshed(text: str) -> str:
    """The document with its table as it should be."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{rows()}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    DOCUMENT.write_text(refreshed(DOCUMENT.read_text()))
