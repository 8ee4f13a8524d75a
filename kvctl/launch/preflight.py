"""What would make a launch fail, found before anything is started, all of it at once."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from kvctl.engine.environment import nixl_remedy, vllm_remedy
from kvctl.errors import Exit, KvctlError
from kvctl.launch import ports
from kvctl.launch.offer_key import offer_key_path
from kvctl.launch.remedies import SHARED_MEMORY
from kvctl.launch.shared_memory import SHM
from kvctl.launch.state import STATE_DIR, RunState, run_folder
from kvctl.units import format_bytes
from kvctl_connector.config import ConfigError
from kvctl_connector.offers import read_keys
from kvctl_connector.paths import RUNTIME_DIR, RuntimeDirError, ensure_runtime_dir

if TYPE_CHECKING:
    from kvctl.topology.plan import Plan, Process

RINGS = 400 << 20  # bytes in /dev/shm of one engine with worker processes: rings of 160 + 240 MiB


@dataclass(frozen=True)
class Problem:
    """One thing that is in the way.

    Attributes:
        code: USAGE where the file or the command is to be changed, UNREACHABLE where the machine.
    """

    what: str
    remedy: str
    code: Exit


class PreflightError(KvctlError):
    """A launch that was not begun, and everything that is in its way."""

    def __init__(self, name: str, problems: list[Problem]) -> None:
        if len(problems) == 1:
            super().__init__(problems[0].what, hint=problems[0].remedy)
        else:
            listed = "\n".join(f"- {each.what}\n  {each.remedy}" for each in problems)
            super().__init__(f"{name} cannot be launched:\n{listed}")
        self.exit_code = min(each.code for each in problems)


def check(plan: Plan, *, locked: bool, previous: RunState | None) -> None:
    """Looks at everything that a launch needs, and starts nothing.

    Args:
        locked: True when this launch holds the lock of its name.
        previous: the state of the last launch of that name.

    Raises:
        PreflightError: something is in the way.
    """
    running = list(_running(plan, locked, previous))
    # Its own ports would be taken by what runs: one answer is enough.
    problems = running or [
        *_model(plan), *_offer_key(plan), *_environment(plan), *_ports(plan),
        *_shared_memory(plan), *_folders(plan),
    ]  # fmt: skip
    if problems:
        raise PreflightError(plan.name, problems)


def _running(plan: Plan, locked: bool, previous: RunState | None) -> Iterator[Problem]:
    name = plan.name
    if not locked:
        yield Problem(
            f"{name} is launched already",
            f"see it with: kvctl ps -p {name}; end it with: kvctl stop -p {name}",
            Exit.USAGE,
        )
    elif previous and (living := previous.living()):
        names = ", ".join(record.name for record in living)
        yield Problem(
            f"{name} still runs although its supervisor is gone: {names}",
            f"end it first: kvctl stop -p {name}",
            Exit.USAGE,
        )


def _model(plan: Plan) -> Iterator[Problem]:
    model = plan.model
    where = f"model: {model}"
    path = Path(model).expanduser()
    if model.startswith(("/", "./", "../", "~")) or path.exists():
        if not path.exists():
            yield Problem(
                f"{where}: there is no such folder",
                f"correct `model:` in {plan.file}, or put the model there",
                Exit.USAGE,
            )
        elif path.is_dir() and not any(
            (path / name).exists() for name in ("config.json", "params.json")
        ):
            yield Problem(
                f"{where}: the folder holds no config.json",
                f"correct `model:` in {plan.file}: it takes a folder as transformers saves it",
                Exit.USAGE,
            )
    elif _offline(plan) and not _in_hub_cache(model, plan):
        yield Problem(
            f"{where}: not in the local hub cache, and HF_HUB_OFFLINE is set",
            "download it first, unset HF_HUB_OFFLINE, or give the path of a folder",
            Exit.USAGE,
        )


def _setting(plan: Plan, name: str) -> str | None:
    """An environment variable as the engines will see it."""
    for process in plan.processes:
        if process.kind == "engine" and name in process.env:
            return process.env[name]
    return os.environ.get(name)


def _offline(plan: Plan) -> bool:
    return (_setting(plan, "HF_HUB_OFFLINE") or "0").lower() in {"1", "on", "yes", "true"}


def _in_hub_cache(model: str, plan: Plan) -> bool:
    """Whether the hub's client has a copy; folders as huggingface_hub.constants has them."""
    home = Path(_setting(plan, "HF_HOME") or "~/.cache/huggingface")
    cache = Path(_setting(plan, "HF_HUB_CACHE") or home / "hub").expanduser()
    return (cache / f"models--{model.replace('/', '--')}").is_dir()


def _offer_key(plan: Plan) -> Iterator[Problem]:
    """A key that the file names must be there; the topology's own is made by the launch."""
    if plan.offer_key == offer_key_path(plan.name):
        return
    try:
        read_keys(str(plan.offer_key))
    except ConfigError as error:
        yield Problem(
            f"{plan.file}: transfer.offer_key: {error}",
            "make one: (umask 077; head -c 32 /dev/urandom | base64 > FILE), the same on all nodes",
            Exit.USAGE,
        )


def _environment(plan: Plan) -> Iterator[Problem]:
    engine = plan.engine
    if any(process.kind == "engine" for process in plan.processes):
        if engine.vllm is None:
            yield Problem(
                f"the engine environment of {engine.python} has no vLLM",
                vllm_remedy(engine.python),
                Exit.UNREACHABLE,
            )
        elif engine.nixl is None:
            yield Problem(
                f"the engine environment of {engine.python} has no NIXL",
                nixl_remedy(engine),
                Exit.UNREACHABLE,
            )
    for process in plan.processes:
        if process.kind == "router" and shutil.which(process.argv[0]) is None:
            yield Problem(
                f"{process.name}: there is no program {process.argv[0]}",
                "install it in an environment of its own (pip install vllm-router) and name the "
                "program by KVCTL_ROUTER, or take `router:` out of the file",
                Exit.UNREACHABLE,
            )


def _ports(plan: Plan) -> Iterator[Problem]:
    wanted: dict[int, str] = {}
    for process in plan.processes:
        host = _host(process)
        for purpose, port in process.ports.items():
            what = f"port {port} ({purpose} of {process.name})"
            if port in wanted:
                yield Problem(
                    f"{what} is also that of {wanted[port]}",
                    f"choose other ports in {plan.file}",
                    Exit.USAGE,
                )
                continue
            wanted[port] = f"{purpose} of {process.name}"
            refused = ports.refusal(host, port)
            if refused == errno.EADDRINUSE:
                owner = ports.owner(port)
                yield Problem(
                    f"{what} is in use" + (f" by {owner}" if owner else ""),
                    f"end that, or choose another block in {plan.file}: `ports: {{base: N}}`",
                    Exit.USAGE,
                )
            elif refused is not None:
                yield Problem(
                    f"{what} cannot be bound on {host}: {os.strerror(refused)}",
                    "the address must be one of this machine, the port one that you may use",
                    Exit.USAGE,
                )


def _host(process: Process) -> str:
    """The address that a process will listen on."""
    argv = list(process.argv)
    if "--host" in argv[:-1]:
        return argv[argv.index("--host") + 1]
    return (urlsplit(process.url).hostname if process.url else None) or "127.0.0.1"


def _shared_memory(plan: Plan) -> Iterator[Problem]:
    engines = [process for process in plan.processes if process.kind == "engine"]
    with_workers = [
        process
        for process in engines
        # One device needs no worker process, except on the CPU platform.
        if plan.engine.platform == "cpu" or "--tensor-parallel-size" in " ".join(process.argv)
    ]
    needed = len(with_workers) * RINGS
    with contextlib.suppress(OSError):
        info = os.statvfs(SHM)
        free = info.f_bavail * info.f_frsize
        if free < needed:
            yield Problem(
                f"/dev/shm has {format_bytes(free)} free; {len(with_workers)} engines need "
                f"{format_bytes(needed)} there",
                SHARED_MEMORY,
                Exit.UNREACHABLE,
            )


def _folders(plan: Plan) -> Iterator[Problem]:
    logs = run_folder(plan.name) / "logs"
    try:
        logs.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=logs):
            pass
    except OSError as error:
        yield Problem(
            f"the log folder {logs} cannot be written: {error.strerror}",
            f"make it writable, or set {STATE_DIR} to a folder that is",
            Exit.UNREACHABLE,
        )
    try:
        ensure_runtime_dir()
    except RuntimeDirError as error:
        yield Problem(
            f"no place for the feeds' sockets: {error}",
            f"set {RUNTIME_DIR} to a folder of your own with a short path",
            Exit.UNREACHABLE,
        )
