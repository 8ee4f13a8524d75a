"""The connector's copy: alone in its folder, made once, and usable by another interpreter."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import kvctl_connector
from kvctl.launch import connector_copy
from kvctl.launch.connector_copy import connector_path, lay_connector, source_path


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCTL_STATE_DIR", str(tmp_path / "state"))


def test_the_copy_is_alone_and_complete(tmp_path: Path) -> None:
    assert not connector_path().exists()
    folder = lay_connector()
    assert folder == connector_path()
    assert folder.parent == tmp_path / "state/connector"
    assert [path.name for path in folder.iterdir()] == ["kvctl_connector"]
    source = Path(kvctl_connector.__file__).parent
    assert source == source_path()
    copied = {path.relative_to(folder / "kvctl_connector") for path in folder.rglob("*.py")}
    assert copied == {path.relative_to(source) for path in source.rglob("*.py")}
    assert not list(folder.rglob("__pycache__"))


def test_it_is_made_once(tmp_path: Path) -> None:
    before = lay_connector().stat().st_mtime_ns
    assert lay_connector().stat().st_mtime_ns == before
    assert len(list((tmp_path / "state/connector").iterdir())) == 1


def test_another_content_gets_another_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    first = connector_path()
    files = connector_copy._files()
    monkeypatch.setattr(connector_copy, "_files", lambda: [*files, ("extra.py", b"")])
    assert connector_path() != first
    assert (lay_connector() / "kvctl_connector/extra.py").exists()


def test_an_interpreter_without_kvctl_imports_it(tmp_path: Path) -> None:
    code = "import kvctl_connector.paths as p; print(p.__file__)"
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], env={"PYTHONPATH": str(lay_connector())},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.startswith(str(tmp_path / "state/connector"))


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("")
    with pytest.raises(Exception, match="KVCTL_STATE_DIR"):
        lay_connector()
