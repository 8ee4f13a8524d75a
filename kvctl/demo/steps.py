"""How the demo tells what it is doing; the command line shows it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from kvctl.launch.state import RunState
from kvctl.launch.supervisor import Watcher

Say = Callable[[str], None]


class Display(Protocol):
    """What the demo needs of whoever shows its progress."""

    def note(self, text: str) -> None:
        """Says something that stays to be read."""
        ...

    def step(self, what: str) -> AbstractContextManager[Say]:
        """Surrounds one step. What it gives is called with how far the step is."""
        ...

    def processes(self, known: RunState | None = None) -> AbstractContextManager[Watcher]:
        """Surrounds the start or the stop of the pair. What it gives shows each of its states.

        Args:
            known: a state that was shown before, so that only what changes is.
        """
        ...

    def supervisor_log(self) -> Watcher:
        """Shows progress in the log of the supervisor."""
        ...
