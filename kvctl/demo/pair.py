"""Starts and stops the demo's pair: the same launch, detached, that a person would use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvctl.demo.setting import Setting
from kvctl.demo.steps import Display
from kvctl.demo.topology_file import NAME, topology_text
from kvctl.engine.environment import EngineEnvironment
from kvctl.errors import UsageError
from kvctl.launch.connector_copy import lay_connector
from kvctl.launch.ending import stop_run
from kvctl.launch.launching import launch
from kvctl.launch.state import load, state_dir
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


def start_pair(
    setting: Setting, *, model: Path, engine: EngineEnvironment, display: Display
) -> tuple[int, Pair | None]:
    """Launches the pair and waits until it is ready.

    Returns:
        The exit code, and the pair if that is 0; otherwise a signal ended the launch.

    Raises:
        KvctlError: it did not get ready, and nothing of it runs any more.
    """
    file = demo_folder() / "kvctl.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    text = topology_text(setting, model=model, python=engine.python, base=free_base())
    file.write_text(text)
    topology = load_topology(str(file), text=text)
    plan = make_plan(topology, engine=engine, connector_path=lay_connector())
    with display.processes() as watcher:
        code = launch(
            plan, text=text, detach=True, watcher=watcher, log_watcher=display.supervisor_log
        )
    return code, None if code else _pair(plan, file)


def stop_pair(display: Display) -> None:
    """Ends the pair, whatever of it runs.

    Raises:
        InstanceError: something does not end.
    """
    state = load(NAME)
    if state:
        with display.processes(state) as watcher:
            stop_run(state, [], watcher)


def _pair(plan: Plan, file: Path) -> Pair:
    (url,) = (each.url for each in plan.processes if each.kind == "router" and each.url)
    engines = [each for each in plan.processes if each.kind == "engine"]
    return Pair(file, url, [feed for engine in engines for feed in engine.feeds])
