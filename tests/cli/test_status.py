"""``kvctl status`` over recorded launches whose engines are stand-ins for a feed."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from fake_feed import counter, fake_feed, histogram

from kvctl.cli.app import main
from kvctl.launch.procfs import identify
from kvctl.launch.state import ProcessRecord, RunState, save
from kvctl_connector import semconv

RECV = {"tier": "peer", "direction": "recv"}


@pytest.fixture(autouse=True)
def state_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCTL_STATE_DIR", str(tmp_path / "state"))


@pytest.fixture
def kvctl(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Any]:
    """Runs ``kvctl …`` and returns exit code, stdout and stderr."""

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["kvctl", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return run


def process(
    name: str, kind: str = "engine", *, alive: bool = True, **changes: Any
) -> ProcessRecord:
    """A recorded process; one that is alive borrows the identity of the test's own."""
    me = identify(os.getpid())
    assert me is not None
    pid, started = me if alive else (me.pid, me.started - 1)
    values: dict[str, Any] = {
        "role": {"prefill-0": "prefill", "decode-0": "decode"}.get(name),
        "phase": "ready",
        "pid": pid,
        "started": started,
        "started_at": 1_700_000_000.0,
        "url": "http://127.0.0.1:8100" if kind != "relay" else None,
    }
    return ProcessRecord(name=name, kind=kind, **{**values, **changes})


def record_run(*processes: ProcessRecord, name: str = "demo") -> None:
    save(RunState(name=name, run_id="r", processes=list(processes), model="tiny", phase="running"))


def busy_series():
    ok = {**RECV, "outcome": "ok"}
    return (
        counter(semconv.TRANSFER_COUNT, 12, **ok, peer="prefill-0"),
        counter(semconv.TRANSFER_BYTES, 12 << 20, **ok, peer="prefill-0"),
        histogram(semconv.TRANSFER_DURATION, [0.002] * 12, **ok),
        counter(semconv.TRANSFER_COUNT, 1, **RECV, outcome="failed", peer="prefill-0"),
        counter(semconv.TRANSFER_FAILURES, 1, **RECV, phase="handshake", reason="remote_gone"),
        histogram(semconv.REQUEST_WAIT, [0.01, 0.02], tier="peer", outcome="ok"),
        counter(semconv.TIER_USED, 1 << 20, tier="host"),
        counter(semconv.TIER_CAPACITY, 4 << 20, tier="host"),
        counter(semconv.CONNECTOR_INFO, 1, version="0.1.0", vllm="0.32.0", mode="compose"),
        counter(semconv.PROMPT_TOKENS, 512, source="peer"),
        counter(semconv.TELEMETRY_DROPPED, 3, sink="feed", cause="slow_reader"),
    )


def test_a_ready_topology_shows_processes_and_transfers(kvctl, tmp_path):
    with fake_feed(tmp_path / "d.sock", name="decode-0") as feed:
        feed.publish(*busy_series())
        record_run(
            process("decode-0", feeds=[str(feed.path)]),
            process("decode-0.relay", "relay", feeds=[str(feed.path)]),
            process("router", "router"),
        )
        code, out, err = kvctl("status")
    assert (code, err) == (0, "")
    lines = [line.split() for line in out.splitlines()]
    assert lines[0] == ["demo", "is", "ready:", "tiny"]
    (row,) = [line for line in lines if line[:2] == ["decode-0", "decode"]]
    assert (row[2], row[-2:]) == ("ready", ["open", "alive"])
    assert [
        "decode-0",
        "peer",
        "recv",
        "12",
        "1",
        "0",
        "12",
        "MiB",
        "524",
        "MB/s",
        "1.75",
        "ms",
        "2.49",
        "ms",
    ] in lines
    assert ["decode-0", "peer", "recv", "remote_gone", "handshake", "-", "1"] in lines
    assert ["decode-0", "host", "1", "MiB", "4", "MiB", "25", "%"] in lines
    assert ["decode-0", "feed", "slow_reader", "3"] in lines
    assert any(line[:4] == ["decode-0", "peer", "ok", "2"] for line in lines)


def test_json_is_versioned_alone_on_stdout_and_complete(kvctl, tmp_path):
    with fake_feed(tmp_path / "d.sock", name="decode-0") as feed:
        feed.publish(*busy_series())
        record_run(process("decode-0", feeds=[str(feed.path)]))
        code, out, err = kvctl("status", "--json")
        _, as_yaml, _ = kvctl("status", "-o", "yaml")
    found = json.loads(out)
    assert (code, err) == (0, "")
    assert (found["version"], found["name"], found["verdict"]) == (1, "demo", "ready")
    (engine,) = found["engines"]
    assert (engine["name"], engine["reachable"], engine["relay"]) == ("decode-0", True, "none")
    assert engine["transfers"] == [
        {
            "tier": "peer",
            "direction": "recv",
            "outcomes": {"ok": 12, "failed": 1},
            "inflight": 0,
            "bytes": 12 << 20,
            "bytes_per_second": pytest.approx((12 << 20) / 0.024),
            "p50_seconds": pytest.approx(0.00175),
            "p99_seconds": pytest.approx(0.002485),
        }
    ]
    assert engine["failures"][0]["reason"] == "remote_gone"
    assert engine["tiers"] == [{"tier": "host", "used_bytes": 1 << 20, "capacity_bytes": 4 << 20}]
    assert engine["prompt_tokens"] == {"peer": 512}
    assert engine["dropped"] == [{"sink": "feed", "cause": "slow_reader", "count": 3}]
    assert yaml.safe_load(as_yaml)["engines"][0]["transfers"] == engine["transfers"]


def test_wide_adds_where_it_runs_and_what_it_is(kvctl, tmp_path):
    with fake_feed(tmp_path / "d.sock") as feed:
        feed.publish(*busy_series())
        record_run(process("decode-0", feeds=[str(feed.path)]))
        code, out, _ = kvctl("status", "-o", "wide")
    assert code == 0
    assert "http://127.0.0.1:8100" in out and str(os.getpid()) in out
    assert "version=0.1.0 vllm=0.32.0 mode=compose" in out
    assert "512" in out


def test_an_engine_that_cannot_be_read_is_named_with_the_reason(kvctl, tmp_path):
    with fake_feed(tmp_path / "d.sock") as feed:
        record_run(
            process("decode-0", feeds=[str(feed.path)]),
            process("prefill-0", feeds=[str(tmp_path / "p.sock")]),
        )
        code, out, _ = kvctl("status")
    assert code == 1
    assert "demo is degraded" in out
    assert f"prefill-0 cannot be read: {tmp_path}/p.sock: there is no such socket" in out


def test_a_dead_relay_is_a_degradation(kvctl, tmp_path):
    with fake_feed(tmp_path / "d.sock") as feed:
        record_run(
            process("decode-0", feeds=[str(feed.path)]),
            process("decode-0.relay", "relay", feeds=[str(feed.path)], alive=False),
        )
        code, out, _ = kvctl("status", "--json")
    assert code == 1
    assert json.loads(out)["engines"][0]["relay"] == "gone"


def test_an_instance_that_still_loads_is_not_ready(kvctl, tmp_path):
    with fake_feed(tmp_path / "d.sock") as feed:
        record_run(process("decode-0", feeds=[str(feed.path)], phase="loading"))
        code, out, _ = kvctl("status")
    assert code == 1
    assert "loading" in out


def test_a_failed_instance_is_shown_with_its_cause(kvctl, tmp_path):
    failed = process("decode-0", feeds=[], alive=False, phase="failed", cause="out of memory")
    with fake_feed(tmp_path / "p.sock") as feed:
        record_run(process("prefill-0", feeds=[str(feed.path)]), failed)
        code, out, _ = kvctl("status")
    assert code == 1
    assert "decode-0 failed: out of memory" in out


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"phase": "exited", "exit_code": 0}, "decode-0 cannot be read: it has exited\n"),
        ({"phase": "exited", "exit_code": 7}, "cannot be read: it has exited with exit code 7\n"),
        ({"phase": "failed"}, "decode-0 cannot be read: it has failed\n"),
        ({"phase": "failed", "cause": "out of memory"}, "decode-0 failed: out of memory\n"),
        ({"phase": "killed"}, "cannot be read: it was killed, since it did not end in time\n"),
        ({"phase": "ready"}, "it has exited, and no supervisor was left to see why\n"),
        ({"phase": "exited", "pid": 0}, "decode-0 cannot be read: it was not started\n"),
    ],
)
def test_of_an_engine_that_has_ended_its_end_is_told_and_no_socket(kvctl, tmp_path, changes, told):
    with fake_feed(tmp_path / "p.sock") as feed:
        record_run(
            process("prefill-0", feeds=[str(feed.path)]),
            process("decode-0", feeds=[str(tmp_path / "d.sock")], alive=False, **changes),
        )
        code, out, _ = kvctl("status")
        _, as_json, _ = kvctl("status", "--json")
    assert code == 1
    assert out.endswith(told)
    assert out.count("decode-0") == 2  # once in the table, once with the reason
    assert "socket" not in out + as_json
    (problem,) = [each["problem"] for each in json.loads(as_json)["engines"] if each["problem"]]
    assert changes.get("cause", "it ") in problem


def test_each_rank_is_an_engine(kvctl, tmp_path):
    with fake_feed(tmp_path / "0.sock") as zero, fake_feed(tmp_path / "1.sock") as one:
        record_run(process("decode-0", feeds=[str(zero.path), str(one.path)]))
        _, out, _ = kvctl("status", "--json")
    assert [each["name"] for each in json.loads(out)["engines"]] == ["decode-0:0", "decode-0:1"]


def test_what_ran_once_can_not_be_read(kvctl, tmp_path):
    feed = str(tmp_path / "gone.sock")
    record_run(process("decode-0", feeds=[feed], alive=False))
    code, out, _ = kvctl("status", "-p", "demo")
    assert code == 3
    assert "demo is unreachable" in out and "gone" in out


def test_an_engine_cannot_write_to_the_terminal(kvctl, tmp_path):
    with fake_feed(tmp_path / "d.sock") as feed:
        labels = {**RECV, "phase": "\x1b[2J", "reason": "[red]x[/red]\n", "peer": "\x07"}
        feed.publish(counter(semconv.TRANSFER_FAILURES, 1, **labels))
        record_run(process("decode-0", feeds=[str(feed.path)]))
        _, out, _ = kvctl("status")
        _, as_json, _ = kvctl("status", "--json")
    assert "\x1b" not in out + as_json and "\x07" not in out
    assert "[red]x[/red]\ufffd" in out
    assert json.loads(as_json)["engines"][0]["failures"][0]["peer"] == "\ufffd"


def test_nothing_was_launched(kvctl):
    code, out, err = kvctl("status", "--json")
    assert (code, out) == (2, "")
    assert "nothing was launched here" in err


def test_an_unknown_format_is_a_usage_error(kvctl):
    code, _, err = kvctl("status", "-o", "xml")
    assert code == 2
    assert "-o xml: there is table, wide, json, yaml" in err
