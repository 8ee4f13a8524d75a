"""Stopping: with a supervisor and without, only what was started, and nothing left behind."""

from __future__ import annotations

import json
import mmap
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from places import Place, until

from kvctl.launch import procfs
from kvctl.launch.state import backup_path, load, save, state_path


def kill_supervisor(place: Place) -> None:
    supervisor = place.state().supervisor
    os.kill(supervisor.pid, signal.SIGKILL)
    until("the supervisor's end", lambda: not procfs.lives(supervisor))


def launched(place: Place, *processes: dict[str, object], **changes: object) -> str:
    plan = place.plan(*processes, **changes)
    done = place.kvctl(plan, "launch", "-d")
    assert done.returncode == 0, done.stderr
    return plan


def test_stop_after_the_supervisor_was_killed(place: Place) -> None:
    plan = launched(
        place,
        place.engine("prefill-0", feed="p.sock"),
        place.relay("prefill-0.relay", feed="p.sock"),
        place.router(),
    )
    kill_supervisor(place)
    listed = place.kvctl(plan, "ps").stdout
    assert listed.count("ready") == 3
    assert "fake has no supervisor any more; kvctl stop -p fake ends it" in listed
    refused = place.kvctl(plan, "launch", "-d")
    assert refused.returncode == 2
    assert "still runs although its supervisor is gone: prefill-0" in refused.stderr
    done = place.kvctl(plan, "stop")
    assert done.returncode == 0, done.stderr
    assert "fake: stopped prefill-0, prefill-0.relay, router" in done.stdout
    assert [event for event in place.events() if "end" in event] == [
        "end router", "end prefill-0", "end prefill-0.relay",
    ]  # fmt: skip
    assert place.state().phase == "stopped"


def test_what_ignores_sigterm_is_killed_in_time(place: Place) -> None:
    plan = launched(place, place.engine("prefill-0", "--ignore-term"), stop_timeout=0.3)
    assert place.kvctl(plan, "stop").returncode == 0
    assert place.state().processes[0].phase == "killed"
    assert place.state().processes[0].exit_code == 137


def test_a_drain_within_the_time_is_waited_for(place: Place) -> None:
    plan = launched(place, place.engine("prefill-0", "--linger", 0.8))
    place.kvctl(plan, "stop")
    record = place.state().processes[0]
    assert (record.phase, record.exit_code) == ("exited", 0)


def test_a_killed_engine_tree_leaves_nothing_after_the_next_stop(place: Place, shm: str) -> None:
    plan = launched(place, place.engine("prefill-0", "--shm", shm, "--children", 2, feed="p.sock"))
    until("its file", lambda: place.state().processes[0].shm)
    members = place.state().processes[0].members
    kill_supervisor(place)
    for member in members:
        os.kill(member.pid, signal.SIGKILL)
    assert len(members) == 3
    done = place.kvctl(plan, "stop")
    assert done.returncode == 0, done.stderr
    assert f"removed what was left behind: /dev/shm/{shm}" in done.stdout
    assert not Path("/dev/shm", shm).exists()
    assert not (place.runtime / "p.sock").exists()


def test_a_killed_engine_under_supervision_is_cleaned_up_at_once(place: Place, shm: str) -> None:
    plan = launched(
        place, place.engine("prefill-0", "--shm", shm, feed="p.sock"), place.engine("decode-0")
    )
    until("its file", lambda: place.state().processes[0].shm)
    os.kill(place.state().processes[0].pid, signal.SIGKILL)
    until("the removal", lambda: not Path("/dev/shm", shm).exists())
    record = place.state().processes[0]
    assert (record.phase, record.exit_code) == ("failed", 137)
    assert "killed by SIGKILL" in (record.cause or "")
    place.kvctl(plan, "stop")


def test_a_file_that_somebody_has_mapped_stays(place: Place, shm: str) -> None:
    plan = launched(place, place.engine("prefill-0", "--shm", shm))
    until("its file", lambda: place.state().processes[0].shm)
    with Path("/dev/shm", shm).open("r+b") as file:
        kept = mmap.mmap(file.fileno(), 4096)
    done = place.kvctl(plan, "stop")
    assert Path("/dev/shm", shm).exists()
    kept.close()
    assert done.returncode == 0
    done = place.kvctl(plan, "stop")
    assert f"removed what was left behind: /dev/shm/{shm}" in done.stdout
    assert not Path("/dev/shm", shm).exists()


def test_a_file_that_was_there_before_is_not_the_engines(place: Place, shm: str) -> None:
    Path("/dev/shm", shm).write_bytes(b"weights")
    plan = launched(place, place.engine("prefill-0", "--shm", shm))
    place.kvctl(plan, "stop")
    assert Path("/dev/shm", shm).exists()
    assert place.state().processes[0].shm == []


@pytest.mark.parametrize("what", ["another process", "another boot"])
def test_a_reused_pid_is_not_hit(place: Place, what: str) -> None:
    plan = launched(place, place.engine("prefill-0"))
    place.kvctl(plan, "stop")
    with subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True
    ) as other:
        # As if the pid, and the number of the session, had gone to somebody else.
        state = place.state()
        record = state.processes[0]
        if what == "another boot":
            state.boot = "the-boot-before"
            record.started = procfs.identify(other.pid).started
        record.phase, record.pid = "ready", other.pid
        record.members = [procfs.Identity(other.pid, record.started)]
        state.supervisor_pid, state.supervisor_started = other.pid, record.started
        state.phase = "running"
        save(state)
        done = place.kvctl(plan, "stop")
        assert (done.returncode, done.stdout) == (0, "fake is not running\n")
        assert other.poll() is None
        assert place.kvctl(plan, "ps").stdout == ""
        other.communicate(b"\n", timeout=10)
    assert other.returncode == 0


def test_members_are_found_after_their_leader_has_gone(place: Place) -> None:
    plan = launched(place, place.engine("prefill-0", "--children", 2))
    kill_supervisor(place)
    leader = place.state().processes[0].identity
    os.kill(leader.pid, signal.SIGKILL)
    until("the leader's end", lambda: not procfs.lives(leader))
    assert len(place.processes()) == 2
    done = place.kvctl(plan, "stop")
    assert "fake: stopped prefill-0" in done.stdout
    assert not place.processes()


@pytest.mark.parametrize("supervised", [True, False])
def test_single_instances_with_their_relays(place: Place, supervised: bool) -> None:
    plan = launched(
        place,
        place.engine("prefill-0", feed="p.sock"),
        place.relay("prefill-0.relay", feed="p.sock"),
        place.engine("decode-0"),
    )
    if not supervised:
        kill_supervisor(place)
    done = place.kvctl(plan, "stop", "prefill-0")
    assert done.returncode == 0, done.stderr
    assert "fake: stopped prefill-0, prefill-0.relay\n" in done.stdout
    phases = {each.name: each.phase for each in place.state().processes}
    assert phases == {"prefill-0": "exited", "prefill-0.relay": "exited", "decode-0": "ready"}
    assert place.state().supervised() is supervised
    unknown = place.kvctl(plan, "stop", "prefil-0")
    assert unknown.returncode == 2
    assert "it has: prefill-0, prefill-0.relay, decode-0" in unknown.stderr
    place.kvctl(plan, "stop", "decode-0")
    until("the supervisor's end", lambda: not place.state().supervised())


@pytest.mark.parametrize("supervised", [True, False])
def test_a_broken_state_file_is_named_kept_and_no_reason_not_to_stop(
    place: Place, supervised: bool
) -> None:
    plan = launched(place, place.engine("prefill-0"))
    if not supervised:
        kill_supervisor(place)
    path = state_path("fake")
    path.write_text('{"name": "fake", "run_id"')
    for command in ("ps", "logs"):
        told = place.kvctl(plan, command, "-p", "fake")
        assert told.returncode == 3
        assert f"the state of fake cannot be read: {path}" in told.stderr
        assert "kvctl stop -p fake" in told.stderr
    relaunched = place.kvctl(plan, "launch", "-d")
    assert relaunched.returncode == 3
    assert str(path) in relaunched.stderr
    done = place.kvctl(plan, "stop")
    assert done.returncode == 0, done.stderr
    assert path.with_name("state.json.broken-1").read_text() == '{"name": "fake", "run_id"'
    assert done.stdout.endswith("fake: stopped prefill-0\n")
    assert not place.processes()
    assert place.state().phase == "stopped"


def test_with_no_copy_either_the_marked_processes_are_found(place: Place) -> None:
    plan = launched(place, place.engine("prefill-0"), place.router())
    kill_supervisor(place)
    state_path("fake").write_text("")
    backup_path("fake").unlink()
    done = place.kvctl(plan, "stop")
    assert done.returncode == 0, done.stderr
    assert "fake: stopped prefill-0, router" in done.stdout
    assert not place.processes()


def test_a_state_of_a_newer_schema_can_be_stopped_and_keeps_its_fields(place: Place) -> None:
    plan = launched(place, place.engine("prefill-0"))
    kill_supervisor(place)
    path = state_path("fake")
    newer = json.loads(path.read_text())
    newer |= {"schema": 99, "file": {"path": "kvctl.yaml", "digest": "abc"}, "zone": "north"}
    newer["processes"][0] |= {"ports": ["api", 1], "phase": "rebalancing", "shard": 7}
    path.write_text(json.dumps(newer))
    done = place.kvctl(plan, "stop")
    assert done.returncode == 0, done.stderr
    assert "stopped prefill-0" in done.stdout
    after = json.loads(path.read_text())
    assert (after["schema"], after["zone"], after["phase"]) == (99, "north", "stopped")
    assert after["file"] == {"path": "kvctl.yaml", "digest": "abc"}
    assert after["processes"][0]["ports"] == ["api", 1]
    assert (after["processes"][0]["shard"], after["processes"][0]["phase"]) == (7, "exited")


def test_a_state_of_an_older_version_can_be_stopped(place: Place) -> None:
    plan = launched(place, place.engine("prefill-0"))
    kill_supervisor(place)
    path = state_path("fake")
    full = json.loads(path.read_text())
    core = {key: full[key] for key in ("name", "run_id")}
    core["processes"] = [
        {key: each[key] for key in ("name", "kind", "pid", "started")} for each in full["processes"]
    ]
    path.write_text(json.dumps(core))
    done = place.kvctl(plan, "stop")
    assert done.returncode == 0, done.stderr
    assert "stopped prefill-0" in done.stdout


def test_unknown_names_are_listed_against_the_known_ones(place: Place) -> None:
    plan = launched(place, place.engine("prefill-0"), name="north")
    missing = place.kvctl(plan, "stop", "-p", "south")
    assert missing.returncode == 2
    assert "no topology south was launched here\n  known: north" in missing.stderr
    whole = place.kvctl(plan, "stop", "north")
    assert "kvctl stop -p north" in whole.stderr
    other = launched(place, place.engine("prefill-0"), name="south")
    unclear = place.kvctl(other, "stop")
    assert unclear.returncode == 2
    assert "several topologies run: north, south\n  say which one with -p NAME" in unclear.stderr
    for name in ("north", "south"):
        assert place.kvctl(plan, "-p", name, "down").returncode == 0
    assert load("north") and load("south")


def test_two_stops_at_once_are_one(place: Place) -> None:
    plan = launched(place, place.engine("prefill-0", "--linger", 0.5))
    kill_supervisor(place)
    first, second = place.start(plan, "stop"), place.start(plan, "stop")
    began = time.monotonic()
    for process in (first, second):
        _, err = process.communicate(timeout=20)
        assert process.returncode == 0, err
    assert time.monotonic() - began < 20
    assert place.events().count("end prefill-0") == 1
