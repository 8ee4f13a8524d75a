"""YAML text → nodes that know where they stand. Nothing is interpreted here.

The parser's events are read, not its objects: no tag can build anything, depth and size are
bounded before they cost anything, and every node keeps its line and column.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Union

import yaml

MAX_DEPTH = 32

_UNPRINTABLE = re.compile("[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
# What "\0" or "\e" in double quotes can bring in, and no argument or terminal should get.
UNUSABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
_BARE_REFERENCE = re.compile(r"[:,\[{]\s*[^\s'\"#,:{}\[\]]*(\$\{)")


class Mark(NamedTuple):
    """A place in the file, both counted from 1."""

    line: int
    column: int


class DocumentError(Exception):
    """The text is not one plain YAML document, and where it stops being one."""

    def __init__(self, mark: Mark, message: str) -> None:
        super().__init__(message)
        self.mark = mark
        self.message = message


@dataclass(slots=True)
class Scalar:
    """A value as it was written. `plain`: without quotes."""

    mark: Mark
    text: str
    plain: bool


@dataclass(slots=True)
class Items:
    """A list."""

    mark: Mark
    items: list[Node] = field(default_factory=list)


@dataclass(slots=True)
class Entries:
    """A mapping. Keys may repeat; whoever reads it says so."""

    mark: Mark
    entries: list[tuple[Scalar, Node]] = field(default_factory=list)


Node = Union[Scalar, Items, Entries]  # noqa: UP007 - the classes above name it before it exists


def parse(text: str) -> Node | None:
    """The document's root; None if there is nothing in it but comments.

    An alias gives the very node that its anchor named.

    Raises:
        DocumentError: broken YAML, or something that no topology file needs (tags, several
            documents, merge keys, deep nesting).
    """
    if odd := _UNPRINTABLE.search(text):
        raise DocumentError(
            _mark_of(text, odd.start()),
            f"the character U+{ord(odd[0]):04X} cannot stand in a YAML file",
        )
    try:
        return _Composer(_events(text)).document()
    except yaml.MarkedYAMLError as error:
        raise _explained(error, text) from error


def _events(text: str) -> Iterator[Any]:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    events: Iterator[Any] = yaml.parse(text, Loader=loader)
    return events


class _Composer:
    def __init__(self, events: Iterator[Any]) -> None:
        self._events = events
        self._anchors: dict[str, Node | None] = {}

    def document(self) -> Node | None:
        root: Node | None = None
        for event in self._events:
            if isinstance(event, yaml.DocumentStartEvent):
                if root is not None:
                    raise DocumentError(_mark(event), "a second document: one file, one topology")
                first = next(self._events)
                empty = isinstance(first, yaml.ScalarEvent) and not first.value and not first.style
                root = None if empty else self._node(first, 0)
        return root

    def _node(self, event: Any, depth: int) -> Node:
        mark = _mark(event)
        if isinstance(event, yaml.AliasEvent):
            return self._alias(event, mark)
        if event.tag is not None:
            raise DocumentError(mark, f"a tag ({event.tag}): values are written without tags")
        if depth > MAX_DEPTH:
            raise DocumentError(mark, f"nested more than {MAX_DEPTH} deep")
        if event.anchor is not None:
            self._anchors[event.anchor] = None
        node = self._content(event, mark, depth)
        if event.anchor is not None:
            self._anchors[event.anchor] = node
        return node

    def _content(self, event: Any, mark: Mark, depth: int) -> Node:
        if isinstance(event, yaml.ScalarEvent):
            return Scalar(mark, event.value, plain=bool(event.implicit[0]))
        if isinstance(event, yaml.SequenceStartEvent):
            sequence = Items(mark)
            while not isinstance(item := next(self._events), yaml.SequenceEndEvent):
                sequence.items.append(self._node(item, depth + 1))
            return sequence
        mapping = Entries(mark)
        while not isinstance(item := next(self._events), yaml.MappingEndEvent):
            key = self._key(item)
            mapping.entries.append((key, self._node(next(self._events), depth + 1)))
        return mapping

    def _key(self, event: Any) -> Scalar:
        mark = _mark(event)
        if not isinstance(event, yaml.ScalarEvent) or event.tag is not None:
            raise DocumentError(mark, "a key must be a word")
        if event.value == "<<":
            raise DocumentError(
                mark, "merge keys (<<) are not read; settings for all engines go to the top level"
            )
        if not event.value:
            raise DocumentError(mark, "an empty key")
        if "\n" in event.value or UNUSABLE.search(event.value):
            raise DocumentError(mark, "a key must be a word")
        if "$" in event.value:
            raise DocumentError(mark, f"{event.value}: a $ in a key; only values are filled in")
        return Scalar(mark, event.value, plain=True)

    def _alias(self, event: Any, mark: Mark) -> Node:
        if event.anchor not in self._anchors:
            raise DocumentError(mark, f"*{event.anchor}: nothing above is named &{event.anchor}")
        node = self._anchors[event.anchor]
        if node is None:
            raise DocumentError(mark, f"*{event.anchor} stands inside what it names")
        return node


def _mark(event: Any) -> Mark:
    return Mark(event.start_mark.line + 1, event.start_mark.column + 1)


def _mark_of(text: str, position: int) -> Mark:
    before = text[:position]
    return Mark(before.count("\n") + 1, position - before.rfind("\n"))


def _explained(error: yaml.MarkedYAMLError, text: str) -> DocumentError:
    """The parser's complaint in the words of somebody who edits the file."""
    problem = error.problem or ""
    at = _at(error.problem_mark)
    start = _at(error.context_mark) if error.context_mark else at
    line = text.splitlines()[at.line - 1] if at.line <= len(text.splitlines()) else ""
    character = line[at.column - 1 : at.column]
    if "cannot start any token" in problem:
        if character == "\t":
            return DocumentError(at, "a tab: indent with spaces")
        return DocumentError(at, f"a value cannot begin with {character}: quote it")
    if "mapping values are not allowed" in problem:
        return DocumentError(
            at, "a ':' where no key can stand: check the indentation, or quote the value"
        )
    if "end of stream" in problem and "quoted" in (error.context or ""):
        return DocumentError(start, "this quote is never closed")
    if "while parsing a flow" in (error.context or "") and _character(text, start) in "[{":
        if reference := _bare_reference(text, start):
            return DocumentError(reference, 'inside { } and [ ] quotes are needed: "${NAME}"')
        return DocumentError(start, f"the {_character(text, start)} is not closed where it should")
    if "block" in (error.context or "") and ("block end" in problem or "did not find" in problem):
        return DocumentError(at, "the indentation does not fit the lines above")
    return DocumentError(at, f"not YAML: {problem}")


def _bare_reference(text: str, start: Mark) -> Mark | None:
    """The first ``${`` after `start` that stands where a value begins: YAML ends the value at {."""
    lines = text.splitlines(keepends=True)
    offset = sum(map(len, lines[: start.line - 1])) + start.column - 1
    found = _BARE_REFERENCE.search(text, offset)
    return _mark_of(text, found.start(1)) if found else None


def _at(mark: Any) -> Mark:
    return Mark(mark.line + 1, mark.column + 1) if mark else Mark(1, 1)


def _character(text: str, mark: Mark) -> str:
    lines = text.splitlines()
    return lines[mark.line - 1][mark.column - 1 :][:1] if mark.line <= len(lines) else ""
