"""vLLM's own tests of MultiConnector, run on its class and on ours."""

import os
import shutil
import subprocess
import xml.etree.ElementTree as ET
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hub_cache import write_hub_cache
from sources import own_tests

from kvctl.demo.model import tiny_model

TESTS = "tests/v1/kv_connector/unit/test_multi_connector.py"
TIMEOUT = 300  # seconds: two imports of vLLM and torch on a busy machine
# Looks for each method in the class's own __dict__, where a subclass has only what it changes.
ONLY_UPSTREAMS = "test_multi_connector_overrides_all_base_methods"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, engine_python: Path) -> Path:
    """The tests, copied out, and what they need of a hub."""
    folder = tmp_path_factory.mktemp("upstream")
    shutil.copytree(own_tests("0.32.0") / "tests", folder / "tests")
    write_hub_cache(folder / "home", tiny_model(engine_python, log=folder / "model.log"))
    return folder


def test_ours_passes_what_upstreams_passes(place: Path, engine_python: Path) -> None:
    with ThreadPoolExecutor() as both:
        theirs = both.submit(run, place, engine_python, "theirs", [])
        ours = both.submit(run, place, engine_python, "ours", ["-p", "kvctl_in_place"])

    expected = {
        test
        for test, result in theirs.result().items()
        if result == "passed" and not test.endswith(ONLY_UPSTREAMS)
    }
    passed = {test for test, result in ours.result().items() if result == "passed"}
    differing = {test: ours.result().get(test) for test in expected ^ passed}
    assert not differing
    assert len(passed) >= 27


def run(place: Path, python: Path, name: str, plugin: list[str]) -> dict[str, str]:
    """Test → ``passed``, or how it ended and the message."""
    own = place / name  # the tests of connectors write their calls to files of fixed names
    own.mkdir()
    path = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [python, "-m", "pytest", TESTS, "-q", "-p", "no:cacheprovider", *plugin,
         f"--junit-xml={own / 'report.xml'}"],
        cwd=place, capture_output=True, text=True, timeout=TIMEOUT,
        env={
            **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path)), "TMPDIR": str(own),
            "HF_HOME": str(place / "home"), "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
        },
    )  # fmt: skip
    assert (own / "report.xml").exists(), done.stdout + done.stderr
    results = {}
    for case in ET.parse(own / "report.xml").iter("testcase"):
        ended = next((each for each in case if each.tag != "properties"), None)
        how = "passed" if ended is None else f"{ended.tag}: {ended.get('message')}"
        results[f"{case.get('classname')}::{case.get('name')}"] = how
    return results
