"""What the connector promises, checked on whichever vLLM is imported here.

``test_overlay.py`` runs the ``contract_checks*.py`` once for each release, in a process of its own;
their names keep them out of the main run. The engines are described in ``engine_rig.py``:
everything between the scheduler and NIXL's transport is the release's own code.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import vllm
from contract_engines import (
    CHILDREN,
    free_blocks,
    is_computed,
    is_held,
    make_prompt,
    offer,
    start,
)
from engine_rig import Engine, contents, expected
from fake_nixl import FakeNixlAgent
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.v1.request import RequestStatus

from kvctl_connector.connector import MultiConnector, WorkerMetadata
from kvctl_connector.offers import LEASE, SIGNATURE

pytestmark = pytest.mark.usefixtures("no_hook_fails")


def test_this_is_the_release_that_was_meant() -> None:
    """`KVCTL_CHECKS_ON` is the folder whose ``vllm/`` is under test."""
    assert Path(vllm.__file__).parents[1] == Path(os.environ["KVCTL_CHECKS_ON"])


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
