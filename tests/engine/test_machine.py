"""What a machine needs: each rule with facts that pass and facts that do not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvctl.engine import machine
from kvctl.engine.machine import GIB, Check, Machine

MIB = 1024**2

GOOD = Machine(
    system="Linux x86_64",
    glibc=(2, 36),
    python="3.12.1",
    python_path=Path("/usr/bin/python3.12"),
    has_venv=True,
    disk=Path("/home/me"),
    disk_free=50 * GIB,
    memory=16 * GIB,
    memory_available=12 * GIB,
    shared_memory=8 * GIB,
    cores=4,
    missing_libraries=(),
    apt="needs root",
)


def judge(
    *, engine: bool = True, disk: tuple[int, int] = (6 * GIB, 13 * GIB), **facts: object
) -> dict[str, Check]:
    checks = machine.check(replace(GOOD, **facts), disk=disk, engine=engine)  # type: ignore[arg-type]
    return {one.what: one for one in checks}


def test_a_good_machine_needs_nothing() -> None:
    checks = judge()
    assert {one.state for one in checks.values()} == {"ok"}
    assert set(checks) >= {"system", "python", "venv", "disk", "memory", "/dev/shm", "cores"}


@pytest.mark.parametrize(
    ("what", "facts", "found", "remedy"),
    [
        ("system", {"system": "Linux aarch64"}, "aarch64", "wheels"),
        ("system", {"system": "Darwin arm64", "glibc": None}, "no glibc", "wheels"),
        ("system", {"glibc": None}, "no glibc", "distribution"),
        ("system", {"glibc": (2, 28)}, "glibc 2.28", "newer distribution"),
        ("python", {"python": "3.10.13"}, "3.10.13", "make PYTHON="),
        ("python", {"python": "3.15.0"}, "3.15.0", "make PYTHON="),
        ("venv", {"has_venv": False}, "not there", "apt-get install -y python3.12-venv"),
        ("disk", {"disk_free": 2 * GIB}, "2 GiB free", "/home/me"),
        ("memory", {"memory": 2 * GIB, "memory_available": GIB}, "2 GiB in all", "two engines"),
        ("/dev/shm", {"shared_memory": 64 * MIB}, "64 MiB free", "--shm-size=2g"),
        ("/dev/shm", {"shared_memory": 0}, "0 B free", "--shm-size=2g"),
        (
            "libraries",
            {"missing_libraries": ("libnuma.so.1",)},
            "libnuma.so.1",
            "run as root: apt-get update && apt-get install -y libnuma1",
        ),
    ],
)
def test_what_is_missing_is_said_with_a_remedy(
    what: str, facts: dict[str, object], found: str, remedy: str
) -> None:
    one = judge(**facts)[what]
    assert one.state == "missing"
    assert found in one.found
    assert remedy in one.remedy


@pytest.mark.parametrize(
    ("what", "facts", "said"),
    [
        ("memory", {"memory_available": GIB}, "may be killed"),
        ("cores", {"cores": 1}, "slow"),
        ("disk", {"disk_free": 8 * GIB}, "without torch's CPU build, 13 GiB"),
    ],
)
def test_what_may_do_is_a_warning(what: str, facts: dict[str, object], said: str) -> None:
    one = judge(**facts)[what]
    assert one.state == "warning" and said in one.remedy


def test_without_an_engine_only_what_installing_needs_is_judged() -> None:
    assert set(judge(engine=False)) == {"system", "python", "venv", "disk"}


def test_root_on_debian_has_packages_installed() -> None:
    facts = replace(GOOD, apt="usable", has_venv=False, missing_libraries=("libnuma.so.1",))
    checks = machine.check(facts, disk=(0, 0), engine=True)
    assert {one.what for one in checks if one.state == "install"} == {"venv", "libraries"}
    assert machine.apt_packages(facts, checks) == ["python3.12-venv", "libnuma1"]


def test_no_debian_package_completes_a_python_that_is_not_debians() -> None:
    facts = {"has_venv": False, "apt": "usable", "python_path": Path("/opt/py/bin/python3")}
    one = judge(**facts)["venv"]
    assert one.state == "missing"
    assert "apt-get" not in one.remedy


def test_the_list_is_aligned_and_says_what_to_do() -> None:
    checks = machine.check(replace(GOOD, shared_memory=64 * MIB), disk=(GIB, GIB), engine=True)
    lines = machine.table(checks).splitlines()
    assert lines[1].split()[:3] == ["system", "Linux", "x86_64,"]
    (shm,) = (line for line in lines if "/dev/shm" in line)
    assert "64 MiB free" in shm and "MISSING: start the container with --shm-size=2g" in shm
    assert len({line.rstrip().rfind("ok") for line in lines if line.endswith("ok")}) == 1


def test_a_containers_limits_count(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 16777216 kB\nMemFree: 1 kB\nMemAvailable: 8388608 kB\n")
    assert machine._memory(meminfo, tmp_path) == (16 * GIB, 8 * GIB)
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert machine._memory(meminfo, tmp_path) == (16 * GIB, 8 * GIB)
    whole = machine._cores(tmp_path)
    (tmp_path / "memory.max").write_text(f"{2 * GIB}\n")
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    assert machine._memory(meminfo, tmp_path) == (2 * GIB, 2 * GIB)
    assert machine._cores(tmp_path) == 0.5 < whole


def test_the_machine_at_hand_can_be_looked_at(tmp_path: Path) -> None:
    facts = machine.look(tmp_path / "not" / "there" / "yet")
    assert facts.disk == tmp_path
    assert facts.disk_free > 0
    assert facts.system.startswith("Linux")
