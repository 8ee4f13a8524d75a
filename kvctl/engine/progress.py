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
ERASE = "\r\x1b[2K"


def say(text: str, stream: TextIO | None = None) -> None:
    """A line that stays; on a terminal, in the place of one that was being rewritten."""
    stream = stream or sys.stderr
    print(f"{ERASE if is_live(stream) else ''}{text}", file=stream, flush=True)


def is_live(stream: TextIO) -> bool:
    """Whether a line can be rewritten there."""
    return stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"


class Progress:
    """Says which step is at work, for how long, and what it does right now."""

    def __init__(self, steps: int, *, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._live = is_live(self._stream)
        self._steps = steps
        self._step = 0
        self._title = ""
        self._started = self._said = time.monotonic()

    def begin(self, title: str, detail: str = "") -> None:
        """The next step begins; `detail` is said once, `title` with everything."""
        self._step += 1
        self._title = title
        self._started = self._said = time.monotonic()
        say(f"[{self._step}/{self._steps}] {title}{detail and f': {detail}'} …", self._stream)

    def update(self, activity: str) -> None:
        """What the step does now; call it often, it limits itself."""
        now = time.monotonic()
        if self._live:
            line = f"[{self._step}/{self._steps}] {self._title} · {self._elapsed()} · {activity}"
            width = shutil.get_terminal_size().columns - 1
            self._stream.write(ERASE + line[:width])
            self._stream.flush()
        elif now - self._said >= HEARTBEAT:
            self._said = now
            say(f"      {self._elapsed()}  {activity}", self._stream)

    def end(self) -> None:
        """The step is done."""
        say(f"[{self._step}/{self._steps}] {self._title}: done in {self._elapsed()}", self._stream)

    def _elapsed(self) -> str:
        minutes, seconds = divmod(int(time.monotonic() - self._started), 60)
        return f"{minutes}:{seconds:02}"
