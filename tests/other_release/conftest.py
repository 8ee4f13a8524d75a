"""One pair of engines of another release; ``make test-vllm VERSION=…`` says which.

Without ``KVCTL_TEST_RELEASE`` nothing here is collected: each release takes minutes, and an
environment of its own.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from environments import LEASE, RELEASES
from pair import Pair, topology

from kvctl.demo.model import SERVED_NAME, tiny_model
from kvctl.demo.prompts import make_prompts
from kvctl.demo.reference import Question, pins_of, reference_answers
from kvctl.demo.setting import setting_for

RELEASE = "KVCTL_TEST_RELEASE"
ENVIRONMENT = "KVCTL_TEST_RELEASE_PYTHON"  # one that has it already
PROMPTS = 24  # the demo's, so that their reference answers are in the cache

collect_ignore_glob = [] if os.environ.get(RELEASE) else ["test_*.py"]


def pytest_report_header() -> str:
    """What runs, by its right name."""
    chosen = os.environ.get(RELEASE, "")
    return f"engines: {RELEASES[chosen].name}" if chosen else ""


@pytest.fixture(scope="session")
def pair(places: Path, engine_python: Path) -> Iterator[Pair]:
    """Prefill, decode and router, ready. The reference is a plain engine of the pinned release."""
    release = RELEASES[os.environ[RELEASE]]
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
    with tempfile.TemporaryDirectory(prefix="kvctl-release-") as folder:
        if existing := os.environ.get(ENVIRONMENT):
            python, path = Path(existing), []
        else:
            python, path = release.make(Path(folder))
        content = topology("e2e", setting, model, python, flags, path)
        content["env"] |= release.env
        content["transfer"] |= {"kv_lease_duration": f"{LEASE}s", "composed_hits": "always"}
        file = places / "e2e.yaml"
        file.write_text(yaml.safe_dump(content, sort_keys=False))
        tool = Path(sys.executable).with_name("kvctl")
        with Pair(tool, file, "", SERVED_NAME, prompts, references, flags).running() as ready:
            yield ready
