"""The entry of set-up, which any Python 3 must be able to read."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from kvctl.engine import bootstrap, machine

SCRIPT = Path(bootstrap.__file__)


def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], cwd=cwd, capture_output=True, text=True
    )


def test_an_old_python_can_read_it() -> None:
    assert ast.parse(SCRIPT.read_text(), feature_version=(3, 5))


def test_both_files_name_the_same_pythons() -> None:
    assert (bootstrap.OLDEST, bootstrap.NEWEST) == (machine.OLDEST_PYTHON, machine.NEWEST_PYTHON)


def test_an_old_python_is_named_with_a_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 9, 18))
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SystemExit) as stopped:
        bootstrap.main()
    assert stopped.value.code == 4
    said = capsys.readouterr()
    assert "Python 3.11 to 3.14 is needed" in said.err
    assert "is 3.9.18" in said.err and "make PYTHON=" in said.err
    assert said.out == ""


def test_another_python_on_the_path_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, code in (("python3.12", 127), ("python3.11", 0)):
        (tmp_path / name).write_text(f"#!/bin/sh\nexit {code}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert bootstrap.find_other_python() == str(tmp_path / "python3.11")


def test_as_a_script_it_runs_from_anywhere_and_keeps_stdout_clean(tmp_path: Path) -> None:
    done = run("engin", cwd=tmp_path)
    assert done.returncode == 2
    assert "unknown part engin; there are engine, cpu, cuda" in done.stderr
    assert done.stdout == ""
