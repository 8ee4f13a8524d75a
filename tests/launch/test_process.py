"""What one process of a plan inherits, and what is cleared away before it starts."""

import os
import socket
import sys
from pathlib import Path

import pytest

from kvctl.launch.process import Instance
from kvctl.topology.plan import Process


def make_process(kind: str, *, feeds: tuple[str, ...] = ()) -> Process:
    show = "import os; print(sorted(name for name in os.environ if name.startswith('OTEL_')))"
    return Process(
        name="it", kind=kind, role=None, argv=(sys.executable, "-c", show),
        env={"OTEL_EXPORTER_OTLP_ENDPOINT": "http://from-the-file:4318"},
        url=None, ports={}, feeds=feeds, log="it.log",
    )  # fmt: skip


def run(process: Process, folder: Path) -> str:
    (folder / "logs").mkdir()
    instance = Instance(process, folder)
    instance.start("run")
    os.waitpid(instance.record.pid, 0)
    return (folder / "logs" / "it.log").read_text()


def test_a_relay_exports_where_the_file_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", "http://elsewhere:4318")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "site=here")
    shown = run(make_process("relay"), tmp_path)
    assert shown.strip() == "['OTEL_EXPORTER_OTLP_ENDPOINT', 'OTEL_RESOURCE_ATTRIBUTES']"


def test_an_engine_keeps_what_it_inherits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://traces:4318")
    assert "TRACES_ENDPOINT" in run(make_process("engine"), tmp_path)


def test_a_stale_feed_is_removed_before_its_engine_starts(tmp_path: Path) -> None:
    feed = tmp_path / "feed.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(feed))
    run(make_process("engine", feeds=(str(feed),)), tmp_path)
    assert not feed.exists()


def test_a_feed_that_somebody_serves_stays(tmp_path: Path) -> None:
    feed = tmp_path / "feed.sock"
    with socket.socket(socket.AF_UNIX) as served:
        served.bind(str(feed))
        served.listen()
        run(make_process("engine", feeds=(str(feed),)), tmp_path)
        assert feed.exists()
