"""How far a launch or a stop is: a live table on a terminal, else one line a change."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, TextIO

from kvctl.launch.log_lines import last_lines, parse
from kvctl.launch.state import ENDED, ProcessRecord, RunState, log_path
from kvctl.units import format_seconds

if TYPE_CHECKING:
    from rich.live import Live
    from rich.table import Table

REFRESH = 0.25  # s between two pictures of the live table
COLOURS = {"ready": "green", "failed": "red", "killed": "red", "loading": "yellow"}


def phase_of(record: ProcessRecord) -> str:
    """The phase as people read it: what has no pid has neither begun to start nor exited."""
    without_pid = {"starting": "waiting", "exited": "not started"}
    return record.phase if record.pid else without_pid.get(record.phase, record.phase)


def actual_phase(state: RunState, record: ProcessRecord, living: set[str]) -> str:
    """The phase, put right where nobody was left to write that the process has ended.

    Args:
        living: the names of `RunState.living`.
    """
    if record.phase in ENDED or record.name in living or (not record.pid and state.supervised()):
        return phase_of(record)
    return "gone" if record.pid else "not started"


def elapsed(record: ProcessRecord) -> str:
    """How long its boot took, or its boot or stop takes so far; empty before and after."""
    if not record.started_at or record.phase in ENDED:
        return ""
    until = record.since if record.phase == "ready" else time.time()
    began = record.since if record.phase == "stopping" else record.started_at
    return format_seconds(max(0.0, round(until - began, 1)))


class Progress:
    """Shows each state that it is called with.

    Args:
        stream: where to; a terminal gets the live table unless `plain`.
        stamp: begin each line with date and time, for a log.
    """

    def __init__(self, stream: TextIO, *, plain: bool = False, stamp: bool = False) -> None:
        self._stream = stream
        self._stamp = stamp
        self._plain = plain or not stream.isatty()
        self._live: Live | None = None
        self._shown: dict[str, str] = {}
        self._next = 0.0

    def __call__(self, state: RunState) -> None:
        # Whoever read our output may be gone: that must not end what runs.
        with contextlib.suppress(OSError):
            if self._plain:
                self._lines(state)
            elif state.phase in ("starting", "stopping"):
                self._picture(state)
            else:
                self.close(state)
                self._lines(state)

    def known(self, state: RunState) -> None:
        """Takes note of phases that need not be shown, since they are no news."""
        self._shown = {record.name: phase_of(record) for record in state.processes}

    def close(self, state: RunState | None = None) -> None:
        """Leaves the last picture of the live table on the screen."""
        if self._live is None:
            return
        if state:
            self._live.update(table(state, self._live.console.width), refresh=True)
            self.known(state)
        self._live.stop()
        self._live = None

    def _picture(self, state: RunState) -> None:
        if self._live is None:
            from rich.console import Console
            from rich.live import Live

            console = Console(file=self._stream)
            if state.phase == "stopping":
                console.print()  # below the ^C that the terminal has shown
            self._live = Live(console=console, auto_refresh=False)
            self._live.start()
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + REFRESH
            self._live.update(table(state, self._live.console.width), refresh=True)

    def _lines(self, state: RunState) -> None:
        for record in state.processes:
            phase = phase_of(record)
            if self._shown.get(record.name) == phase:
                continue
            self._shown[record.name] = phase
            if phase == "waiting":
                continue
            text = f"{record.name:<18} {phase:<9}"
            if phase == "ready" and record.url:
                text += f" after {elapsed(record):<8} {record.url}"
            elif phase == "failed" and record.cause and (self._stamp or state.phase == "running"):
                text += f" {record.cause}"  # a launch that fails ends with the cause anyway
            if self._stamp:
                text = f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}"
            print(text.rstrip(), file=self._stream, flush=True)


def table(state: RunState, width: int) -> Table:
    """One row a process: how far it is, for how long, and what it said last."""
    from rich.table import Table
    from rich.text import Text

    grid = Table(box=None, pad_edge=False, expand=False)
    for title in (state.name, "phase", "time"):
        grid.add_column(title, no_wrap=True)
    grid.add_column("", no_wrap=True, overflow="ellipsis", max_width=max(10, width - 48))
    for record in state.processes:
        phase = phase_of(record)
        grid.add_row(
            record.name,
            Text(phase, style=COLOURS.get(phase, "dim" if record.phase in ENDED else "")),
            elapsed(record),
            Text(_saying(state, record), style="dim"),
        )
    return grid


def _saying(state: RunState, record: ProcessRecord) -> str:
    if record.phase == "ready":
        return record.url or ""
    if record.phase in ENDED or not record.pid:
        return (record.cause or "").partition("\n")[0]
    said = last_lines(log_path(state.name, record.log), 1, limit=4096)
    return parse(said[0]).text.strip() if said else ""
