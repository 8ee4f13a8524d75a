from __future__ import annotations

import pytest

from kvctl.demo.prompts import (
    FEWEST,
    LONGEST,
    SHORTEST,
    blocks,
    blocks_between,
    make_prompts,
    make_schedule,
)

DEVICE_BLOCKS, BLOCK = 24, 128
HOST_BLOCKS = 190
LARGEST = LONGEST // BLOCK


@pytest.mark.parametrize("count", [FEWEST, 9, 17, 24, 25, 26, 60, 100])
def test_every_prompt_that_comes_again_was_evicted_from_the_device_and_not_from_the_host(
    count: int,
) -> None:
    prompts, visits = make_prompts(count), make_schedule(count)
    between = blocks_between(visits, prompts, BLOCK)
    # Two clients may swap neighbours: one prompt more or less between two visits.
    assert min(between.values()) >= DEVICE_BLOCKS + LARGEST
    assert max(between.values()) + LARGEST <= HOST_BLOCKS


@pytest.mark.parametrize("count", [FEWEST, 24, 26])
def test_every_prompt_is_sent_and_about_half_of_them_again(count: int) -> None:
    visits = make_schedule(count)
    first = [visit.prompt for visit in visits if not visit.again]
    again = [visit.prompt for visit in visits if visit.again]
    assert sorted(first) == list(range(count))
    assert len(set(again)) == len(again) >= count // 2
    assert all(
        first.index(visit.prompt) < position for position, visit in enumerate(visits) if visit.again
    )


@pytest.mark.parametrize("count", [FEWEST, 24, 26])
def test_lengths_span_less_than_a_block_to_many(count: int) -> None:
    prompts = make_prompts(count)
    lengths = {len(prompt) for prompt in prompts}
    assert min(lengths) == SHORTEST < BLOCK
    assert max(lengths) == LONGEST
    assert len({blocks(prompt, BLOCK) for prompt in prompts}) >= FEWEST - 1


def test_the_prompts_are_the_same_every_time_and_share_no_block() -> None:
    prompts = make_prompts(24)
    assert prompts == make_prompts(24)
    assert prompts != make_prompts(24, seed=4)
    assert len({tuple(prompt[:16]) for prompt in prompts}) == 24
    assert {token for prompt in prompts for token in prompt} == set(range(256))


def test_a_prompt_that_returns_too_early_would_be_noticed() -> None:
    prompts = make_prompts(4)
    visits = make_schedule(4)
    assert min(blocks_between(visits, prompts, BLOCK).values()) < DEVICE_BLOCKS
