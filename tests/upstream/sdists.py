"""vLLM's source distributions, fetched at test time: none of their files is in this repository.

They lie in ``${XDG_CACHE_HOME:-~/.cache}/kvctl/releases/`` under their own file names, checked
against pinned hashes.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import urllib.request
from pathlib import Path

from kvctl.demo.cache import entry

FILES = "https://files.pythonhosted.org/packages"
TIMEOUT = 60.0  # seconds without a byte
# Release → where PyPI keeps the sdist, and its sha256.
PINS = {
    "0.20.2": (
        "cd/23/4a5dc23600be07407835e404d06a2fcd587c8dcaebeab314b5c3593509ce",
        "58809377798c5335c6e2fe30092abda54d9200b5b8a717b3735a63f5daa0e383",
    ),
    "0.22.1": (
        "84/7c/6c745e218eaffc0fe77480d0fcbbf6835ba655da3691606eba3b8b48cc81",
        "cd34902729f3767e3dfbb391956b2986bc638a54be9893e78bda9cc55669f15c",
    ),
    "0.24.0": (
        "d4/17/ea541f9ffb31d438ed6a5a8e1f7b9805410664abf97e326f28416147a5da",
        "0862453adc1f3339f1a0c9dca1179c34d6ed6e118f87b6e5bddd120af614ac66",
    ),
    "0.32.0": (
        "d5/df/5471312c76e335eaa2b8333e87ea39f0d37bfe24f10a582620e34ff12e33",
        "d2c957d5eee3d0985012151315ddc62cbe0cd368fc96a5fc3510438d9dddf2ad",
    ),
    "0.33.0": (
        "f7/25/aa5684e9c59d6fc75f78926b7f15e8d9adc7de2d9e6e7575b80776ad8169",
        "f4c33c2503d52bb411146afa9618a4f48bed68912f617e6803ac8d76e4c74112",
    ),
}

# What a release's Python imports and the installed one does not.
NEEDS = {"0.20.2": "gguf==0.19.0", "0.22.1": "gguf==0.19.0"}


def search_path(version: str) -> list[Path]:
    """What goes in front of the path so that a release's Python is imported, not the installed one.

    The package alone, without its metadata, which would hide the version that says "CPU".

    Raises:
        AssertionError: as `unpack`, or pip failed.
    """
    name = f"{version}-{PINS[version][1][:8]}"
    folders = [entry("vllm", name, lambda folder: unpack(version, "vllm", folder))]
    if requirement := NEEDS.get(version):
        folders.append(entry("package", requirement, lambda folder: _install(requirement, folder)))
    return folders


def _install(requirement: str, folder: Path) -> None:
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target"]
    done = subprocess.run([*pip, folder, requirement], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def unpack(version: str, inside: str, folder: Path) -> None:
    """Puts one folder of a release's sdist, ``tests`` or ``vllm``, into `folder`.

    Raises:
        AssertionError: what was fetched is not the file that is pinned.
    """
    top = f"vllm-{version}/"
    with tarfile.open(_sdist(version)) as archive:
        for member in archive:
            if member.name.startswith(f"{top}{inside}/"):
                name = member.name.removeprefix(top)
                archive.extract(member.replace(name=name), folder, filter="data")


def _sdist(version: str) -> Path:
    place, sha256 = PINS[version]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    file = cache / "kvctl" / "releases" / f"vllm-{version}.tar.gz"
    if not file.exists() or _sha256(file) != sha256:
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_name(f"{file.name}.{os.getpid()}")
        url = f"{FILES}/{place}/{file.name}"
        with urllib.request.urlopen(url, timeout=TIMEOUT) as response, part.open("wb") as out:
            shutil.copyfileobj(response, out)
        found = _sha256(part)
        assert found == sha256, f"{url} has the hash {found}, not the pinned one: {part}"
        part.replace(file)
    return file


def _sha256(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
