"""Engines that do not start: each gives one clear message and leaves nothing running."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from pair import free_block

from kvctl.demo.model import tiny_model
from kvctl.demo.setting import setting_for

pytestmark = pytest.mark.engine


def launch(
    tool: Path, folder: Path, model: Path, python: Path, **changes: Any
) -> "subprocess.CompletedProcess[str]":
    setting = setting_for("cpu", gpus=0)
    content = {
        "version": 1,
        "name": "bad",
        "model": str(model),
        "engine": {"python": str(python)},
        "args": dict(setting.args),
        "env": dict(setting.env),
        "instances": {"prefill": {"role": "prefill"}, "decode": {"role": "decode"}},
        "ports": {"base": free_block()},
        "start_timeout": "180s",
    }
    for key, value in changes.items():
        content[key] = {**content[key], **value} if isinstance(value, dict) else value
    file = folder / "bad.yaml"
    file.write_text(yaml.safe_dump(content, sort_keys=False))
    return subprocess.run([tool, "launch", str(file)], capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def model(places: Path, engine_python: Path) -> Path:
    return tiny_model(engine_python, log=places / "model.log")


def test_an_engine_that_dies_while_starting(
    tool: Path, tmp_path: Path, places: Path, model: Path, engine_python: Path
) -> None:
    ended = launch(tool, tmp_path, model, engine_python, args={"max-model-len": 99_999})
    assert ended.returncode == 4, ended.stdout + ended.stderr
    assert "99999" in ended.stderr
    assert "max_model_len" in ended.stderr
    assert ".log" in ended.stderr


def test_an_engine_that_never_gets_ready(
    tool: Path, tmp_path: Path, places: Path, model: Path, engine_python: Path
) -> None:
    ended = launch(tool, tmp_path, model, engine_python, start_timeout="4s")
    assert ended.returncode == 4, ended.stdout + ended.stderr
    assert "not ready after" in ended.stderr
    assert ".log" in ended.stderr


def test_neither_left_anything(places: Path) -> None:
    listed = list(Path(os.environ["KVCTL_RUNTIME_DIR"]).glob("bad-*"))
    assert listed == []
