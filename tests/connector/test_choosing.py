"""Which child loads, with which blocks, and who is told: over fake children."""

from types import SimpleNamespace
from typing import Any

import pytest
from fake_connector import make_blocks, make_connector, make_request, step

from kvctl_connector.composed import Composition
from kvctl_connector.connector import Metadata
from kvctl_connector.speeds import Speeds
from kvctl_connector.tier_choice import TierChoice


def test_a_load_is_announced_with_the_child_that_was_chosen() -> None:
    made = make_connector()
    made._connectors[1].matched = (256, True)

    assert made.get_num_new_matched_tokens(make_request(), 0) == (256, True)
    made.update_state_after_alloc(make_request(), make_blocks(1, 2), 256)
    meta = step(made)

    assert isinstance(meta, Metadata)
    assert meta.loads == {"r": (1,)}
    assert made._connectors[1].allocated == [("r", 256)]
    assert made._connectors[0].allocated == [("r", 0)]
    (admitted,) = (call for call in made._scheduler_half.calls if call[0] == "admitted")
    assert {child: tokens for child, (tokens, _) in admitted[3].items()} == {1: 256}
    assert not hasattr(step(made), "loads"), "announced once"


def test_the_second_allocation_without_tokens_announces_nothing() -> None:
    made = make_connector()
    made._connectors[0].matched = (128, True)
    made.get_num_new_matched_tokens(make_request(), 0)
    made.update_state_after_alloc(make_request(), make_blocks(1), 128)
    step(made)
    made.update_state_after_alloc(make_request(), make_blocks(1), 0)
    assert not hasattr(step(made), "loads")


def test_a_synchronous_load_is_never_awaited() -> None:
    made = make_connector()
    made._connectors[1].matched = (128, False)
    made.get_num_new_matched_tokens(make_request(), 0)
    made.update_state_after_alloc(make_request(), make_blocks(1), 128)
    assert not hasattr(step(made), "loads")


def test_a_choice_does_not_outlive_a_query_that_found_nothing() -> None:
    made = make_connector()
    made._connectors[0].matched = (128, True)
    made.get_num_new_matched_tokens(make_request(), 0)
    made._connectors[0].matched = (0, False)
    made.get_num_new_matched_tokens(make_request(), 0)
    made.update_state_after_alloc(make_request(), make_blocks(1), 0)
    assert made._requests_to_connector == {}


def test_the_offload_child_learns_which_blocks_another_child_will_write() -> None:
    made = make_connector()
    made._connectors[0].matched = (256, True)
    made.get_num_new_matched_tokens(make_request(), 0)
    made.update_state_after_alloc(make_request(), make_blocks(7, 9), 256)
    told = [
        child.connector_scheduler._current_batch_allocated_block_ids for child in made._connectors
    ]
    assert told == [set(), {7, 9}]


# Two tiers at once


class FakeBlocks:
    def __init__(self, blocks: Any) -> None:
        self.blocks = blocks


def fresh_blocks(count: int) -> FakeBlocks:
    return FakeBlocks(
        ([SimpleNamespace(block_id=n, block_hash=None, is_null=False) for n in range(count)],)
    )


def plan_composed(made: Any) -> Any:
    """The peer offers 1000 tokens, host memory the first 384 of them, and both are taken."""
    nixl, host = made._connectors
    nixl.matched, host.matched = (1000, True), (384, True)
    host.connector_scheduler.config = SimpleNamespace(kv_group_configs=(object(),))
    made._scheduler_half.choice = TierChoice(
        made._connectors, ["peer", "host"], speeds=Speeds(), bytes_per_token=1, block=128,
        composition=Composition(made._connectors, (128,), always=True), lookup_deadline=0,
    )  # fmt: skip
    request = SimpleNamespace(
        request_id="r",
        prompt_token_ids=[0] * 1000,
        kv_transfer_params={"do_remote_prefill": True, "remote_block_ids": [list(range(8))]},
    )
    assert made.get_num_new_matched_tokens(request, 0) == (1000, True)
    return request


def test_a_composed_load_is_announced_with_both_children() -> None:
    made = make_connector()
    request = plan_composed(made)
    shown: dict[int, Any] = {}
    for index, child in enumerate(made._connectors):
        child.update_state_after_alloc = lambda _, blocks, tokens, index=index: shown.update(
            {index: (tokens, [block.block_hash is not None for block in blocks.blocks[0]])}
        )
    made.update_state_after_alloc(request, fresh_blocks(8), 1000)
    assert set(step(made).loads["r"]) == {0, 1}
    assert shown == {0: (616, [True] * 3 + [False] * 5), 1: (384, [False] * 8)}


def test_of_a_composed_load_too_the_offload_child_learns_what_will_be_written() -> None:
    made = make_connector()
    made.update_state_after_alloc(plan_composed(made), fresh_blocks(8), 1000)
    told = made._connectors[1].connector_scheduler._current_batch_allocated_block_ids
    assert told == set(range(8))


def test_vllm_may_take_fewer_tokens_than_it_was_told() -> None:
    made = make_connector()
    request = plan_composed(made)
    made.update_state_after_alloc(request, fresh_blocks(7), 896)
    assert step(made).loads == {"r": (0,)}
    assert [child.allocated for child in made._connectors] == [[("r", 896)], [("r", 0)]]


def test_groups_of_a_composed_load_are_those_that_both_load() -> None:
    made = make_connector()
    request = plan_composed(made)
    for child, groups in zip(made._connectors, [(0, 1, 2), (0, 2)], strict=True):
        child.get_loaded_kv_cache_group_ids = lambda _, groups=groups: groups
    assert made.get_loaded_kv_cache_group_ids(request) == (0, 2)


def test_groups_of_a_request_that_nobody_loads() -> None:
    """D16: upstream raises KeyError."""
    assert make_connector().get_loaded_kv_cache_group_ids(make_request()) == ()


def test_hits_of_a_composed_load_are_counted_by_source() -> None:
    made = make_connector()
    request = plan_composed(made)
    for child, source in zip(made._connectors, ["remote", "cpu"], strict=True):
        child.get_external_cache_hit_sources = lambda _, n, source=source: {source: n}
    made.update_state_after_alloc(request, fresh_blocks(8), 1000)
    assert made.get_external_cache_hit_sources(request, 1000) == {"remote": 616, "cpu": 384}


def test_a_composed_load_is_no_load_that_the_next_step_waits_for() -> None:
    made = make_connector()
    request = plan_composed(made)
    batch = {"r", "other"}
    made._connectors[1].connector_scheduler._current_batch_sync_loads = batch
    made.update_state_after_alloc(request, fresh_blocks(8), 1000)
    assert batch == {"other"}


# Upstream's way


@pytest.mark.parametrize("composes", [True, False], ids=["tier_policy upstream", "mode observe"])
def test_upstreams_order(composes: bool) -> None:
    made = make_connector()
    made._composes, made._chooses = composes, False
    first, second = made._connectors
    first.matched, second.matched = (128, True), (1000, True)
    assert made.get_num_new_matched_tokens(make_request(), 0) == (128, True)
    made.update_state_after_alloc(make_request(), make_blocks(5), 128)
    assert step(made).loads == {"r": (0,)}, "known, to tell strays"
    told = second.connector_scheduler._current_batch_allocated_block_ids
    assert told == ({5} if composes else set())
    second.matched = (None, False)
    assert made.get_num_new_matched_tokens(make_request(), 0) == (None, False)


def test_upstreams_order_records_what_it_passes_over() -> None:
    made = make_connector()
    made._composes = made._chooses = False
    made._hear_offers()
    first, second = made._connectors
    first.matched, second.matched = (128, True), (1000, True)
    made.get_num_new_matched_tokens(make_request(), 0)
    assert made._choices["r"].offers == ((128, True), (1000, True))
    first.matched, second.matched = (None, False), (1000, True)
    made.get_num_new_matched_tokens(make_request(), 0)
    assert made._choices["r"].offers == ((None, False), None), "the second one was not asked"
