"""Starts and stops the demo's pair: the same launch, detached, that a person would use."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvctl.demo.setting import Setting
from kvctl.demo.steps import Display
from kvctl.demo.topology_file import NAME, topology_text
from kvctl.engine.environment import EngineEnvironment
from kvctl.errors import KvctlError, UnreachableError, UsageError
from kvctl.launch.connector_copy import lay_connector
from kvctl.launch.ending import stop_run
from kvctl.launch.launching import launch
from kvctl.launch.offer_key import offer_key_path
from kvctl.launch.state import STATE_DIR, load, state_dir
from kvctl.topology.free_ports import free_base
from kvctl.topology.load import load as load_topology
from kvctl.topology.plan import Plan, make_plan


@dataclass(frozen=True)
class Pair:
    """The running pair.

    Attributes:
        file: its topology file.
        url: of the router.
        feeds: of both engines.
    """

    file: Path
    url: str
    feeds: Sequence[str]


def demo_folder() -> Path:
    """Where the demo keeps its topology file and the logs of what it runs beside the pair."""
    return state_dir() / "demo"


def refuse_second() -> None:
    """Its figures count from the start of a fresh pair, so one that runs is not taken over.

    Raises:
        UsageError: a demo runs already.
    """
    state = load(NAME)
    if state and state.running():
        raise UsageError(
            f"a topology called {NAME} is running already: of an earlier kvctl demo --keep, or "
            "of a demo that is under way",
            hint=f"look at it with kvctl status -p {NAME}, or end it with kvctl stop -p {NAME}",
        )


@contextlib.contextmanager
def running_pair(
    setting: Setting, *, model: Path, engine: EngineEnvironment, keep: bool, display: Display
) -> Iterator[tuple[int, Pair | None]]:
    """Launches the pair, waits until it is ready, and stops it at the end of the block.

    The block gets the exit code of the launch and, if that is 0, the pair; with another code a
    signal has ended the launch.

    Args:
        keep: let the pair run on after a block that raised nothing.

    Raises:
        KvctlError: it did not get ready, and nothing of it runs any more; or it does not end.
    """
    file = demo_folder() / "kvctl.yaml"
    text = topology_text(setting, model=model, python=engine.python, base=free_base())
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    except OSError as error:
        raise UnreachableError(
            f"the topology cannot be written: {file}: {error.strerror}",
            hint=f"free space there, or set {STATE_DIR} to a folder that can be written",
        ) from error
    topology = load_topology(str(file), text=text)
    plan = make_plan(
        topology, engine=engine, connector_path=lay_connector(), offer_key=offer_key_path(NAME)
    )
    stop = True
    try:
        try:
            code = _launch(plan, text, display)
        except KvctlError:
            stop = False  # nothing runs, or what runs was started by another kvctl
            raise
        yield code, None if code else _pair(plan, file)
        stop = not keep
    finally:
        if stop:
            _stop(display)


def _launch(plan: Plan, text: str, display: Display) -> int:
    with display.processes() as watcher:
        return launch(
            plan, text=text, detach=True, watcher=watcher, log_watcher=display.supervisor_log
        )


def _stop(display: Display) -> None:
    state = load(NAME)
    if state and state.running():
        with display.processes(state) as watcher:
            stop_run(state, [], watcher)


def _pair(plan: Plan, file: Path) -> Pair:
    (url,) = (each.url for each in plan.processes if each.kind == "router" and each.url)
    engines = [each for each in plan.processes if each.kind == "engine"]
    return Pair(file, url, [feed for engine in engines for feed in engine.feeds])
