"""Builds the wheel, an environment that holds only it, and the pair of engines that all share."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from otlp_receiver import OtlpReceiver, http_receiver
from pair import Pair, topology

from kvctl.demo.model import SERVED_NAME, tiny_model
from kvctl.demo.prompts import make_prompts
from kvctl.demo.reference import Question, pins_of, reference_answers
from kvctl.demo.setting import setting_for

ROOT = Path(__file__).parents[2]
PROMPTS = 24  # the demo's, so that their reference answers are in the cache


@pytest.fixture(scope="session")
def tool(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kvctl command of the built wheel, in an environment without vLLM."""
    folder = tmp_path_factory.mktemp("tool")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    wheel = [*pip, "wheel", "--no-deps", "--wheel-dir", folder, ROOT]
    subprocess.run(wheel, check=True, timeout=300)
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True, timeout=120)
    python = folder / "venv" / "bin" / "python"
    (built,) = folder.glob("kvctl-*.whl")
    install = [python, *pip[1:], "install", built]
    subprocess.run(install, check=True, timeout=300)
    return folder / "venv" / "bin" / "kvctl"


@pytest.fixture(scope="session")
def receiver() -> Iterator[OtlpReceiver]:
    """An OTLP receiver that lives as long as the pair."""
    with http_receiver() as running:
        yield running


@pytest.fixture(scope="session")
def pair(tool: Path, receiver: OtlpReceiver, places: Path, engine_python: Path) -> Iterator[Pair]:
    """Prefill, decode, their relays and the router, ready; stopped at the end of the run."""
    setting = setting_for("cpu", gpus=())
    model = tiny_model(engine_python, log=places / "model.log")
    prompts = make_prompts(PROMPTS)
    question = Question(
        prompts, setting.reference_arguments(), setting.reference_env(), "cpu",
        pins_of(engine_python),
    )  # fmt: skip
    references = reference_answers(
        question, model=model, python=engine_python, log=places / "reference.log"
    )
    flags = places / "flags"
    flags.mkdir()
    content = topology("e2e", setting, model, engine_python, flags)
    content["transfer"] |= {
        "kv_lease_duration": "10s",
        "composed_hits": "always",
        "wait_deadline": "14s",
    }
    content["telemetry"] = {"otlp": {"endpoint": receiver.endpoint, "interval": "500ms"}}
    file = places / "e2e.yaml"
    file.write_text(yaml.safe_dump(content, sort_keys=False))
    before = set(Path("/dev/shm").iterdir())
    with Pair(tool, file, "", SERVED_NAME, prompts, references, flags, before).running() as ready:
        yield ready
