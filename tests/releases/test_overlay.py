"""The connector on the Python of each release, over the installed engine's environment.

A release's ``vllm/`` folder alone goes in front of the path, so its code runs with the installed
torch and the installed distribution's metadata. No kernels of that release run, nor any model.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import sources

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TIMEOUT = 240  # seconds; 15 to 25 are usual, half of it the import of vLLM
# Tests of the main run that touch vLLM; of some, the fakes answer what later releases ask only.
UNIT_TESTS = (
    "test_forwarding.py", "test_host_memory.py", "test_host_spec.py", "test_saves.py",
    "test_start_checks.py", "test_store_fence.py",
)  # fmt: skip
LATER_UNIT_TESTS = ("test_choosing.py", "test_connector.py", "test_waits.py")
LATER = ("0.30.0", "0.32.0", "0.33.0")


@pytest.mark.parametrize("version", sources.RELEASES)
def test_the_connector_holds_on_the_python_of_the_release(
    version: str, engine_python: Path, tmp_path: Path
) -> None:
    path = [*sources.search_path(version), HERE, ROOT / "connector", ROOT, ROOT / "tests"]
    environ = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "KVCTL_CHECKS_ON": str(sources.release(version)),
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    files = [*UNIT_TESTS, *(LATER_UNIT_TESTS if version in LATER else ())]
    units = (ROOT / "tests/connector" / file for file in files)
    checks = [*units, *sorted(HERE.glob("contract_checks*.py"))]
    done = subprocess.run(
        [
            engine_python, "-m", "pytest", "-q", "-c", os.devnull, "-p", "no:cacheprovider",
            "-p", "contract_engines",
            "--strict-markers", f"--rootdir={tmp_path}", "-W", "ignore", *checks,
        ],
        cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=TIMEOUT,
    )  # fmt: skip
    assert done.returncode == 0, f"vLLM {version}:\n{done.stdout}\n{done.stderr}"
