"""What the tests of several packages share. Being here, it also puts this folder on the path, so
that they can import the stand-ins next to it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from otlp_receiver import OtlpReceiver, http_receiver


@pytest.fixture
def otlp() -> Iterator[OtlpReceiver]:
    """An OTLP/HTTP receiver in this process."""
    with http_receiver() as receiver:
        yield receiver


@pytest.fixture(scope="session")
def engine_python() -> Path:
    """Python of the environment that has vLLM: ``$KVCTL_ENGINE_PYTHON``, else this one.

    Without one the test fails: a run that tested no engine must not look like one that did.
    """
    python = Path(os.environ.get("KVCTL_ENGINE_PYTHON") or sys.executable)
    probe = "import importlib.metadata as m; print(m.version('vllm'))"
    try:
        found = subprocess.run([python, "-c", probe], capture_output=True, text=True, timeout=60)
        why = found.stderr.strip().rpartition("\n")[2]
    except OSError as error:
        found, why = None, str(error)
    if found is None or found.returncode:
        pytest.fail(
            f"no engine: {python} has no vLLM ({why}); `make test` installs one, or name the "
            "Python of another environment in KVCTL_ENGINE_PYTHON"
        )
    return python
