"""The tables of docs/topology.md, from the models: every key, type, default and meaning.

``python -m kvctl.topology.reference docs/topology.md`` writes them into the page.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from kvctl.topology.fields import Kind
from kvctl.topology.load import models_in
from kvctl.topology.models import Topology
from kvctl.topology.resolved import written_duration, written_size

BEGIN, END = "<!-- keys: begin -->", "<!-- keys: end -->"
_NAMED = "NAME"


def tables() -> str:
    """One table for each mapping of the file, in the file's order."""
    return "\n\n".join(_table(path, model) for path, model in _models("", Topology))


def with_tables(page: str) -> str:
    """The page with the tables between its two markers."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{tables()}\n\n{END}{after}"


def _models(path: str, model: type[BaseModel]) -> Iterator[tuple[str, type[BaseModel]]]:
    yield path, model
    for name, field in model.model_fields.items():
        inner, named = models_in(field.annotation)
        if inner is None or (path and name == "offload"):  # the same keys as at the top level
            continue
        below = f"{path}.{name}" if path else name
        yield from _models(f"{below}.{_NAMED}" if named else below, inner)


def _table(path: str, model: type[BaseModel]) -> str:
    lines = [f"### {f'`{path}`' if path else 'Top level'}", ""]
    lines += ["| key | type | default | meaning |", "|---|---|---|---|"]
    for name, field in model.model_fields.items():
        cells = (f"`{name}`", _type_of(field), _default(field), field.description or "")
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def _type_of(field: FieldInfo) -> str:
    for one in field.metadata:
        if isinstance(one, Kind):
            return f"{one.name} ({one.unit})" if one.unit else one.name
    return _words(field.annotation)


def _words(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        kinds = [one for one in arguments[1:] if isinstance(one, Kind)]
        return kinds[0].name if kinds else _words(arguments[0])
    if origin in (Union, UnionType):
        return _words(next(one for one in arguments if one is not type(None)))
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin is list:
        return f"list: {_words(arguments[0])}"
    if origin is dict:
        return f"mapping: {_words(arguments[0])} → {_words(arguments[1])}"
    if annotation is str:
        return "text"
    return "mapping" if issubclass(annotation, BaseModel) else str(annotation.__name__)


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.default
    kinds = [one.name for one in field.metadata if isinstance(one, Kind)]
    if value is None or isinstance(value, BaseModel) or value == {}:
        return ""
    if kinds == ["duration"]:
        value = written_duration(value)
    elif kinds == ["size"]:
        value = written_size(value)
    elif isinstance(value, list):
        value = f"[{', '.join(map(str, value))}]"
    return f"`{value}`"


if __name__ == "__main__":
    file = Path(sys.argv[1])
    file.write_text(with_tables(file.read_text()))
