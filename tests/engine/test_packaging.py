"""The built wheel, away from the clone: it carries its pins, and its commands work."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
VENV = [sys._base_executable, "-m", "venv", "--without-pip"]  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def elsewhere(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment that sees the wheel's contents and our requirements, but not
    the clone: a path file is not followed into the path files of what it names."""
    folder = tmp_path_factory.mktemp("elsewhere")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "contents")
    subprocess.run([*VENV, str(folder / "venv")], check=True)
    (site_packages,) = folder.glob("venv/lib/python3*/site-packages")
    requirements = sysconfig.get_path("purelib")
    (site_packages / "wheel.pth").write_text(f"{folder / 'contents'}\n{requirements}\n")
    return folder / "venv" / "bin" / "python"


def make_engine(folder: Path) -> Path:
    """An environment that claims to hold the CPU engine, as far as metadata goes."""
    subprocess.run([*VENV, str(folder)], check=True)
    (site_packages,) = folder.glob("lib/python3*/site-packages")
    for name, version in {"vllm": "0.32.0+cpu", "nixl": "1.5.1"}.items():
        info = site_packages / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
    return folder / "bin" / "python"


def run(
    python: Path, *arguments: str, cwd: Path, stdin: str = "", **environ: str
) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("KVCTL_")}
    return subprocess.run(
        [python, "-m", *arguments],
        cwd=cwd,
        input=stdin,
        env={**clean, "KVCTL_STATE_DIR": str(cwd / "state"), **environ},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_the_wheel_carries_what_set_up_is_made_of(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for file in (ROOT / "kvctl" / "engine").rglob("*"):
        if file.is_file() and "__pycache__" not in file.parts:
            assert str(file.relative_to(ROOT)) in names
    assert "kvctl_connector/connector.py" in names
    assert not [name for name in names if name.startswith(("tests/", "bench/", "connector/"))]


def test_no_vllm_is_required_and_none_is_provided(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (metadata,) = (name for name in archive.namelist() if name.endswith("dist-info/METADATA"))
    required = archive.read(metadata).decode()
    assert "Requires-Dist: msgspec" in required
    assert "Requires-Dist: vllm" not in required and "Requires-Dist: torch" not in required
    assert not [name for name in archive.namelist() if name.startswith("vllm/")]


def test_init_and_dry_run_work_from_it(elsewhere: Path, tmp_path: Path) -> None:
    engine = str(make_engine(tmp_path / "engine"))
    router = tmp_path / "engine" / "bin" / "vllm-router"
    router.write_text("#!/bin/sh\n")
    router.chmod(0o755)
    written = run(elsewhere, "kvctl", "init", "-f", "-", cwd=tmp_path, KVCTL_ENGINE_PYTHON=engine)
    assert written.returncode == 0, written.stderr
    arguments = ("kvctl", "launch", "--dry-run", "-f", "-")
    planned = run(
        elsewhere, *arguments, cwd=tmp_path, stdin=written.stdout, KVCTL_ENGINE_PYTHON=engine
    )
    assert planned.returncode == 0, planned.stderr
    assert str(tmp_path / "engine" / "bin") in planned.stdout
    assert str(router) in planned.stdout
    assert str(ROOT) not in planned.stdout


def test_without_an_engine_the_shipped_pins_are_named(elsewhere: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    subprocess.run([*VENV, str(empty)], check=True)
    python = str(empty / "bin" / "python")
    done = run(elsewhere, "kvctl", "demo", cwd=tmp_path, KVCTL_ENGINE_PYTHON=python)
    assert done.returncode == 3, done.stderr
    pins = elsewhere.parents[2] / "contents" / "kvctl" / "engine" / "pins"
    assert f"{python} -m pip install -r {pins / 'cpu.txt'}" in done.stderr
    assert "kvctl.engine.bootstrap engine router --folder" in done.stderr


def test_set_up_runs_from_it(elsewhere: Path, tmp_path: Path) -> None:
    done = run(elsewhere, "kvctl.engine.bootstrap", "cpu", cwd=tmp_path)
    assert done.returncode == 2
    assert "say where the environment is to be: --folder DIR" in done.stderr
