"""The scheduler half: from facts to sums, over its real feed."""

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvctl_connector import arrivals
from kvctl_connector.config import ConfigError, Options
from kvctl_connector.facts import Fact
from kvctl_connector.offers import Verdict
from kvctl_connector.recorder import Recorder
from kvctl_connector.scheduler_half import SchedulerHalf
from kvctl_connector.tier_choice import Choice, Offer
from kvctl_connector.wire import Choice as ChoiceItem
from kvctl_connector.wire import Transfer, Wait

SECOND = 1_000_000_000  # ns


class FakeManager:
    """Upstream's manager of the host tier, as far as the occupancy needs it."""

    _num_chunks = 10
    free = 10

    def _get_num_free_chunks(self) -> int:
        return self.free


def make_fact(**changes: Any) -> Fact:
    fact = Fact(0, 1, "peer", "recv", "r", "r", SECOND, 2 * SECOND, 1000, "ok", peer="prefill")
    return fact._replace(**changes)


def make_half(options: Options) -> SchedulerHalf:
    vllm_config = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(engine_id="engine"),
        parallel_config=SimpleNamespace(data_parallel_index=2, world_size=1),
        model_config=SimpleNamespace(model="tiny"),
    )
    offload = SimpleNamespace(connector_scheduler=SimpleNamespace(manager=FakeManager()))
    children = [SimpleNamespace(), offload]
    configs = [
        SimpleNamespace(kv_connector_extra_config={}),
        SimpleNamespace(kv_connector_extra_config={"cpu_bytes_to_use": 1000}),
    ]
    spec = SimpleNamespace(block_size=128, page_size_bytes=128)
    groups = [SimpleNamespace(kv_cache_spec=spec, layer_names=["0", "1"])]
    kv_cache_config = SimpleNamespace(kv_cache_groups=groups)
    return SchedulerHalf(options, vllm_config, kv_cache_config, ["peer", "host"], children, configs)


def admit(half: SchedulerHalf, child: int, tokens: int, *, waits: bool) -> None:
    """Request ``r`` gets one block, into which that child loads."""
    block = SimpleNamespace(block_id=1, block_hash=None, is_null=False, ref_cnt=1)
    blocks = SimpleNamespace(blocks=([block],))
    choice = Choice(child, tokens, waits, "only", ())
    half.admitted(make_request("r", {}), choice, {child: (tokens, blocks)}, blocks)


@pytest.fixture
def half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SchedulerHalf]:
    monkeypatch.setenv("KVCTL_RUNTIME_DIR", str(tmp_path / "run"))
    half = make_half(Options(topology="t", instance="decode-0", role="decode"))
    yield half
    half.close()


def values(half: SchedulerHalf) -> dict[tuple[str, ...], float]:
    return {
        (series.metric.removeprefix("kvctl."), *series.attributes.values()): series.value
        for series in half.recorder.everything()
    }


def test_the_feed_is_where_the_tool_looks_for_it(half: SchedulerHalf, tmp_path: Path) -> None:
    assert half.feed.path == tmp_path / "run" / "t.decode-0.2.sock"
    assert half.feed.path.is_socket()


def test_failure_counters_of_the_tiers_begin_at_zero(half: SchedulerHalf) -> None:
    found = values(half)
    assert found["transfer.failures", "peer", "lease_expired"] == 0
    assert found["transfer.failures", "host", "io_error"] == 0
    assert found["tier.capacity", "host"] == 1000


def test_a_pull_from_allocation_to_completion(half: SchedulerHalf) -> None:
    admit(half, 0, 256, waits=True)
    assert values(half)["request.waiting", "remote_kv"] == 1
    assert values(half)["transfer.inflight", "peer", "recv"] == 1

    half.completed([make_fact()], {"r"}, 0)

    found = values(half)
    assert found["request.waiting", "remote_kv"] == 0
    assert found["transfer.bytes", "peer", "recv", "ok", "prefill"] == 1000
    assert found["transfer.count", "peer", "recv", "ok", "prefill"] == 1
    assert found["transfer.duration", "peer", "recv", "ok"] == 1  # second
    assert found["prompt.tokens", "peer"] == 256
    _, transfer, wait = half.recorder.outbox
    assert isinstance(transfer, Transfer)
    assert (transfer.bytes, transfer.start, transfer.end) == (1000, SECOND, 2 * SECOND)
    assert isinstance(wait, Wait)
    assert (wait.tier, wait.outcome, wait.request) == ("peer", "ok", "r")


def test_a_failed_pull_is_a_failure_with_its_reason_and_no_tokens(half: SchedulerHalf) -> None:
    admit(half, 0, 256, waits=True)
    failed = make_fact(outcome="failed", phase="post", reason="setup_failed", bytes=0)
    half.completed([failed], {"r"}, 0)

    found = values(half)
    assert found["transfer.failures", "peer", "recv", "post", "setup_failed", "prefill"] == 1
    assert found["transfer.count", "peer", "recv", "failed", "prefill"] == 1
    assert ("prompt.tokens", "peer") not in found
    assert half.recorder.outbox[-1].outcome == "failed"


def test_an_aborted_wait_is_over_at_once(half: SchedulerHalf) -> None:
    admit(half, 1, 128, waits=True)
    assert values(half)["request.waiting", "offload_load"] == 1
    half.finished("r", offered=False)
    assert values(half)["request.waiting", "offload_load"] == 0
    assert half.recorder.outbox[-1].outcome == "aborted"
    half.completed([], {"r"}, 0)  # the load itself ends later
    assert len(half.recorder.outbox) == 2, "the choice, and the wait"


def test_prompt_tokens_are_counted_by_where_they_came_from(half: SchedulerHalf) -> None:
    admit(half, 0, 256, waits=True)
    half.completed([make_fact()], {"r"}, 0)
    new = SimpleNamespace(req_id="r", num_computed_tokens=384, prompt_token_ids=[0] * 400)
    half.scheduled([new])

    found = values(half)
    assert found["prompt.tokens", "peer"] == 256
    assert found["prompt.tokens", "local"] == 128
    assert found["prompt.tokens", "computed"] == 16


def test_stores_are_in_flight_until_their_job_ends(half: SchedulerHalf) -> None:
    half.announced(1, [1, 2])
    assert values(half)["transfer.inflight", "host", "store"] == 2
    FakeManager.free = 7
    try:
        half.completed([make_fact(tier="host", direction="store", key="1", peer="")], (), 0)
    finally:
        FakeManager.free = 10
    found = values(half)
    assert found["transfer.inflight", "host", "store"] == 1
    assert found["transfer.bytes", "host", "store", "ok"] == 1000
    assert found["tier.used", "host"] == 300


def test_stores_that_are_known_by_request_alone(half: SchedulerHalf) -> None:
    """As on vLLM 0.20.2."""
    half.announced(1, ["a", "b"])
    stored = make_fact(tier="host", direction="store", key="0", request="a", peer="")
    half.completed([stored], (), 0)
    assert values(half)["transfer.inflight", "host", "store"] == 1


@pytest.mark.parametrize(
    ("fixed", "extra", "seconds"),
    [({"VLLM_NIXL_ABORT_REQUEST_TIMEOUT": 7}, {"kv_lease_duration": 5}, 7),
     ({}, {"kv_lease_duration": 5}, 5), ({}, None, 30)],
    ids=["one for all offers, vLLM 0.20.2", "as configured", "vLLM's own"],
)  # fmt: skip
def test_how_long_prefill_keeps_blocks(
    monkeypatch: pytest.MonkeyPatch, fixed: Any, extra: Any, seconds: int
) -> None:
    monkeypatch.setattr(arrivals, "envs", SimpleNamespace(**fixed))
    config = SimpleNamespace(kv_connector_extra_config=extra)
    made = arrivals.Arrivals(Options(), [config], Recorder())
    params = {"do_remote_prefill": True}
    made.offer(make_request("r", {}), params)
    assert params["kvctl_lease"][1] == seconds * 1000


def test_an_offer_that_was_read_and_one_whose_lease_ran_out(half: SchedulerHalf) -> None:
    half.finished("read", offered=True)
    half.finished("unread", offered=True)
    assert values(half)["transfer.inflight", "peer", "send"] == 2
    sends = [
        make_fact(direction="send", key="read", request="read", start=0, bytes=0, peer=""),
        make_fact(
            direction="send", key="unread", request="unread", start=0, bytes=0, peer="",
            outcome="expired", phase="notify", reason="lease_expired",
        ),
    ]  # fmt: skip
    half.completed(sends, (), 0)

    found = values(half)
    assert found["transfer.count", "peer", "send", "ok"] == 1
    assert found["transfer.count", "peer", "send", "expired"] == 1
    assert found["transfer.failures", "peer", "send", "notify", "lease_expired"] == 1
    assert found["transfer.inflight", "peer", "send"] == 0
    assert not any(key[0] == "transfer.duration" for key in found), "prefill cannot know it"


def test_a_synchronous_load_does_not_wait(half: SchedulerHalf) -> None:
    admit(half, 1, 128, waits=False)
    found = values(half)
    assert found["request.waiting", "offload_load"] == 0
    assert found["prompt.tokens", "host"] == 128


def make_request(name: str, params: dict[str, Any]) -> Any:
    return SimpleNamespace(
        request_id=name, prompt_token_ids=[1, 2, 3], kv_transfer_params=params, cache_salt=None
    )


def make_offer(**changes: Any) -> dict[str, Any]:
    known = {
        "do_remote_prefill": True, "remote_engine_id": "prefill", "remote_request_id": "p-1",
        "remote_block_ids": [[1]], "remote_host": "127.0.0.1", "remote_port": 5600, "tp_size": 1,
    }  # fmt: skip
    return known | changes


def test_an_unsigned_offer_is_taken_once_and_counted(half: SchedulerHalf) -> None:
    first = make_request("r", make_offer())
    half.arrived(first)
    half.arrived(first)  # asked about again at every step until it is admitted
    second = make_request("again", make_offer())
    half.arrived(second)

    assert first.kv_transfer_params["do_remote_prefill"]
    assert not second.kv_transfer_params["do_remote_prefill"]
    found = values(half)
    assert (found["offers", "unsigned"], found["offers", "refused"]) == (1, 1)
    assert found["transfer.failures", "peer", "recv", "offer_reused"] == 1


def test_without_a_grant_our_own_lease_counts_from_the_arrival(half: SchedulerHalf) -> None:
    before = time.time_ns()
    half.arrived(make_request("r", make_offer()))
    (lease,) = half.arrivals.take_leases().values()
    assert lease.remote_request == "p-1"
    assert 29 * SECOND < lease.end - before < 31 * SECOND
    assert half.arrivals.take_leases() == {}


def test_a_grant_is_what_counts_unless_it_comes_from_our_future(half: SchedulerHalf) -> None:
    now = time.time_ns() // 1_000_000
    half.arrived(make_request("r", make_offer(kvctl_lease=[now - 2000, 7000, 4000])))
    (lease,) = half.arrivals.take_leases().values()
    assert (lease.end, lease.extension) == ((now + 5000) * 1_000_000, 4 * SECOND)

    ahead = make_offer(kvctl_lease=[now + 3_600_000, 7000, 4000], remote_request_id="p-2")
    half.arrived(make_request("s", ahead))
    (own,) = half.arrivals.take_leases().values()
    assert own.end < time.time_ns() + 31 * SECOND


def test_an_unsigned_grant_can_only_shorten_our_own_lease(half: SchedulerHalf) -> None:
    now = time.time_ns() // 1_000_000
    century = 100 * 365 * 86_400_000
    half.arrived(make_request("r", make_offer(kvctl_lease=[now - 2000, century, century])))
    (lease,) = half.arrivals.take_leases().values()
    assert lease.end < time.time_ns() + 31 * SECOND
    assert lease.extension < 31 * SECOND


def test_a_pull_that_nobody_awaits_tells_no_speed(half: SchedulerHalf) -> None:
    half.completed([make_fact()], (), 0)
    assert half.transfers.speeds.of("peer", "recv", "prefill") is None
    admit(half, 0, 256, waits=True)
    half.completed([make_fact()], {"r"}, 0)
    assert half.transfers.speeds.of("peer", "recv", "prefill") == 1000


def test_prefill_grants_and_decode_judges(half: SchedulerHalf) -> None:
    request = make_request("r", {"do_remote_decode": True})
    half.arrived(request)
    params = make_offer()
    half.offer(request, params)
    assert [type(part) for part in params["kvctl_lease"]] == [int, int, int]
    assert "kvctl_signature" not in params, "there is no key here"


def test_a_client_cannot_make_prefill_wait_for_blocks_it_will_not_pull(half: SchedulerHalf) -> None:
    params = make_offer(do_remote_prefill=False, do_remote_decode=True, remote_num_tokens=500)
    half.arrived(make_request("r", params))
    assert params["remote_block_ids"] is None


def test_signatures_need_a_key(half: SchedulerHalf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVCTL_OFFER_KEY_FILE", raising=False)
    with pytest.raises(ConfigError, match="names no key file"):
        make_half(Options(topology="t", instance="other", role="decode", offers="signed"))


def test_strays_and_missing_hooks_are_counted(half: SchedulerHalf) -> None:
    half.completed([], (), 3)
    half.missing(["_read_blocks"])
    half.missing(["offload_worker", "_read_blocks"])  # another rank, a step later
    found = values(half)
    assert found["telemetry.dropped", "recorder", "stray_completion"] == 3
    assert found["telemetry.dropped", "hook", "_read_blocks"] == 1
    assert found["telemetry.dropped", "hook", "offload_worker"] == 1
    named = {key[-1] for key, value in found.items() if key[0] == "connector.info" and value}
    assert named == {"_read_blocks+offload_worker"}


def test_a_plain_pair_stays_within_the_budget_of_series(half: SchedulerHalf) -> None:
    for outcome in ("ok", "failed"):
        for tier, direction in (("peer", "recv"), ("host", "load"), ("host", "store")):
            half.completed(
                [make_fact(tier=tier, direction=direction, key="1", outcome=outcome,
                           phase="move", reason="unknown")], (), 0,
            )  # fmt: skip
    assert len(half.recorder.everything()) <= 150


def test_a_peer_whose_pulls_keep_failing_is_no_longer_asked(half: SchedulerHalf) -> None:
    for number in range(3):
        name = f"r{number}"
        half.arrived(make_request(name, make_offer(remote_request_id=name)))
        failed = make_fact(
            key=name, request=name, outcome="failed", phase="move", reason="remote_gone"
        )
        half.completed([failed], (), 0)

    refused = make_request("r", make_offer(remote_request_id="fresh"))
    half.arrived(refused)
    assert not refused.kv_transfer_params["do_remote_prefill"]
    other = make_request("s", make_offer(remote_engine_id="another"))
    half.arrived(other)
    assert other.kv_transfer_params["do_remote_prefill"]
    found = values(half)
    assert found["transfer.failures", "peer", "recv", "peer_quarantined"] == 1
    assert found["peer.quarantined", "prefill"] == 1


def fail_three_times_before_anything_is_read(half: SchedulerHalf, *, signed: bool) -> float:
    """Whether the peer that the offers named is in quarantine then."""
    half.arrivals._offers.judge = lambda request: Verdict("", signed)  # type: ignore[method-assign]
    for number in range(3):
        name = f"r{number}"
        half.arrived(make_request(name, make_offer(remote_request_id=name)))
        half.completed([make_fact(key=name, request=name, outcome="failed", peer="")], (), 0)
    return values(half).get(("peer.quarantined", "prefill"), 0)


@pytest.mark.parametrize("signed", [True, False])
def test_whose_failure_it_is_only_a_signed_offer_tells(half: SchedulerHalf, signed: bool) -> None:
    """Anybody can name a closed port with a real peer's id."""
    assert fail_three_times_before_anything_is_read(half, signed=signed) == signed


def test_an_offer_that_does_not_fit_tells_nothing_of_its_peer(half: SchedulerHalf) -> None:
    for number in range(3):
        name = f"r{number}"
        half.arrived(make_request(name, make_offer(remote_request_id=name)))
        unfit = make_fact(key=name, request=name, outcome="failed", phase="post")
        half.completed([unfit._replace(reason="offer_mismatch")], (), 0)
    assert ("peer.quarantined", "prefill") not in values(half)


def test_in_observe_mode_nobody_is_in_quarantine(half: SchedulerHalf) -> None:
    observing = make_half(Options("t", "observing", "decode", mode="observe"))
    assert fail_three_times_before_anything_is_read(observing, signed=True) == 0
    observing.close()


def test_who_asks_for_both_sides_asks_to_prefill(half: SchedulerHalf) -> None:
    """vLLM asserts that nobody does, and the engine ends (D23)."""
    request = make_request("r", make_offer(do_remote_decode=True))
    half.arrived(request)
    assert not request.kv_transfer_params["do_remote_prefill"]
    assert request.kv_transfer_params["do_remote_decode"]
    assert values(half)["transfer.failures", "peer", "recv", "offer_mismatch"] == 1


def test_a_tier_that_failed_a_request_is_avoided_for_it(half: SchedulerHalf) -> None:
    half.arrived(make_request("r", {}))
    half.completed([make_fact(tier="host", direction="load", outcome="failed")], {"r"}, 0)
    assert half.choice._avoided == {"r": {"host"}}
    half.finished("r", offered=False)
    assert half.choice._avoided == {}


def test_a_pull_that_fails_after_its_request_has_gone_leaves_nothing(half: SchedulerHalf) -> None:
    half.completed([make_fact(outcome="failed")], (), 0)
    assert half.choice._avoided == {}


def test_pulls_of_clients_that_hung_up_count_for_the_quarantine(half: SchedulerHalf) -> None:
    for number in range(3):
        name = f"r{number}"
        half.arrived(make_request(name, make_offer(remote_request_id=name)))
        half.finished(name, offered=False)
        half.completed([make_fact(key=name, request=name, outcome="failed")], (), 0)
    assert values(half)["peer.quarantined", "prefill"] == 1


def test_a_lookup_that_took_too_long_is_counted(half: SchedulerHalf) -> None:
    choice = Choice(None, 0, False, "deadline", (Offer(0, False), Offer(None, False)))
    half.admitted(make_request("r", {}), choice, {}, SimpleNamespace(blocks=()))
    found = values(half)
    assert found["tier.choices", "none", "deadline"] == 1
    assert found["transfer.failures", "host", "load", "queue", "wait_deadline"] == 1


def test_a_pull_that_is_given_up_tells_against_its_tier_and_its_peer(
    half: SchedulerHalf, monkeypatch: pytest.MonkeyPatch
) -> None:
    half.waits.block_pool = object()
    half.arrivals._offers.judge = lambda request: Verdict("", True)  # type: ignore[method-assign]
    for number in range(3):
        half.arrived(make_request("r", make_offer(remote_request_id=f"p-{number}")))
        admit(half, 0, 256, waits=True)
        with monkeypatch.context() as patch:
            later = time.monotonic_ns() + 3600 * SECOND
            patch.setattr(time, "monotonic_ns", lambda later=later: later)
            assert half.give_up_overdue()["r"].tiers == ("peer",)
        assert half.choice._avoided["r"] == {"peer"}
        half.finished("r", offered=False)
    assert values(half)["peer.quarantined", "prefill"] == 1


def test_a_choice_is_counted_and_told_with_every_offer(half: SchedulerHalf) -> None:
    block = SimpleNamespace(block_id=1, block_hash=None, is_null=False, ref_cnt=1)
    blocks = SimpleNamespace(blocks=([block],))
    offers = (Offer(1000, True), Offer(128, True))
    choice = Choice(0, 1000, True, "more", offers)
    half.admitted(make_request("r", {}), choice, {0: (1000, blocks)}, blocks)
    assert values(half)["tier.choices", "peer", "more"] == 1
    told = half.recorder.outbox[0]
    assert isinstance(told, ChoiceItem)
    assert (told.tier, told.why, told.offers) == ("peer", "more", {"peer": 1000, "host": 128})


def test_in_observe_mode_nothing_is_refused_or_granted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVCTL_RUNTIME_DIR", str(tmp_path / "run"))
    half = make_half(Options(topology="t", instance="o", role="decode", mode="observe"))
    try:
        first, second = (make_request(name, make_offer()) for name in ("r", "s"))
        half.arrived(first)
        half.arrived(second)
        assert second.kv_transfer_params == make_offer()
        assert values(half)["transfer.failures", "peer", "recv", "offer_reused"] == 1, "counted"
        params = make_offer()
        half.offer(make_request("t", {"do_remote_decode": True}), params)
        assert params == make_offer()
        half.waits.block_pool = object()
        admit(half, 0, 256, waits=True)
        monkeypatch.setattr(time, "time_ns", lambda: 1 << 62)
        assert half.give_up_overdue() == {}
    finally:
        half.close()
