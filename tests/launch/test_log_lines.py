"""Lines of logs: their parts, what must not reach a terminal, and reading as they grow."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import pytest

from kvctl.launch.log_lines import Tail, clean, history, last_lines, parse

NOW = datetime(2026, 1, 2, 12, 0, 0)


@pytest.mark.parametrize(
    ("line", "source", "level", "where", "time", "text"),
    [
        ("(EngineCore_DP0 pid=7) ERROR 01-01 10:20:30 [core.py:1510] boom", "EngineCore_DP0",
         "ERROR", "core.py:1510", datetime(2026, 1, 1, 10, 20, 30), "boom"),
        ("INFO 12-31 23:00:00 [a.py:1] last year", "", "INFO", "a.py:1",
         datetime(2025, 12, 31, 23, 0, 0), "last year"),
        ("(Worker pid=7) plain", "Worker", "", "", None, "plain"),
        ("2026-01-01 10:20:30 NIXL INFO  x", "", "", "", datetime(2026, 1, 1, 10, 20, 30),
         "2026-01-01 10:20:30 NIXL INFO  x"),
        ("\x1b[2m2026-01-01T10:20:30.123\x1b[0m INFO", "", "", "",
         datetime(2026, 1, 1, 10, 20, 30), "2026-01-01T10:20:30.123 INFO"),
        ("ERROR 13-45 99:00:00 [a.py:1] no date", "", "ERROR", "a.py:1", None, "no date"),
        ("    raise ValueError", "", "", "", None, "    raise ValueError"),
    ],
)  # fmt: skip
def test_the_parts_of_a_line(
    line: str, source: str, level: str, where: str, time: datetime | None, text: str
) -> None:
    found = parse(line, now=NOW)
    assert (found.source, found.level, found.where, found.text) == (source, level, where, text)
    assert found.time == (time.timestamp() if time else None)


@pytest.mark.parametrize(
    ("raw", "plain", "coloured"),
    [
        ("a\x1b[31mb\x1b[0mc", "abc", "a\x1b[31mb\x1b[0mc\x1b[0m"),
        ("x\x1b]0;title\x07y", "xy", "xy"),
        ("x\x1b]52;c;aGk=\x1b\\y", "xy", "xy"),
        ("x\x1b[2J\x1b[1;1Hy", "xy", "xy"),
        ("x\x1bcy\x9b31my\x00", "xy31my", "xy31my"),
        ("x\x1b[3", "x", "x"),
        ("50%\r100%\x08", "50%100%", "50%100%"),
        ("tab\tü", "tab\tü", "tab\tü"),
    ],
)
def test_what_drives_a_terminal_is_taken_out(raw: str, plain: str, coloured: str) -> None:
    assert clean(raw) == plain
    assert clean(raw, colours=True) == coloured


def test_a_log_is_followed_over_a_rotation(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    tail = Tail(path)
    assert tail.lines() == []
    path.write_text("one\ntw")
    assert tail.lines() == ["one"]
    with path.open("a") as file:
        file.write("o\nthree\n")
    path.rename(tmp_path / "a.log.1")
    path.write_text("four\n")
    assert tail.lines() == ["two", "three"]
    assert tail.lines() == ["four"]
    path.write_text("")
    path.write_text("5\n")
    assert tail.lines() == ["5"]
    tail.close()


def test_following_from_the_end_misses_nothing_and_repeats_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_text("one\ntwo\nthr")
    tail = Tail(path, from_end=True)
    assert list(history(path, end=tail.offset)) == ["one", "two"]
    with path.open("a") as file:
        file.write("ee\n")
    assert tail.lines() == ["three"]


@pytest.mark.parametrize(("count", "expected"), [(0, []), (1, ["c"]), (2, ["b", "c"]), (9, None)])
def test_the_last_lines(tmp_path: Path, count: int, expected: list[str] | None) -> None:
    path = tmp_path / "a.log"
    path.write_text("a\nb\nc\n")
    assert list(history(path, tail=count)) == (["a", "b", "c"] if expected is None else expected)


def test_the_last_lines_of_a_long_log(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_text("".join(f"line {number}\n" for number in range(30_000)) + "\x1b[1m  \n")
    assert next(history(path, tail=20_000)) == "line 10001"
    assert last_lines(path, 2) == ["line 29998", "line 29999"]
    assert last_lines(tmp_path / "none", 2) == []
