"""State files: what is chosen, what is known, and that they are written whole or not at all."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from kvctl.errors import UsageError
from kvctl.launch import procfs
from kvctl.launch.state import (
    ProcessRecord,
    RunState,
    StateError,
    backup_path,
    choose,
    load,
    save,
    state_dir,
    state_path,
    survey,
)


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCTL_STATE_DIR", str(tmp_path / "state"))


def make_state(name: str = "qwen") -> RunState:
    record = ProcessRecord("prefill-0", "engine", phase="ready")
    return RunState(name, "run-1", [record], boot=procfs.boot_id())


def test_what_was_written_is_read(tmp_path: Path) -> None:
    state = make_state()
    state.processes[0].members = [procfs.Identity(7, 8)]
    state.processes[0].ports = {"api": 8100}
    save(state)
    assert load("qwen") == state
    assert backup_path("qwen").read_bytes() == state_path("qwen").read_bytes()
    assert sorted(path.name for path in state_path("qwen").parent.iterdir()) == [
        "state.json", "state.json.bak",
    ]  # fmt: skip
    assert state_path("qwen").parent.stat().st_mode & 0o077 == 0


def test_a_write_that_fails_leaves_the_state_before(monkeypatch: pytest.MonkeyPatch) -> None:
    save(make_state())
    before = state_path("qwen").read_bytes()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    changed = make_state()
    changed.phase = "failed"
    with pytest.raises(Exception, match=r"the state cannot be written.*No space left"):
        save(changed)
    assert state_path("qwen").read_bytes() == before


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", '{"name": "qwen"}', '{"name": 7, "run_id": "x", "processes": [], "schema": 9}',
     '{"name": "qwen", "run_id": "x", "processes": [{"pid": 1}], "schema": 9}', "\xff\xfe"],
)  # fmt: skip
def test_a_broken_file_is_named_with_the_remedy(content: str) -> None:
    save(make_state())
    state_path("qwen").write_text(content, encoding="latin-1")
    with pytest.raises(StateError) as caught:
        load("qwen")
    assert str(state_path("qwen")) in caught.value.message
    assert "kvctl stop -p qwen" in (caught.value.hint or "")
    assert state_path("qwen").read_text(encoding="latin-1") == content


def test_unknown_fields_are_ignored() -> None:
    save(make_state())
    raw = json.loads(state_path("qwen").read_text())
    raw["zone"] = {"north": 1}
    raw["processes"][0]["shard"] = 3
    state_path("qwen").write_text(json.dumps(raw))
    assert load("qwen") == make_state()


@pytest.mark.parametrize("name", ["", ".", "..", "../qwen", "a/b"])
def test_what_cannot_be_a_name_is_not_looked_for(name: str) -> None:
    assert load(name) is None


def test_a_name_is_found_or_answered_with_those_that_are_known() -> None:
    with pytest.raises(UsageError) as caught:
        choose("new")
    assert caught.value.hint == "nothing was launched here"
    save(make_state("old"))
    save(make_state("broken"))
    state_path("broken").write_text("{")
    assert choose("old").name == "old"
    with pytest.raises(UsageError) as caught:
        choose("new")
    assert caught.value.hint == "known: broken, old"
    readable, unreadable = survey()
    assert ([each.name for each in readable], [each.name for each in unreadable]) == (
        ["old"], ["broken"],
    )  # fmt: skip


def test_where_the_state_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert state_dir() == tmp_path / "state"
    monkeypatch.delenv("KVCTL_STATE_DIR")
    monkeypatch.setenv("XDG_STATE_HOME", "/xdg")
    assert state_dir() == Path("/xdg/kvctl")
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert state_dir() == Path("/home/somebody/.local/state/kvctl")
