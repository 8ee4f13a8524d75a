"""``kvctl version`` and ``kvctl completion``."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvctl import __version__

KVCTL = [sys.executable, "-m", "kvctl"]


def run(*arguments: str, **env: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*KVCTL, *arguments], capture_output=True, text=True, timeout=60, env={**os.environ, **env}
    )


def test_versions_of_what_it_finds(engine_python: Path) -> None:
    shown = run("version", "--json", "--engine", str(engine_python))
    assert shown.returncode == 0, shown.stderr
    facts = json.loads(shown.stdout)
    assert (facts["version"], facts["kvctl"]) == (1, __version__)
    assert facts["vllm"]
    assert facts["engine"] == str(engine_python)


def test_a_wrong_engine_is_an_error(tmp_path: Path) -> None:
    shown = run("version", "--engine", str(tmp_path / "nowhere"))
    assert shown.returncode == 3
    assert "nowhere" in shown.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts(shell: str) -> None:
    shown = run("completion", shell)
    assert shown.returncode == 0, shown.stderr
    assert "_KVCTL_COMPLETE" in shown.stdout


def test_an_unknown_shell_is_a_usage_error() -> None:
    assert run("completion", "powershell").returncode == 2


def test_bash_really_completes_a_command() -> None:
    command = Path(sys.executable).parent / "kvctl"
    shown = subprocess.run(
        [command], capture_output=True, text=True, timeout=60,
        env={**os.environ, "_KVCTL_COMPLETE": "complete_bash", "COMP_WORDS": "kvctl sta",
             "COMP_CWORD": "1"},
    )  # fmt: skip
    assert shown.stdout.split() == ["status"]


def test_a_bare_kvctl_prints_its_help_and_nothing_else() -> None:
    shown = run()
    assert shown.returncode == 2
    assert "Usage:" in shown.stdout
    assert shown.stderr == ""
