from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kvctl.cli import app
from kvctl.engine import environment
from kvctl.engine.environment import EngineEnvironment
from kvctl.errors import UnreachableError
from kvctl.topology.load import load


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty folder, an empty cache, and an engine environment for CPUs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KVCTL_CACHE_DIR", str(tmp_path / "cache"))
    found = EngineEnvironment(Path(sys.executable), "0.32.0+cpu", "1.5.1", "cpu", None)
    monkeypatch.setattr(environment, "find", lambda: found)


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["kvctl", *arguments])
    with pytest.raises(SystemExit) as ended:
        app.main()
    return int(ended.value.code or 0)


def test_it_writes_the_default_file(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, "init") == 0
    assert load("kvctl.yaml").engine.python is None  # kvctl's own environment


def test_it_prints_the_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "init", "-f", "-") == 0
    assert set(load("out", text=capsys.readouterr().out).instances) == {"prefill", "decode"}
    assert not Path("kvctl.yaml").exists()


def test_an_existing_file_is_kept_unless_forced(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("my.yaml").write_text("mine")
    assert run(monkeypatch, "-f", "my.yaml", "init") == 2
    assert capsys.readouterr().err == (
        "kvctl: my.yaml exists\n  --force replaces it; -f names another file\n"
    )
    assert Path("my.yaml").read_text() == "mine"
    assert run(monkeypatch, "init", "--force", "-f", "my.yaml") == 0
    assert load("my.yaml").version == 1
    assert [path.name for path in Path().glob("*my.yaml*")] == ["my.yaml"]


def test_a_folder_that_is_not_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "init", "-f", "no/kvctl.yaml") == 2
    assert "no/kvctl.yaml cannot be written: No such file or directory" in capsys.readouterr().err


def test_the_demos_model_is_used_where_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = tmp_path / "cache" / "tiny-model-1"
    tiny.mkdir(parents=True)
    (tiny / "config.json").write_text("{}")
    assert run(monkeypatch, "init") == 0
    assert load("kvctl.yaml").model == str(tiny)


def test_without_an_engine_it_writes_all_the_same(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def none() -> EngineEnvironment:
        raise UnreachableError("no Python environment with vLLM was found", hint="install one")

    monkeypatch.setattr(environment, "find", none)
    assert run(monkeypatch, "init") == 0
    assert load("kvctl.yaml").name
    assert "no Python environment with vLLM was found" in capsys.readouterr().err
