"""docs/topology.md, the JSON schema and the models say the same."""

from __future__ import annotations

import json
from pathlib import Path

from kvctl.topology.load import load
from kvctl.topology.models import Topology
from kvctl.topology.reference import with_tables
from kvctl.topology.schema import schema

PAGE = Path(__file__).parents[2] / "docs" / "topology.md"


def test_the_page_is_fresh() -> None:
    page = PAGE.read_text()
    assert with_tables(page) == page, "run python -m kvctl.topology.reference docs/topology.md"


def test_the_pages_example_is_a_topology() -> None:
    example = PAGE.read_text().split("```yaml\n")[1].split("```")[0]
    assert load("docs/topology.md", text=example).name == "qwen"


def test_every_key_is_described() -> None:
    described = schema()
    models = [described, *described["$defs"].values()]
    for model in models:
        for name, key in model["properties"].items():
            target = described["$defs"].get(key.get("$ref", "").rpartition("/")[2], {})
            assert key.get("description") or target.get("description"), name
            assert model["additionalProperties"] is False


def test_the_schema_offers_no_null() -> None:
    assert "null" not in json.dumps(schema())
    router = schema()["properties"]["router"]
    assert router["anyOf"] == [{"$ref": "#/$defs/Router"}, {"const": "none"}]
    assert schema()["required"] == ["name", "model", "instances"]
    assert set(schema()["properties"]) == set(Topology.model_fields)
