"""Set-up as a whole: what a person sees, and that it goes on after any interruption."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kvctl.engine import machine, provision
from kvctl.engine import steps as plans
from kvctl.errors import UsageError

ROOT = Path(__file__).parents[2]
DEADLINE = 120.0


class Programs:
    """Stands in for pip and venv: makes the files that a step gives, and can be told to fail."""

    def __init__(self) -> None:
        self.commands: list[list[str]] = []
        self.before: Callable[[list[str]], None] = lambda _command: None

    def run(self, command: list[str], **_options: object) -> None:
        self.before(command)
        self.commands.append(command)
        if "venv" in command:
            self._give(Path(command[-1]), "python")
        for pins, program in {
            "cpu.txt": "vllm",
            "router.txt": "vllm-router",
            "dev.txt": "pytest",
        }.items():
            if command[-1].endswith(pins):
                self._give(Path(command[0]).parents[1], program)

    @staticmethod
    def _give(environment: Path, program: str) -> None:
        (environment / "bin").mkdir(parents=True, exist_ok=True)
        (environment / "bin" / program).touch()


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> Programs:
    stand_in = Programs()
    monkeypatch.setattr(provision, "run", stand_in.run)
    monkeypatch.setattr(provision, "has_nvidia_gpu", lambda: False)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    for name in ("KVCTL_ENGINE", "KVCTL_ENGINE_PYTHON"):
        monkeypatch.delenv(name, raising=False)
    change_machine(monkeypatch)
    return stand_in


def change_machine(monkeypatch: pytest.MonkeyPatch, **facts: object) -> None:
    """The machine at hand, but roomy; and with those facts."""
    roomy = dict.fromkeys(("disk_free", "memory", "memory_available"), 64 * machine.GIB)
    at_hand = machine.look(Path("/"))
    made_up = {**roomy, "shared_memory": 8 * machine.GIB, "missing_libraries": (), **facts}
    changed = replace(at_hand, cores=4, has_venv=True, **made_up)  # type: ignore[arg-type]
    monkeypatch.setattr(provision, "look", lambda _folder: changed)


def set_up(folder: Path, *parts: str) -> int:
    return provision.main([*(parts or ("cpu", "router", "dev")), "--folder", str(folder)])


def test_a_second_run_starts_no_program(
    tmp_path: Path, programs: Programs, capsys: pytest.CaptureFixture[str]
) -> None:
    assert set_up(tmp_path / "v") == 0
    said = capsys.readouterr()
    assert "[1/4] environment" in said.err and "[4/4] test tools: done" in said.err
    assert said.out == ""
    programs.commands.clear()
    assert set_up(tmp_path / "v") == 0
    assert programs.commands == []
    assert capsys.readouterr().err == f"kvctl set-up: {tmp_path / 'v'} is complete\n"


@pytest.mark.parametrize("last", range(6))
def test_interrupted_anywhere_it_goes_on(tmp_path: Path, programs: Programs, last: int) -> None:
    def interrupt(_command: list[str]) -> None:
        if len(programs.commands) == last:
            raise KeyboardInterrupt

    programs.before = interrupt
    assert set_up(tmp_path / "v") == 130
    programs.before = lambda _command: None
    done = len(programs.commands)
    assert set_up(tmp_path / "v") == 0
    again = programs.commands[done:]
    # What was finished is not done again: venv, 2 × engine, venv, router, dev.
    assert len(again) == 6 - {0: 0, 1: 1, 2: 1, 3: 3, 4: 3, 5: 5}[last]
    assert not list((tmp_path / "v" / plans.STAMPS).glob("tmp*"))


def test_what_is_missing_ends_it_before_anything_is_done(
    tmp_path: Path,
    programs: Programs,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    change_machine(monkeypatch, shared_memory=64 * 1024**2, disk_free=machine.GIB)
    assert set_up(tmp_path / "v") == 4
    said = capsys.readouterr().err
    assert "--shm-size=2g" in said
    assert "cannot go on without: disk, /dev/shm" in said
    assert programs.commands == [] and not (tmp_path / "v").exists()


def test_a_complete_set_up_still_says_what_is_missing_now(
    tmp_path: Path, programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert set_up(tmp_path / "v") == 0
    change_machine(monkeypatch, shared_memory=0)
    assert set_up(tmp_path / "v") == 4
    assert set_up(tmp_path / "v", "dev") == 0


def test_root_has_system_packages_installed_first(
    tmp_path: Path, programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    change_machine(monkeypatch, missing_libraries=("libnuma.so.1",), apt="usable")
    assert set_up(tmp_path / "v", "cpu") == 0
    assert programs.commands[0] == ["apt-get", "update"]
    assert programs.commands[1][-1] == "libnuma1"


def test_a_foreign_folder_is_left_alone(tmp_path: Path, programs: Programs) -> None:
    (tmp_path / "mine").touch()
    assert set_up(tmp_path) == 4
    assert programs.commands == [] and (tmp_path / "mine").exists()


@pytest.mark.parametrize(
    ("number", "said"), [(errno.ENOSPC, "No space left on device"), (errno.EACCES, "Permission")]
)
def test_an_error_of_the_disk_is_a_sentence(
    tmp_path: Path,
    programs: Programs,
    capsys: pytest.CaptureFixture[str],
    number: int,
    said: str,
) -> None:
    def fail(_command: list[str]) -> None:
        raise OSError(number, os.strerror(number), "/v/.setup/tmp")

    programs.before = fail
    assert set_up(tmp_path / "v") == 4
    assert f"/v/.setup/tmp: {said}" in capsys.readouterr().err


def test_a_second_set_up_waits_for_the_first(
    tmp_path: Path, programs: Programs, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "v"
    folder.mkdir()
    first = os.open(folder / plans.LOCK, os.O_RDWR | os.O_CREAT)
    os.write(first, b"4711")
    fcntl.flock(first, fcntl.LOCK_EX)
    second = threading.Thread(target=set_up, args=(folder, "dev"), daemon=True)
    second.start()
    said = ""
    give_up = time.monotonic() + 10
    while "process 4711" not in said and time.monotonic() < give_up:
        said += capsys.readouterr().err
        time.sleep(0.01)
    assert "waiting for the set-up that is at work" in said
    assert programs.commands == []
    os.close(first)
    second.join(10)
    assert len(programs.commands) == 2


@pytest.mark.parametrize(
    ("environ", "nvidia", "part"),
    [
        ({}, False, {"cpu"}),
        ({}, True, {"cuda"}),
        ({"KVCTL_ENGINE": "cpu"}, True, {"cpu"}),
        ({"KVCTL_ENGINE": "cuda"}, False, {"cuda"}),
        ({"KVCTL_ENGINE_PYTHON": "/opt/vllm/bin/python"}, True, set()),
    ],
)
def test_the_engine_fits_the_hardware_or_what_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], nvidia: bool, part: set[str]
) -> None:
    monkeypatch.setattr(provision, "has_nvidia_gpu", lambda: nvidia)
    parts, why = provision._resolve_engine({"engine", "router"}, environ)
    assert parts == part | {"router"}
    assert why
    assert provision._resolve_engine({"dev"}, environ) == ({"dev"}, "")


def test_an_unknown_engine_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="KVCTL_ENGINE=tpu: it is cpu or cuda"):
        provision._resolve_engine({"engine"}, {"KVCTL_ENGINE": "tpu"})


def test_outside_a_clone_a_folder_must_be_named(
    programs: Programs,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(provision, "SOURCE", tmp_path)
    assert provision.main(["cpu"]) == 2
    assert "--folder DIR" in capsys.readouterr().err
    assert set_up(tmp_path / "v", "tool") == 2


def test_pip_is_kept_from_installing_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_USER", "1")
    monkeypatch.setenv("PIP_TARGET", "/elsewhere")
    monkeypatch.setenv("PIP_INDEX_URL", "https://index.example/simple")
    environ = provision._environ(tmp_path)
    assert environ["TMPDIR"] == str(tmp_path)
    assert environ["PIP_INDEX_URL"] == "https://index.example/simple"
    assert not {"PIP_USER", "PIP_TARGET"} & environ.keys()


# A distribution whose build says that it has begun, and then waits to be let go.
SLOW_BACKEND = """
import os, pathlib, shutil, time
HERE = pathlib.Path(__file__).parent
def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    (HERE / "building").write_text(str(os.getpid()))
    deadline = time.monotonic() + 60
    while not (HERE / "go").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    return shutil.copy(HERE / "slow-1-py3-none-any.whl", wheel_directory).rsplit("/", 1)[-1]
"""


def make_clone(folder: Path, *requirements: Path) -> Path:
    """A copy of what set-up is made of, with other pins; returns the script. That it runs shows
    that set-up needs nothing else of kvctl, and nothing that is installed."""
    engine = folder / "kvctl" / "engine"
    shutil.copytree(ROOT / "kvctl" / "engine", engine, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("__init__.py", "errors.py", "units.py"):
        shutil.copy(ROOT / "kvctl" / name, folder / "kvctl" / name)
    (engine / "pins" / "dev.txt").write_text("".join(f"{file}\n" for file in requirements))
    return engine / "bootstrap.py"


def make_wheel(folder: Path, name: str) -> Path:
    """A wheel with one script called pytest, which the step for the test tools gives."""
    wheel = folder / f"{name}-1-py3-none-any.whl"
    kind = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    with zipfile.ZipFile(wheel, "w") as archive:
        info = f"{name}-1.dist-info"
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
        archive.writestr(f"{info}/WHEEL", kind)
        archive.writestr(f"{name}-1.data/scripts/pytest", "#!python\n")
        archive.writestr(f"{info}/RECORD", "")
    return wheel


def wait_for(path: Path) -> None:
    give_up = time.monotonic() + DEADLINE
    while not path.exists():
        assert time.monotonic() < give_up, f"{path} never appeared"
        time.sleep(0.02)


def test_killed_while_pip_works_and_run_again(tmp_path: Path) -> None:
    slow = tmp_path / "slow"
    slow.mkdir()
    (slow / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    )
    (slow / "backend.py").write_text(SLOW_BACKEND)
    make_wheel(slow, "slow")
    script = make_clone(tmp_path / "clone", make_wheel(tmp_path, "tools"), slow)
    folder = tmp_path / "v"
    command = [sys.executable, "-I", str(script), "dev", "--folder", str(folder)]
    environ = {**os.environ, "PIP_NO_INDEX": "1"}

    first = subprocess.Popen(command, env=environ, stderr=subprocess.DEVNULL)
    wait_for(slow / "building")
    first.kill()  # pip, its child, lives on and holds the lock
    first.wait()
    second = subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True)
    (slow / "go").touch()
    _, said = second.communicate(timeout=DEADLINE)
    assert second.returncode == 0, said
    assert "is complete" in said
    assert (folder / "bin" / "pytest").exists()
    assert "[1/1] test tools" in said  # the environment was there already

    moved = tmp_path / "moved"
    folder.rename(moved)
    command[-1] = str(moved)
    third = subprocess.run(
        command, env=environ, stderr=subprocess.PIPE, text=True, timeout=DEADLINE
    )
    assert third.returncode == 0, third.stderr
    assert "[1/2] environment" in third.stderr
    assert str(moved) in (moved / "bin" / "pytest").read_text()
