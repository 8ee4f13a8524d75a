"""What ``kvctl demo`` is doing and for how long: live on a terminal, else a line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

from kvctl.cli.progress import Progress
from kvctl.units import format_seconds

if TYPE_CHECKING:
    from kvctl.demo.steps import Say
    from kvctl.launch.state import RunState
    from kvctl.launch.supervisor import Watcher

STEPS = {
    "model": "a tiny model with random weights",
    "reference": "reference answers of one plain engine",
    "traffic": "prompts through the router",
}
SAY_EVERY = 5.0  # seconds between two lines of one step, where there is no terminal
QUICK = 0.5  # seconds; a shorter step found its result in the cache


class DemoProgress:
    """Shows the steps of the demo on `stream`; see `kvctl.demo.steps.Display`."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def note(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    @contextmanager
    def step(self, what: str) -> Iterator[Say]:
        shown = self._live(STEPS[what]) if self._stream.isatty() else self._lines(STEPS[what])
        began = time.monotonic()
        with shown as say:
            yield say
        seconds = time.monotonic() - began
        how = "from the cache" if seconds < QUICK else format_seconds(round(seconds, 1))
        self.note(f"{STEPS[what]}: {how}")

    @contextmanager
    def processes(self, known: RunState | None = None) -> Iterator[Watcher]:
        progress = Progress(self._stream)
        if known:
            progress.known(known)
        try:
            yield progress
        finally:
            progress.close()

    def supervisor_log(self) -> Watcher:
        return Progress(sys.stdout, plain=True, stamp=True)

    @contextmanager
    def _live(self, text: str) -> Iterator[Say]:
        from rich.console import Console
        from rich.progress import Progress as Bar
        from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with Bar(*columns, console=Console(file=self._stream), transient=True) as bar:
            task = bar.add_task(text, total=None)
            yield lambda said: bar.update(task, description=f"{text}: {said}")

    @contextmanager
    def _lines(self, text: str) -> Iterator[Say]:
        self.note(f"{text} …")
        last = [time.monotonic()]

        def say(said: str) -> None:
            if time.monotonic() - last[0] >= SAY_EVERY:
                last[0] = time.monotonic()
                self.note(f"  {said}")

        yield say
