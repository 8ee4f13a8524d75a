"""The very last test of a run: nothing that it started is still there."""

import os
from pathlib import Path

import pytest

pytestmark = pytest.mark.last


def test_no_process_of_this_run_is_left() -> None:
    run_id = os.environ["KVCTL_RUN_ID"].encode()
    left = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if b"KVCTL_RUN_ID=" + run_id in (entry / "environ").read_bytes():
                    command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                    left[int(entry.name)] = command
            except OSError:
                continue
    assert left == {}
