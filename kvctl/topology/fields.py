"""The kinds of values that the topology file knows, with the complaints of each.

A `Kind` beside the annotation is what the reference and the JSON schema say about it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import BeforeValidator, PlainValidator, WithJsonSchema

from kvctl.topology.text import Text, WrittenFloat, WrittenInt, shown
from kvctl.units import parse_duration, parse_size

_NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,38}[a-z0-9])?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ADDRESS = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?|[0-9A-Fa-f:]*:[0-9A-Fa-f:.]*")

MAX_SHOWN = 80  # characters of a wrong value
MAX_SIZE = 2**50  # bytes
MIN_SECONDS, MAX_SECONDS = 0.001, 30 * 86400.0


@dataclass(frozen=True)
class Kind:
    """What a value is, in words. `unit`: what a number without one is taken as."""

    name: str
    unit: str = ""


def spelling(value: object) -> str:
    """A value as the file writes it, for an error; what came from the environment by name."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, WrittenInt | WrittenFloat):
        return value.text
    if isinstance(value, str):
        text = shown(value).replace("\n", "\\n") or '""'
        return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"
    if value is None:
        return "null"
    if isinstance(value, dict):
        return "a mapping"
    return "a list" if isinstance(value, list) else str(value)


def whole_number(value: Any) -> int:
    if isinstance(value, Text) and re.fullmatch(r"-?[0-9]{1,18}", value):
        return int(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return int(value)
    if isinstance(value, str) and value.isdigit() and not isinstance(value, Text):
        raise ValueError(f'"{value}" is a text; write the number without quotes')
    raise ValueError(f"{spelling(value)} is not a whole number")


def text(value: Any) -> str:
    if isinstance(value, str):
        if not value:
            raise ValueError("is empty")
        return value
    if isinstance(value, bool | int | float):
        raise ValueError(f'{spelling(value)} is not a text; write "{spelling(value)}" in quotes')
    raise ValueError(f"{spelling(value)} is not a text")


def model(value: Any) -> str:
    if text(value).startswith("-"):
        raise ValueError(f"{spelling(value)} is not a model: it begins with a dash")
    return str(value)


def name(value: Any) -> str:
    if not _NAME.fullmatch(text(value)):
        raise ValueError(
            f"{spelling(value)}: a name has only a-z, 0-9 and -, begins and ends with a letter "
            "or digit, and has at most 40 characters"
        )
    return str(value)


def address(value: Any) -> str:
    if not _ADDRESS.fullmatch(text(value)):
        raise ValueError(f"{spelling(value)} is not a host name or an IP address")
    return str(value)


def variable_name(value: Any) -> str:
    if not _VARIABLE.fullmatch(text(value)):
        raise ValueError("not the name of an environment variable")
    return str(value)


def written(value: Any) -> str:
    """A value of an environment variable: what stands in the file, character for character."""
    if value is None or isinstance(value, dict | list):
        raise ValueError(f"{spelling(value)} is not a value for an environment variable")
    return value if isinstance(value, str) else spelling(value)  # a number or a boolean


def size(value: Any) -> int:
    if not isinstance(value, str | int) or isinstance(value, bool):
        raise ValueError(f"{spelling(value)} is not a size; write for example 64GiB")
    try:
        count = parse_size(value)
    except (ValueError, OverflowError):
        raise ValueError(
            f"{spelling(value)} is not a size; write for example 64GiB, 500MB or 1048576"
        ) from None
    if not 0 < count <= MAX_SIZE:
        raise ValueError(f"{spelling(value)}: more than nothing, and at most 1024TiB")
    return count


def duration(value: Any) -> float:
    if not isinstance(value, str | int | float) or isinstance(value, bool):
        raise ValueError(f"{spelling(value)} is not a duration; write for example 30s")
    try:
        seconds = parse_duration(float(value) if str(value).isdigit() else value)
    except ValueError:
        raise ValueError(
            f"{spelling(value)} is not a duration; write for example 30s, 250ms or 1m30s"
        ) from None
    if not MIN_SECONDS <= seconds <= MAX_SECONDS:
        raise ValueError(f"{spelling(value)}: at least 1ms, and at most 30d")
    return seconds


def lease(value: Any) -> float:
    seconds = duration(value)
    if seconds != int(seconds):
        raise ValueError(f"{spelling(value)}: NIXL's lease is whole seconds")
    return seconds


def gpu(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return str(int(value))
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9/:-]*", value):
        return str(value)
    raise ValueError(f"{spelling(value)} is not a GPU: write its number or UUID")


def endpoint(value: Any) -> str:
    try:
        parts = urlsplit(text(value))
        known = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        known = False
    if not known:
        raise ValueError(f"{spelling(value)} is not a URL; write for example http://localhost:4318")
    return str.__str__(value) if not isinstance(value, Text) else value


def secret(value: Any) -> str:
    if not isinstance(value, Text):
        raise ValueError(
            "is written in the clear; put it into an environment variable and write ${NAME}"
        )
    return value


def as_is(value: Any) -> Any:
    return value


Whole = Annotated[int, BeforeValidator(whole_number), Kind("whole number")]
Line = Annotated[str, BeforeValidator(text), Kind("text")]
Model = Annotated[str, BeforeValidator(model), Kind("text")]
Name = Annotated[str, BeforeValidator(name), Kind("name")]
Address = Annotated[str, BeforeValidator(address), Kind("host name or IP address")]
Gpu = Annotated[
    str,
    PlainValidator(gpu),
    WithJsonSchema({"type": ["integer", "string"], "minimum": 0}),
    Kind("GPU number or UUID"),
]
Size = Annotated[
    int,
    BeforeValidator(size),
    WithJsonSchema({"type": ["string", "integer"], "examples": ["64GiB"]}),
    Kind("size", "bytes"),
]
Seconds = Annotated[
    float,
    BeforeValidator(duration),
    WithJsonSchema({"type": ["string", "number"], "examples": ["30s"]}),
    Kind("duration", "seconds"),
]
Lease = Annotated[
    float,
    BeforeValidator(lease),
    WithJsonSchema({"type": ["string", "integer"], "examples": ["30s"]}),
    Kind("duration", "whole seconds"),
]
# Plain validators from here on: pydantic's own would turn a `Text` into a plain string.
Endpoint = Annotated[str, PlainValidator(endpoint), WithJsonSchema({"type": "string"}), Kind("URL")]
Secret = Annotated[
    str, PlainValidator(secret), WithJsonSchema({"type": "string"}), Kind("text with ${NAME}")
]
Written = Annotated[
    str,
    PlainValidator(written),
    WithJsonSchema({"type": ["string", "number", "boolean"]}),
    Kind("text"),
]
Variable = Annotated[str, BeforeValidator(variable_name), Kind("variable name")]
Anything = Annotated[Any, PlainValidator(as_is), WithJsonSchema({}), Kind("any value")]
