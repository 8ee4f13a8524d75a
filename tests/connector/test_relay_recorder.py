"""The whole way from the recorder to OTLP: the engine's own feed, in a process that is killed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from otlp_receiver import PATIENCE

from kvctl.sources.feed import Watch, read_snapshot
from kvctl_connector import semconv

ENGINE = """
import sys, uuid, time, os
from pathlib import Path
from kvctl_connector import semconv
from kvctl_connector.feed import Feed
from kvctl_connector.recorder import Recorder
from kvctl_connector.wire import PROTOCOL_MAJOR, PROTOCOL_MINOR, Hello, Transfer

recorder = Recorder()
hello = Hello(
    (PROTOCOL_MAJOR, PROTOCOL_MINOR), uuid.uuid4().hex, time.time_ns(), "engine:0", "decode-0",
    "decode", os.getpid(), {semconv.RESOURCE_TOPOLOGY: "demo"},
)
recorder.set(semconv.TIER_CAPACITY, 1 << 20, "host")
assert Feed(recorder, hello, Path(sys.argv[1])).start()
print("ready", flush=True)
for line in sys.stdin:
    for _ in range(int(line)):
        labels = ("peer", "recv", "ok")
        recorder.add(semconv.TRANSFER_COUNT, 1, *labels, "prefill-0")
        recorder.add(semconv.TRANSFER_BYTES, 4096, *labels, "prefill-0")
        recorder.observe(semconv.TRANSFER_DURATION, 0.002, *labels)
        recorder.put(Transfer(0, *labels, "request", 1, 2_000_001, 4096))
"""


class Engine:
    """A process with a real recorder and feed, that records what it is told."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.process = subprocess.Popen(
            [sys.executable, "-c", ENGINE, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"

    def record(self, transfers: int) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{transfers}\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=PATIENCE)


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    monkeypatch.setenv("KVCTL_RUNTIME_DIR", str(tmp_path))
    running = Engine(tmp_path / "feed.sock")
    yield running
    running.kill()


def test_feed_and_otlp_say_what_was_recorded_also_after_a_kill(engine, otlp, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", otlp.endpoint)
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "100")
    relay = subprocess.Popen(
        [sys.executable, "-m", "kvctl_connector.relay", "--feed", str(engine.path)],
        stderr=subprocess.PIPE,
        text=True,
    )
    with Watch([engine.path]) as watch:
        assert watch.wait_for(lambda: not watch.problems(), PATIENCE)
        engine.record(1000)
        assert watch.wait_for(lambda: len(watch.transfers()) == 1000, PATIENCE)
        assert watch.lost() == 0
        otlp.wait_for(lambda: otlp.value("kvctl.transfer.count") == 1000)
        engine.record(500)
        assert watch.wait_for(lambda: len(watch.transfers()) == 1500, PATIENCE)
        # Answered by the feed's one thread, so by now the relay too was sent everything.
        seen = read_snapshot(str(engine.path)).transfers_of("peer", "recv")
        assert (seen.ok, seen.bytes, seen.duration.count) == (1500, 1500 * 4096, 1500)
        engine.kill()
        _, said = relay.communicate(timeout=PATIENCE)
    assert relay.returncode == 0, said
    assert otlp.value("kvctl.engine.up") == 0
    assert otlp.value("kvctl.transfer.count", peer="prefill-0") == 1500
    assert otlp.value("kvctl.transfer.bytes") == 1500 * 4096
    duration = otlp.find("kvctl.transfer.duration")
    assert duration.count == 1500 and duration.value == pytest.approx(3.0)
    assert duration.bounds == semconv.TRANSFER_DURATION.buckets
    assert otlp.value("kvctl.tier.capacity", tier="host") == 1 << 20
