"""The tests of the host tier over the Python of releases that ask for it as handlers."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from sdists import search_path

TESTS = Path(__file__).parents[1] / "connector"
TIMEOUT = 300  # seconds
RUN = """
import sys, pytest, vllm
assert vllm.__file__.startswith(sys.argv[1]), vllm.__file__
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", *sys.argv[2:]]))
"""


@pytest.mark.parametrize("version", ["0.20.2", "0.22.1", "0.24.0"])
def test_the_host_tier_as_handlers(version: str) -> None:
    path = search_path(version)
    files = [str(TESTS / name) for name in ("test_host_memory.py", "test_host_spec.py")]
    own = os.environ.get("PYTHONPATH", "")
    done = subprocess.run(
        [sys.executable, "-c", RUN, path[0], *files],
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [*map(str, path), own]))},
    )
    assert done.returncode == 0, done.stdout + done.stderr
