"""What the tests of several packages share. Being here, it also puts this folder on the path, so
that they can import the stand-ins next to it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from otlp_receiver import OtlpReceiver, http_receiver


def pytest_configure() -> None:
    """Marks every process that this run starts, so that the last test can look for leftovers."""
    os.environ["KVCTL_RUN_ID"] = f"tests-{uuid.uuid4().hex}"
    # A shell starts its background jobs with Ctrl-C ignored, and so is all that they start.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Fast tests first, then those on real engines, then the look for leftovers."""
    items.sort(
        key=lambda item: (
            item.get_closest_marker("last") is not None,
            item.get_closest_marker("engine") is not None,
        )
    )


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """A failure beside running engines leaves their stacks in the log."""
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]
    running = getattr(item, "funcargs", {}).get("pair")
    if report.failed and hasattr(running, "print_stacks"):
        running.print_stacks()


@pytest.fixture(scope="session")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """State and runtime folders of this run's own, for every kvctl that it starts."""
    folder = tmp_path_factory.mktemp("kvctl")
    patch = pytest.MonkeyPatch()
    patch.setenv("KVCTL_STATE_DIR", str(folder / "state"))
    patch.setenv("KVCTL_RUNTIME_DIR", str(folder / "run"))
    yield folder
    patch.undo()


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
