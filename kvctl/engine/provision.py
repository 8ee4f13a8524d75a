"""Set-up itself: look at the machine, say what is missing or will be done, then do it.

    provision [cpu|cuda|engine] [tool] [router] [dev] [--folder DIR]

"engine" is the CPU or the CUDA engine, by the hardware that is found; ``KVCTL_ENGINE=cpu`` or
``cuda`` decides otherwise, and ``KVCTL_ENGINE_PYTHON`` says that there is an engine already, so
that none is installed. All that is said goes to stderr.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import fcntl
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from kvctl.engine import steps as plans
from kvctl.engine.hardware import has_nvidia_gpu
from kvctl.engine.machine import apt_packages, base_python, check, look, table
from kvctl.engine.programs import run
from kvctl.engine.progress import Progress, say
from kvctl.engine.steps import Place, Step
from kvctl.errors import Exit, InstanceError, KvctlError, UsageError

ENGINE = "KVCTL_ENGINE"
PARTS = ("engine", "cpu", "cuda", "tool", "router", "dev")
SOURCE = Path(__file__).resolve().parents[2]  # the clone, where this file lies in one


def main(arguments: list[str]) -> int:
    """Runs set-up; returns an exit code of `kvctl.errors.Exit`."""
    for name in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, _stop)
    try:
        _provision(arguments)
    except KvctlError as error:
        _say(str(error))
        return error.exit_code
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        _say(f"{error.filename or 'cannot write'}: {error.strerror}")
        return Exit.FAILED
    except KeyboardInterrupt:
        _say("interrupted; run it again to go on")
        return Exit.INTERRUPTED
    return Exit.OK


def _provision(arguments: list[str]) -> None:
    options = _parse(arguments)
    parts, why = _resolve_engine(set(options.parts), os.environ)
    in_clone = (SOURCE / "pyproject.toml").exists()
    if "tool" in parts and not in_clone:
        raise UsageError("there is no clone of kvctl here to install", hint="leave out: tool")
    if options.folder is None and not in_clone:
        raise UsageError("say where the environment is to be: --folder DIR")
    folder = Path(options.folder).expanduser().absolute() if options.folder else SOURCE / ".venv"
    version = ".".join(map(str, sys.version_info[:2]))
    place = Place(folder, base_python(), version)
    steps = plans.plan(place, parts, SOURCE)
    due = place.due(steps)
    if due:
        plans.refuse_foreign(folder)
    packages = _check_machine(place, due, engine=why)
    if due or packages:
        with _locked(folder) as lock:
            if packages:
                _apt_install(place, packages)
            # Somebody else may have done some of it while we waited.
            _install(place, place.due(steps), lock)


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bootstrap.py", description="Sets up kvctl and engines.")
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--folder", metavar="DIR", help="the environment (default: .venv)")
    options = parser.parse_args(arguments)
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"unknown part {sorted(unknown)[0]}; there are {', '.join(PARTS)}")
    return options


def _resolve_engine(parts: set[str], environ: Mapping[str, str]) -> tuple[set[str], str]:
    """Puts "cpu" or "cuda" in the place of "engine", and says why; empty if no engine is meant.

    Raises:
        UsageError: ``$KVCTL_ENGINE`` is neither.
    """
    if named := parts & plans.ENGINES.keys():
        return parts - {"engine"}, f"{sorted(named)[0]}, as asked for"
    if "engine" not in parts:
        return parts, ""
    rest = parts - {"engine"}
    if python := environ.get("KVCTL_ENGINE_PYTHON"):
        return rest, f"the one of {python}, as KVCTL_ENGINE_PYTHON says"
    if chosen := environ.get(ENGINE):
        if chosen not in plans.ENGINES:
            raise UsageError(f"{ENGINE}={chosen}: it is cpu or cuda")
        return rest | {chosen}, f"{chosen}, as {ENGINE} says"
    if has_nvidia_gpu():
        return rest | {"cuda"}, f"cuda, as there is an NVIDIA GPU ({ENGINE}=cpu for the other one)"
    return rest | {"cpu"}, f"cpu, as there is no NVIDIA GPU ({ENGINE}=cuda for the other one)"


def _check_machine(place: Place, due: list[Step], *, engine: str) -> list[str]:
    """Prints the list, if anything is to be done or is wrong.

    Args:
        engine: which one and why; empty if none is to run here.

    Returns:
        Debian packages that are to be installed.

    Raises:
        InstanceError: something is missing that only the operator can give.
    """
    machine = look(place.folder)
    checks = check(machine, disk=plans.disk_needed(place.folder, due), engine=bool(engine))
    if not due and all(one.state == "ok" for one in checks):
        _say(f"{place.folder} is complete")
        return []
    _say("what is needed here")
    say(table(checks))
    if engine:
        say(f"  the engine is {engine}")
    if missing := [one.what for one in checks if one.state == "missing"]:
        raise InstanceError(
            f"cannot go on without: {', '.join(missing)}", hint="see the list above"
        )
    return apt_packages(machine, checks)


def _apt_install(place: Place, packages: list[str]) -> None:
    log = place.folder / "setup-apt.log"
    environ = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C"}
    progress = Progress(1)
    progress.begin("system packages", ", ".join(packages))
    for arguments in (["update"], ["install", "-y", "--no-install-recommends", *packages]):
        run(["apt-get", *arguments], log=log, show=progress.update, env=environ)
    progress.end()


def _install(place: Place, due: list[Step], lock: int) -> None:
    began = time.monotonic()
    progress = Progress(len(due))
    for step in due:
        progress.begin(step.title, step.detail)
        if step.environment == place.folder and step.creates:
            plans.clear(place.folder, keep=(plans.LOCK,))
        place.begin(step)
        _run_all(place, step, progress, lock)
        place.mark_done(step)
        progress.end()
    minutes, seconds = divmod(round(time.monotonic() - began), 60)
    _say(f"{place.folder} is complete, after {minutes}:{seconds:02}")


def _run_all(place: Place, step: Step, progress: Progress, lock: int) -> None:
    log = place.folder / f"setup-{step.name}.log"
    log.unlink(missing_ok=True)
    temporary = place.folder / plans.STAMPS / "tmp"  # pip unpacks there: on the disk we checked
    shutil.rmtree(temporary, ignore_errors=True)  # of a run that was killed
    temporary.mkdir(parents=True)
    show = _counting(step.environment, progress.update)
    try:
        for command in _commands(place, step):
            run(command, log=log, show=show, env=_environ(temporary), keep_open=(lock,))
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _commands(place: Place, step: Step) -> Iterator[list[str]]:
    """The command lines of a step; what an interrupted run left is removed before they run."""
    if step.creates:
        if step.environment != place.folder:
            plans.clear(step.environment)
        # -I: no PYTHONPATH and no user's packages, so that the same is installed everywhere.
        yield [str(place.python), "-I", "-m", "venv", str(step.environment)]
    if dropped := plans.drop_half_installed(step.environment):
        say(f"      an interrupted run left half-installed, now replaced: {', '.join(dropped)}")
    pip = [str(step.environment / "bin" / "python"), "-I", "-m", "pip", "install"]
    for arguments in step.pip:
        yield [*pip, "--progress-bar", _progress_bar(step.environment), *arguments]


def _counting(environment: Path, show: Callable[[str], None]) -> Callable[[str], None]:
    """Adds to pip's "installing 147 packages", which lasts a minute, how many are there by now."""
    before: int | None = None

    def shown(activity: str) -> None:
        nonlocal before
        if activity.startswith("installing "):
            there = sum(1 for _ in environment.glob("lib/python3.*/site-packages/*.dist-info"))
            before = there if before is None else before
            activity += f", {there - before} done"
        else:
            before = None
        show(activity)

    return shown


def _progress_bar(environment: Path) -> str:
    """pip 24.1 and later can print plain figures of a download."""
    for pip in environment.glob("lib/python3.*/site-packages/pip-*.dist-info"):
        if (version := re.match(r"pip-(\d+)\.(\d+)", pip.name)) is not None:
            return "raw" if (int(version[1]), int(version[2])) >= (24, 1) else "off"
    return "off"


def _environ(temporary: Path) -> dict[str, str]:
    """pip's settings are honoured, but for those that would install somewhere else."""
    elsewhere = {"PIP_USER", "PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_REQUIRE_VIRTUALENV"}
    environ = {name: value for name, value in os.environ.items() if name not in elsewhere}
    settings = {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1", "PIP_NO_COLOR": "1"}
    return environ | settings | {"TMPDIR": str(temporary)}


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[int]:
    """One set-up at a time. The programs that it runs inherit the lock: one that was orphaned by
    a SIGKILL is waited for as well."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / plans.LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(descriptor, 32, 0).decode() or "?"
            _say(f"waiting for the set-up that is at work in {folder} (process {owner})")
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield descriptor
    finally:
        os.close(descriptor)


def _stop(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)


def _say(text: str) -> None:
    say(f"kvctl set-up: {text}")
