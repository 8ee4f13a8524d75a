"""The very last test of a run: nothing that it started is still there.

Every process of a run carries KVCTL_RUN_ID in its environment. vLLM's engine cores and workers
overwrite that memory when they set their title, so they are known by their output, which goes to
a log below the run's temporary folder.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.last


def processes_of_this_run(folder: Path) -> dict[int, str]:
    """Command lines by pid, without this process."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                marked = f"KVCTL_RUN_ID={os.environ['KVCTL_RUN_ID']}".encode()
                if marked in (entry / "environ").read_bytes() or any(
                    file.is_relative_to(folder) for file in open_files(entry)
                ):
                    command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                    found[int(entry.name)] = command
            except OSError:
                continue
    return found


def open_files(process: Path) -> Iterator[Path]:
    for descriptor in (process / "fd").iterdir():
        try:
            yield descriptor.readlink()
        except OSError:
            continue


def test_the_look_finds_both_kinds(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.getbasetemp()
    wait = [sys.executable, "-c", "input()"]
    marked = subprocess.Popen(wait, stdin=subprocess.PIPE)
    env = {key: value for key, value in os.environ.items() if key != "KVCTL_RUN_ID"}
    with (folder / "log").open("w") as log:
        unmarked = subprocess.Popen(wait, stdin=subprocess.PIPE, stdout=log, env=env)
    try:
        assert set(processes_of_this_run(folder)) == {marked.pid, unmarked.pid}
    finally:
        for process in (marked, unmarked):
            process.communicate(b"\n", timeout=20)


def test_no_process_of_this_run_is_left(tmp_path_factory: pytest.TempPathFactory) -> None:
    assert processes_of_this_run(tmp_path_factory.getbasetemp()) == {}
