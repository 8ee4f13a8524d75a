"""Runs one program of set-up (pip, venv, apt-get): its output to a log, its progress to the
screen, its failure to one sentence."""

from __future__ import annotations

import os
import re
import selectors
import subprocess
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TextIO

from kvctl.errors import InstanceError, KvctlError, UnreachableError

TICK = 0.25  # seconds between two looks at a silent program
GRACE = 10.0  # seconds that an interrupted program gets before it is killed
KEPT = 400  # lines of output that a failure is explained from
TAIL = 12  # lines of them that are shown

_NO_SPACE = re.compile(
    r"No space left on device|Errno 28|not enough free space|Disk quota exceeded"
)
_NO_NETWORK = re.compile(
    r"NewConnectionError|NameResolutionError|ConnectTimeoutError|ReadTimeoutError|ProxyError"
    r"|Failed to establish a new connection|Max retries exceeded|Connection (refused|reset|aborted)"
    r"|Network is unreachable|name resolution|Name or service not known|Read timed out"
    r"|SSLError|IncompleteRead|Could not connect to|Failed to fetch|Temporary failure resolving"
)
# What pip complains about in the CPU engine although nothing is wrong: packages that were left
# out on purpose (see pins/cpu-no-deps.txt).
_HARMLESS = re.compile(
    r"requires (torchvision|torchaudio|torchcodec|nixl-cu12)|dependency resolver"
)


def run(
    command: Sequence[str | Path],
    *,
    log: Path,
    show: Callable[[str], None],
    env: Mapping[str, str],
    keep_open: Sequence[int] = (),
) -> None:
    """Runs `command`, appends what it prints to `log`, and shows what it is doing.

    Args:
        show: gets a short text several times a second.
        keep_open: file descriptors that the program inherits.

    Raises:
        UnreachableError: the network failed it.
        InstanceError: anything else did.
    """
    line = " ".join(map(str, command))
    with log.open("a") as record:
        print(f"$ {line}", file=record, flush=True)
        try:
            program = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, env=env, pass_fds=keep_open,
            )  # fmt: skip
        except OSError as error:
            raise InstanceError(f"cannot run {command[0]}: {error.strerror}") from error
        try:
            printed = _follow(program, record, show)
            code = program.wait()
        finally:
            _end(program)
    if code != 0:
        raise explain(printed, command=line, code=code, log=log)


def describe(line: str) -> str | None:
    """What a line of pip's (or apt-get's) output says about the work; None: nothing new."""
    words = line.split()
    if not words:
        return None
    if words[0] == "Collecting" and len(words) > 1:
        return f"looking for {words[1].split('==')[0]}"
    if words[0] in ("Downloading", "Processing") and len(words) > 1:
        file = words[1].rsplit("/", 1)[-1].split(".whl")[0]
        size = " ".join(words[2:]) if words[-1] in ("kB)", "MB)", "GB)") else ""
        return f"{words[0].lower()} {file} {size}".rstrip()
    if words[0] == "Progress" and len(words) == 4 and words[3].isdigit():
        return f"downloading {int(words[1]) / 1e6:.0f} of {int(words[3]) / 1e6:.0f} MB"
    if line.startswith("Installing collected packages:"):
        return f"installing {line.count(',') + 1} packages"
    if "Retrying" in line and "after connection broken" in line:
        return "no answer from the package index, trying again"
    if words[0] in ("Building", "Preparing", "Unpacking") or line.startswith("Setting up"):
        return " ".join(words[:4]).rstrip(".").lower()
    return None


def explain(lines: Iterable[str], *, command: str, code: int, log: Path) -> KvctlError:
    """The error for a `command` that ended with exit code `code` after it printed `lines`."""
    printed = "\n".join(lines)
    if _NO_SPACE.search(printed):
        return InstanceError(
            f"the disk of {log.parent} is full",
            hint="make room, then run this again: it goes on with the step that failed.\n"
            f"  What was being done: {log}",
        )
    if _NO_NETWORK.search(printed):
        return UnreachableError(
            "the package index could not be reached",
            hint="check the network, then run this again. pip's own settings are honoured, for\n"
            f"  example PIP_INDEX_URL and PIP_PROXY. What pip said: {log}",
        )
    said = [line for line in lines if line.strip() and not _HARMLESS.search(line)]
    shown = "".join(f"\n  | {line}" for line in said[-TAIL:])
    return InstanceError(f"{command}\n  failed with exit code {code}:{shown}", hint=f"log: {log}")


def _follow(
    program: subprocess.Popen[bytes], record: TextIO, show: Callable[[str], None]
) -> Iterable[str]:
    """Copies the program's output to `record` until it closes it; returns the last lines."""
    assert program.stdout is not None
    last: deque[str] = deque(maxlen=KEPT)
    activity, rest = "starting", ""
    with selectors.DefaultSelector() as selector:
        selector.register(program.stdout, selectors.EVENT_READ)
        while True:
            show(activity)
            if not selector.select(TICK):
                continue
            chunk = os.read(program.stdout.fileno(), 65536).decode(errors="replace")
            *lines, rest = (rest + (chunk or "\n")).split("\n")
            for line in lines:
                activity = describe(line) or activity
                if not line.startswith("Progress "):
                    last.append(line)
                    print(line, file=record, flush=True)
            if not chunk:
                return last


def _end(program: subprocess.Popen[bytes]) -> None:
    """Ends the program, if it has not: politely, then for good."""
    if program.stdout is not None:
        program.stdout.close()
    if program.poll() is not None:
        return
    program.terminate()
    try:
        program.wait(GRACE)
    except subprocess.TimeoutExpired:
        program.kill()
        program.wait()
