"""Nodes → Python values: numbers, booleans, and text with the environment filled in.

What two YAML readers would read differently (``no``, ``08000``, ``1:30``) is an error here
instead of a guess. Every problem is collected with its place; none stops the reading.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from kvctl.topology.document import MAX_DEPTH, UNUSABLE, Entries, Items, Mark, Node, Scalar
from kvctl.topology.text import (
    NUMBER,
    SubstitutionError,
    WrittenFloat,
    WrittenInt,
    substitute,
)

NO_VALUE = 'no value: write one ("" is an empty text), or leave the key out'
MAX_VALUES = 20_000
MAX_DIGITS = 40  # a longer number is somebody's text

Path = tuple[str | int, ...]

_WORDS = {"yes", "no", "on", "off", "true", "false", "null"}
_ODD_NUMBER = re.compile(
    r"[-+]?0[0-9_]+"  # octal in YAML 1.1, decimal in 1.2
    r"|[-+]?0[xob][0-9a-fA-F_]+"
    r"|[-+]?[0-9][0-9_]*_[0-9_]*"
    r"|[-+]?[0-9]+(?::[0-5]?[0-9])+(?:\.[0-9]*)?"  # base 60 in YAML 1.1
    r"|\+[0-9.]+(?:[eE][-+]?[0-9]+)?|[-+]?\.[0-9]+(?:[eE][-+]?[0-9]+)?|[-+]?[0-9]+\."
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
)


class Problem(NamedTuple):
    """Something wrong in the file: where it stands, what it belongs to, and what it is."""

    mark: Mark
    path: Path
    message: str


class Broken:
    """Takes the place of a value that could not be read; its problem is known already."""


BROKEN = Broken()


class Reading:
    """One reading of a document.

    Attributes:
        problems: what was found, in the order of the file.
        value: the root as dicts, lists, strings (`Text` where the environment had a part),
            `WrittenInt`, `WrittenFloat`, booleans and None; `BROKEN` where there is a problem.
    """

    def __init__(self, root: Node, environ: Mapping[str, str]) -> None:
        self.problems: list[Problem] = []
        self._environ = environ
        self._left = MAX_VALUES
        self.value = self._read(root, ())

    def _read(self, node: Node, path: Path) -> Any:
        self._left -= 1
        if self._left < 0 or len(path) > MAX_DEPTH:
            if self._left >= -1:
                self._problem(node.mark, (), "this file unfolds (through its aliases) to too much")
                self._left = -1
            return BROKEN
        if isinstance(node, Scalar):
            return self._scalar(node, path)
        if isinstance(node, Items):
            return [self._read(item, (*path, index)) for index, item in enumerate(node.items)]
        return self._mapping(node, path)

    def _mapping(self, node: Entries, path: Path) -> dict[str, Any]:
        values: dict[str, Any] = {}
        first: dict[str, Mark] = {}
        for key, child in node.entries:
            if key.text in first:
                self._problem(
                    key.mark,
                    (*path, key.text),
                    f"given twice; the first one is in line {first[key.text].line}",
                )
                continue
            first[key.text] = key.mark
            values[key.text] = self._read(child, (*path, key.text))
        return values

    def _scalar(self, node: Scalar, path: Path) -> Any:
        if odd := UNUSABLE.search(node.text):
            return self._problem(node.mark, path, f"holds the character U+{ord(odd[0]):04X}")
        if node.plain and not node.text:
            return self._problem(node.mark, path, NO_VALUE)
        try:
            text = substitute(node.text, self._environ, plain=node.plain)
        except SubstitutionError as error:
            return self._problem(node.mark, path, str(error))
        if not node.plain or "$" in node.text:
            return text
        if text in ("true", "false"):
            return text == "true"
        if text in ("null", "~"):
            return None
        if text.lower() in _WORDS:
            return self._problem(
                node.mark,
                path,
                f"{text}: YAML readers disagree about this word; write true or false for a "
                f'switch, "{text}" in quotes for a text',
            )
        if _ODD_NUMBER.fullmatch(text):
            return self._problem(
                node.mark,
                path,
                f"{text}: YAML readers disagree about this number; write it as a plain decimal, "
                f'or "{text}" in quotes if it is a text',
            )
        if NUMBER.fullmatch(text) and len(text) <= MAX_DIGITS:
            return WrittenInt(text) if text.lstrip("-").isdigit() else WrittenFloat(text)
        return text

    def _problem(self, mark: Mark, path: Path, message: str) -> Broken:
        self.problems.append(Problem(mark, path, message))
        return BROKEN


def place(root: Node, path: Path, *, key: bool = False) -> Mark:
    """Where the value at `path` stands, or its key; of what is missing, the key it belongs to."""
    node, mark = root, root.mark
    for step in path:
        found = _child(node, step)
        if found is None:
            return mark
        mark, node = found
    return mark if key else node.mark


def _child(node: Node, step: str | int) -> tuple[Mark, Node] | None:
    if isinstance(node, Entries):
        same = [one for one in node.entries if one[0].text == step]
        # Flags are known by their dashes, however they are written.
        alike = [one for one in node.entries if one[0].text.replace("_", "-") == step]
        for key, child in same or alike:
            return key.mark, child
    if isinstance(node, Items) and isinstance(step, int) and step < len(node.items):
        return node.items[step].mark, node.items[step]
    return None
