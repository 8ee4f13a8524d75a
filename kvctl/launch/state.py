"""What a launch started, on disk: how ``ps``, ``stop``, ``logs`` and ``status`` know of it.

One folder a topology: ``<state dir>/runs/<name>/`` with ``state.json``, ``lock`` (held by the
supervisor for its life), ``logs/`` and ``topology.yaml``. Only the holder of the lock writes.

Any kvctl must be able to stop what any other started. So fields that a version does not know are
ignored and missing ones get defaults; of a file of a newer schema at least the core is taken
(names, pids, start times), and nothing in it is touched but what a stop changes.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

import msgspec

from kvctl.errors import UnreachableError, UsageError
from kvctl.launch import procfs
from kvctl.launch.procfs import Identity
from kvctl.launch.shared_memory import Segment

SCHEMA = 1
STATE_DIR = "KVCTL_STATE_DIR"

Phase = Literal["starting", "loading", "ready", "stopping", "exited", "failed", "killed"]
RunPhase = Literal["starting", "running", "stopping", "stopped", "failed"]
DEFAULT_STOP_TIMEOUT = 30.0  # s
ENDED = ("exited", "failed", "killed")


class StateError(UnreachableError):
    """A state file that cannot be read. Nothing of it is ever overwritten or removed."""

    def __init__(self, path: Path, why: str) -> None:
        self.name = path.parent.name
        super().__init__(
            f"the state of {self.name} cannot be read: {path}: {why}",
            hint=f"kvctl stop -p {self.name} ends what it started as far as it can be found, "
            "and keeps the file under another name",
        )


class ProcessRecord(msgspec.Struct):
    """One process of a plan.

    Attributes:
        pid, started: of the process that was started, its `Identity`; 0 before that.
        exit_code: as a shell gives it, 128 + n for signal n; None while it runs or when unknown.
        members: the living processes of its session when last looked at, itself included.
        shm: the files in /dev/shm that they had and that are not removed yet.
        since: Unix time in s at which the phase began.
        started_at: Unix time in s at which the process was started.
        log: file name inside the run's log folder.
        cause, hint: why it failed and what to do, for people.
    """

    name: str
    kind: str
    role: str | None = None
    pid: int = 0
    started: int = 0
    phase: Phase = "starting"
    exit_code: int | None = None
    url: str | None = None
    ports: dict[str, int] = {}
    feeds: list[str] = []
    log: str = ""
    members: list[Identity] = []
    shm: list[Segment] = []
    since: float = 0.0
    started_at: float = 0.0
    cause: str | None = None
    hint: str | None = None

    @property
    def identity(self) -> Identity:
        return Identity(self.pid, self.started)


class RunState(msgspec.Struct):
    """One launch.

    Attributes:
        boot: id of the boot in which the pids and start times were taken.
        supervisor_pid, supervisor_started: `Identity` of the supervisor.
        started_at: Unix time in s.
        stop_timeout: seconds that an engine gets to end by itself.
        cause, hint: why the launch failed and what to do, for people.
    """

    name: str
    run_id: str
    processes: list[ProcessRecord]
    schema: int = SCHEMA
    kvctl_version: str = ""
    file: str = ""
    model: str = ""
    boot: str = ""
    supervisor_pid: int = 0
    supervisor_started: int = 0
    started_at: float = 0.0
    stop_timeout: float = DEFAULT_STOP_TIMEOUT
    phase: RunPhase = "starting"
    cause: str | None = None
    hint: str | None = None

    @property
    def supervisor(self) -> Identity:
        return Identity(self.supervisor_pid, self.supervisor_started)

    def same_boot(self) -> bool:
        """False when the machine was restarted since: then nothing recorded can live."""
        return not self.boot or self.boot == procfs.boot_id()

    def supervised(self) -> bool:
        """True while its supervisor lives."""
        return self.same_boot() and procfs.lives(self.supervisor)

    def living(self) -> list[ProcessRecord]:
        """The records of which the process itself or another member of its session lives."""
        if not self.same_boot():
            return []
        return [
            record
            for record in self.processes
            if any(procfs.lives(identity) for identity in {record.identity, *record.members})
        ]

    def running(self) -> bool:
        """True while the supervisor or any recorded process lives."""
        return self.supervised() or bool(self.living())


def state_dir() -> Path:
    """``$KVCTL_STATE_DIR``, else ``$XDG_STATE_HOME/kvctl``, else ``~/.local/state/kvctl``."""
    if chosen := os.environ.get(STATE_DIR):
        return Path(chosen).absolute()
    if xdg := os.environ.get("XDG_STATE_HOME"):
        return Path(xdg) / "kvctl"
    return Path.home() / ".local/state/kvctl"


def run_folder(name: str) -> Path:
    """The folder of one topology; it need not exist."""
    return state_dir() / "runs" / name


def state_path(name: str) -> Path:
    return run_folder(name) / "state.json"


def backup_path(name: str) -> Path:
    """A copy of the state file, written with it."""
    return run_folder(name) / "state.json.bak"


def log_path(name: str, log: str) -> Path:
    """Where a process writes; `log` is `ProcessRecord.log`."""
    return run_folder(name) / "logs" / log


def load(name: str) -> RunState | None:
    """The last launch of that topology; None when there was none.

    Raises:
        StateError: the file is there and cannot be read.
    """
    if not name or "/" in name or name.startswith("."):
        return None  # no topology can have that name
    path = state_path(name)
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StateError(path, error.strerror or str(error)) from error
    return decode(content, path)


def decode(content: bytes, path: Path) -> RunState:
    """A state file's content.

    Raises:
        StateError: not even the core can be read.
    """
    try:
        return msgspec.json.decode(content, type=RunState)
    except msgspec.ValidationError:
        return _core(content, path)
    except msgspec.DecodeError as error:
        raise StateError(path, str(error)) from error


def _core(content: bytes, path: Path) -> RunState:
    """What is needed to stop a run whose other fields a newer version writes differently."""
    keep = {"name", "run_id", "schema", "boot", "supervisor_pid", "supervisor_started"}
    keep_each = {"name", "kind", "pid", "started", "members", "shm", "feeds"}
    try:
        raw = msgspec.json.decode(content, type=dict[str, Any])
        core = {key: value for key, value in raw.items() if key in keep}
        core["processes"] = [
            {key: value for key, value in each.items() if key in keep_each}
            for each in raw["processes"]
        ]
        state = msgspec.convert(core, RunState)
    except (msgspec.MsgspecError, KeyError, TypeError, AttributeError) as error:
        raise StateError(path, f"not the state of a launch ({error})") from error
    if state.schema <= SCHEMA:
        raise StateError(path, "it has fields of a wrong type")
    return state


def save(state: RunState) -> None:
    """Writes the state at once or not at all; only the holder of the run's lock may.

    Raises:
        UnreachableError: the folder cannot be written, or the disk is full.
    """
    path = state_path(state.name)
    content = msgspec.json.format(_encode(state, path))
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # A copy, for the day when somebody has edited or cut off the file itself.
        _replace(backup_path(state.name), content)
        _replace(path, content)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise UnreachableError(
            f"the state cannot be written: {path}: {error.strerror}",
            hint=f"free space there, or set {STATE_DIR} to a folder that can be written",
        ) from error


def _replace(path: Path, content: bytes) -> None:
    fresh = path.with_name(f"{path.name}.new")
    with fresh.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)


# What a stop changes: all that may be written into a file of a newer schema.
_OURS = {"phase", "cause", "hint"}
_OURS_EACH = {"phase", "exit_code", "since", "cause", "hint", "members", "shm"}


def _encode(state: RunState, path: Path) -> bytes:
    """As JSON; into a file of a newer schema only what a stop changes."""
    if state.schema <= SCHEMA:
        return msgspec.json.encode(state)
    ours: dict[str, Any] = msgspec.to_builtins(state)
    changed = {each["name"]: each for each in ours["processes"]}
    theirs = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    theirs |= {key: ours[key] for key in _OURS}
    for each in theirs["processes"]:
        each |= {key: changed[each["name"]][key] for key in _OURS_EACH}
    return msgspec.json.encode(theirs)


def known_names() -> list[str]:
    """Every topology that was launched here, broken state files included."""
    return sorted(path.parent.name for path in (state_dir() / "runs").glob("*/state.json"))


def survey() -> tuple[list[RunState], list[StateError]]:
    """The last launch of every topology, by name; and what is wrong with those not readable."""
    readable, broken = [], []
    for name in known_names():
        try:
            state = load(name)
        except StateError as error:
            broken.append(error)
            continue
        if state:
            readable.append(state)
    return readable, broken


def choose(name: str) -> RunState:
    """The last launch of that topology.

    Raises:
        UsageError: there is none of that name; lists those that there are.
        StateError: its state file is broken.
    """
    if state := load(name):
        return state
    known = ", ".join(known_names())
    raise UsageError(
        f"no topology {name} was launched here",
        hint=f"known: {known}" if known else "nothing was launched here",
    )
