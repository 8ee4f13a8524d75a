"""Host memory beside the peer, on each release."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from contract_engines import (
    free_blocks,
    is_computed,
    is_held,
    make_prompt,
    offer,
    start,
    stored,
)
from engine_rig import BLOCK, Engine, contents, expected

from kvctl_connector.forwarding import FAILS_REQUESTS
from kvctl_connector.host_memory import HostMemoryWorker

pytestmark = pytest.mark.usefixtures("no_hook_fails")


def test_what_left_the_cache_is_loaded_from_the_host(make: Callable[..., Engine]) -> None:
    engine = make("alone")
    prompt = make_prompt()
    engine.run(start(engine, prompt, None))
    engine.run(start(engine, make_prompt(), None))  # stores are submitted a step late
    engine.until(lambda: engine.value("transfer.count", "store", "ok") >= 1, "stored")
    engine.until(engine.scheduler.reset_prefix_cache, "no request holds blocks")

    name = start(engine, prompt, None)
    blocks = engine.blocks(name)
    engine.run(name)

    assert contents(engine, blocks)[:4] == expected(prompt)
    assert engine.value("transfer.count", "load", "ok") == 1
    assert engine.value("transfer.bytes", "load", "ok") > 0
    assert engine.value("prompt.tokens", "host") == 4 * BLOCK
    assert engine.value("tier.used", "host") > 0
    assert engine.value("request.waiting") == 0


@pytest.mark.parametrize("composed", ["always", "never"])
def test_decode_has_a_part_of_what_prefill_offers(
    make: Callable[..., Engine], prefill: Engine, composed: str
) -> None:
    """A prefix from host memory and the rest from prefill, or all of it from the faster one."""
    receiver = make(f"composing-{composed}", role="decode", offers="signed", composed=composed)
    prompt = make_prompt()
    stored(receiver, prompt)
    half = receiver.connector._scheduler_half
    half.transfers.speeds.add("peer", "recv", "prefill", 1000, 1.0)
    half.transfers.speeds.add("host", "load", "", 10_000_000, 1.0)
    params = offer(prefill, prompt)

    name = start(receiver, prompt, params)
    blocks = receiver.blocks(name)
    receiver.run(name)

    assert contents(receiver, blocks)[:4] == expected(prompt)
    if composed == "always":
        assert receiver.value("tier.choices", "composed") == 1
        assert receiver.value("prompt.tokens", "host") == 4 * BLOCK
        assert receiver.value("prompt.tokens", "peer") == 2
    else:
        assert receiver.value("tier.choices", "host", "faster") == 1
        assert receiver.value("transfer.count", "recv") == 0

    def told() -> bool:
        receiver.step()  # an idle engine says nothing
        return not is_held(prefill, params)

    prefill.until(told, "prefill was told")
    assert receiver.value("telemetry.dropped", "stray_completion") == 0


def test_the_offload_child_hears_which_blocks_a_pull_will_write(
    prefill: Engine, decode: Engine
) -> None:
    scheduler = decode.connector._connectors[1].connector_scheduler
    if not hasattr(scheduler, "_current_batch_allocated_block_ids"):
        # 0.20.2 keeps a request's blocks until it has stored them, so there is nothing to hear;
        # 0.22.1 looks a block's stores up at once, and here none is stored.
        known = {"_reqs_being_stored", "_block_id_to_pending_jobs"} & vars(scheduler).keys()
        assert known, "how does this release learn that a block is used again?"
        return
    prompt = make_prompt()
    params = offer(prefill, prompt)
    told: set[int] = set()
    original = scheduler.build_connector_meta
    with pytest.MonkeyPatch.context() as patch:

        def build_connector_meta(planned: Any) -> Any:
            told.update(scheduler._current_batch_allocated_block_ids)
            return original(planned)

        patch.setattr(scheduler, "build_connector_meta", build_connector_meta)
        name = start(decode, prompt, params)
        blocks = set(decode.blocks(name))
    decode.run(name)
    assert told >= blocks


def test_a_load_that_hangs_is_given_up_and_its_blocks_kept(make: Callable[..., Engine]) -> None:
    engine = make("hanging", wait_deadline_ms=300)
    prompt = make_prompt()
    stored(engine, prompt)
    go_on = threading.Event()
    copy = HostMemoryWorker._copy

    def hang(self: HostMemoryWorker, device: Any, host: Any, *, to_host: bool) -> int:
        if not to_host:
            go_on.wait(60)
        return copy(self, device, host, to_host=to_host)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostMemoryWorker, "_copy", hang)
        idle = free_blocks(engine)
        name = start(engine, prompt, None)
        if FAILS_REQUESTS:
            engine.until(lambda: is_computed(engine, name), "computed while the load hangs")
            assert engine.value("transfer.failures", "load", "wait_deadline") == 1
            assert engine.value("blocks.held", "abort") == 4
            assert engine.connector.has_pending_push_work(), "to hear of the load's end"
            engine.run(start(engine, make_prompt(), None))
        go_on.set()
        engine.until(lambda: free_blocks(engine) == idle, "the load has ended")
    engine.until(lambda: name in engine.finished, "answered")
    assert engine.value("blocks.held", "abort") == 0
    assert engine.value("request.waiting") == 0
    offload = engine.connector._connectors[1].connector_scheduler
    engine.until(lambda: not getattr(offload, "_req_status", {}), "no state is left behind")

    engine.until(engine.scheduler.reset_prefix_cache, "no request holds blocks")
    loads = engine.value("transfer.count", "load", "ok")
    again = start(engine, prompt, None)
    engine.until(lambda: is_computed(engine, again), "loaded")
    assert engine.value("transfer.count", "load", "ok") == loads + 1
