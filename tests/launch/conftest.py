"""A place of its own for each test that launches something, and proof that nothing is left."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from places import Place


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """A place to launch in; afterwards nothing of it may run any more."""
    runtime = Path(tempfile.mkdtemp(prefix="kvctl-test-"))  # short: sockets lie there
    place = Place(tmp_path, runtime)
    for name in ("KVCTL_STATE_DIR", "KVCTL_RUNTIME_DIR"):
        monkeypatch.setenv(name, place.env[name])
    yield place
    left = place.processes()
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    sockets = list(runtime.iterdir())
    shutil.rmtree(runtime)
    assert not left, f"still running: {left}"
    assert not sockets, f"left behind: {sockets}"


@pytest.fixture
def shm() -> Iterator[str]:
    """The name of a file in /dev/shm that nothing else uses."""
    name = f"kvctl-test-{secrets.token_hex(6)}"
    yield name
    Path("/dev/shm", name).unlink(missing_ok=True)
