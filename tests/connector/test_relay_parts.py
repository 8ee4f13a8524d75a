"""The relay's parts where a whole process would only be slower: settings, lock, deadlines."""

from __future__ import annotations

import logging
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
from fake_feed import STARTED, counter, fake_feed, make_hello
from otlp_receiver import PATIENCE, grpc_receiver

from kvctl_connector import semconv
from kvctl_connector.feed_client import FeedClient, FeedError, FeedUnavailableError
from kvctl_connector.relay import lock
from kvctl_connector.relay.lifecycle import LOST, OK, UNREACHABLE, Deadlines, Relay, Stop
from kvctl_connector.relay.outlet import Complaints
from kvctl_connector.relay.settings import Settings, SettingsError, from_environment
from kvctl_connector.relay.translation import Translation


class Running:
    """A relay in a thread of this process."""

    def __init__(self, path, settings, deadlines=Deadlines()):
        self.stop = Stop()
        self.code: int | None = None
        complaints = Complaints()
        logging.getLogger("opentelemetry.exporter").handlers = [complaints]
        relay = Relay(path, settings, stop=self.stop, complaints=complaints, deadlines=deadlines)
        self._thread = threading.Thread(target=lambda: setattr(self, "code", relay.run()))
        self._thread.start()

    def ended(self) -> int | None:
        self._thread.join(PATIENCE)
        return self.code


@pytest.fixture(autouse=True)
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    caplog.set_level(logging.INFO, "kvctl.relay")
    yield caplog


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ENDPOINT", "PROTOCOL", "HEADERS", "TIMEOUT"):
        monkeypatch.delenv(f"OTEL_EXPORTER_OTLP_{name}", raising=False)


def settings_for(endpoint: str, monkeypatch, protocol: str = "http/protobuf") -> Settings:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
    return Settings(protocol, endpoint, 0.05)


def test_a_dead_collector_at_the_end_is_given_up_in_time(tmp_path, monkeypatch, log):
    settings = settings_for("http://127.0.0.1:9", monkeypatch)
    with fake_feed(tmp_path / "feed.sock") as feed:
        relay = Running(feed.path, settings, Deadlines(last_export=0.2))
        assert feed.greeted.wait(PATIENCE)
    assert relay.ended() == LOST
    assert "lost: what happened in prefill-0 since it started" in log.text
    assert "Connection refused" in log.text


def test_a_collector_that_went_away_loses_only_what_came_later(tmp_path, monkeypatch, log, otlp):
    settings = settings_for(otlp.endpoint, monkeypatch)
    with fake_feed(tmp_path / "feed.sock") as feed:
        relay = Running(feed.path, settings, Deadlines(last_export=0.2))
        otlp.wait_for(lambda: otlp.exports)
        otlp.status = 500
        otlp.wait_for(lambda: otlp.refused)
    assert relay.ended() == LOST
    why = "500|Internal Server Error"  # releases of the exporter differ
    assert re.search(rf"lost: what happened in prefill-0 since [\d:]{{8}}: .*({why})", log.text)


def test_a_collector_that_never_answers_does_not_hold_the_end(tmp_path, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        settings = settings_for(f"http://127.0.0.1:{silent.getsockname()[1]}", monkeypatch)
        with fake_feed(tmp_path / "feed.sock") as feed:
            relay = Running(feed.path, settings, Deadlines(last_export=0.2))
            silent.accept()
        assert relay.ended() == LOST


def test_after_a_request_to_stop_an_endless_feed_is_left_at_the_deadline(
    tmp_path, monkeypatch, otlp
):
    settings = settings_for(otlp.endpoint, monkeypatch)
    with fake_feed(tmp_path / "feed.sock") as feed:
        relay = Running(feed.path, settings, Deadlines(drain=0.1))
        otlp.wait_for(lambda: otlp.exports)
        relay.stop.request()
        assert relay.ended() == OK
    assert otlp.value("kvctl.engine.up") == 1


def test_an_engine_that_says_nothing_is_no_feed(tmp_path, monkeypatch, log):
    settings = settings_for("http://127.0.0.1:9", monkeypatch)
    with fake_feed(tmp_path / "feed.sock", greeting=b"") as feed:
        relay = Running(feed.path, settings, Deadlines(feed=0, hello=0.1))
        assert relay.ended() == UNREACHABLE
    assert "said nothing for 0.1 s" in log.text


def test_a_folder_that_cannot_be_written_only_costs_the_lock(tmp_path, log):
    with lock.held(tmp_path / "missing" / "x.relay.lock") as ours:
        assert ours
    assert "cannot lock" in log.text


def test_the_lock_is_exclusive_and_free_again_afterwards(tmp_path):
    path = lock.lock_path(tmp_path, "0123abcd")
    assert path.name == "0123abcd.relay.lock"
    with lock.held(path) as ours, lock.held(path) as also:
        assert ours and not also
    with lock.held(path) as ours:
        assert ours


def test_an_incarnation_never_leaves_the_folder(tmp_path):
    assert lock.lock_path(tmp_path, "../../etc/passwd").parent == tmp_path
    assert "/" not in lock.lock_path(tmp_path, "../../etc/passwd").name


def test_grpc_carries_the_same_figures(tmp_path, monkeypatch):
    with grpc_receiver() as receiver, fake_feed(tmp_path / "feed.sock") as feed:
        feed.publish(counter(semconv.TRANSFER_BYTES, 4096, tier="peer"))
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-team=storage")
        relay = Running(feed.path, settings_for(receiver.endpoint, monkeypatch, "grpc"))
        receiver.wait_for(lambda: receiver.value("kvctl.transfer.bytes") == 4096)
        feed.close()
        assert relay.ended() == OK
        assert receiver.value("kvctl.engine.up") == 0
        assert receiver.headers[0]["x-team"] == "storage"


def test_grpc_without_its_extra_says_what_to_install(monkeypatch):
    name = "opentelemetry.exporter.otlp.proto.grpc"
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(SettingsError, match=r"pip install 'kvctl\[otlp-grpc\]'"):
        Settings("grpc", "", 1).exporter()


@pytest.mark.parametrize(
    ("environ", "protocol", "endpoint", "interval"),
    [
        ({}, "http/protobuf", "http://localhost:4318/v1/metrics", 10),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "grpc", "http://localhost:4317", 10),
        (
            {
                "OTEL_EXPORTER_OTLP_ENDPOINT": "https://user:secret@otel.example/base/",
                "OTEL_METRIC_EXPORT_INTERVAL": "500",
            },
            "http/protobuf",
            "https://otel.example/base/v1/metrics",
            0.5,
        ),
        (
            {
                "OTEL_EXPORTER_OTLP_ENDPOINT": "http://ignored:4318",
                "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://vm:8428/opentelemetry/v1/metrics",
                "OTEL_EXPORTER_OTLP_METRICS_PROTOCOL": " ",
            },
            "http/protobuf",
            "http://vm:8428/opentelemetry/v1/metrics",
            10,
        ),
    ],
    ids=["defaults", "grpc", "base-url", "metrics-url"],
)
def test_settings_follow_the_specification(environ, protocol, endpoint, interval):
    assert from_environment(environ) == Settings(protocol, endpoint, interval)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "localhost:4318", "write a whole URL"),
        ("OTEL_EXPORTER_OTLP_METRICS_PROTOCOL", "http/json", "speaks http/protobuf and grpc"),
        ("OTEL_METRIC_EXPORT_INTERVAL", "10s", "write milliseconds"),
        ("OTEL_METRIC_EXPORT_INTERVAL", "0", "write milliseconds"),
        ("OTEL_METRIC_EXPORT_INTERVAL", "nan", "write milliseconds"),
    ],
)
def test_a_wrong_variable_is_named(name, value, says):
    with pytest.raises(SettingsError, match=f"{name} is '{value}'.*{says}"):
        from_environment({name: value})


def test_the_relays_own_counters_count_from_its_own_start():
    translation = Translation(make_hello(), began=STARTED + 5)
    translation.count_loss("export_failed")
    (resource,) = translation.metrics_data({}, up=True, now=STARTED + 9).resource_metrics
    points = {m.name: m.data.data_points[0] for m in resource.scope_metrics[0].metrics}
    assert points["kvctl.telemetry.dropped"].start_time_unix_nano == STARTED + 5
    assert points["kvctl.telemetry.dropped"].value == 1


def test_the_client_explains_why_there_is_no_feed(tmp_path):
    plain = tmp_path / "plain"
    plain.write_text("")
    with pytest.raises(FeedError, match="is not a socket"):
        FeedClient(plain)
    with pytest.raises(FeedUnavailableError, match="there is no such socket"):
        FeedClient(tmp_path / "missing")
    with pytest.raises(FeedError, match="too long"):
        FeedClient(tmp_path / ("x" * 200))


def test_a_major_of_another_shape_is_still_told_apart(tmp_path):
    from msgspec.msgpack import encode

    body = encode({"type": "hello", "protocol": [3, 1], "who": "somebody"})
    greeting = len(body).to_bytes(4, "big") + body
    with (
        fake_feed(tmp_path / "feed.sock", greeting=greeting) as feed,
        pytest.raises(FeedError, match=r"feed protocol 3\.1"),
    ):
        FeedClient(feed.path).wait_synced(PATIENCE)


def test_the_relay_imports_no_engine():
    code = (
        "import sys, kvctl_connector.relay.__main__; "
        "print([m for m in ('vllm', 'torch', 'nixl', 'kvctl') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
