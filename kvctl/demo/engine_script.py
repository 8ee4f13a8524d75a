"""Runs one of the scripts in ``kvctl/demo/scripts`` with the engine's Python."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvctl.errors import InstanceError, UnreachableError
from kvctl.launch.log_lines import last_lines

FOLDER = Path(__file__).parent / "scripts"
TAIL = 15  # lines of the log that an error shows


def run_script(
    python: Path,
    script: str,
    arguments: Sequence[str | Path],
    *,
    env: Mapping[str, str],
    log: Path,
    timeout: float,
) -> None:
    """Runs a script to its end; what it says goes into `log`.

    It runs in a process group of its own, and whatever ends this function early (Ctrl-C, an
    error, the deadline) ends the whole group.

    Args:
        env: added to the inherited environment.
        timeout: seconds.

    Raises:
        UnreachableError: `python` cannot be run.
        InstanceError: it failed, or was not done in time; the end of its log is shown.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        try:
            process = subprocess.Popen(
                [python, FOLDER / script, *arguments],
                env={**os.environ, **env},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise UnreachableError(f"{python} cannot be run: {error.strerror}") from error
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise InstanceError(
                f"{script} was not done after {timeout:.0f} s\n{_tail(log)}",
                hint=f"its whole output: {log}",
            ) from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if code:
        how = f"was ended by signal {-code}" if code < 0 else f"failed with exit code {code}"
        raise InstanceError(
            f"{script}, run by {python}, {how}\n{_tail(log)}", hint=f"its whole output: {log}"
        )


def _tail(log: Path) -> str:
    return "\n".join(f"    {line}" for line in last_lines(log, TAIL))
