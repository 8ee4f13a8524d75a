"""Values as the file writes them: what came from the environment is never shown in the clear.

A `Text` is an ordinary string for whoever uses it, and remembers which of its pieces were
``${NAME}``. Whatever is printed (a plan, a resolved topology, an error) shows the reference.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_DOLLAR = re.compile(
    r"\$(?:(?P<escaped>\$)|\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::-(?P<default>[^{}$]*))?\})?"
)
_IN_DOUBLE_QUOTES = re.compile(r'([\\"$`])')


class SubstitutionError(ValueError):
    """A ``$`` that cannot be replaced, and why."""


@dataclass(frozen=True)
class Reference:
    """One ``${NAME}`` or ``${NAME:-default}``, and what it stands for.

    Attributes:
        value: what takes its place where the text is used.
    """

    name: str
    default: str | None
    value: str

    def __str__(self) -> str:
        return f"${{{self.name}}}" if self.default is None else f"${{{self.name}:-{self.default}}}"

    def __repr__(self) -> str:
        return str(self)


class Text(str):
    """A string, some pieces of which came from the environment.

    Attributes:
        parts: literals and references, in order.
        plain: it stood in the file without quotes, so it may be meant as a number or a boolean.
    """

    parts: tuple[str | Reference, ...]
    plain: bool

    def __new__(cls, parts: tuple[str | Reference, ...], plain: bool = False) -> Text:
        text = super().__new__(
            cls, "".join(part.value if isinstance(part, Reference) else part for part in parts)
        )
        text.parts = parts
        text.plain = plain
        return text

    def __getnewargs__(self) -> tuple[tuple[str | Reference, ...], bool]:  # type: ignore[override]
        return self.parts, self.plain

    def __repr__(self) -> str:
        return repr(shown(self))


class WrittenInt(int):
    """A whole number with its spelling in the file."""

    text: str

    def __new__(cls, text: str) -> WrittenInt:
        number = super().__new__(cls, text)
        number.text = text
        return number


class WrittenFloat(float):
    """A number with its spelling in the file: ``0.90`` and ``1.10`` stay what they are."""

    text: str

    def __new__(cls, text: str) -> WrittenFloat:
        number = super().__new__(cls, text)
        number.text = text
        return number


def substitute(raw: str, environ: Mapping[str, str], *, plain: bool = False) -> str:
    """Replaces ``${NAME}`` and ``${NAME:-default}``; ``$$`` is a dollar sign.

    As in a shell, the default also stands in for an empty variable.

    Raises:
        SubstitutionError: an unset variable without a default, or a ``$`` that is neither.
    """
    if "$" not in raw:
        return raw
    parts: list[str | Reference] = []
    end = 0
    for match in _DOLLAR.finditer(raw):
        parts.append(raw[end : match.start()])
        parts.append("$" if match["escaped"] else _reference(match, raw, environ))
        end = match.end()
    parts.append(raw[end:])
    pieces = _merged(parts)
    return Text(pieces, plain) if _has_reference(pieces) else "".join(map(str, pieces))


def _reference(match: re.Match[str], raw: str, environ: Mapping[str, str]) -> Reference:
    name, default = match["name"], match["default"]
    if name is None:
        rest = raw[match.start() :]
        word = re.match(r"\$([A-Za-z_][A-Za-z0-9_]*)", rest)
        if word:
            raise SubstitutionError(
                f"{word[0]}: write ${{{word[1]}}} for a variable, or $${word[1]} for a dollar sign"
            )
        if rest.startswith("${"):
            raise SubstitutionError(
                f"{rest.split()[0][:40]}: not a variable; write ${{NAME}} or "
                "${NAME:-default} (no braces or dollar signs in the default)"
            )
        raise SubstitutionError("a single $: write $$ for a dollar sign, ${NAME} for a variable")
    value = environ.get(name)
    if default is not None:
        value = value or default
    if value is None:
        raise SubstitutionError(
            f"the environment variable {name} is not set; set it, or write ${{{name}:-default}}"
        )
    if "\0" in value:
        raise SubstitutionError(f"the environment variable {name} holds a NUL")
    return Reference(name, default, value)


def shown(text: str) -> str:
    """The text as the file may write it: references kept, a dollar sign as ``$$``."""
    return "".join(
        str(part) if isinstance(part, Reference) else part.replace("$", "$$")
        for part in parts_of(text)
    )


def quoted_for_shell(text: str) -> str:
    """The text as one word of a POSIX shell, which fills in the references itself."""
    words = []
    for part in parts_of(text):
        if isinstance(part, Reference):
            default = part.default
            if default is None:
                words.append(f'"${{{part.name}}}"')
            else:
                escaped = _IN_DOUBLE_QUOTES.sub(r"\\\1", default)
                words.append(f'"${{{part.name}:-{escaped}}}"')
        elif part:
            words.append(shlex.quote(part))
    return "".join(words) or "''"


def joined(*texts: str) -> str:
    """The texts one after another; a `Text` if any of them is one."""
    pieces = _merged([part for text in texts for part in parts_of(text)])
    return Text(pieces) if _has_reference(pieces) else "".join(texts)


def converted(text: str, convert: Callable[[str], str]) -> str:
    """The text with `convert` applied to every piece, for encodings that work on characters."""
    if not isinstance(text, Text):
        return convert(text)
    return Text(
        tuple(
            replace(part, value=convert(part.value)) if isinstance(part, Reference)
            else convert(part)
            for part in text.parts
        )
    )  # fmt: skip


def json_text(value: object) -> str:
    """JSON on one line, as `json.dumps` writes it, with the references of its texts kept."""
    if isinstance(value, Text):
        if value.plain and (NUMBER.fullmatch(value) or value in ("true", "false", "null")):
            return Text(value.parts)
        return joined('"', converted(value, lambda piece: json.dumps(piece)[1:-1]), '"')
    if isinstance(value, Mapping):
        pieces = [joined(json.dumps(str(key)), ": ", json_text(value[key])) for key in value]
        return joined("{", *_separated(pieces), "}")
    if isinstance(value, list | tuple):
        return joined("[", *_separated([json_text(item) for item in value]), "]")
    if isinstance(value, WrittenInt | WrittenFloat):
        return value.text
    return json.dumps(value)


def parts_of(text: str) -> tuple[str | Reference, ...]:
    """The pieces of a text; a plain string is one literal."""
    return text.parts if isinstance(text, Text) else (text,)


def _separated(pieces: list[str]) -> list[str]:
    return [item for piece in pieces for item in (", ", piece)][1:]


def _merged(parts: list[str | Reference]) -> tuple[str | Reference, ...]:
    merged: list[str | Reference] = []
    for part in parts:
        if isinstance(part, str) and merged and isinstance(merged[-1], str):
            merged[-1] += part
        elif part != "":
            merged.append(part)
    return tuple(merged)


def _has_reference(parts: tuple[str | Reference, ...]) -> bool:
    return any(isinstance(part, Reference) for part in parts)
