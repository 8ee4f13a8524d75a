"""Launching: order, readiness, early failure, signals, and what is left behind: nothing."""

from __future__ import annotations

import os
import select
import signal
import socket
import time
from pathlib import Path

import pytest
from places import DEADLINE, Place, until

from kvctl.launch.supervisor import SAME_REQUEST

CRASH = """\
(APIServer pid=7) INFO 11-30 19:24:13 [api.py:1] starting
(EngineCore pid=8) ERROR 11-30 19:24:20 [core.py:1510] EngineCore failed to start.
(EngineCore pid=8) ERROR 11-30 19:24:20 [core.py:1510] Traceback (most recent call last):
(EngineCore pid=8) ERROR 11-30 19:24:20 [core.py:1510]   File "core.py", line 1, in run
(EngineCore pid=8) ERROR 11-30 19:24:20 [core.py:1510] ValueError: the flux is out of phase
Traceback (most recent call last):
  File "utils.py", line 2, in wait
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
"""


@pytest.fixture
def crash(tmp_path: Path) -> Path:
    path = tmp_path / "crash.txt"
    path.write_text(CRASH)
    return path


def pair(place: Place, *told: object) -> str:
    return place.plan(
        place.engine("prefill-0", "--loading", *told, feed="p.sock"),
        place.relay("prefill-0.relay", feed="p.sock"),
        place.engine("decode-0", "--ready-after", "0.3"),
        place.router(),
    )


def test_a_detached_supervisor_keeps_no_file_of_its_caller_open(place: Place) -> None:
    """Else ``flock FILE kvctl launch -d`` would hold the lock for as long as the engines run."""
    plan = place.plan(place.engine("prefill-0"))
    read, write = os.pipe()
    launched = place.start(plan, "launch", "-d", pass_fds=[write])
    os.close(write)
    launched.communicate(timeout=DEADLINE)
    assert launched.returncode == 0
    ended, _, _ = select.select([read], [], [], DEADLINE)
    assert ended
    assert os.read(read, 1) == b""
    os.close(read)
    assert [each.phase for each in place.state().processes] == ["ready"]
    place.kvctl(plan, "stop")


def test_detached_launch_is_ready_in_order_and_stops_in_order(place: Place) -> None:
    plan = pair(place)
    done = place.kvctl(plan, "launch", "-d")
    assert done.returncode == 0, done.stderr
    assert "fake is ready: prefill-0, prefill-0.relay, decode-0, router" in done.stdout
    assert "/v1" in done.stdout
    state = place.state()
    assert [each.phase for each in state.processes] == ["ready"] * 4
    assert state.run_id == place.run_id
    # The relay starts when its engine's feed is there, beside everything else.
    events = [event for event in place.events() if "relay" not in event]
    assert set(events[:2]) == {"start prefill-0", "start decode-0"}
    assert events[2:] == ["start router"]

    stopped = place.kvctl(plan, "stop")
    assert stopped.returncode == 0, stopped.stderr
    ends = [event for event in place.events() if event.startswith("end")]
    assert ends[0] == "end router"
    assert set(ends[1:3]) == {"end prefill-0", "end decode-0"}
    assert ends[3] == "end prefill-0.relay"
    assert place.state().phase == "stopped"
    again = place.kvctl(plan, "stop")
    assert (again.returncode, again.stdout) == (0, "fake is not running\n")


def test_progress_without_a_terminal_is_one_line_a_change(place: Place) -> None:
    plan = pair(place, "--ready-after", "0.8")
    done = place.kvctl(plan, "launch", "-d")
    lines = [" ".join(line.split()[:2]) for line in done.stderr.splitlines()]
    prefill = [line.split()[1] for line in lines if line.startswith("prefill-0 ")]
    assert prefill == ["starting", "loading", "ready"]
    place.kvctl(plan, "stop")


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_in_the_foreground_stops_everything(
    place: Place, signum: signal.Signals, code: int
) -> None:
    running = place.start(pair(place), "launch")
    until("ready", lambda: (place.folder / "state/runs/fake/state.json").exists()
          and place.state().phase == "running")  # fmt: skip
    running.send_signal(signum)
    out, err = running.communicate(timeout=20)
    assert running.returncode == code, err
    assert "fake is ready" in out
    assert place.state().phase == "stopped"
    assert not place.processes()


def test_ctrl_c_while_starting_stops_what_was_started(place: Place) -> None:
    plan = place.plan(place.engine("prefill-0", "--ready-after", "-1"), place.router())
    for arguments in (["launch"], ["launch", "-d"]):
        place.order.unlink(missing_ok=True)
        running = place.start(plan, *arguments)
        until("the start", place.order.exists)
        running.send_signal(signal.SIGINT)
        _, err = running.communicate(timeout=20)
        assert running.returncode == 130, err
        assert "router             not started\n" in err
        assert "router             exited" not in err
        assert not place.processes()


def test_a_second_ctrl_c_kills_at_once(place: Place) -> None:
    plan = place.plan(place.engine("prefill-0", "--ignore-term"), stop_timeout=600.0)
    running = place.start(plan, "launch")
    until("ready", lambda: "fake is ready" in (running.stdout.readline() if running.stdout else ""))
    running.send_signal(signal.SIGINT)
    running.send_signal(signal.SIGINT)  # at once: taken for the same request
    time.sleep(SAME_REQUEST + 0.2)
    running.send_signal(signal.SIGHUP)  # as from a terminal that goes away
    time.sleep(0.2)
    assert place.state().processes[0].phase == "stopping"
    running.send_signal(signal.SIGINT)
    running.communicate(timeout=20)
    assert running.returncode == 130
    assert place.state().processes[0].phase == "killed"


@pytest.mark.parametrize("arguments", [["launch"], ["launch", "-d"]])
def test_an_engine_that_dies_while_starting_ends_the_launch(
    place: Place, crash: Path, arguments: list[str]
) -> None:
    plan = place.plan(
        place.engine("prefill-0", "--ready-after", "-1"),
        place.engine("decode-0", "--say", crash, "--exit-after", 0, "--ready-after", -1),
        place.router(),
    )
    done = place.kvctl(plan, *arguments)
    assert done.returncode == 4
    assert "decode-0 ended while starting: exit code 1: ValueError: the flux" in done.stderr
    assert done.stderr.count("the flux") == 1, "one clear message"
    assert "Engine core initialization failed" not in done.stderr
    assert "logs/decode-0.log" in done.stderr
    assert "start router" not in place.events()
    assert "\nrouter             not started\n" in done.stderr
    assert "router             exited" not in done.stderr
    (listed,) = [
        line for line in place.kvctl(plan, "ps", "-a").stdout.splitlines() if " router " in line
    ]
    assert "not started" in listed
    state = place.state()
    assert state.phase == "failed"
    assert {each.name: each.phase for each in state.processes}["decode-0"] == "failed"
    assert not place.processes()


def test_an_engine_that_never_gets_ready_fails_in_time(place: Place) -> None:
    plan = place.plan(place.engine("prefill-0", "--ready-after", -1), start_timeout=0.5)
    done = place.kvctl(plan, "launch")
    assert done.returncode == 4
    assert "prefill-0: not ready after" in done.stderr
    assert "this is a fake engine" in done.stderr
    assert "logs/prefill-0.log" in done.stderr


def test_an_engine_that_hangs_on_a_taken_side_channel_fails_at_once(place: Place) -> None:
    said = place.folder / "said.txt"
    said.write_text(
        "Exception in thread nixl_handshake_listener:\nTraceback (most recent call last):\n"
        '  File "x.py", line 1, in run\n'
        "zmq.error.ZMQError: Address already in use (addr='tcp://127.0.0.1:5600')\n"
    )
    done = place.kvctl(
        place.plan(place.engine("prefill-0", "--say", said, "--ready-after", -1)), "launch"
    )
    assert done.returncode == 4
    assert "prefill-0 cannot get ready: zmq.error.ZMQError: Address already in use" in done.stderr
    assert "ports: {base: N}" in done.stderr


def test_a_program_that_is_not_there(place: Place) -> None:
    engine = place.engine("prefill-0")
    done = place.kvctl(place.plan({**engine, "argv": ["/nowhere/vllm", "serve"]}), "launch")
    assert done.returncode == 4
    assert "prefill-0 cannot be started: /nowhere/vllm: No such file" in done.stderr


def test_an_engine_that_dies_later_leaves_the_others_running(place: Place, crash: Path) -> None:
    doom = place.folder / "doom"
    plan = place.plan(
        place.engine("prefill-0"),
        place.engine(
            "decode-0", "--exit-after", 0, "--when", doom, "--children", 1, "--exit-code", 3
        ),
        place.router(),
    )
    assert place.kvctl(plan, "launch", "-d").returncode == 0
    child = place.state().processes[1].members
    doom.touch()
    until("the failure", lambda: place.state().processes[1].phase == "failed")
    until("its child's end", lambda: not place.state().processes[1].members)
    assert len(child) == 2
    state = place.state()
    assert (state.phase, state.processes[1].exit_code) == ("running", 3)
    assert [each.phase for each in state.processes] == ["ready", "failed", "ready"]
    assert "decode-0" in (listed := place.kvctl(plan, "ps").stdout)
    assert "failed (3)" in listed
    assert "exit code 3" in listed
    assert "decode-0           failed    exit code 3" in place.log("supervisor")
    place.kvctl(plan, "stop")


def test_when_nothing_runs_any_more_the_launch_ends(place: Place) -> None:
    doom = place.folder / "doom"
    plan = place.plan(place.engine("prefill-0", "--exit-after", 0, "--when", doom))
    running = place.start(plan, "launch")
    until("ready", lambda: "fake is ready" in (running.stdout.readline() if running.stdout else ""))
    doom.touch()
    _, err = running.communicate(timeout=20)
    assert running.returncode == 4
    assert "nothing runs any more:\nprefill-0: exit code 1" in err


def test_a_second_launch_of_a_name_is_refused(place: Place) -> None:
    plan = place.plan(place.engine("prefill-0"))
    assert place.kvctl(plan, "launch", "-d").returncode == 0
    second = place.kvctl(plan, "launch")
    assert second.returncode == 2
    assert "fake is launched already" in second.stderr
    assert "kvctl stop -p fake" in second.stderr
    assert place.state().phase == "running"
    place.kvctl(plan, "stop")


def test_the_log_of_the_launch_before_is_kept(place: Place) -> None:
    plan = place.plan(place.engine("prefill-0"))
    for _ in range(2):
        assert place.kvctl(plan, "launch", "-d").returncode == 0
        place.kvctl(plan, "stop")
    assert "fake engine" in place.log("prefill-0")
    assert (place.folder / "state/runs/fake/logs/prefill-0.log.1").exists()


def test_a_relay_that_fails_is_noted_and_no_reason_to_stop(place: Place) -> None:
    plan = place.plan(
        place.engine("prefill-0", feed="p.sock"),
        place.relay("prefill-0.relay", "--exit-after", 0, feed="p.sock"),
    )
    assert place.kvctl(plan, "launch", "-d").returncode == 0
    until("the relay's end", lambda: place.state().processes[1].phase == "failed")
    assert place.state().processes[0].phase == "ready"
    place.kvctl(plan, "stop")


def test_a_port_in_use_is_named_with_its_owner(place: Place) -> None:
    engine = place.engine("prefill-0")
    with socket.create_server(("127.0.0.1", engine["ports"]["api"])):
        done = place.kvctl(place.plan(engine), "launch", "-d")
    assert done.returncode == 2
    assert f"port {engine['ports']['api']} (api of prefill-0) is in use by pid" in done.stderr
    assert not place.order.exists()
