"""The topology file → `Topology`, or every error in it at once, each with line and column."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Mapping
from pathlib import Path as FilePath
from typing import Any

from pydantic import BaseModel, ValidationError

from kvctl.errors import UsageError
from kvctl.topology import checks
from kvctl.topology.document import DocumentError, Entries, Mark, Node, parse
from kvctl.topology.fields import spelling
from kvctl.topology.models import Engine, Topology
from kvctl.topology.values import Path, Problem, Reading, place

MAX_BYTES = 1024 * 1024
MAX_SHOWN = 20
STDIN = "-"


def load(source: str, *, text: str | None = None) -> Topology:
    """Reads, resolves and checks a topology.

    Args:
        source: path of the file, or ``-`` for stdin.
        text: its content, where that was read already; `source` then only names it.

    Raises:
        UsageError: the file cannot be read, or is wrong; says where, and what to write.
    """
    label = "<stdin>" if source == STDIN else source
    content = (read(source) if text is None else text).removeprefix("\ufeff")
    _refuse_long(label, len(content))
    try:
        root = parse(content)
    except DocumentError as error:
        raise UsageError(_line(label, error.mark, error.message)) from error
    if not isinstance(root, Entries):
        what = "is empty" if root is None else "does not hold keys and values"
        raise UsageError(f"{label} {what}", hint="kvctl init -f - prints one to begin with")
    topology, problems = _validated(root)
    if topology is None or problems:
        raise UsageError(_report(label, problems))
    topology = _with_paths(topology, FilePath.cwd() if source == STDIN else FilePath(source).parent)
    topology._source = label
    topology._place = lambda path: "{}:{}:{}".format(label, *place(root, path))
    return topology


def read(source: str) -> str:
    """The text of a file or of stdin.

    Raises:
        UsageError: it is not there, not readable, no text, or far too long.
    """
    label = "<stdin>" if source == STDIN else source
    try:
        if source == STDIN:
            data = sys.stdin.buffer.read(MAX_BYTES + 1)
        else:
            with FilePath(source).open("rb") as file:
                data = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise UsageError(
            f"{label}: no such file", hint="kvctl init writes one; -f names another"
        ) from None
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise UsageError(
            f"{label} cannot be read: {why}", hint="name a topology file with -f FILE"
        ) from error
    _refuse_long(label, len(data))
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        before = data[: error.start]
        mark = Mark(before.count(b"\n") + 1, error.start - before.rfind(b"\n"))
        raise UsageError(_line(label, mark, "not UTF-8; save the file as UTF-8")) from error


def _refuse_long(label: str, length: int) -> None:
    if length > MAX_BYTES:
        raise UsageError(f"{label} is longer than 1 MiB: this is not a topology file")


def _validated(root: Node) -> tuple[Topology | None, list[Problem]]:
    reading = Reading(root, os.environ)
    problems = reading.problems
    try:
        topology = Topology.model_validate(reading.value)
    except ValidationError as error:
        known = [problem.path for problem in problems]
        faults = error.errors(include_url=False)
        meant = {key for fault in faults if (key := _meant(fault))}
        for fault in faults:
            if fault["type"] == "missing" and tuple(fault["loc"]) in meant:
                continue  # it is there, misspelt, and that is said
            problem = _problem(root, fault)
            if not any(problem.path[: len(path)] == path for path in known):
                problems.append(problem)
        return None, problems
    if not problems:
        problems = [
            Problem(place(root, path), path, message) for path, message in checks.problems(topology)
        ]
    return topology, problems


def _with_paths(topology: Topology, folder: FilePath) -> Topology:
    """The topology with its relative paths made absolute: they count from the file's folder."""
    changes: dict[str, Any] = {}
    if topology.model.startswith(("/", "./", "../", "~")) or topology.model in (".", ".."):
        changes["model"] = _absolute(folder, topology.model)
    python = topology.engine.python
    if python and ("/" in python or python.startswith("~")):
        changes["engine"] = Engine(python=_absolute(folder, python))
    if key := topology.transfer.offer_key:
        absolute = {"offer_key": _absolute(folder, key)}
        changes["transfer"] = topology.transfer.model_copy(update=absolute)
    return topology.model_copy(update=changes) if changes else topology


def _absolute(folder: FilePath, path: str) -> str:
    # os.path, because links stay as they are (the python of a virtual environment is one), and a
    # ~ that names nobody does too.
    return os.path.abspath(folder / os.path.expanduser(path))  # noqa: PTH100, PTH111


def _problem(root: Node, fault: Mapping[str, Any]) -> Problem:
    """One of pydantic's errors with its place, and in words about the file."""
    path: Path = tuple(fault["loc"])
    if path and path[-1] == "[key]":
        path = path[:-1]
        return Problem(place(root, path, key=True), path, _words(fault))
    kind = fault["type"]
    if kind == "extra_forbidden":
        return Problem(place(root, path, key=True), path, _unknown_key(path))
    return Problem(place(root, path), path, _words(fault))


def _words(fault: Mapping[str, Any]) -> str:
    value, limits = fault["input"], fault.get("ctx", {})
    match fault["type"]:
        case "value_error":
            return str(limits["error"])
        case "missing":
            return _missing(fault["loc"])
        case "literal_error":
            return _no_choice(value, str(limits["expected"]))
        case "model_type" | "dict_type" | "model_attributes_type":
            known = ", ".join(_keys(fault["loc"]))
            return f"{spelling(value)} where keys and values belong" + (known and f": {known}")
        case "list_type":
            hint = "" if isinstance(value, dict) else f"; write [{spelling(value)}]"
            return f"{spelling(value)} where a list belongs{hint}"
        case "too_short":
            return "is empty"
        case "greater_than_equal":
            return f"{spelling(value)} is too small: at least {limits['ge']}"
        case "less_than_equal":
            return f"{spelling(value)} is too large: at most {limits['le']}"
    return str(fault["msg"])


def _no_choice(value: Any, expected: str) -> str:
    choices = expected.replace("'", "").replace(" or ", ", ").split(", ")
    near = difflib.get_close_matches(str(value), choices, 1) if isinstance(value, str) else []
    hint = f'did you mean "{near[0]}"?' if near else f"choose {_or(choices)}"
    return f"{spelling(value)} is none of its values; {hint}"


def _unknown_key(path: Path) -> str:
    if near := _nearest_key(path):
        return f'unknown key; did you mean "{near}"?'
    return f"unknown key; known here: {', '.join(_keys(path[:-1]))}"


def _nearest_key(path: Path) -> str | None:
    written = str(path[-1]).lower().replace("-", "_")
    return next(iter(difflib.get_close_matches(written, _keys(path[:-1]), 1)), None)


def _meant(fault: Mapping[str, Any]) -> Path | None:
    """The path of the key that an unknown one is a misspelling of."""
    path: Path = tuple(fault["loc"])
    if fault["type"] != "extra_forbidden":
        return None
    near = _nearest_key(path)
    return (*path[:-1], near) if near else None


def _keys(path: Path) -> list[str]:
    model = _model_at(path)
    return list(model.model_fields) if model else []


def _missing(path: Path) -> str:
    """With the first sentence of what the reference says about the key."""
    model = _model_at(path[:-1])
    field = model.model_fields.get(str(path[-1])) if model else None
    meaning = (field.description or "") if field else ""
    first = meaning.split(". ")[0].rstrip(".").replace("`", "")
    return f"missing ({first[0].lower()}{first[1:]})" if first else "missing"


def _model_at(path: Path) -> type[BaseModel] | None:
    """The model whose keys stand at `path`."""
    model: type[BaseModel] | None = Topology
    steps = iter(path)
    for step in steps:
        field = model.model_fields.get(str(step)) if model else None
        if field is None:
            return None
        model, named = models_in(field.annotation)
        if named:
            next(steps, None)
    return model


def models_in(annotation: Any) -> tuple[type[BaseModel] | None, bool]:
    """The model in a field's type, and whether it stands under names of the user's choice."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation, False
    arguments = getattr(annotation, "__args__", ())
    is_mapping = getattr(annotation, "__origin__", None) is dict
    for argument in arguments:
        model, named = models_in(argument)
        if model is not None:
            return model, named or is_mapping
    return None, False


def _or(choices: list[str]) -> str:
    return ", ".join(choices[:-1]) + f" or {choices[-1]}" if len(choices) > 1 else choices[0]


def _report(label: str, problems: list[Problem]) -> str:
    ordered = sorted(problems, key=lambda problem: problem.mark)
    lines = [_line(label, one.mark, _labelled(one.path, one.message)) for one in ordered]
    lines = list(dict.fromkeys(lines))
    if len(lines) == 1:
        return lines[0]
    head = [f"{label} has {len(lines)} errors", *lines[:MAX_SHOWN]]
    if len(lines) > MAX_SHOWN:
        head.append(f"… and {len(lines) - MAX_SHOWN} more")
    return "\n".join(head)


def _labelled(path: Path, message: str) -> str:
    written = ""
    for step in path:
        written += f"[{step}]" if isinstance(step, int) else f".{step}" if written else step
    return f"{written}: {message}" if written else message


def _line(label: str, mark: Mark, message: str) -> str:
    return f"{label}:{mark.line}:{mark.column}: {message}"
