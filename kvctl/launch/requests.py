"""What other processes ask of a supervisor: files in the run's folder, taken at its next tick.

A file cannot get lost between two processes, needs no listener, and asking twice is harmless.
"""

from __future__ import annotations

from pathlib import Path

_STOP = "stop."


def ask_stop(folder: Path, names: list[str]) -> None:
    """Asks the supervisor of this run to stop single instances."""
    place = folder / "requests"
    place.mkdir(mode=0o700, exist_ok=True)
    for name in names:
        (place / f"{_STOP}{name}").touch()


def take_stops(folder: Path) -> set[str]:
    """The names of the instances to stop; each is given out once."""
    names = set()
    place = folder / "requests"
    if place.is_dir():
        for path in place.glob(f"{_STOP}*"):
            path.unlink(missing_ok=True)
            names.add(path.name.removeprefix(_STOP))
    return names


def clear(folder: Path) -> None:
    """Forgets requests that an earlier supervisor did not live to take."""
    take_stops(folder)
