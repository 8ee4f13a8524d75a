"""One process of a plan: starting it, and seeing what becomes of it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from kvctl.errors import InstanceError
from kvctl.launch import procfs, shared_memory
from kvctl.launch.diagnosis import shows_hopeless, shows_loading
from kvctl.launch.log_lines import Tail
from kvctl.launch.procfs import Identity, Stat
from kvctl.launch.shared_memory import Segment
from kvctl.launch.sockets import remove_stale
from kvctl.launch.state import Phase, ProcessRecord
from kvctl_connector.paths import RUNTIME_DIR, runtime_dir

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvctl.topology.plan import Process

RUN_ID = "KVCTL_RUN_ID"  # in every process that a run starts, and in what those start
MARK = "KVCTL_PROCESS"  # <run's folder>:<kind>:<name>, unique to one launch
PROBE_INTERVAL = 0.25  # s between two looks at /health
PROBE_TIMEOUT = 3.0  # s for one answer
BOOT_PHASES = ("starting", "loading")


def mark(folder: Path, kind: str, name: str) -> str:
    """The value of `MARK` for one process."""
    return f"{folder}:{kind}:{name}"


def enter(record: ProcessRecord, phase: Phase) -> None:
    """Puts a record into a phase that begins now."""
    record.phase = phase
    record.since = time.time()


class Instance:
    """A process of the plan under supervision. `record` is what the state file says of it."""

    def __init__(self, process: Process, folder: Path) -> None:
        self.process = process
        self.record = ProcessRecord(
            name=process.name,
            kind=process.kind,
            role=process.role,
            url=process.url,
            ports=dict(process.ports),
            feeds=list(process.feeds),
            log=process.log,
            since=time.time(),
        )
        self.log = folder / "logs" / process.log
        self.hopeless = False
        self.was_ready = False
        self.began = 0.0  # monotonic
        self._mark = mark(folder, process.kind, process.name)
        self._popen: subprocess.Popen[bytes] | None = None
        self._tail = Tail(self.log)
        self._probe: asyncio.Task[None] | None = None
        self._shm_before: set[Segment] = set()
        self._looked: tuple[list[Identity], set[Segment]] = ([], set())
        self._look_again = False

    @property
    def started(self) -> bool:
        return self._popen is not None

    @property
    def booting(self) -> bool:
        """Started, and neither ready nor ended."""
        return self.started and self.record.phase in BOOT_PHASES

    def start(self, run_id: str) -> None:
        """Starts it in a session of its own; its output goes to its log, the last one to ``.1``.

        Raises:
            InstanceError: the program cannot be run.
        """
        self._shm_before = shared_memory.present()
        if self.process.kind == "engine":
            for feed in self.process.feeds:
                # Left by a machine that went down: whoever waits for this engine's feed would
                # take it for that.
                remove_stale(Path(feed))
        environment = {
            **self._inherited(),
            RUNTIME_DIR: str(runtime_dir()),
            **self.process.env,
            RUN_ID: run_id,
            MARK: self._mark,
        }
        try:
            if self.log.exists():
                self.log.replace(self.log.with_name(f"{self.log.name}.1"))
            with self.log.open("wb") as output:
                self._popen = subprocess.Popen(
                    self.process.argv,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        except OSError as error:
            self.record.cause = f"{error.filename or self.process.argv[0]}: {error.strerror}"
            enter(self.record, "failed")
            raise InstanceError(
                f"{self.record.name} cannot be started: {self.record.cause}",
                hint="kvctl launch --dry-run prints the command",
            ) from error
        identity = procfs.identify(self._popen.pid)
        self.record.pid = self._popen.pid
        self.record.started = identity.started if identity else 0
        self.record.started_at = time.time()
        self.began = time.monotonic()
        # What nobody asks for its health is ready when it runs.
        enter(self.record, "starting" if self.process.url else "ready")
        if self.process.url:
            self._probe = asyncio.create_task(self._become_ready(self.process.url))

    def _inherited(self) -> dict[str, str]:
        """This process's environment, without what would override the file's telemetry.

        Variables for one signal win over the general ones (OpenTelemetry specification,
        "OTLP Exporter Configuration"), so a relay would export where nobody asked it to.
        """
        if self.process.kind != "relay":
            return dict(os.environ)
        return {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("OTEL_EXPORTER_OTLP")
        }

    def has_ended(self) -> bool:
        """True once it has ended, whether or not it was collected."""
        if self._popen is None or self._popen.returncode is not None:
            return self._popen is not None
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, self._popen.pid, flags) is not None

    def collect(self) -> int | None:
        """Its exit code as subprocess gives it, once it has ended; ends the zombie."""
        return self._popen.poll() if self._popen else None

    def read_log(self) -> None:
        """While it boots: takes from its log how far it is, and whether there is any hope."""
        for line in self._tail.lines():
            if self.record.phase == "starting" and shows_loading(line):
                enter(self.record, "loading")
            self.hopeless = self.hopeless or shows_hopeless(line)

    def close(self) -> None:
        """Ends what the supervisor itself holds for this process."""
        self._tail.close()
        if self._probe:
            self._probe.cancel()

    def remember(self, seen: Mapping[int, Stat], shm: set[Segment]) -> bool:
        """Notes the members of its session, and their files in /dev/shm. True on a change.

        The files are looked up in /proc/PID/maps, which takes the engine's memory-map lock for
        a moment. So that is done only while something has changed since the look before.
        """
        members = sorted(procfs.session_members(self.record.identity, self.record.members, seen))
        changed = members != self.record.members and bool(members)
        if changed:
            self.record.members = members
        ours = shm - self._shm_before
        now = (members, ours)
        if ours and (now != self._looked or self._look_again):
            # Once more after the last change: a file is there before it is mapped.
            self._look_again, self._looked = now != self._looked, now
            found = shared_memory.used_by((member.pid for member in members), ours)
            noted = sorted(found | (set(self.record.shm) & ours))
            changed = changed or noted != self.record.shm
            self.record.shm = noted
        return changed

    async def _become_ready(self, url: str) -> None:
        while self.booting:
            answer = await probe(url)
            if answer == 200 and self.record.phase in BOOT_PHASES:
                self.was_ready = True
                enter(self.record, "ready")
            elif answer is not None and self.record.phase == "starting":
                enter(self.record, "loading")
            await asyncio.sleep(PROBE_INTERVAL)


async def probe(url: str) -> int | None:
    """Status of ``GET url/health``; 0 where the port is open but gives none, None where closed."""
    parts = urlsplit(url)
    host, port = parts.hostname or "127.0.0.1", parts.port or 80
    try:
        async with asyncio.timeout(PROBE_TIMEOUT):
            reader, writer = await asyncio.open_connection(host, port)
    except (OSError, TimeoutError):
        return None
    try:
        async with asyncio.timeout(PROBE_TIMEOUT):
            path = f"{parts.path.rstrip('/')}/health"
            writer.write(
                f"GET {path} HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n\r\n".encode()
            )
            await writer.drain()
            fields = (await reader.readline()).split()
            return int(fields[1]) if len(fields) > 1 and fields[1].isdigit() else 0
    except (OSError, TimeoutError, ValueError):
        return 0
    finally:
        writer.close()
