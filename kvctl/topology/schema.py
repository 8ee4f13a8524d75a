"""The JSON schema of the topology file, for editors and for other tools."""

from __future__ import annotations

from typing import Any

from kvctl.topology.models import Topology


def schema() -> dict[str, Any]:
    """A schema of draft 2020-12. It knows the shapes; `load` knows what they may not be."""
    generated: dict[str, Any] = _without_null(Topology.model_json_schema())
    router = generated["properties"]["router"]
    router["anyOf"] = [{"$ref": "#/$defs/Router"}, {"const": "none"}]
    router.pop("$ref", None)
    generated["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    return generated


def _without_null(value: Any) -> Any:
    """Drops the null that pydantic offers for what may be left out: the file does not take it."""
    if isinstance(value, list):
        return [_without_null(item) for item in value]
    if not isinstance(value, dict):
        return value
    cleaned = {key: _without_null(item) for key, item in value.items() if item is not None}
    choices = cleaned.get("anyOf")
    if isinstance(choices, list) and {"type": "null"} in choices:
        choices.remove({"type": "null"})
        if len(choices) == 1:
            cleaned = {**choices[0], **{key: cleaned[key] for key in cleaned if key != "anyOf"}}
    return cleaned
