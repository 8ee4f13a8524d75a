"""docs/defects.md leaves out no defect, and the tests that it names exist."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROWS = [
    line.strip("|").split(" | ")
    for line in (ROOT / "docs" / "defects.md").read_text().splitlines()
    if line.startswith("| ") and "`tests/" in line
]
NAMED = sorted({name for row in ROWS for name in re.findall(r"`(tests/[^`]*)`", row[-1])})


def test_every_defect_has_its_row_and_says_what_is_done() -> None:
    defects = [row for row in ROWS if row[0].strip().startswith("D")]
    numbers = [str(number) for number in range(1, 24)]
    numbers.insert(13, "13b")
    assert [row[0].strip() for row in defects] == [f"D{number}" for number in numbers]
    for row in defects:
        assert re.match(r"(Fixed|Refused|Kept|Does not apply|A warning)\b", row[3]), row[0]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0].strip())
def test_every_row_names_a_test(row: list[str]) -> None:
    assert re.findall(r"`tests/[^`]*::test_", row[-1])


@pytest.mark.parametrize("name", NAMED)
def test_a_named_test_exists(name: str) -> None:
    path, _, test = name.partition("::")
    tree = ast.parse((ROOT / path).read_text())
    assert test in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
