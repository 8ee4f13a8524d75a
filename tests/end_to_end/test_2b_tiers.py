"""Where a request's KV comes from: decode's host memory, prefill, or both at once."""

import pytest
from misbehaviour import PLANT
from pair import Pair, bytes_of

from kvctl.demo.model import KV_BYTES_PER_TOKEN
from kvctl.demo.prompts import blocks
from kvctl.sources.snapshot import EngineSnapshot

pytestmark = pytest.mark.engine

BLOCK = 128  # tokens, on CPUs


@pytest.fixture(scope="module")
def stored(pair: Pair) -> int:
    """A prompt whose full blocks are in decode's host memory, and whose end is not."""
    prompt = max(range(12), key=lambda prompt: len(pair.prompts[prompt]))
    assert len(pair.prompts[prompt]) % BLOCK
    assert pair.ask(prompt).difference is None
    return prompt


def choices(snapshot: EngineSnapshot, tier: str) -> int:
    return sum(each.count for each in snapshot.choices if each.tier == tier)


def test_a_prefix_from_host_memory_and_the_rest_from_prefill(pair: Pair, stored: int) -> None:
    pair.forget_on_decode(host=False)
    before = pair.settled("decode-0")

    assert pair.take(stored, pair.offer(stored)).difference is None

    after = pair.settled("decode-0")
    whole = blocks(pair.prompts[stored], BLOCK)
    loaded = bytes_of(after, "host", "load") - bytes_of(before, "host", "load")
    pulled = bytes_of(after, "peer", "recv") - bytes_of(before, "peer", "recv")
    assert loaded == whole * BLOCK * KV_BYTES_PER_TOKEN
    assert pulled == BLOCK * KV_BYTES_PER_TOKEN, "the last block, which is not full"
    assert choices(after, "composed") == choices(before, "composed") + 1
    rest = len(pair.prompts[stored]) - whole * BLOCK
    tokens = {tier: after.prompt_tokens[tier] - before.prompt_tokens.get(tier, 0)
              for tier in ("host", "peer")}  # fmt: skip
    assert tokens == {"host": whole * BLOCK, "peer": rest}


def test_prefill_is_told_of_a_composed_load(pair: Pair, stored: int) -> None:
    pair.forget_on_decode(host=False)
    assert pair.take(stored, pair.offer(stored)).difference is None
    assert not pair.settled("prefill-0").transfers_of("peer", "send").inflight


def test_a_wrong_block_in_the_prefix_turns_it_red(pair: Pair, stored: int) -> None:
    pair.forget_on_decode(host=False)
    offer = pair.offer(stored)
    with pair.flag(PLANT):
        assert pair.take(stored, offer).difference is not None
        assert not (pair.flags / PLANT).exists(), "no load came from host memory"


def test_a_prompt_that_only_host_memory_has(pair: Pair, stored: int) -> None:
    pair.forget_on_decode(host=False)
    before = pair.settled("decode-0")
    assert pair.take(stored, None).difference is None
    after = pair.settled("decode-0")
    assert choices(after, "host") == choices(before, "host") + 1


def test_a_prompt_that_is_whole_in_the_device_cache_frees_prefill(pair: Pair, stored: int) -> None:
    assert pair.take(stored, None).difference is None
    assert pair.take(stored, pair.offer(stored)).difference is None
    assert not pair.settled("prefill-0").transfers_of("peer", "send").inflight
