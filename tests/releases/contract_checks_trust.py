"""Which offers are believed, and until when what they point to may be read: on each release."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from contract_engines import (
    PREFILL,
    is_computed,
    make_prompt,
    offer,
    start,
)
from engine_rig import Engine
from fake_nixl import FakeNixlAgent
from vllm import envs
from vllm.distributed.kv_transfer.kv_connector.v1 import base

from kvctl_connector import lease, nixl_probe, offers
from kvctl_connector.offers import LEASE, SIGNATURE

pytestmark = pytest.mark.usefixtures("no_hook_fails")


def test_a_late_pull_is_not_decoded_from(prefill: Engine, decode: Engine) -> None:
    prompt = make_prompt()
    params = offer(prefill, prompt)
    decode.invalid.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeNixlAgent, "slow", True)
        name = start(decode, prompt, params)
        blocks = decode.blocks(name)
        decode.step()
        assert decode.value("request.waiting", "remote_kv") == 1
        # The lease has run out long before the pull ends.
        much_later = SimpleNamespace(time_ns=lambda: time.time_ns() + 3600 * 10**9)
        patch.setattr(lease, "time", much_later)
        patch.setattr(FakeNixlAgent, "slow", False)
        decode.run(name)
    if hasattr(base, "KVConnectorTransferResults"):
        assert decode.invalid == set(), "the failed request says it all"
    else:
        assert decode.invalid >= set(blocks[:4]), "all that was read is unreadable"
    assert decode.value("transfer.failures", "recv", "lease_expired") == 1


def later(seconds: float) -> Any:
    """A clock, for one module of ours."""
    return SimpleNamespace(time_ns=lambda: time.time_ns() + int(seconds * 1e9))


def judged(
    receiver: Engine,
    params: dict[str, Any],
    prompt: list[int],
    seconds: float,
    beat: Callable[[], None] | None = None,
) -> str:
    """How decode judges a pull that ends so many seconds after the request's arrival.

    `beat`: sends a heartbeat in between.
    """
    before = receiver.value("transfer.count", "recv", "expired")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeNixlAgent, "slow", True)
        name = start(receiver, prompt, params)
        receiver.step()
        if beat is not None:
            beat()
        patch.setattr(lease, "time", later(seconds))
        patch.setattr(FakeNixlAgent, "slow", False)
        receiver.run(name)
    expired = receiver.value("transfer.count", "recv", "expired") - before
    return "late" if expired else "in time"


def send_heartbeat(sender: Engine, receiver: Engine, request: str, after: float) -> None:
    """Decode's to prefill, so late. NIXL's worker only logs it where it fails (base_worker.py
    0.32.0:3179)."""
    mine, peers = (
        each.worker._connectors[0].connector_worker.nixl_wrapper for each in (receiver, sender)
    )
    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(RuntimeError):
        patch.setattr(nixl_probe, "time", later(after))
        mine.send_notif(peers.name, notif_msg=f"HB:{request}".encode())


def own_lease(receiver: Engine) -> float:
    """Seconds that this release's NIXL keeps blocks, by the receiver's own configuration."""
    return float(receiver.connector._scheduler_half.arrivals._offers.own_grant().duration / 1000)


def test_of_a_prefill_of_other_make_our_own_lease_counts(make: Callable[..., Engine]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVCTL_CONNECTOR", "off")
        sender = make("other-make")
    receiver = make("accepting", role="decode", offers="accept")
    for more, expected_verdict in ((-5, "in time"), (5, "late")):
        prompt = make_prompt()
        params = offer(sender, prompt)
        assert LEASE not in params
        assert judged(receiver, params, prompt, own_lease(receiver) + more) == expected_verdict


def test_a_grant_by_a_clock_that_is_ahead_is_not_believed(prefill: Engine, decode: Engine) -> None:
    """Else a pull that ends within the next hour would pass."""
    for more, expected_verdict in ((-5, "in time"), (5, "late")):
        prompt = make_prompt()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(offers, "time", later(3600))
            params = offer(prefill, prompt)
        assert judged(decode, params, prompt, own_lease(decode) + more) == expected_verdict


@pytest.mark.parametrize("lost", [False, True], ids=["arrives", "is lost"])
def test_a_heartbeat_extends_the_lease_unless_it(
    prefill: Engine, decode: Engine, lost: bool
) -> None:
    prompt = make_prompt()
    params = offer(prefill, prompt)
    end = params[LEASE][1] / 1000

    def beat() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(FakeNixlAgent, "unreachable", lost)
            send_heartbeat(prefill, decode, params["remote_request_id"], end - 5)

    verdict = judged(decode, params, prompt, end + 5, beat)
    assert verdict == ("late" if lost else "in time")


# Offers


def test_an_offer_is_signed_and_granted(prefill: Engine) -> None:
    params = offer(prefill, make_prompt())
    assert isinstance(params[SIGNATURE], str)
    granted, duration, _ = params[LEASE]
    assert abs(granted - time.time_ns() // 10**6) < 60_000
    # Never more than NIXL keeps: up to 0.20.2 the environment alone says how long that is.
    worker = prefill.worker._connectors[0].connector_worker
    leased = hasattr(worker, "_lease_extension")
    assert 30_000 <= duration <= 1000 * (30 if leased else envs.VLLM_NIXL_ABORT_REQUEST_TIMEOUT)


@pytest.mark.parametrize("kind", ["offer_mismatch", "offer_unsigned", "offer_reused"])
def test_an_offer_that_lies_is_computed_instead(prefill: Engine, decode: Engine, kind: str) -> None:
    prompt = make_prompt()
    params = offer(prefill, prompt)
    if kind == "offer_reused":
        decode.run(start(decode, prompt, dict(params)))
        decode.scheduler.reset_prefix_cache()
    elif kind == "offer_unsigned":
        del params[SIGNATURE]
    else:
        prompt = make_prompt()
    pulled = decode.value("transfer.count", "recv")

    name = start(decode, prompt, params)
    assert is_computed(decode, name) or decode.run(name)

    assert decode.value("transfer.failures", "recv", kind) == 1
    assert decode.value("transfer.count", "recv") == pulled, "nothing was read"


@pytest.mark.parametrize("taken", [1, 3])
def test_an_unsigned_offer_of_too_few_blocks_fails_its_request_alone(
    prefill: Engine, make: Callable[..., Engine], taken: int
) -> None:
    """NIXL's worker asserts that there are enough, which would end the engine."""
    trusting = make(f"trusting-{taken}", role="decode")
    prompt = make_prompt()
    params = offer(prefill, prompt)
    del params[SIGNATURE]
    params["remote_block_ids"] = [list(group)[taken:] for group in params["remote_block_ids"]]
    name = start(trusting, prompt, params)
    trusting.until(lambda: is_computed(trusting, name), "computed")
    assert trusting.value("transfer.failures", "recv", "offer_mismatch") == 1
    assert trusting.value("request.waiting") == 0

    honest = offer(prefill, prompt)
    trusting.until(trusting.scheduler.reset_prefix_cache, "no request holds blocks")
    trusting.run(start(trusting, prompt, honest))
    assert trusting.value("transfer.count", "recv", "ok") == 1, "the peer is still known"


def test_who_asks_for_both_sides_at_once_is_answered(prefill: Engine, decode: Engine) -> None:
    for engine in (prefill, decode):
        both = {**PREFILL, "do_remote_prefill": True}
        assert engine.run(start(engine, make_prompt(), dict(both))).finish_reason is not None
        blocks = {"remote_block_ids": [[1]], "remote_engine_id": "x", "remote_request_id": "y"}
        address = {"remote_host": "127.0.0.1", "remote_port": 9, "tp_size": 1}
        name = start(engine, make_prompt(), {**both, **blocks, **address})
        assert engine.run(name).finish_reason is not None


def test_prefill_takes_no_offer(prefill: Engine) -> None:
    prompt = make_prompt()
    params = {**PREFILL, "remote_block_ids": [[1, 2]], "remote_engine_id": "x"}
    name = start(prefill, prompt, {**params, "remote_host": "127.0.0.1", "remote_port": 9})
    assert prefill.run(name).finish_reason is not None
