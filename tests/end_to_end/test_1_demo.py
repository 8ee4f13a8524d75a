"""The wheel, in an environment of its own, runs the demo on an engine that it finds."""

import json
import os
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.engine


def run(
    command: list[str | Path], *, env: dict[str, str] | None = None, text: str | None = None
) -> "subprocess.CompletedProcess[str]":
    merged = {**os.environ, **(env or {})}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=600, env=merged, input=text
    )


def test_the_tool_has_no_engine_of_its_own(tool: Path) -> None:
    probe = run([tool.parent / "python", "-c", "import vllm"])
    assert "No module named 'vllm'" in probe.stderr


def test_init_config_and_a_dry_run_work_from_the_wheel(
    tool: Path, places: Path, engine_python: Path
) -> None:
    env = {"KVCTL_ENGINE_PYTHON": str(engine_python)}
    written = run([tool, "init", "-f", "-"], env=env)
    assert written.returncode == 0, written.stderr

    shown = run([tool, "config", "-f", "-", "-o", "json"], text=written.stdout, env=env)
    assert json.loads(shown.stdout)["version"] == 1

    planned = run([tool, "launch", "--dry-run", "-f", "-"], text=written.stdout, env=env)
    assert planned.returncode == 0, planned.stderr
    assert "kvctl_connector.connector" in planned.stdout
    assert "vllm-router" in planned.stdout


def test_the_demo_moves_kv_both_ways_and_answers_right(
    tool: Path, places: Path, engine_python: Path
) -> None:
    ended = run([tool, "demo", "--json"], env={"KVCTL_ENGINE_PYTHON": str(engine_python)})
    assert ended.returncode == 0, ended.stderr[-4000:]
    report = json.loads(ended.stdout)
    print(json.dumps(report, indent=1)[:3000])
    assert report["version"] == 1
