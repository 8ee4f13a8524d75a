"""The supervisor: starts a plan's processes in order, watches them, and ends them in order.

In the foreground it runs inside ``kvctl launch``; with ``-d`` in a forked child. It is one
loop: each tick looks at what has ended, at the logs and health of what boots, and at requests;
every two seconds it notes the members and shared-memory files of each engine. Whatever changes
goes to the state file, from which everybody else reads.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from kvctl.errors import Exit, InstanceError, KvctlError
from kvctl.launch import procfs, requests, shared_memory, stopping
from kvctl.launch.diagnosis import Diagnosis, diagnose
from kvctl.launch.log_lines import last_lines
from kvctl.launch.process import Instance, enter
from kvctl.launch.state import ENDED, RunState, log_path, run_folder, save
from kvctl.units import format_seconds

if TYPE_CHECKING:
    from kvctl.topology.plan import Plan

TICK = 0.1  # s between two looks at the processes
LOOK = 2.0  # s between two looks at their sessions and shared memory
SAVE_AGAIN = 10.0  # s after a state that could not be written
# s within which a second signal is the same request: a terminal that goes away signals the
# session and its foreground group, and make or a shell passes on what the terminal sent too.
SAME_REQUEST = 0.5

Watcher = Callable[[RunState], None]


class InterruptedRunError(Exception):
    """A signal asked for the end of the run."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


class Supervisor:
    """One run of a plan, from the first start to the last stop.

    Args:
        plan: what to run.
        state: the run's state as first written; its `processes` are filled in here.
        watcher: called with the state at every tick, to show it.
    """

    def __init__(self, plan: Plan, state: RunState, watcher: Watcher) -> None:
        self._plan = plan
        self._state = state
        self._watcher = watcher
        self._folder = run_folder(plan.name)
        self._instances = [Instance(process, self._folder) for process in plan.processes]
        state.processes = [instance.record for instance in self._instances]
        self._saved = b""
        self._next_save = 0.0
        self._signum: int | None = None
        self._asked_at = 0.0
        self._wake = asyncio.Event()
        self._hurry = asyncio.Event()
        self._next_look = 0.0
        self._ending: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> int:
        """Runs until everything has ended or a signal comes; returns the exit code."""
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # Under nohup the terminal's end is to be survived.
            if signum != signal.SIGHUP or signal.getsignal(signum) != signal.SIG_IGN:
                loop.add_signal_handler(signum, self._on_signal, signum)
        try:
            await self._bring_up()
            self._state.phase = "running"
            while any(each.record.phase not in ENDED for each in self._instances):
                await self._tick()
            return await self._finish(self._verdict())
        except InterruptedRunError as stop:
            return await self._finish(128 + stop.signum)
        except KvctlError as error:
            self._state.cause, self._state.hint = error.message, error.hint
            return await self._finish(error.exit_code)
        except BaseException:
            self._state.cause = "the supervisor failed: a bug in kvctl"
            self._state.hint = f"see {log_path(self._plan.name, 'supervisor.log')}"
            await self._finish(Exit.BUG)
            raise

    def _on_signal(self, signum: int) -> None:
        now = time.monotonic()
        if self._signum is None:
            self._signum, self._asked_at = signum, now
            self._wake.set()
        elif signum != signal.SIGHUP and now - self._asked_at > SAME_REQUEST:
            self._hurry.set()  # asked again: no more patience

    # Starting

    async def _bring_up(self) -> None:
        """Starts engines and their relays, then the routers; returns when all are ready.

        Raises:
            InstanceError: one ended, cannot get ready, or did not in time.
            InterruptedRunError: a signal came.
        """
        for front in (False, True):
            stage = [each for each in self._instances if (each.record.kind == "router") is front]
            for instance in stage:
                if instance.record.kind != "relay":
                    instance.start(self._state.run_id)
                    self._save()
            while any(each.booting for each in stage):
                await self._tick()
                for instance in self._instances:
                    self._check_boot(instance)
        # A last look, so that what a launch promises is in the state when it says "ready".
        self._look()

    def _check_boot(self, instance: Instance) -> None:
        """Ends the launch when an instance that boots has ended, hangs, or takes too long."""
        record = instance.record
        if record.kind == "relay":
            return  # it carries telemetry: an engine runs on without it
        if record.phase == "failed":
            raise InstanceError(
                f"{record.name} ended while starting: {record.cause}", hint=self._where(instance)
            )
        if not instance.booting:
            return
        waited = time.monotonic() - instance.began
        if instance.hopeless:
            why = diagnose(instance.log, exit_code=None)
            self._fail(instance, why)
            raise InstanceError(
                f"{record.name} cannot get ready: {why.cause}", hint=self._where(instance)
            )
        if waited > self._plan.start_timeout:
            said = "\n".join(last_lines(instance.log, 5)) or "(nothing)"
            why = Diagnosis(
                f"not ready after {format_seconds(waited)}; it said last:\n{said}",
                f"if it only needs longer: start_timeout in {self._plan.file}, or --timeout",
            )
            self._fail(instance, why)
            raise InstanceError(f"{record.name}: {why.cause}", hint=self._where(instance))

    def _where(self, instance: Instance) -> str:
        """What to do, and where the log is."""
        parts = [instance.record.hint, f"its log: {instance.log}"]
        return "\n  ".join(part for part in parts if part)

    def _start_relays(self) -> None:
        """Starts each relay once its engine's feed is there.

        A relay gives up after a minute without a feed, and a large model takes longer to load.
        """
        for relay in self._instances:
            if relay.started or relay.record.kind != "relay" or relay.record.phase in ENDED:
                continue
            owner = next(
                (
                    each
                    for each in self._instances
                    if each.record.kind == "engine"
                    and set(each.record.feeds) & set(relay.record.feeds)
                ),
                None,
            )
            there = all(Path(feed).exists() for feed in relay.record.feeds)
            if owner and owner.record.phase in ENDED:
                enter(relay.record, "exited")
            elif there or owner is None or owner.record.phase == "ready":
                with contextlib.suppress(InstanceError):
                    relay.start(self._state.run_id)

    # Watching

    async def _tick(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(TICK):
                await self._wake.wait()
        if self._signum is not None:
            raise InterruptedRunError(self._signum)
        for instance in self._instances:
            if instance.booting:
                instance.read_log()
            self._collect(instance)
        self._start_relays()
        self._take_requests()
        if time.monotonic() >= self._next_look:
            self._look()
        self._save()
        self._watcher(self._state)

    def _collect(self, instance: Instance) -> None:
        """Notes the end of a process that nobody asked to end."""
        record = instance.record
        if record.phase in ENDED or record.phase == "stopping" or not instance.has_ended():
            return
        # While it is a zombie its session cannot be mistaken: whoever is in it is noted now.
        instance.remember(procfs.processes(), shared_memory.present())
        code = instance.collect()
        if code is None:
            return
        record.exit_code = code if code >= 0 else 128 - code
        if record.kind == "relay" and code == 0:
            enter(record, "exited")  # its feed has closed
        else:
            self._fail(
                instance,
                diagnose(instance.log, exit_code=code, was_ready=instance.was_ready),
            )
        self._end([instance])

    def _fail(self, instance: Instance, why: Diagnosis) -> None:
        instance.record.cause, instance.record.hint = why.cause, why.hint
        enter(instance.record, "failed")

    def _take_requests(self) -> None:
        """Stops the instances that `kvctl stop NAME` has asked for."""
        wanted = requests.take_stops(self._folder)
        named = [each for each in self._instances if each.record.name in wanted]
        for instance in named:
            relays = [
                each
                for each in self._instances
                if each.record.kind == "relay"
                and set(each.record.feeds) & set(instance.record.feeds)
            ]
            self._end([instance, *(relays if instance.record.kind == "engine" else [])])

    def _end(self, instances: list[Instance]) -> None:
        """Ends instances, or what is left of them, beside everything else."""
        key = instances[0].record.name
        if key not in self._ending or self._ending[key].done():
            self._ending[key] = asyncio.create_task(self._end_now(instances))

    async def _end_now(self, instances: list[Instance]) -> None:
        self._look()
        records = [each.record for each in instances]
        for instance in instances:
            if not instance.started:
                enter(instance.record, "exited")
        await stopping.stop(records, engine_timeout=self._state.stop_timeout, hurry=self._hurry)
        for instance in instances:
            self._note_exit(instance)
        stopping.sweep(records)

    def _note_exit(self, instance: Instance) -> None:
        code = instance.collect()
        if code is not None and instance.record.exit_code is None:
            instance.record.exit_code = code if code >= 0 else 128 - code
        instance.close()

    def _look(self) -> None:
        """Notes the members and shared-memory files of everything that runs."""
        seen, shm = procfs.processes(), shared_memory.present()
        for instance in self._instances:
            if instance.started and instance.record.phase not in ENDED:
                instance.remember(seen, shm)
        self._next_look = time.monotonic() + LOOK

    def _save(self) -> None:
        """Writes the state if it has changed. A full disk must not end what runs."""
        now = msgspec.json.encode(self._state)
        if now == self._saved or time.monotonic() < self._next_save:
            return
        try:
            save(self._state)
            self._saved = now
        except KvctlError as error:
            if self._state.phase == "starting":
                raise
            print(error, file=sys.stderr, flush=True)
            self._next_save = time.monotonic() + SAVE_AGAIN

    # Ending

    def _verdict(self) -> int:
        """The exit code of a run in which nothing runs any more."""
        failed = [each.record for each in self._instances if each.record.phase == "failed"]
        if not failed:
            return Exit.OK
        self._state.cause = "nothing runs any more:\n" + "\n".join(
            f"{record.name}: {record.cause}" for record in failed
        )
        return Exit.FAILED

    async def _finish(self, code: int) -> int:
        """Ends everything, leaves nothing behind, and writes how it ended."""
        failed = self._state.cause is not None
        self._state.phase = "stopping"
        with contextlib.suppress(Exception):
            self._look()
            self._save()

        def changed() -> None:
            self._save()
            self._watcher(self._state)

        records = [each.record for each in self._instances]
        for instance in self._instances:
            if not instance.started and instance.record.phase not in ENDED:
                enter(instance.record, "exited")
        patience = self._state.stop_timeout
        left = await stopping.stop(
            records, engine_timeout=patience, hurry=self._hurry, changed=changed
        )
        await asyncio.gather(*self._ending.values(), return_exceptions=True)
        left += await stopping.stop(
            stopping.strays(self._folder), engine_timeout=patience, hurry=self._hurry
        )
        for instance in self._instances:
            self._note_exit(instance)
        stopping.sweep(records)
        if left:
            pids = ", ".join(str(identity.pid) for identity in left)
            self._state.cause = self._state.cause or f"these processes do not end: {pids}"
        self._state.phase = "failed" if failed or left else "stopped"
        self._next_save = 0.0
        with contextlib.suppress(KvctlError):
            self._save()
        self._watcher(self._state)
        return code


def supervise(plan: Plan, state: RunState, watcher: Watcher) -> int:
    """Runs a plan to its end in this process and returns the exit code."""
    me = procfs.identify(os.getpid())
    if me:
        state.supervisor_pid, state.supervisor_started = me
    return asyncio.run(Supervisor(plan, state, watcher).run())
