"""The probe on a fake NIXL wrapper: the real one needs an engine (tests/end_to_end)."""

import time
from types import SimpleNamespace
from typing import Any

import pytest

from kvctl_connector import nixl_probe
from kvctl_connector.facts import Fact
from kvctl_connector.nixl_probe import NixlProbe

MICROSECOND = 1000  # ns


class FakeWrapper:
    """Answers like NIXL's agent; a test sets what the next calls return."""

    def __init__(self) -> None:
        self.states: dict[int, str] = {}
        self.telemetry: Any = None
        self.notifications: dict[str, list[bytes]] = {}
        self.refuses = False
        self.released: list[int] = []

    def make_prepped_xfer(self, *args: Any, **kwargs: Any) -> int:
        return len(self.states) + 1

    def transfer(self, handle: int) -> str:
        if self.refuses:
            raise RuntimeError("NIXL_ERR_REMOTE_DISCONNECT")
        self.states[handle] = "PROC"
        return "PROC"

    def check_xfer_state(self, handle: int) -> str:
        return self.states[handle]

    def get_xfer_telemetry(self, handle: int) -> Any:
        return self.telemetry

    def release_xfer_handle(self, handle: int) -> None:
        self.released.append(handle)

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        return self.notifications

    def send_notif(self, agent: str, notif_msg: bytes) -> None:
        if self.refuses:
            raise RuntimeError("NIXL_ERR_REMOTE_DISCONNECT")

    def get_agent_metadata(self) -> str:
        return "untouched"


class FakeWorker:
    """The two methods of vLLM's NIXL worker that surround the wrapper's calls."""

    def __init__(self) -> None:
        self.nixl_wrapper: Any = FakeWrapper()
        self.failures: list[str] = []
        self._reqs_to_send: dict[str, float] = {}

    def _read_blocks(self, *, request_id: str, dst_engine_id: str) -> bool:
        handle = self.nixl_wrapper.make_prepped_xfer("READ", notif_msg=b"r:1")
        self.nixl_wrapper.transfer(handle)
        return True

    def _log_failure(self, failure_type: str, req_id: str | None, **context: Any) -> None:
        self.failures.append(failure_type)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    now = SimpleNamespace(ns=1_000_000)
    monkeypatch.setattr(nixl_probe.time, "time_ns", lambda: now.ns)
    return now


@pytest.fixture
def worker() -> FakeWorker:
    return FakeWorker()


@pytest.fixture
def probe(worker: FakeWorker) -> NixlProbe:
    probe = NixlProbe(rank=0, ranks=1)
    probe.install(worker)
    assert probe.missing == []
    return probe


def telemetry(count: int, microseconds: int) -> Any:
    return SimpleNamespace(totalBytes=count, xferDuration=microseconds)


def test_a_pull_of_two_handles_is_one_transfer(
    worker: FakeWorker, probe: NixlProbe, clock: SimpleNamespace
) -> None:
    wrapper = worker.nixl_wrapper
    worker._read_blocks(request_id="r", dst_engine_id="prefill")
    clock.ns += 5000
    worker._read_blocks(request_id="r", dst_engine_id="prefill")
    clock.ns += 100_000
    fake = wrapper._kvctl_original
    for handle, fake.telemetry in ((1, telemetry(10, 20)), (2, telemetry(30, 50))):
        fake.states[handle] = "DONE"
        assert wrapper.check_xfer_state(handle) == "DONE"
        wrapper.get_xfer_telemetry(handle)
        wrapper.release_xfer_handle(handle)

    fact = probe.received("r", failed=False)

    assert (fact.bytes, fact.peer, fact.outcome) == (40, "prefill", "ok")
    assert fact.start == 1_000_000
    # The second handle's own end, not the poll that noticed it.
    assert fact.end == 1_000_000 + 5000 + 50 * MICROSECOND
    assert fake.released == [1, 2]


def test_without_telemetry_the_poll_that_noticed_is_the_end(
    worker: FakeWorker, probe: NixlProbe, clock: SimpleNamespace
) -> None:
    worker._read_blocks(request_id="r", dst_engine_id="prefill")
    clock.ns += 70_000
    worker.nixl_wrapper._kvctl_original.states[1] = "DONE"
    worker.nixl_wrapper.check_xfer_state(1)
    worker.nixl_wrapper.get_xfer_telemetry(1)

    assert probe.received("r", failed=False).end == 1_070_000


def test_a_refused_post_still_raises_and_is_a_failed_transfer(
    worker: FakeWorker, probe: NixlProbe, clock: SimpleNamespace
) -> None:
    worker.nixl_wrapper._kvctl_original.refuses = True
    with pytest.raises(RuntimeError, match="NIXL_ERR_REMOTE_DISCONNECT"):
        worker._read_blocks(request_id="r", dst_engine_id="prefill")
    worker._log_failure("transfer_setup_failed", "r", error=None)

    fact = probe.received("r", failed=True)

    assert (fact.outcome, fact.phase, fact.reason) == ("failed", "post", "setup_failed")
    assert fact.bytes == 0
    assert worker.failures == ["transfer_setup_failed"]


@pytest.mark.parametrize(
    ("failure_type", "phase", "reason"),
    [
        ("handshake_failed", "handshake", "handshake_refused"),
        ("transfer_failed", "move", "transfer_error"),
        ("something_new", "move", "unknown"),
    ],
)
def test_failures_are_named(
    worker: FakeWorker, probe: NixlProbe, failure_type: str, phase: str, reason: str
) -> None:
    worker._log_failure(failure_type, "r")
    fact = probe.received("r", failed=True)
    assert (fact.phase, fact.reason) == (phase, reason)


def test_a_failure_counts_also_where_vllm_reports_the_pull_as_received(
    worker: FakeWorker, probe: NixlProbe
) -> None:
    worker._log_failure("transfer_failed", "r")
    worker._log_failure("notification_failed", "told late")
    assert probe.received("r", failed=False).outcome == "failed"
    assert probe.received("told late", failed=False).outcome == "ok"


def test_an_offer_that_was_read_is_sent_and_one_that_was_not_has_expired(
    worker: FakeWorker, probe: NixlProbe
) -> None:
    worker.nixl_wrapper._kvctl_original.notifications = {
        "decode": [b"read:1", b"HB:unread,other", b"id:with:colons:2"]
    }
    worker.nixl_wrapper.get_new_notifs()

    facts = {fact.request: fact for fact in probe.sent(["read", "unread", "id:with:colons"])}

    assert {request: fact.outcome for request, fact in facts.items()} == {
        "read": "ok",
        "unread": "expired",
        "id:with:colons": "ok",
    }
    assert facts["unread"].reason == "lease_expired"


def test_heartbeats_that_were_sent_are_told_and_those_that_failed_are_not(
    worker: FakeWorker, clock: SimpleNamespace
) -> None:
    told: list[tuple[bytes, int]] = []
    NixlProbe(0, 1, lambda message, sent: told.append((message, sent))).install(worker)
    worker.nixl_wrapper.send_notif("prefill", notif_msg=b"HB:a,b")
    worker.nixl_wrapper.send_notif("prefill", notif_msg=b"a:1")
    worker.nixl_wrapper._kvctl_original.refuses = True
    with pytest.raises(RuntimeError):
        worker.nixl_wrapper.send_notif("prefill", notif_msg=b"HB:lost")
    assert told == [(b"HB:a,b", clock.ns)]


def test_a_late_pull_is_expired(worker: FakeWorker, probe: NixlProbe) -> None:
    worker._read_blocks(request_id="r", dst_engine_id="prefill")
    fact = probe.received("r", failed=False, late=True)
    assert (fact.outcome, fact.phase, fact.reason) == ("expired", "move", "lease_expired")


def test_everything_else_goes_to_the_wrapper_untouched(
    worker: FakeWorker, probe: NixlProbe
) -> None:
    assert worker.nixl_wrapper.get_agent_metadata() == "untouched"


def test_what_vllm_does_not_have_is_named() -> None:
    probe = NixlProbe(rank=0, ranks=1)
    probe.install(SimpleNamespace(nixl_wrapper=FakeWrapper()))
    assert probe.missing == ["_reqs_to_send", "_read_blocks", "_log_failure"]

    bare = NixlProbe(rank=0, ranks=1)
    bare.install(SimpleNamespace())
    assert bare.missing == ["nixl_wrapper"]


def test_a_lease_is_looked_at_again_before_it_is_reaped(worker: FakeWorker) -> None:
    probe = NixlProbe(rank=0, ranks=1)
    worker._reqs_to_send["r"] = 0.0
    probe.install(worker)
    worker.nixl_wrapper.get_new_notifs()
    assert worker._reqs_to_send["r"] > time.perf_counter()


def test_in_observe_mode_it_is_not(worker: FakeWorker) -> None:
    probe = NixlProbe(rank=0, ranks=1, gives_grace=False)
    worker._reqs_to_send["r"] = 0.0
    probe.install(worker)
    worker.nixl_wrapper.get_new_notifs()
    assert worker._reqs_to_send == {"r": 0.0}


def test_memory_is_bounded(
    worker: FakeWorker, probe: NixlProbe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl_probe, "LIMIT", 10)
    for number in range(50):
        worker._read_blocks(request_id=f"r{number}", dst_engine_id="prefill")
        worker.nixl_wrapper._kvctl_original.notifications = {"d": [f"n{number}:1".encode()]}
        worker.nixl_wrapper.get_new_notifs()
    assert len(probe._pulls) == len(probe._handles) == len(probe._read) == 10
    assert isinstance(probe.received("r0", failed=False), Fact)  # forgotten, but no error
