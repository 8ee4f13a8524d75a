"""The README is kept true: its file loads, its error message is the real one, its links exist."""

import re
from pathlib import Path

import pytest
import typer

from kvctl.cli.app import app
from kvctl.errors import UsageError
from kvctl.topology.load import load

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
(EXAMPLE,) = re.findall(r"```yaml\n(.*?)```", README, re.S)


def test_the_example_file_is_a_topology() -> None:
    topology = load("qwen.yaml", text=EXAMPLE)
    assert topology.name == "qwen"
    assert set(topology.instances) == {"prefill", "decode"}


def test_the_error_message_is_what_two_mistakes_in_it_print() -> None:
    wrong = EXAMPLE.replace("replicas: 2", "replica: 2").replace("30s", "30 parsecs")
    with pytest.raises(UsageError) as raised:
        load("qwen.yaml", text=wrong)
    assert f"```\nkvctl: {raised.value.message}\n```" in README


def test_links_lead_somewhere() -> None:
    for document in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\(([^)#]+)", document.read_text()):
            if not target.startswith("http"):
                assert (document.parent / target).exists(), f"{document.name}: {target}"


def test_every_command_is_listed() -> None:
    command = typer.main.get_command(app)
    for name in command.commands:  # type: ignore[attr-defined]
        assert re.search(rf"`kvctl {name}\b|\(`{name}`\)", README), name
