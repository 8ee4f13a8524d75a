"""Runs of fake engines through the real command and the real supervisor."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvctl.cli.app import main
from kvctl.launch import ports, procfs
from kvctl.launch.state import RunState, load

HERE = Path(__file__).parent
ENGINE = HERE / "fake_engine.py"
DEADLINE = 30.0  # s that anything here may take


def until(what: str, done: Callable[[], Any]) -> Any:
    """Waits for something to become true, and returns it."""
    deadline = time.monotonic() + DEADLINE
    while not (found := done()):
        assert time.monotonic() < deadline, f"never came: {what}"
        time.sleep(0.02)
    return found


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def free_block(size: int = 50) -> int:
    """The first of so many neighbouring free ports, below those that the kernel gives out."""
    for base in random.sample(range(10000, 30000, 100), 50):
        if all(ports.refusal("127.0.0.1", port) is None for port in range(base, base + size)):
            return base
    raise AssertionError("no free block of ports")


class Place:
    """A state folder, a runtime folder and a run id of one test's own."""

    def __init__(self, folder: Path, runtime: Path) -> None:
        self.folder = folder
        self.runtime = runtime
        self.run_id = f"test-{secrets.token_hex(6)}"
        self.order = folder / "order"
        self.env = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("KVCTL_", "XDG_"))},
            "KVCTL_STATE_DIR": str(folder / "state"),
            "KVCTL_RUNTIME_DIR": str(runtime),
            "KVCTL_RUN_ID": self.run_id,
            "TERM": "dumb",
        }
        (folder / "kvctl.yaml").write_text("version: 1\n")
        (folder / "model").mkdir()
        (folder / "model/config.json").write_text("{}")

    def plan(self, *processes: dict[str, Any], name: str = "fake", **changes: Any) -> str:
        """Writes a plan and returns its path."""
        plan = {
            "name": name,
            "processes": processes,
            "start_timeout": 20.0,
            "stop_timeout": 5.0,
            "model": str(self.folder / "model"),
            "engine": {"vllm": "0.32.0", "nixl": "1.5.1", "platform": "cuda", "router": None},
            "node": None,
            "file": "kvctl.yaml",
            **changes,
        }
        path = self.folder / f"{name}.plan.json"
        path.write_text(json.dumps(plan))
        return str(path)

    def process(self, name: str, kind: str, *told: object, feed: str = "") -> dict[str, Any]:
        """One process of a plan: the fake engine, told how to behave."""
        port = None if kind == "relay" else free_port()
        argv = [sys.executable, "-S", str(ENGINE), "--order", str(self.order), *map(str, told)]
        feed_path = str(self.runtime / feed) if feed else ""
        if port:
            argv += ["--port", str(port)]
        if kind == "engine" and feed:
            argv += ["--feed", feed_path]
        return {
            "name": name,
            "kind": kind,
            "role": name.partition("-")[0] if kind == "engine" else None,
            "argv": argv,
            "env": {},
            "url": f"http://127.0.0.1:{port}" if port else None,
            "ports": {"api": port} if port else {},
            "feeds": [feed_path] if feed else [],
            "log": f"{name}.log",
        }

    def engine(self, name: str, *told: object, feed: str = "") -> dict[str, Any]:
        return self.process(name, "engine", *told, feed=feed)

    def router(self, *told: object) -> dict[str, Any]:
        return self.process("router", "router", *told)

    def relay(self, name: str, *told: object, feed: str) -> dict[str, Any]:
        return self.process(name, "relay", *told, feed=feed)

    def start(self, plan: str, *arguments: str, **how: Any) -> subprocess.Popen[str]:
        """Starts ``kvctl ARGUMENTS`` with that plan."""
        return subprocess.Popen(
            [sys.executable, str(HERE / "fake_plan.py"), plan, *arguments],
            env=self.env, cwd=self.folder, text=True, stdin=subprocess.DEVNULL,
            **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **how},
        )  # fmt: skip

    def kvctl(self, plan: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Runs ``kvctl ARGUMENTS`` with that plan to its end.

        What only looks or stops runs in this process, since an interpreter's start costs more
        than all of it.
        """
        if "launch" in arguments:
            process = self.start(plan, *arguments)
            out, err = process.communicate(timeout=DEADLINE)
            code = process.returncode
        else:
            code, out, err = self._here(arguments)
        assert "Traceback" not in err, err
        return subprocess.CompletedProcess(arguments, code, out, err)

    def _here(self, arguments: tuple[str, ...]) -> tuple[int, str, str]:
        out, err = io.StringIO(), io.StringIO()
        with (
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            pytest.MonkeyPatch.context() as patch,
        ):
            patch.setattr(sys, "argv", ["kvctl", *arguments])
            with pytest.raises(SystemExit) as ended:
                main()
        return int(ended.value.code or 0), out.getvalue(), err.getvalue()

    def state(self, name: str = "fake") -> RunState:
        state = load(name)
        assert state
        return state

    def log(self, name: str, topology: str = "fake") -> str:
        return (self.folder / f"state/runs/{topology}/logs/{name}.log").read_text()

    def events(self) -> list[str]:
        """``start NAME`` and ``end NAME`` in the order in which they happened."""
        return self.order.read_text().splitlines()

    def processes(self) -> dict[int, str]:
        """What runs with this test's run id."""
        return {
            pid: procfs.command(pid)
            for pid, process in procfs.processes().items()
            if not process.dead and procfs.environment(pid).get("KVCTL_RUN_ID") == self.run_id
        }
