"""Why a process ended, or never gets ready: the cause from its log, and what to do about it.

vLLM says the cause first, in the worker or the engine core, and then once more in every process
above, ending in "Engine core initialization failed. See root cause above". What is wanted is
the first exception that is not such an echo. `KNOWN` adds what to do.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from kvctl.launch.log_lines import Line, last_lines, parse, read_end
from kvctl.launch.remedies import remedy

READ = 4 << 20  # bytes of a log that are looked at, from its end
RECENT = 60.0  # s: of a process that had been ready, older exceptions were survived
LINES = 4  # of a long message, and of a log in which no cause was found
WIDTH = 400  # characters of one such line
SILENT = "one of the engine's own processes ended without a message: killed, or crashed"

# Exceptions that only pass on what another process said before.
_ECHO = re.compile(
    r"Engine core initialization failed|WorkerProc initialization failed|Worker failed with error"
    r"|Engine core proc .* died unexpectedly|Worker proc .* died unexpectedly|EngineDeadError"
    r"|Executor failed|EngineCore encountered an issue|^(asyncio\.\S*)?CancelledError"
    r"|^KeyboardInterrupt|^SystemExit|BrokenPipeError|^EOFError|leaked s"
)
_EXCEPTION = re.compile(r"(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:: .*)?$")
_ERROR = re.compile(
    r"^\S*(?: \S+)?: error: |^(?:Error|error|fatal|panicked): |^thread '.*' panicked at "
)
_ADVERTISEMENT = re.compile(r"^\s*For further information visit https://errors\.pydantic\.dev")
_CHAIN = re.compile(
    r"The above exception was the direct cause|During handling of the above exception"
)
# While it starts, each of these means that it will never get ready, though it does not end.
_HOPELESS = re.compile(r"Exception in thread nixl_handshake_listener")
_LOADING = re.compile(
    r"Initializing a V1 LLM engine|Starting to load model|Loading safetensors|Loading weights"
)


@dataclass(frozen=True)
class Diagnosis:
    """Why a process failed: the lines that say so, and what to do about it."""

    cause: str
    hint: str | None = None


def shows_loading(line: str) -> bool:
    """True for a log line with which vLLM begins to load the model."""
    return _LOADING.search(line) is not None


def shows_hopeless(line: str) -> bool:
    """True for a log line after which an engine hangs for ever while it starts."""
    return _HOPELESS.search(line) is not None


def diagnose(log: Path, *, exit_code: int | None, was_ready: bool = False) -> Diagnosis:
    """Finds why a process ended or hangs.

    Args:
        log: its log.
        exit_code: as subprocess gives it, negative for a signal; None while it runs.
        was_ready: it had been ready before, so only what came last counts.
    """
    text = read_end(log, READ)
    lines = [parse(line) for line in text.splitlines()]
    said = _cause(_recent(lines) if was_ready else lines)
    how = describe_exit(exit_code)
    if not said and was_ready and how:
        # Its last lines would be those of a day's work.
        return Diagnosis(how, remedy("", text, exit_code))
    if not said:
        tail = [line[:WIDTH] for line in last_lines(log, LINES)]
        said = "last lines of its log:\n" + "\n".join(tail) if tail else "its log is empty"
    cause = f"{how}: {said}" if how else said
    return Diagnosis(cause, remedy(said, text, exit_code))


def describe_exit(code: int | None) -> str:
    """``-9`` → ``"killed by SIGKILL"``; empty while it runs or where it is not known."""
    if code is None:
        return ""
    if code < 0:
        try:
            return f"killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"killed by signal {-code}"
    return f"exit code {code}"


def _recent(lines: list[Line]) -> list[Line]:
    """The lines of the log's last `RECENT` seconds; all, where it carries no times."""
    times = [line.time for line in lines if line.time is not None]
    if not times:
        return lines
    for index, line in enumerate(lines):
        if line.time is not None and line.time >= max(times) - RECENT:
            return lines[index:]
    return lines


@dataclass(eq=False)
class _Raised:
    """One exception of a log: its message's lines, and those of the one it came from."""

    message: list[str] = field(default_factory=list)
    origin: list[str] = field(default_factory=list)


def _cause(lines: list[Line]) -> str:
    exceptions = _exceptions(lines)
    for each in exceptions:
        if _ECHO.search(each.message[0]):
            continue
        if each.origin and each.origin[0] not in each.message[0]:
            return f"{_cut(each.message)}\ncaused by {_cut(each.origin)}"
        return _cut(each.message)
    for line in lines:
        if _ERROR.search(line.text) or line.level == "CRITICAL":
            return line.text.strip()
    if exceptions or any(_ECHO.search(line.text) for line in lines):
        return SILENT
    errors = [line.text.strip() for line in lines if line.level == "ERROR" and line.text.strip()]
    return errors[0] if errors else ""


def _exceptions(lines: Iterable[Line]) -> list[_Raised]:
    """The exceptions of a log in the order in which their processes finished saying them.

    Processes write into each other's tracebacks, so each record of each source is followed for
    itself. One that a program chose to log as a warning or lower is not among them.
    """
    found: list[_Raised] = []
    open_blocks: dict[tuple[str, str, str], _Block] = {}
    for line in lines:
        key = (line.source, line.level, line.where)
        block = open_blocks.get(key)
        if line.text.startswith("Traceback (most recent call last):"):
            if line.level in ("", "ERROR", "CRITICAL"):
                following = _Block(after=block)
                if following.raised.origin and block:
                    found.remove(block.raised)  # named as the origin of this one
                open_blocks[key] = following
                found.append(following.raised)
        elif block and not block.take(line.text):
            del open_blocks[key]
    return [each for each in found if each.message]


class _Block:
    """One traceback while it is read: frames first, then the exception's message."""

    def __init__(self, *, after: _Block | None = None) -> None:
        self.raised = _Raised()
        self._chained: bool = False
        if after is not None and after._chained:
            self.raised.origin = after.raised.origin or after.raised.message

    def take(self, text: str) -> bool:
        """Takes the next line of the same source; False when the block is over."""
        if _CHAIN.search(text):
            self._chained = True
            return True
        message = self.raised.message
        if not message:
            if _EXCEPTION.match(text):
                message.append(text)
            elif text and not text[0].isspace():
                return False
            return True
        if self._chained or not text.strip() or _ADVERTISEMENT.search(text):
            return True
        if len(message) < 2 * LINES and not text.startswith(("Process ", "/")):
            message.append(text)
            return True
        return False


def _cut(message: list[str]) -> str:
    return "\n".join(line.rstrip()[:WIDTH] for line in message[:LINES])
