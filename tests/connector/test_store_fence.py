"""Blocks that are being stored when another child is about to write them (D8)."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    OffloadingConnectorScheduler,
)

from kvctl_connector.store_fence import fence, fenced, never_ran


def child(**attributes: Any) -> Any:
    return SimpleNamespace(connector_scheduler=SimpleNamespace(**attributes))


def test_allocations_join_those_that_the_offload_child_judges_itself() -> None:
    offload = child(_current_batch_allocated_block_ids={1}, _block_id_to_pending_jobs={})
    fence(offload, {7, 9})
    assert offload.connector_scheduler._current_batch_allocated_block_ids == {1, 7, 9}


def test_where_it_judges_at_once_the_jobs_that_read_the_blocks_are_flushed() -> None:
    offload = child(
        _block_id_to_pending_jobs={7: {70, 71}, 8: {80}}, _current_batch_jobs_to_flush={1}
    )
    fence(offload, {7, 9})
    assert offload.connector_scheduler._current_batch_jobs_to_flush == {1, 70, 71}


def test_others_are_left_alone() -> None:
    for other in (SimpleNamespace(), child(_reqs_being_stored={})):
        before = repr(other)
        fence(other, {1})
        assert repr(other) == before


@pytest.mark.parametrize(
    ("attributes", "known"),
    [
        ({"_reqs_being_stored": {}}, True),
        ({"_block_id_to_pending_jobs": {}, "_current_batch_jobs_to_flush": set()}, True),
        ({"_current_batch_allocated_block_ids": set()}, True),
        ({"_block_id_to_pending_jobs": {}}, False),
        ({}, False),
    ],
)
def test_a_child_that_cannot_be_told_is_known(attributes: dict[str, Any], known: bool) -> None:
    assert fenced(child(**attributes)) is known


def test_the_installed_offload_connector_can_be_told() -> None:
    made = OffloadingConnectorScheduler.__init__.__code__.co_names
    assert fenced(child(**dict.fromkeys(made)))


def test_a_request_that_never_ran_has_nothing_to_store() -> None:
    """D22: its keys are known, its blocks are not, and 0.26.0 asserts that both are."""
    never, ran = (
        SimpleNamespace(block_ids=blocks, offload_keys=["a", "b"], next_stored_chunk_idx=0)
        for blocks in ([], [1, 2])
    )
    known = {
        name: SimpleNamespace(group_states=(group,)) for name, group in (("n", never), ("r", ran))
    }
    child = SimpleNamespace(connector_scheduler=SimpleNamespace(_req_status=known))
    for request in ("n", "r", "stranger"):
        never_ran(child, request)
    assert (never.next_stored_chunk_idx, ran.next_stored_chunk_idx) == (2, 0)
    never_ran(SimpleNamespace(), "n")
