"""``kvctl logs`` and ``kvctl ps``, as a person sees them."""

from __future__ import annotations

import json
import time
from pathlib import Path

from places import Place, until

from kvctl.launch.state import ProcessRecord, RunState, log_path, save

EPOCH = 1_700_000_000


def ended_run(place: Place, **logs: str) -> str:
    """A run that has ended and left these logs."""
    records = [
        ProcessRecord(name, "engine", role="prefill", pid=1, phase="exited", log=f"{name}.log")
        for name in logs
    ]
    save(RunState("fake", "run-1", records, phase="stopped"))
    for name, text in logs.items():
        path = log_path("fake", f"{name}.log")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return place.plan()


def stamp(seconds_ago: float) -> str:
    return time.strftime("%m-%d %H:%M:%S", time.localtime(time.time() - seconds_ago))


def test_one_log_stands_without_a_name_and_without_control_characters(place: Place) -> None:
    plan = ended_run(place, a="x\x1b[31mred\x1b[0m\x1b]0;evil\x07\n", b="other\n")
    assert place.kvctl(plan, "logs", "a").stdout == "xred\n"


def test_several_logs_are_joined_by_time(place: Place) -> None:
    plan = ended_run(
        place,
        first=f"INFO {stamp(50)} [a:1] one\n  more of one\nINFO {stamp(10)} [a:1] three\n",
        b=f"INFO {stamp(30)} [a:1] two\n",
    )
    lines = place.kvctl(plan, "logs").stdout.splitlines()
    assert [line.split()[-1] for line in lines] == ["one", "one", "two", "three"]
    assert lines[0].startswith("first | INFO")
    assert lines[2].startswith("b     | INFO")


def test_tail_and_since(place: Place) -> None:
    text = f"INFO {stamp(3000)} [a:1] old\nINFO {stamp(5)} [a:1] new\nof new\n"
    plan = ended_run(place, a=text, b="untimed\n")
    assert place.kvctl(plan, "logs", "a", "--tail", "1").stdout == "of new\n"
    since = place.kvctl(plan, "logs", "a", "--since", "5m").stdout
    assert [line.split()[-1] for line in since.splitlines()] == ["new", "new"]
    assert place.kvctl(plan, "logs", "b", "--since", "5m").stdout == "untimed\n"
    wrong = place.kvctl(plan, "logs", "--since", "soon")
    assert (wrong.returncode, "--since: 'soon' is not a duration" in wrong.stderr) == (2, True)
    unknown = place.kvctl(plan, "logs", "c")
    assert (unknown.returncode, "it has: a, b" in unknown.stderr) == (2, True)


def test_following_goes_on_over_a_restart_until_all_has_ended(place: Place) -> None:
    plan = place.plan(place.engine("prefill-0", "--beat", 0.05), place.engine("decode-0"))
    assert place.kvctl(plan, "launch", "-d").returncode == 0
    following = place.start(plan, "logs", "-f", "--tail", "1", "prefill-0", "decode-0")
    assert following.stdout
    until("a beat", lambda: "prefill-0 | beat" in following.stdout.readline())
    path = Path(place.folder, "state/runs/fake/logs/decode-0.log")
    path.rename(path.with_suffix(".log.1"))
    path.write_text("after the rotation\n")
    until("the new file", lambda: "decode-0  | after" in following.stdout.readline())
    place.kvctl(plan, "stop")
    _, err = following.communicate(timeout=20)
    assert following.returncode == 0, err


def test_ps_shows_what_runs_and_with_a_what_ran(place: Place) -> None:
    ended_run(place, a="")
    plan = place.plan(place.engine("prefill-0"), name="live")
    nothing = place.kvctl(plan, "ps")
    assert (nothing.stdout, nothing.returncode) == ("", 0)
    assert "kvctl ps -a shows what ran before" in nothing.stderr
    assert place.kvctl(plan, "launch", "-d").returncode == 0
    listed = place.kvctl(plan, "ps").stdout.splitlines()
    assert [line.split()[:4] for line in listed[1:]] == [["live", "prefill-0", "prefill", "ready"]]
    assert "fake" in place.kvctl(plan, "ps", "-a").stdout
    facts = json.loads(place.kvctl(plan, "ps", "--json").stdout)
    assert facts["version"] == 1
    (run,) = facts["runs"]
    assert (run["name"], run["phase"], run["supervised"]) == ("live", "running", True)
    (process,) = run["processes"]
    assert process["phase"] == "ready"
    assert process["pid"] in place.processes()
    assert Path(process["log"]).exists()
    assert json.loads(place.kvctl(plan, "ps", "-o", "json").stdout)["runs"]
    assert place.kvctl(plan, "ps", "-o", "xml").returncode == 2
    place.kvctl(plan, "stop", "-p", "live")
