import pytest

from kvctl_connector import recorder as recorder_module
from kvctl_connector import semconv
from kvctl_connector.recorder import Recorder
from kvctl_connector.wire import Wait


def values(recorder: Recorder) -> dict[tuple[str, ...], float]:
    return {
        (series.metric, *series.attributes.values()): series.value
        for series in recorder.everything()
    }


def test_counters_add_and_empty_attributes_are_left_out() -> None:
    recorder = Recorder()
    recorder.add(semconv.TRANSFER_BYTES, 5, "host", "store", "ok", "")
    recorder.add(semconv.TRANSFER_BYTES, 7, "host", "store", "ok", "")
    assert values(recorder) == {("kvctl.transfer.bytes", "host", "store", "ok"): 12}


def test_a_failure_counter_can_start_at_zero() -> None:
    recorder = Recorder()
    recorder.add(semconv.TRANSFER_FAILURES, 0, "peer", "", "", "unknown", "")
    assert values(recorder) == {("kvctl.transfer.failures", "peer", "unknown"): 0}


def test_histogram_bounds_are_inclusive_and_the_last_bucket_is_open() -> None:
    recorder = Recorder()
    bounds = semconv.TRANSFER_DURATION.buckets
    for seconds in (bounds[0], bounds[0] * 1.01, bounds[-1], bounds[-1] * 2):
        recorder.observe(semconv.TRANSFER_DURATION, seconds, "peer", "recv", "ok")
    (series,) = recorder.everything()
    assert series.buckets is not None
    assert (series.buckets[0], series.buckets[1]) == (1, 1)
    assert series.buckets[-2:] == [1, 1]
    assert sum(series.buckets) == 4
    assert series.value == pytest.approx(bounds[0] * 2.01 + bounds[-1] * 3)


def test_only_changes_are_taken_and_each_once() -> None:
    recorder = Recorder()
    recorder.set(semconv.REQUEST_WAITING, 2, "remote_kv")
    recorder.add(semconv.PROMPT_TOKENS, 1, "peer")
    assert {series.metric for series in recorder.take_changes()} == {
        "kvctl.request.waiting",
        "kvctl.prompt.tokens",
    }
    assert recorder.take_changes() == []

    recorder.set(semconv.REQUEST_WAITING, 2, "remote_kv")  # the same value again
    assert recorder.take_changes() == []
    recorder.set(semconv.REQUEST_WAITING, 0, "remote_kv")
    assert [series.value for series in recorder.take_changes()] == [0]


def test_a_gauge_that_begins_at_zero_is_told() -> None:
    recorder = Recorder()
    recorder.set(semconv.TIER_USED, 0, "host")
    assert [series.value for series in recorder.take_changes()] == [0]


def test_series_are_bounded_and_the_overflow_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_module, "MAX_SERIES", 3)
    recorder = Recorder()
    for number in range(10):
        recorder.add(semconv.PROMPT_TOKENS, 1, f"source {number}")
    found = values(recorder)
    assert len(found) == 4
    assert found[("kvctl.telemetry.dropped", "recorder", "series_limit")] == 7


def test_peers_are_bounded() -> None:
    recorder = Recorder()
    labels = [recorder.peer(f"engine {number}") for number in range(20)]
    assert labels[:16] == [f"engine {number}" for number in range(16)]
    assert set(labels[16:]) == {"other"}
    assert recorder.peer("engine 3") == "engine 3"
    assert recorder.peer("") == ""


def test_the_outbox_is_bounded_and_numbers_its_items() -> None:
    recorder = Recorder()
    for number in range(recorder_module.OUTBOX + 5):
        recorder.put(Wait(0, "peer", "ok", f"request {number}", 1, 2))
    assert len(recorder.outbox) == recorder_module.OUTBOX
    assert (recorder.outbox[0].seq, recorder.outbox[-1].seq) == (6, recorder_module.OUTBOX + 5)
