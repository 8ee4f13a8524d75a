"""Errors that are written for the operator, and the exit codes they turn into.

Every error says what happened, to what, and what to do. ``kvctl.cli.app.main`` is the one
place that prints them; anything else that escapes is a bug of ours and exits 70.
"""

from __future__ import annotations

import enum


class Exit(enum.IntEnum):
    """Exit codes of the ``kvctl`` command."""

    OK = 0
    FINDINGS = 1  # findings, degraded, or a demo that did not match
    USAGE = 2  # usage, or a bad file
    UNREACHABLE = 3  # could not look, or could not reach
    FAILED = 4  # an instance failed, or a deadline passed
    BUG = 70  # every uncaught exception, never a bare 1
    INTERRUPTED = 130
    TERMINATED = 143


class KvctlError(Exception):
    """An error for the operator.

    Args:
        message: what happened, and to what; one or more lines.
        hint: what to do about it.
    """

    exit_code = Exit.FINDINGS

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n  {self.hint}" if self.hint else self.message


class UsageError(KvctlError):
    """The command line or a file it names is wrong (exit code 2)."""

    exit_code = Exit.USAGE


class UnreachableError(KvctlError):
    """Something that had to be looked at could not be (exit code 3)."""

    exit_code = Exit.UNREACHABLE


class InstanceError(KvctlError):
    """An instance failed, or a deadline passed (exit code 4)."""

    exit_code = Exit.FAILED
