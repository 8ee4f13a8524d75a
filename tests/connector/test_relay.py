"""The relay as a process: what it exports, and when it ends.

The engine's side is `fake_feed` here, because these tests are about the reader and need an engine
that is killed, restarted, or says nonsense on command.
"""

from __future__ import annotations

import contextlib
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from fake_feed import (
    STARTED,
    FakeFeed,
    counter,
    fake_feed,
    histogram,
    make_hello,
    make_transfer,
)
from otlp_receiver import PATIENCE, OtlpReceiver

from kvctl_connector import semconv
from kvctl_connector.wire import Delta, Series, frame

INTERVAL = 0.1  # seconds between exports here


class RelayProcess:
    """A running relay, and what it said on stderr."""

    def __init__(self, feed: Path, log: Path, endpoint: str, *options: str, **env: str) -> None:
        environment = {key: value for key, value in os.environ.items() if "OTEL_" not in key}
        environment["OTEL_EXPORTER_OTLP_ENDPOINT"] = endpoint
        environment["OTEL_METRIC_EXPORT_INTERVAL"] = str(INTERVAL * 1000)
        environment.update(env)
        self._log = log
        with log.open("w") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "kvctl_connector.relay", "--feed", str(feed), *options],
                env=environment,
                stderr=stderr,
                stdin=subprocess.DEVNULL,
            )

    @property
    def said(self) -> str:
        return self._log.read_text()

    def wait_said(self, text: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while text not in self.said:
            assert time.monotonic() < deadline, f"never said {text!r}, but:\n{self.said}"
            time.sleep(0.02)

    def ended(self) -> int:
        """Its exit code, once it ended by itself."""
        try:
            code = self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            pytest.fail(f"the relay still runs; it said:\n{self.said}")
        assert "Traceback" not in self.said
        return code


@pytest.fixture
def relay(tmp_path: Path, otlp: OtlpReceiver) -> Iterator[object]:
    """Starts relays, and ends those that are left."""
    started: list[RelayProcess] = []

    def start(feed: Path, *options: str, endpoint: str = "", **env: str) -> RelayProcess:
        log = tmp_path / f"relay-{len(started)}.log"
        process = RelayProcess(feed, log, endpoint or otlp.endpoint, *options, **env)
        started.append(process)
        return process

    yield start
    for one in started:
        with contextlib.suppress(ProcessLookupError):
            one.process.kill()
        one.process.wait(PATIENCE)


@pytest.fixture
def feed(tmp_path: Path) -> Iterator[FakeFeed]:
    with fake_feed(tmp_path / "feed.sock") as served:
        yield served


BYTES = counter(semconv.TRANSFER_BYTES, 4096, tier="peer", direction="recv", outcome="ok")


def test_all_three_kinds_arrive_as_they_were_sent(feed, relay, otlp):
    used = counter(semconv.TIER_USED, 1e6, tier="host")
    took = histogram(semconv.TRANSFER_DURATION, [0.002, 0.003, 40.0],
                     tier="peer", direction="recv", outcome="ok")  # fmt: skip
    feed.publish(BYTES, used, took)
    relay(feed.path)
    otlp.wait_for(lambda: otlp.find("kvctl.transfer.bytes"))

    bytes_ = otlp.find("kvctl.transfer.bytes")
    assert (bytes_.value, bytes_.kind, bytes_.unit) == (4096, "sum", "By")
    assert bytes_.monotonic and bytes_.cumulative and bytes_.start == STARTED < bytes_.time
    gauge = otlp.find("kvctl.tier.used")
    assert (gauge.value, gauge.kind) == (1e6, "gauge")
    duration = otlp.find("kvctl.transfer.duration")
    assert duration.bounds == semconv.TRANSFER_DURATION.buckets
    assert duration.buckets == tuple(took.buckets) and duration.count == 3
    assert duration.value == pytest.approx(40.005)
    assert duration.cumulative and duration.start == STARTED
    assert duration.help == semconv.TRANSFER_DURATION.help
    assert duration.attributes == {
        "tier": "peer",
        "direction": "recv",
        "outcome": "ok",
        "kvctl.instance": "demo-prefill-0",
    }
    assert otlp.value("kvctl.engine.up", kvctl__instance="demo-prefill-0") == 1


def test_resource_says_who_it_is_and_the_environment_may_add(feed, relay, otlp):
    relay(feed.path, OTEL_RESOURCE_ATTRIBUTES="deployment.environment=lab,service.version=7")
    resource = otlp.wait_for(lambda: otlp.find("kvctl.engine.up")).resource
    assert (
        resource.items()
        >= {
            "service.name": "demo",
            "service.instance.id": "demo-prefill-0",
            "service.version": "7",
            "deployment.environment": "lab",
            "kvctl.role": "prefill",
            "kvctl.topology": "demo",
            "kvctl.model": "tiny",
        }.items()
    )


def test_the_environment_names_the_service_and_sends_headers(feed, relay, otlp):
    relay(feed.path, OTEL_SERVICE_NAME="my-service", OTEL_EXPORTER_OTLP_HEADERS="x-team=storage")
    assert otlp.wait_for(lambda: otlp.find("kvctl.engine.up")).resource["service.name"] == (
        "my-service"
    )
    assert otlp.headers[0]["x-team"] == "storage"


def test_sums_stay_cumulative_over_exports(feed, relay, otlp):
    relay(feed.path)
    for total in (4096, 8192, 12288):
        feed.publish(counter(semconv.TRANSFER_COUNT, total, tier="host", direction="store"))
        otlp.wait_for(lambda total=total: otlp.value("kvctl.transfer.count") == total)
    points = [p for e in otlp.exports for p in e if p.name == "kvctl.transfer.count"]
    assert [p.value for p in points] == sorted(p.value for p in points)
    assert {p.start for p in points} == {STARTED}


def test_a_killed_engine_gives_its_last_sums_and_up_0(feed, relay, otlp):
    # An interval that never comes: what arrives after the first export is the last one.
    process = relay(feed.path, OTEL_METRIC_EXPORT_INTERVAL="3600000")
    otlp.wait_for(lambda: otlp.value("kvctl.engine.up") == 1)
    feed.publish(BYTES)
    feed.close()
    assert process.ended() == 0
    assert otlp.value("kvctl.engine.up") == 0
    assert otlp.value("kvctl.transfer.bytes") == 4096
    assert "exported the last sums of prefill-0" in process.said


def test_a_killed_relay_is_replaced_and_nothing_is_doubled(feed, relay, otlp):
    feed.publish(BYTES)
    first = relay(feed.path)
    before = otlp.wait_for(lambda: otlp.find("kvctl.transfer.bytes"))
    first.process.kill()
    first.process.wait(PATIENCE)
    otlp.exports.clear()
    relay(feed.path)
    after = otlp.wait_for(lambda: otlp.find("kvctl.transfer.bytes"))
    assert (after.value, after.start) == (before.value, before.start)
    assert (after.attributes, after.resource) == (before.attributes, before.resource)


def test_sigterm_waits_for_the_end_of_the_feed(feed, relay, otlp):
    process = relay(feed.path, OTEL_METRIC_EXPORT_INTERVAL="3600000")
    otlp.wait_for(lambda: otlp.value("kvctl.engine.up") == 1)
    process.process.send_signal(signal.SIGTERM)
    process.wait_said("asked to stop: up to 10 s for the feed to end")
    feed.publish(BYTES)  # happened after the signal, and is exported all the same
    feed.close()
    assert process.ended() == 0
    assert otlp.value("kvctl.transfer.bytes") == 4096
    assert otlp.value("kvctl.engine.up") == 0


def test_a_second_sigterm_does_not_wait(feed, relay, otlp):
    process = relay(feed.path)
    otlp.wait_for(lambda: otlp.exports)
    process.process.send_signal(signal.SIGTERM)
    process.wait_said("asked to stop")
    process.process.send_signal(signal.SIGTERM)
    assert process.ended() == 0
    assert otlp.value("kvctl.engine.up") == 1  # which is true


def test_a_collector_that_answers_with_an_error_is_tried_again(feed, relay, otlp):
    feed.publish(BYTES)
    otlp.status = 400
    process = relay(feed.path)
    otlp.wait_for(lambda: otlp.refused >= 3)
    otlp.status = 200
    otlp.wait_for(lambda: otlp.value("kvctl.transfer.bytes") == 4096)
    dropped = otlp.find("kvctl.telemetry.dropped", sink="otlp", cause="export_failed")
    assert dropped.value >= 3
    process.wait_said("exports work again, after")
    assert process.said.count("export failed:") == 1
    assert "400" in process.said


def test_a_slow_collector_does_not_stop_the_reading(feed, relay, otlp):
    otlp.delay = 1.0
    process = relay(feed.path)
    process.wait_said("relaying")
    for total in range(2000):  # more than a socket's buffer: an unread feed would block here
        items = [make_transfer(total, request="r" * 500)]
        feed.publish(counter(semconv.TRANSFER_COUNT, total), items=items)
    otlp.delay = 0.0
    assert otlp.wait_for(lambda: otlp.value("kvctl.transfer.count") == 1999)


def test_a_second_relay_finds_nothing_to_do(feed, relay, otlp):
    relay(feed.path)
    otlp.wait_for(lambda: otlp.exports)
    second = relay(feed.path)
    assert second.ended() == 0
    assert "another relay exports this engine already" in second.said


def test_no_feed_in_time_ends_it(relay, tmp_path):
    process = relay(tmp_path / "feed.sock", "--wait", "0.3")
    assert process.ended() == 3
    assert f"no feed within 0.3 s: {tmp_path}/feed.sock: there is no such socket" in process.said


def test_it_waits_for_a_feed_behind_a_stale_socket(relay, otlp, tmp_path):
    stale = FakeFeed(tmp_path / "feed.sock", make_hello())
    stale.close()
    process = relay(stale.path)
    process.wait_said("nobody listens there")
    with fake_feed(stale.path):
        assert otlp.wait_for(lambda: otlp.value("kvctl.engine.up") == 1)


def test_sigterm_while_waiting_ends_it_at_once(relay, tmp_path):
    process = relay(tmp_path / "feed.sock")
    process.wait_said("waiting up to 60 s")
    process.process.send_signal(signal.SIGTERM)
    assert process.ended() == 0


def test_a_restarted_engine_is_left_to_its_own_relay(feed, relay, otlp):
    process = relay(feed.path)
    otlp.wait_for(lambda: otlp.exports)
    feed.hello = make_hello(incarnation="another")
    feed.drop_readers()
    assert process.ended() == 0
    assert otlp.value("kvctl.engine.up") == 0


def test_an_engine_that_dropped_a_slow_reader_is_followed_again(feed, relay, otlp):
    process = relay(feed.path)
    otlp.wait_for(lambda: otlp.exports)
    feed.drop_readers()
    process.wait_said("connected again")
    feed.publish(BYTES)
    otlp.wait_for(lambda: otlp.value("kvctl.transfer.bytes") == 4096)
    assert all(p.value == 1 for e in otlp.exports for p in e if p.name == "kvctl.engine.up")


def test_another_major_is_a_clear_error(relay, tmp_path):
    with fake_feed(tmp_path / "feed.sock", protocol=(2, 0)):
        process = relay(tmp_path / "feed.sock")
        assert process.ended() == 3
    assert "the engine speaks feed protocol 2.0, this kvctl reads 1.x" in process.said


@pytest.mark.parametrize(
    "greeting",
    [b"HTTP/1.1 400 Bad Request\r\n\r\n", struct.pack(">I", 3) + b"abc", frame(Delta(1))],
    ids=["foreign", "broken", "no-hello"],
)
def test_garbage_on_the_socket_is_a_clear_error(relay, tmp_path, greeting):
    with fake_feed(tmp_path / "feed.sock", greeting=greeting):
        process = relay(tmp_path / "feed.sock")
        assert process.ended() == 3
    assert str(tmp_path / "feed.sock") in process.said


def test_garbage_later_on_keeps_the_sums(feed, relay, otlp):
    process = relay(feed.path)
    otlp.wait_for(lambda: otlp.exports)
    feed.publish(BYTES)
    feed.say(b"\xff" * 64)
    assert process.ended() == 3
    assert otlp.value("kvctl.transfer.bytes") == 4096


def test_what_a_newer_engine_adds_is_ignored_and_counted_once(feed, relay, otlp):
    feed.publish(BYTES, Series("kvctl.from.the.future", {}, 1.0))
    process = relay(feed.path)
    feed.publish(
        counter(semconv.TRANSFER_COUNT, 1),
        items=[make_transfer(1), msgspec.Raw(msgspec.msgpack.encode({"type": "novelty"}))],
    )
    otlp.wait_for(lambda: len(otlp.exports) >= 3 and otlp.find("kvctl.transfer.count"))
    assert otlp.value("kvctl.telemetry.dropped", sink="otlp", cause="unknown_metric") == 1
    assert otlp.find("kvctl.from.the.future") is None
    assert process.said.count("kvctl.from.the.future") == 1


def test_a_disabled_sdk_exports_nothing(feed, relay, otlp):
    process = relay(feed.path, OTEL_SDK_DISABLED="true")
    assert process.ended() == 0
    assert "OTEL_SDK_DISABLED is true" in process.said
    assert not otlp.exports


def test_a_wrong_setting_is_said_at_once(feed, relay):
    process = relay(feed.path, OTEL_EXPORTER_OTLP_PROTOCOL="http/json")
    assert process.ended() == 2
    assert "OTEL_EXPORTER_OTLP_PROTOCOL is 'http/json'" in process.said


def test_the_lock_and_nothing_else_is_cleaned_up(feed, relay, tmp_path, otlp):
    process = relay(feed.path)
    otlp.wait_for(lambda: otlp.exports)
    assert list(tmp_path.glob("*.relay.lock"))
    feed.close()
    process.ended()
    assert not list(tmp_path.glob("*.relay.lock"))
    assert feed.path.exists()  # the engine's
