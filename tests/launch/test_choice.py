"""What a command does that names no launch: the one that is meant, or why none can be told."""

from __future__ import annotations

import os
import socket

import pytest
from places import Place

from kvctl.errors import UsageError
from kvctl.launch import procfs
from kvctl.launch.choice import NothingRunsError, only_run, traces
from kvctl.launch.lock import holder, take
from kvctl.launch.state import (
    ProcessRecord,
    RunState,
    StateError,
    backup_path,
    save,
    state_path,
)

BROKEN = "{broken"
UNREADABLE = "(its state file cannot be read)"


def record_run(name: str, *, running: bool = False, broken: bool = False) -> None:
    """A launch on record; one that runs borrows the identity of this process."""
    me = procfs.identify(os.getpid()) if running else procfs.Identity(0, 0)
    assert me
    process = ProcessRecord("prefill-0", "engine", pid=me.pid, started=me.started, phase="ready")
    phase = "running" if running else "stopped"
    save(RunState(name, "run-1", [process], boot=procfs.boot_id(), phase=phase))
    if broken:
        state_path(name).write_text(BROKEN)


def test_the_one_that_is_meant(place: Place) -> None:
    with pytest.raises(NothingRunsError, match="nothing was launched here"):
        only_run()
    record_run("old")
    assert only_run().name == "old"
    record_run("older")
    with pytest.raises(NothingRunsError, match="nothing runs; launched before: old, older"):
        only_run()
    record_run("live", running=True)
    assert only_run().name == "live"
    record_run("too", running=True)
    with pytest.raises(UsageError, match="several topologies run: live, too"):
        only_run()


@pytest.mark.parametrize("found_by", ["its copy", "its lock"])
def test_one_that_runs_with_a_broken_state_file_is_meant(place: Place, found_by: str) -> None:
    record_run("demo")
    record_run("base", running=found_by == "its copy", broken=True)
    lock = None
    if found_by == "its lock":
        backup_path("base").unlink()
        assert traces("base") == []
        lock = take("base")
    with pytest.raises(StateError, match="the state of base cannot be read"):
        only_run()
    record_run("demo", running=True)
    with pytest.raises(UsageError, match=r"several topologies run: base .*, demo") as caught:
        only_run()
    assert UNREADABLE in caught.value.message
    if lock:
        lock.release()


def test_a_broken_state_file_of_what_does_not_run_is_no_candidate(place: Place) -> None:
    record_run("base", broken=True)
    record_run("live", running=True)
    assert only_run().name == "live"
    record_run("live")
    with pytest.raises(NothingRunsError, match=r"launched before: base .*, live"):
        only_run()


def test_who_has_given_the_lock_back_does_not_hold_it(place: Place) -> None:
    assert holder("base") is None
    lock = take("base")
    assert lock
    assert holder("base") == procfs.identify(os.getpid())
    lock.release()
    assert holder("base") is None


@pytest.mark.parametrize("command", ["status", "logs"])
def test_to_look_at_one_of_several_it_must_be_named(place: Place, command: str) -> None:
    record_run("base")
    record_run("demo")
    done = place.kvctl("", command)
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "kvctl: nothing runs; launched before: base, demo",
        "  to look at one of them, name it: -p NAME",
    ]


def test_there_is_nothing_to_stop_and_that_is_no_error(place: Place) -> None:
    done = place.kvctl("", "stop")
    assert (done.returncode, done.stdout, done.stderr) == (0, "nothing runs\n", "")
    record_run("base")
    record_run("demo")
    done = place.kvctl("", "stop")
    assert (done.returncode, done.stdout, done.stderr) == (
        0, "nothing runs; launched before: base, demo\n", "",
    )  # fmt: skip
    unknown = place.kvctl("", "stop", "-p", "south")
    assert unknown.returncode == 2
    assert "no topology south was launched here\n  known: base, demo" in unknown.stderr


def test_a_stop_clears_up_after_what_ended_unseen_even_so(place: Place) -> None:
    record_run("base")
    record_run("demo")
    feed = place.runtime / "p.sock"
    process = ProcessRecord("prefill-0", "engine", pid=1, phase="ready", feeds=[str(feed)])
    save(RunState("demo", "run-2", [process], boot=procfs.boot_id(), phase="running"))
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(feed))
    done = place.kvctl("", "stop")
    assert (done.returncode, done.stdout.splitlines()) == (
        0, ["nothing runs; launched before: base, demo", f"removed what was left behind: {feed}"],
    )  # fmt: skip
    assert place.state("demo").phase == "stopped"


def test_ps_with_a_broken_state_file_lists_the_others_and_fails(place: Place) -> None:
    record_run("base", broken=True)
    alone = place.kvctl("", "ps")
    assert (alone.returncode, alone.stdout) == (3, "")
    assert f"kvctl: the state of base cannot be read: {state_path('base')}" in alone.stderr
    assert "kvctl stop -p base ends what it started" in alone.stderr
    assert "nothing runs" not in alone.stderr
    record_run("live", running=True)
    listed = place.kvctl("", "ps")
    assert listed.returncode == 3
    assert "live" in listed.stdout and "the state of base" in listed.stderr


def test_a_broken_state_file_while_all_runs(place: Place) -> None:
    record_run("demo")
    plan = place.plan(place.engine("prefill-0"), place.router(), name="base")
    launched = place.kvctl(plan, "launch", "-d")
    assert launched.returncode == 0, launched.stderr
    state_path("base").write_text(BROKEN)
    for command in (["status"], ["logs"], ["stop", "prefill-0"]):
        told = place.kvctl(plan, *command)
        assert (told.returncode, told.stdout) == (3, "")
        assert f"the state of base cannot be read: {state_path('base')}" in told.stderr
        assert "kvctl stop -p base" in told.stderr
    done = place.kvctl(plan, "stop")
    assert done.returncode == 0, done.stderr
    aside = state_path("base").with_name("state.json.broken-1")
    assert done.stdout.splitlines() == [
        f"base: its state file could not be read and is now {aside}",
        "base: stopped prefill-0, router",
    ]
    assert not place.processes()
