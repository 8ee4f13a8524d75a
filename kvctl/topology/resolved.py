"""The resolved topology: defaults filled in, units normalised, as a file that reads back the same.

What came from the environment stays a reference wherever it may be a secret (``args``, ``env``,
``extra``, the OTLP endpoint and headers).
"""

from __future__ import annotations

from typing import Any

import yaml
from pydantic import BaseModel

from kvctl.topology.document import Mark, Scalar
from kvctl.topology.fields import Kind
from kvctl.topology.models import Topology
from kvctl.topology.text import Text, WrittenFloat, WrittenInt, shown
from kvctl.topology.values import Reading


def as_yaml(topology: Topology) -> str:
    """The resolved topology as YAML."""
    return yaml.dump(
        _plain(topology), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10**6
    )


def as_data(topology: Topology) -> dict[str, Any]:
    """The resolved topology, ready for a JSON encoder."""
    data: dict[str, Any] = _shown(_plain(topology))
    return data


def written_size(count: int) -> str | int:
    """Bytes in the largest unit that is exact; a number where there is none."""
    for power, prefix in reversed(list(enumerate("KMGT", 1))):
        for base, unit in ((1024, f"{prefix}iB"), (1000, f"{prefix.replace('K', 'k')}B")):
            if count % base**power == 0:
                return f"{count // base**power}{unit}"
    return count


def written_duration(seconds: float) -> str:
    """``1h``, ``15m``, ``90s``, ``1.5s``: the largest unit without a fraction, else seconds."""
    if seconds == int(seconds):
        for unit, size in (("h", 3600), ("m", 60)):
            if int(seconds) % size == 0:
                return f"{int(seconds) // size}{unit}"
        return f"{int(seconds)}s"
    return f"{seconds:.9f}".rstrip("0") + "s"


def _plain(topology: Topology) -> dict[str, Any]:
    data = _model(topology)
    if topology.router is None:
        data["router"] = "none"
    return data


def _model(model: BaseModel) -> dict[str, Any]:
    data = {}
    for name, field in type(model).model_fields.items():
        value = getattr(model, name)
        kind = next((one.name for one in field.metadata if isinstance(one, Kind)), "")
        if value is None and name != "router":
            continue
        if kind == "size":
            data[name] = written_size(value)
        elif kind == "duration":
            data[name] = written_duration(value)
        else:
            data[name] = _value(value, as_written=name == "args")
    return data


def _value(value: Any, *, as_written: bool = False) -> Any:
    """Models, lists and mappings opened up.

    Args:
        as_written: numbers keep their spelling (one level down, where flags are): as a text,
            which is the same to vLLM, where Python would spell them otherwise.
    """
    if isinstance(value, BaseModel):
        return _model(value)
    if isinstance(value, dict):
        return {
            key: item.text
            if as_written and isinstance(item, WrittenFloat) and repr(float(item)) != item.text
            else _value(item)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [_value(item) for item in value]
    if isinstance(value, WrittenInt):
        return int(value)
    return float(value) if isinstance(value, WrittenFloat) else value


def _shown(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _shown(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_shown(item) for item in value]
    return shown(value) if isinstance(value, str) else value


class _Dumper(yaml.SafeDumper):
    """Quotes what the reader of topology files would take for something else than a text."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    written = shown(text)
    if isinstance(text, Text) and text.plain:
        # The tag that the dumper would take for granted, so that it writes neither tag nor quotes.
        tag = dumper.resolve(yaml.ScalarNode, written, (True, False))  # type: ignore[no-untyped-call]
        return dumper.represent_scalar(tag, written)
    read = Reading(Scalar(Mark(1, 1), text, plain=True), {})
    as_text = not read.problems and isinstance(read.value, str) and "$" not in text
    if isinstance(text, Text):
        as_text = False  # in quotes it is never meant as a number
    return dumper.represent_scalar("tag:yaml.org,2002:str", written, style=None if as_text else "'")


_Dumper.add_representer(str, _represent_text)
_Dumper.add_representer(Text, _represent_text)
