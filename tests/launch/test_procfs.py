"""Processes by pid and start time: members of sessions, and signals that hit no other."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from kvctl.launch import procfs
from kvctl.launch.procfs import Identity, Stat, identify, lives, send, session_members


def seen(*stats: Stat) -> dict[int, Stat]:
    return {stat.pid: stat for stat in stats}


def stat(pid: int, session: int, started: int = 5, state: str = "S") -> Stat:
    return Stat(pid, state, 1, session, started)


LEADER = Identity(100, 5)
CHILD = Identity(101, 5)


def test_all_of_a_session_are_members_while_its_leader_is_there() -> None:
    found = session_members(LEADER, [], seen(stat(100, 100), stat(101, 100), stat(7, 7)))
    assert found == {LEADER, CHILD}


def test_a_leader_that_is_a_zombie_still_holds_its_session() -> None:
    found = session_members(LEADER, [], seen(stat(100, 100, state="Z"), stat(101, 100)))
    assert found == {CHILD}


def test_one_remembered_member_is_enough_to_know_the_others() -> None:
    found = session_members(LEADER, [CHILD], seen(stat(101, 100), stat(102, 100)))
    assert found == {CHILD, Identity(102, 5)}


def test_a_session_of_which_nobody_is_known_is_somebody_elses() -> None:
    assert session_members(LEADER, [CHILD], seen(stat(105, 100))) == set()


def test_a_reused_pid_of_leader_or_member_is_somebody_elses() -> None:
    others = seen(stat(100, 100, started=9), stat(101, 100, started=9), stat(102, 100, started=9))
    assert session_members(LEADER, [CHILD], others) == set()


def test_a_remembered_member_that_left_the_session_is_ours_but_not_its_new_session() -> None:
    others = seen(stat(101, 101), stat(102, 101))
    assert session_members(LEADER, [CHILD], others) == {CHILD}


def test_a_signal_goes_only_to_that_very_process() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE
    ) as process:  # fmt: skip
        there = identify(process.pid)
        assert there and lives(there)
        assert not lives(Identity(there.pid, there.started + 1))
        assert not send(Identity(there.pid, there.started + 1), signal.SIGKILL)
        assert process.poll() is None
        assert send(there, signal.SIGKILL)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert not lives(there), "a zombie does not live"
        assert not send(there, signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert identify(process.pid) is None
    assert not send(there, signal.SIGKILL)


def test_a_command_with_blanks_and_parentheses_does_not_confuse() -> None:
    rename = "import ctypes; ctypes.CDLL(None).prctl(15, b'a) S 1 (b', 0, 0, 0)"
    code = f"{rename}; print(1, flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout and process.stdout.readline()
        found = procfs.read_stat(process.pid)
        assert found and found.parent == os.getpid()
        process.communicate(b"\n", timeout=10)


def test_the_environment_and_command_of_a_process() -> None:
    assert procfs.environment(os.getpid()).get("PATH")
    assert "pytest" in procfs.command(os.getpid())
    assert procfs.environment(1 << 30) == {}
    assert procfs.command(1 << 30) == ""
