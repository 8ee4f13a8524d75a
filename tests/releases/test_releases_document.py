"""docs/releases.md says what is run."""

import releases_table


def test_the_table_is_that_of_the_tests() -> None:
    text = releases_table.DOCUMENT.read_text()
    assert releases_table.refreshed(text) == text, "run: python tests/releases/releases_table.py"
    assert releases_table.rows() in text
