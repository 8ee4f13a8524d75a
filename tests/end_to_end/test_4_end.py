"""The end of a pair: a killed relay, a refused second launch, a killed engine, and a clean stop."""

import os
import signal
import subprocess
from pathlib import Path

import pytest
from otlp_receiver import OtlpReceiver
from pair import Pair, is_free, kill_session, session_of, transfers, wait_for

pytestmark = pytest.mark.engine


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
    ports = [port for each in pair.records() for port in each["ports"].values()]
    assert ports
    assert [port for port in ports if not is_free(port)] == []
