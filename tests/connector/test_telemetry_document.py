"""docs/telemetry.md says what the code does."""

from __future__ import annotations

import runpy
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_the_signals_of_the_document_are_those_of_the_code():
    table = runpy.run_path(str(DOCS / "signals_table.py"))
    text = (DOCS / "telemetry.md").read_text()
    assert text == table["refreshed"](text), "run: python docs/signals_table.py"
    assert table["signals"]() in text and table["values"]() in text
