"""The lines of an instance's log: who wrote them, when, how loudly; and reading them as they come.

vLLM writes ``(EngineCore pid=77) ERROR 11-30 19:26:12 [core.py:1510] text``, the part in
parentheses and the header being optional; NIXL ``2026-11-30 19:25:13 NIXL INFO  file:1 text``;
the router and the relay begin with an ISO time. Anything else belongs to the line before it.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import BinaryIO, NamedTuple

_COLOUR = re.compile(r"(\x1b\[[0-9;]*m)")
# Escape sequences (CSI, OSC, two-byte ones, cut-off ones) and control characters but tab.
_CONTROL = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]?|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b.?"
    r"|[\x00-\x08\x0a-\x1f\x7f-\x9f]"
)
_VLLM = re.compile(
    r"(?:\((?P<source>[\w-]+) pid=\d+\) )?"
    r"(?:(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL) (?P<time>\d\d-\d\d \d\d:\d\d:\d\d)"
    r" \[(?P<where>[^\]]*)\] ?)?"
)
_ISO = re.compile(
    r"\[?(?P<time>\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d)(?:[.,]\d+)?(?P<zone>Z|[+-]\d\d:?\d\d)?\]?"
)


class Line(NamedTuple):
    """One line.

    Attributes:
        source: the process of the engine that wrote it (``EngineCore``), "" where not said.
        level: as written; "" where not said.
        where: file and line of the code that logged it; "" where not said.
        time: Unix time in s, whole seconds; None where not said.
        text: without what the other attributes hold.
    """

    source: str
    level: str
    where: str
    time: float | None
    text: str


def clean(text: str, *, colours: bool = False) -> str:
    """Without control characters: what comes from a log must not drive the reader's terminal."""
    pieces = _COLOUR.split(text)  # text, colour, text, ...
    kept = [
        _CONTROL.sub("", piece) if index % 2 == 0 else piece * colours
        for index, piece in enumerate(pieces)
    ]
    if colours and len(pieces) > 1:
        kept.append("\x1b[0m")
    return "".join(kept)


def parse(line: str, *, now: datetime | None = None) -> Line:
    """Takes a line apart.

    Args:
        line: without its newline.
        now: what vLLM's times without a year are read against; default: the clock.
    """
    line = clean(line)
    if iso := _ISO.match(line):
        return Line("", "", "", _iso_time(iso), line)
    match = _VLLM.match(line)
    assert match  # every part is optional
    time = _vllm_time(match["time"], now or datetime.now()) if match["time"] else None
    return Line(
        match["source"] or "", match["level"] or "", match["where"] or "", time, line[match.end() :]
    )


def _iso_time(match: re.Match[str]) -> float | None:
    try:
        return datetime.fromisoformat(match["time"] + (match["zone"] or "")).timestamp()
    except ValueError:
        return None


def _vllm_time(text: str, now: datetime) -> float | None:
    """Local time without a year: the latest such moment that is not in the future."""
    for year in (now.year, now.year - 1):
        try:
            moment = datetime.strptime(f"{year}-{text}", "%Y-%m-%d %H:%M:%S")
        except ValueError:
            continue  # 29 February
        if moment <= now + timedelta(days=1):
            return moment.timestamp()
    return None


def history(path: Path, *, tail: int | None = None, end: int | None = None) -> Iterator[str]:
    """The lines of a log as it is now, without newlines; nothing where there is none.

    Args:
        tail: only so many of the last ones.
        end: only what stands before this offset in bytes.
    """
    try:
        file = path.open("rb")
    except OSError:
        return
    with file:
        end = file.seek(0, os.SEEK_END) if end is None else end
        file.seek(0 if tail is None else _start_of_last(file, tail, end))
        while file.tell() < end and (line := file.readline()):
            yield line.decode(errors="replace").rstrip("\n")


def _start_of_last(file: BinaryIO, count: int, end: int) -> int:
    """The offset at which the last `count` lines before `end` begin, read from the end."""
    block, position, seen = 1 << 16, end, 0
    while position > 0:
        start = max(0, position - block)
        file.seek(start)
        data = file.read(position - start)
        for index in range(len(data) - 1, -1, -1):
            # The newline that ends the last line begins no further one.
            if data[index] == 0x0A and start + index + 1 < end:
                seen += 1
                if seen == count:
                    return start + index + 1
        position = start
    return 0 if count else end


class Tail:
    """Reads a log as it grows, by name: after a rotation it ends the old file, then goes on.

    Attributes:
        offset: with `from_end`, where it began: after the last complete line.
    """

    LIMIT = 1 << 20  # bytes a call, so that a flood of output cannot hold up its reader

    def __init__(self, path: Path, *, from_end: bool = False) -> None:
        self._path = path
        self._file: io.BufferedReader | None = None
        self._partial = b""
        self.offset = 0
        if from_end:
            self._go_to_end()

    def lines(self) -> list[str]:
        """The lines that were completed since the last call, without newlines."""
        if self._file is None and not self._open():
            return []
        data = self._read()
        if not data and self._replaced() and self._open():
            self._partial = b""
            data = self._read()
        *complete, self._partial = (self._partial + data).split(b"\n")
        return [line.decode(errors="replace") for line in complete]

    def close(self) -> None:
        if self._file:
            self._file.close()
            self._file = None

    def _go_to_end(self) -> None:
        self._open()
        if self._file:
            size = self._file.seek(0, os.SEEK_END)
            self._file.seek(max(0, size - (1 << 16)))
            self.offset = size - len(self._file.read().rpartition(b"\n")[2])
            self._file.seek(self.offset)

    def _open(self) -> bool:
        try:
            fresh = self._path.open("rb")
        except OSError:
            return False
        self.close()
        self._file = fresh
        return True

    def _read(self) -> bytes:
        assert self._file
        if os.fstat(self._file.fileno()).st_size < self._file.tell():
            self._file.seek(0)  # emptied in place
        return self._file.read(self.LIMIT)

    def _replaced(self) -> bool:
        assert self._file
        try:
            return self._path.stat().st_ino != os.fstat(self._file.fileno()).st_ino
        except OSError:
            return False


def last_lines(path: Path, count: int, *, limit: int = 1 << 16) -> list[str]:
    """The last lines of a file that say anything, clean; of its last `limit` bytes at most."""
    text = read_end(path, limit)
    said = [line for line in map(clean, text.splitlines()) if line.strip()]
    return said[-count:]


def read_end(path: Path, limit: int) -> str:
    """The last `limit` bytes of a file from a line's beginning; empty where there is none."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - limit))
            data = file.read(limit)
    except OSError:
        return ""
    if size > limit:
        data = data.partition(b"\n")[2]
    return data.decode(errors="replace")
