"""What set-up shows while it works: one line that is rewritten on a terminal, plain lines else.

All of it goes to stderr, so that the stdout of ``make demo ARGS=--json`` stays JSON.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from typing import TextIO

HEARTBEAT = 20.0  # seconds between two plain lines of one step


class Progress:
    """Says which step is at work, for how long, and what it does right now."""

    def __init__(self, steps: int, *, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._live = self._stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        self._steps = steps
        self._step = 0
        self._title = ""
        self._started = self._said = time.monotonic()

    def say(self, text: str) -> None:
        """A line that stays."""
        self._erase()
        print(text, file=self._stream, flush=True)

    def begin(self, title: str) -> None:
        """The next step begins."""
        self._step += 1
        self._title = title
        self._started = self._said = time.monotonic()
        if not self._live:
            self.say(f"[{self._step}/{self._steps}] {title} …")

    def update(self, activity: str) -> None:
        """What the step does now; call it often, it limits itself."""
        now = time.monotonic()
        if self._live:
            line = f"[{self._step}/{self._steps}] {self._title} · {self._elapsed()} · {activity}"
            width = shutil.get_terminal_size().columns - 1
            self._erase()
            self._stream.write(line[:width])
            self._stream.flush()
        elif now - self._said >= HEARTBEAT:
            self._said = now
            self.say(f"      {self._elapsed()}  {activity}")

    def end(self) -> None:
        """The step is done."""
        self.say(f"[{self._step}/{self._steps}] {self._title}: done in {self._elapsed()}")

    def _elapsed(self) -> str:
        minutes, seconds = divmod(int(time.monotonic() - self._started), 60)
        return f"{minutes}:{seconds:02}"

    def _erase(self) -> None:
        if self._live:
            self._stream.write("\r\x1b[2K")
