"""One pair of real engines, from its first request to a SIGKILL. The order of these tests counts:
each leaves the pair as the next one needs it."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from otlp_receiver import OtlpReceiver
from pair import Pair, bytes_of, kill_session, session_of, transfers, wait_for

from kvctl.demo.prompts import blocks
from kvctl.demo.setting import DEVICE_TOKENS

pytestmark = pytest.mark.engine

BLOCK = 128  # tokens, on CPUs
DEVICE_BLOCKS = DEVICE_TOKENS // BLOCK
FIRST_ROUND = range(12)


def test_launch_says_that_everything_is_ready(pair: Pair) -> None:
    listed = pair.run("ps", "--json", "-p", "e2e")
    assert listed.returncode == 0, listed.stderr
    phases = {each["name"]: each["phase"] for each in pair.records()}
    assert phases["prefill-0"] == phases["decode-0"] == phases["router"] == "ready"


def test_the_engine_runs_the_connector_of_the_wheel(pair: Pair) -> None:
    """Two environments: the engine's own kvctl, if it has one, is not what it loads."""
    pid = pair.record("prefill-0")["pid"]
    environ = dict(
        entry.split("=", 1)
        for entry in Path(f"/proc/{pid}/environ").read_text().split("\0")
        if "=" in entry
    )
    first = Path(environ["PYTHONPATH"].split(":")[0])
    assert first.is_relative_to(os.environ["KVCTL_STATE_DIR"])
    assert [entry.name for entry in first.iterdir()] == ["kvctl_connector"]


def test_kv_is_pulled_over_nixl_and_answers_are_right(pair: Pair) -> None:
    before = pair.settled("decode-0")
    for prompt in FIRST_ROUND:
        assert pair.ask(prompt).difference is None
    after = pair.settled("decode-0")

    pulled = transfers(after, "peer", "recv")
    earlier = transfers(before, "peer", "recv")
    assert pulled.ok - (earlier.ok if earlier else 0) == len(FIRST_ROUND)
    # Every block of each prompt, the last one begun included, at its full size.
    tokens = sum(-(-len(pair.prompts[prompt]) // BLOCK) * BLOCK for prompt in FIRST_ROUND)
    assert bytes_of(after, "peer", "recv") - bytes_of(before, "peer", "recv") == tokens * 4096


def test_prefill_was_told_of_every_pull(pair: Pair) -> None:
    sent = transfers(pair.settled("prefill-0"), "peer", "send")
    assert sent.ok == transfers(pair.seen("decode-0"), "peer", "recv").ok
    assert sent.not_ok == 0


def test_full_blocks_are_stored_in_host_memory(pair: Pair) -> None:
    stored = bytes_of(pair.settled("prefill-0"), "host", "store")
    full = sum(blocks(pair.prompts[prompt], BLOCK) for prompt in FIRST_ROUND)
    assert stored == full * BLOCK * 4096


def test_what_the_device_cache_evicted_is_reloaded_and_right(pair: Pair) -> None:
    """The first prompts have left the device cache of prefill, and come back from its host."""
    used = sum(blocks(pair.prompts[prompt], BLOCK) for prompt in FIRST_ROUND)
    assert used > 2 * DEVICE_BLOCKS, "these prompts would not evict anything"
    longest = max(FIRST_ROUND[:4], key=lambda prompt: len(pair.prompts[prompt]))
    before = pair.settled("prefill-0")

    assert pair.ask(longest).difference is None

    after = pair.settled("prefill-0")
    loaded = bytes_of(after, "host", "load") - bytes_of(before, "host", "load")
    assert loaded > 0
    assert loaded % (BLOCK * 4096) == 0
    assert bytes_of(after, "host", "store") == bytes_of(before, "host", "store")


def test_a_wrong_block_turns_the_comparison_red(pair: Pair) -> None:
    """The self-test of every "answers are equal" above: one block of one load is another."""
    pair.plant.touch()
    evicted = max(FIRST_ROUND[4:8], key=lambda prompt: len(pair.prompts[prompt]))

    found = pair.ask(evicted)

    assert not pair.plant.exists(), "no load came from host memory"
    assert found.difference is not None, f"unnoticed; deviation {found.deviation}"


def test_figures_by_otlp_are_those_of_the_feed(pair: Pair, receiver: OtlpReceiver) -> None:
    for name in ("prefill-0", "decode-0"):
        snapshot = pair.settled(name)
        for each in snapshot.transfers:
            wanted = {
                "kvctl.instance": snapshot.instance,
                "tier": each.tier,
                "direction": each.direction,
                "outcome": "ok",
            }
            receiver.wait_for(
                lambda wanted=wanted, each=each: (
                    receiver.value("kvctl.transfer.count", **wanted) == each.ok
                )
            )
            if each.direction != "send":
                assert receiver.value("kvctl.transfer.bytes", **wanted) == each.bytes
                duration = receiver.find("kvctl.transfer.duration", **wanted)
                assert duration is not None
                assert duration.count == each.duration.count == each.ok
                assert duration.value == pytest.approx(each.duration.total)


def test_status_agrees(pair: Pair) -> None:
    shown = pair.run("status", "--json", "-p", "e2e")
    assert shown.returncode == 0, shown.stdout + shown.stderr
    status = json.loads(shown.stdout)
    assert status["version"] == 1
    pulled = transfers(pair.seen("decode-0"), "peer", "recv")
    assert f'"bytes": {pulled.bytes}' in json.dumps(status)


def test_a_relay_that_was_killed_and_started_again_doubles_nothing(
    pair: Pair, receiver: OtlpReceiver
) -> None:
    relay = pair.record("decode-0.relay")
    feed = relay["feeds"][0]
    os.kill(relay["pid"], signal.SIGKILL)
    wait_for(lambda: not session_of(relay["pid"]), "the relay lives on")
    pulled = transfers(pair.settled("decode-0"), "peer", "recv")
    exports = len(receiver.exports)
    again = subprocess.Popen(
        [pair.kvctl.parent / "python", "-m", "kvctl_connector.relay", "--feed", feed],
        env={
            **os.environ,
            "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint,
            "OTEL_METRIC_EXPORT_INTERVAL": "500",
        },
    )
    try:
        wanted = {"tier": "peer", "direction": "recv", "outcome": "ok"}
        receiver.wait_for(
            lambda: any(
                point.value == pulled.ok
                for export in receiver.exports[exports:]
                for point in export
                if point.name == "kvctl.transfer.count"
                and wanted.items() <= point.attributes.items()
            )
        )
        assert pair.ask(0).difference is None
        receiver.wait_for(lambda: receiver.value("kvctl.transfer.count", **wanted) == pulled.ok + 1)
    finally:
        again.terminate()
        assert again.wait(30) == 0


def test_a_second_launch_of_the_running_topology_is_refused(pair: Pair) -> None:
    second = pair.run("launch", "-d", str(pair.file))
    assert second.returncode == 2, second.stdout + second.stderr
    assert "e2e" in second.stderr
    assert pair.ask(1).difference is None, "the refused launch did harm"


def test_an_engine_killed_whole_is_told_to_the_end(pair: Pair, receiver: OtlpReceiver) -> None:
    """SIGKILL of a whole tree: its relay still exports the last sums, and says it is gone."""
    prefill = pair.record("prefill-0")
    snapshot = pair.settled("prefill-0")
    stored = transfers(snapshot, "host", "store")
    assert prefill["shm"], "the engine's shared memory was not recorded"
    members = session_of(prefill["pid"])
    assert len(members) > 1

    kill_session(prefill["pid"])

    receiver.wait_for(
        lambda: receiver.value("kvctl.engine.up", kvctl__instance=snapshot.instance) == 0
    )
    last = {"kvctl.instance": snapshot.instance, "tier": "host", "direction": "store"}
    assert receiver.value("kvctl.transfer.count", **last) == stored.ok
    wait_for(
        lambda: pair.record("prefill-0")["phase"] in ("failed", "killed"),
        "the supervisor did not notice",
    )


def test_stop_leaves_nothing(pair: Pair) -> None:
    records = pair.records()
    stopped = pair.run("stop", "-p", "e2e", timeout=120)
    assert stopped.returncode == 0, stopped.stdout + stopped.stderr

    assert [pid for each in records for pid in session_of(each["pid"])] == []
    assert set(Path("/dev/shm").iterdir()) - pair.shared_memory_before == set()
    assert list(Path(os.environ["KVCTL_RUNTIME_DIR"]).glob("*.sock")) == []
    again = pair.run("stop", "-p", "e2e")
    assert again.returncode == 0


def test_ports_are_free_again(pair: Pair) -> None:
    import socket

    ends = time.monotonic() + 5
    for each in pair.records():
        for port in each["ports"].values():
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(("127.0.0.1", port))
    assert time.monotonic() < ends
