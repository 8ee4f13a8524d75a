"""What the connector promises, checked on whichever vLLM is imported here.

``test_overlay.py`` runs this file once for each release, in a process of its own; its name keeps
it out of the main run. The engines are described in ``engine_rig.py``: everything between the
scheduler and NIXL's transport is the release's own code.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import engine_rig
import pytest
import vllm
from engine_rig import BLOCK, Engine, contents, expected
from fake_nixl import FakeNixlAgent
from vllm import envs
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.v1.request import RequestStatus

from kvctl_connector import guard, lease, nixl_probe, offers
from kvctl_connector.connector import MultiConnector, WorkerMetadata
from kvctl_connector.offers import KEY_FILE, LEASE, SIGNATURE

NIXL = {
    "kv_connector": "NixlConnector",
    "kv_role": "kv_both",
    "kv_buffer_device": "cpu",
    "kv_connector_extra_config": {"kv_lease_duration": 30},
}
HOST = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {
        "cpu_bytes_to_use": 1 << 20,
        "spec_name": "HostMemorySpec",
        "spec_module_path": "kvctl_connector.host_memory",
    },
}
CHILDREN = [NIXL, HOST]

PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}
numbers = itertools.count()


def test_this_is_the_release_that_was_meant() -> None:
    """`KVCTL_CHECKS_ON` is the folder whose ``vllm/`` is under test."""
    assert Path(vllm.__file__).parents[1] == Path(os.environ["KVCTL_CHECKS_ON"])


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """This process, prepared as a worker's."""
    with pytest.MonkeyPatch.context() as patch:
        engine_rig.prepare(patch, tmp_path_factory.mktemp("run"))
        yield


@pytest.fixture(scope="module")
def make(
    process: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Engine]]:
    model = tmp_path_factory.mktemp("model")  # one path: NIXL compares it between engines
    key = model / "key"
    key.write_text("sixteen characters or more")
    key.chmod(0o600)
    engines: list[Engine] = []

    def make(name: str, **options: Any) -> Engine:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(KEY_FILE, str(key))
            engines.append(Engine(name, model, CHILDREN, **options))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture(scope="module")
def prefill(make: Callable[..., Engine]) -> Engine:
    return make("prefill", role="prefill", offers="signed")


@pytest.fixture(scope="module")
def decode(make: Callable[..., Engine]) -> Engine:
    return make("decode", role="decode", offers="signed")


@pytest.fixture(autouse=True)
def no_hook_fails() -> Iterator[None]:
    guard.failures.clear()
    yield
    assert guard.failures == {}, "a hook raised; its traceback is in the log above"


def make_prompt() -> list[int]:
    """A prompt of four blocks and two tokens that no other test has."""
    first = next(numbers)
    return [(first * 7 + place * (first + 3)) % 250 for place in range(4 * BLOCK + 2)]


def offer(prefill: Engine, prompt: list[int]) -> dict[str, Any]:
    """What prefill answers for a request that another engine is to decode."""
    name = f"prefill-{next(numbers)}"
    prefill.add(name, prompt, dict(PREFILL))
    params = prefill.run(name).kv_transfer_params
    assert params is not None and params["do_remote_prefill"]
    return dict(params)


def start(engine: Engine, prompt: list[int], params: dict[str, Any] | None) -> str:
    """A request whose blocks have been allocated."""
    name = f"decode-{next(numbers)}"
    engine.add(name, prompt, params)
    engine.step()
    return name


def is_held(prefill: Engine, params: dict[str, Any]) -> bool:
    """Whether prefill still keeps the blocks of an offer."""
    return params["remote_request_id"] in prefill.scheduler.requests


def free_blocks(engine: Engine) -> int:
    return int(engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())


# Construction


def test_vllm_builds_our_class_in_both_roles(prefill: Engine) -> None:
    for connector in (prefill.connector, prefill.worker):
        assert type(connector) is MultiConnector
        assert len(connector._connectors) == len(CHILDREN)
    assert prefill.connector._scheduler_half is not None
    assert prefill.worker._worker_half is not None


def test_every_hook_of_ours_is_there(prefill: Engine) -> None:
    prefill.step()
    assert prefill.value("telemetry.dropped", "hook") == 0


# A pull, from the offer to the freed blocks


def test_a_pull_brings_the_blocks_and_completes_once(prefill: Engine, decode: Engine) -> None:
    prompt = make_prompt()
    params = offer(prefill, prompt)
    before = decode.value("transfer.count", "recv", "ok")
    idle = free_blocks(decode)

    name = start(decode, prompt, params)
    blocks = decode.blocks(name)
    assert decode.value("request.waiting", "remote_kv") == 1
    decode.run(name)

    assert contents(decode, blocks)[:4] == expected(prompt)
    assert decode.value("transfer.count", "recv", "ok") == before + 1
    assert decode.value("transfer.bytes", "recv", "ok", "prefill") > 0
    assert decode.value("request.waiting") == 0
    assert decode.value("telemetry.dropped", "stray_completion") == 0
    assert decode.invalid == set()
    decode.until(lambda: free_blocks(decode) == idle, "decode's blocks are free")
    prefill.until(lambda: not is_held(prefill, params), "prefill's blocks are free")
    assert prefill.value("transfer.count", "send", "ok") >= 1


def test_a_report_that_nobody_awaits_is_dropped(decode: Engine) -> None:
    child = decode.worker._connectors[0]
    newer = hasattr(base, "KVConnectorTransferResults")
    question = "get_transfer_results" if newer else "get_finished"
    answer: Any = (None, {"stranger"})
    if newer:
        answer = base.KVConnectorTransferResults(finished_recving={"stranger"})
    before = decode.value("telemetry.dropped", "stray_completion")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(child, question, lambda finished: answer)
        decode.step()  # the scheduler asserts on a request that it does not know
    decode.step()
    assert decode.value("telemetry.dropped", "stray_completion") == before + 1


def test_a_pull_that_fails_is_computed_instead(prefill: Engine, decode: Engine) -> None:
    prompt = make_prompt()
    params = offer(prefill, prompt)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeNixlAgent, "refuses", True)
        name = start(decode, prompt, params)
        decode.until(lambda: is_computed(decode, name), "recomputed")
    assert decode.value("transfer.failures", "recv", "post", "setup_failed") == 1
    assert decode.value("request.waiting") == 0


def is_computed(engine: Engine, name: str) -> bool:
    """Whether a request has ended with the KV that its own prompt gives."""
    request = engine.scheduler.requests.get(name)
    if request is not None and request.num_computed_tokens > 0:
        blocks = engine.blocks(name)
        wanted = expected(list(request.prompt_token_ids))
        running = request.status is RequestStatus.RUNNING
        assert not running or contents(engine, blocks)[: len(wanted)] == wanted
    return name in engine.finished


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


def test_an_aborted_pull_frees_the_blocks_of_both_sides(prefill: Engine, decode: Engine) -> None:
    prompt = make_prompt()
    params = offer(prefill, prompt)
    idle = free_blocks(decode)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeNixlAgent, "slow", True)
        name = start(decode, prompt, params)
        decode.step()
        decode.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        decode.step()
        patch.setattr(FakeNixlAgent, "slow", False)
        decode.until(lambda: free_blocks(decode) == idle, "decode's blocks are free")
    prefill.until(lambda: not is_held(prefill, params), "prefill's blocks are free")
    decode.step()  # the worker may still have to say that it ended
    decode.step()
    assert decode.value("request.waiting") == 0


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


def test_prefill_takes_no_offer(prefill: Engine) -> None:
    prompt = make_prompt()
    params = {**PREFILL, "remote_block_ids": [[1, 2]], "remote_engine_id": "x"}
    name = start(prefill, prompt, {**params, "remote_host": "127.0.0.1", "remote_port": 9})
    assert prefill.run(name).finish_reason is not None


# What rides with each step


def test_worker_metadata_has_a_slot_for_every_child(decode: Engine) -> None:
    decode.worker._worker_half.completion.strays = 1
    meta = decode.worker.build_connector_worker_meta()
    assert isinstance(meta, WorkerMetadata)
    assert len(meta.metadata) == len(CHILDREN)
    joined = meta.aggregate(WorkerMetadata(metadata=(None,) * len(CHILDREN), strays=2))
    assert (type(joined), joined.strays) == (WorkerMetadata, 3)


def test_full_cuda_graphs_stay(decode: Engine) -> None:
    extra = decode.config.kv_transfer_config.kv_connector_extra_config
    assert MultiConnector.requires_piecewise_for_cudagraph(extra) is False


def test_events_are_a_list(decode: Engine) -> None:
    assert decode.connector.take_events() == []


def test_switched_off_it_is_stock(make: Callable[..., Engine]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVCTL_CONNECTOR", "off")
        sender, receiver = make("stock-prefill"), make("stock-decode")
    prompt = make_prompt()
    params = offer(sender, prompt)
    assert LEASE not in params
    name = start(receiver, prompt, params)
    blocks = receiver.blocks(name)
    receiver.run(name)
    assert contents(receiver, blocks)[:4] == expected(prompt)


# The host tier


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


def stored(engine: Engine, prompt: list[int]) -> None:
    """Has an engine compute a prompt and store it, and empties its device cache."""
    stores = engine.value("transfer.count", "store", "ok")
    engine.run(start(engine, prompt, None))
    engine.run(start(engine, make_prompt(), None))  # stores are submitted a step late
    engine.until(lambda: engine.value("transfer.count", "store", "ok") > stores, "stored")
    engine.until(engine.scheduler.reset_prefix_cache, "no request holds blocks")


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


def test_in_observe_mode_it_is_as_stock_and_measured(make: Callable[..., Engine]) -> None:
    sender = make("observed-prefill", role="prefill", mode="observe")
    receiver = make("observed-decode", role="decode", mode="observe")
    prompt = make_prompt()
    params = offer(sender, prompt)
    assert LEASE not in params and SIGNATURE not in params
    name = start(receiver, prompt, params)
    blocks = receiver.blocks(name)
    receiver.run(name)
    assert contents(receiver, blocks)[:4] == expected(prompt)
    assert receiver.value("transfer.count", "recv", "ok") == 1
    assert receiver.value("prompt.tokens", "peer") == len(prompt)


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
