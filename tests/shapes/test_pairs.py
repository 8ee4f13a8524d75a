"""Prefill, decode and host tier in other shapes: whatever KV goes where, the answers are those of
one plain engine. The order counts: each test leaves its pair as the next one needs it."""

from __future__ import annotations

import pytest
from late_read import late_read
from layouts import BLOCK, CHUNKS, GROUPS, ONE_GROUP, TO_FEWER, TO_MORE, Layout, shaped
from misbehaviour import NO_LEASE_GUARD, PLANT
from pair import OTHERS, Pair

from kvctl.demo.prompts import blocks
from kvctl.sources.snapshot import Transfers

pytestmark = pytest.mark.shapes

WINDOW_BLOCKS = 3  # that a window of two blocks reaches into
FIRST_ROUND = range(12)

every_shape = shaped(GROUPS, ONE_GROUP, TO_MORE, TO_FEWER, CHUNKS)


def longest(pair: Pair, among: range) -> int:
    return max(among, key=lambda prompt: len(pair.prompts[prompt]))


def pulled_blocks(layout: Layout, prompt: list[int]) -> int:
    """What decode has to read: every block, the last one begun included, of the full layers, and
    of those with a window the blocks that it reaches into."""
    full = -(-len(prompt) // BLOCK)
    return full + (layout.groups - 1) * min(full, WINDOW_BLOCKS)


def recv(pair: Pair) -> Transfers:
    return pair.settled("decode-0").transfers_of("peer", "recv")


@every_shape
def test_kv_is_pulled_and_answers_are_right(pair: Pair) -> None:
    for prompt in FIRST_ROUND:
        assert pair.ask(prompt).difference is None
    # A pull that a busy machine has stalled for its whole lease is expired, not wrong.
    pulled = recv(pair)
    assert pulled.ok >= len(FIRST_ROUND) - 2, pulled.counts


@every_shape
def test_the_ranks_shares_are_one_transfer(pair: Pair, layout: Layout) -> None:
    """Of each request, with the bytes of all ranks, and one completion."""
    seen, pulled = pair.settled("decode-0"), recv(pair)
    assert sum(pulled.counts.values()) == len(FIRST_ROUND)
    if not pulled.not_ok:
        expected = sum(pulled_blocks(layout, pair.prompts[prompt]) for prompt in FIRST_ROUND)
        assert pulled.bytes == expected * layout.block_bytes
    sent = pair.settled("prefill-0").transfers_of("peer", "send")
    assert sum(sent.counts.values()) == len(FIRST_ROUND)
    waits = [wait.duration.count for wait in seen.waits if wait.tier == "peer"]
    assert sum(waits) == len(FIRST_ROUND)
    lost = {each.cause for each in (*seen.dropped, *pair.settled("prefill-0").dropped)}
    assert not lost & {"stray_completion", "rank_missing", "hook_failed"}


@every_shape
def test_what_the_device_cache_evicted_is_reloaded_and_right(pair: Pair) -> None:
    before = pair.settled("prefill-0")
    assert before.transfers_of("host", "store").bytes > 0
    pair.forget_on_decode()  # else it answers from its own host memory, if that is faster

    assert pair.ask(longest(pair, FIRST_ROUND[:4])).difference is None

    after = pair.settled("prefill-0")
    loads = after.transfers_of("host", "load")
    assert loads.bytes > before.transfers_of("host", "load").bytes
    assert loads.not_ok == 0


@every_shape
def test_a_wrong_block_turns_the_comparison_red(pair: Pair) -> None:
    """The self-test of every "answers are right" here: one block of one load is another."""
    pair.forget_on_decode()  # else it answers from its own host memory, which is right
    (pair.flags / PLANT).touch()

    found = pair.ask(longest(pair, FIRST_ROUND[4:8]))

    assert not (pair.flags / PLANT).exists(), "no load came from host memory"
    assert found.difference is not None, f"unnoticed; deviation {found.deviation}"


@shaped(GROUPS, ONE_GROUP)
def test_an_offer_names_blocks_of_every_group(pair: Pair, layout: Layout) -> None:
    prompt = longest(pair, OTHERS)
    offer = pair.offer(prompt)
    counts = sorted(len(group) for group in offer["remote_block_ids"])
    full = -(-len(pair.prompts[prompt]) // BLOCK)
    assert counts == [WINDOW_BLOCKS] * (layout.groups - 1) + [full]
    assert pair.take(prompt, offer).difference is None


@shaped(GROUPS)
def test_another_prompts_offer_is_no_offer(pair: Pair) -> None:
    before = pair.refused("offer_mismatch")
    asked, offered = longest(pair, FIRST_ROUND[:6]), longest(pair, FIRST_ROUND[6:])
    pair.forget_on_decode()
    assert pair.take(asked, pair.offer(offered)).difference is None
    assert pair.refused("offer_mismatch") == before + 1


@shaped(GROUPS)
def test_a_late_read_is_not_answered_from(pair: Pair) -> None:
    pair.forget_on_decode()
    before = pair.refused("lease_expired")
    assert late_read(pair, longest(pair, FIRST_ROUND)).difference is None
    assert pair.refused("lease_expired") > before


@shaped(GROUPS)
def test_without_the_guard_it_is_answered_wrong(pair: Pair) -> None:
    pair.forget_on_decode()
    with pair.flag(NO_LEASE_GUARD):
        assert late_read(pair, longest(pair, FIRST_ROUND)).difference is not None
    pair.forget_on_decode()
    assert pair.ask(longest(pair, FIRST_ROUND)).difference is None


@shaped(CHUNKS)
def test_a_load_that_begins_inside_a_chunk(pair: Pair, layout: Layout) -> None:
    """Of a prompt in host memory the device cache holds three blocks: one chunk and a half."""
    prompt = longest(pair, FIRST_ROUND)
    for other in OTHERS:
        assert pair.ask(other).difference is None
    pair.forget_on_decode()
    pair.compute(prompt, first=3 * BLOCK + 1)
    before = pair.settled("prefill-0").transfers_of("host", "load").bytes

    assert pair.ask(prompt).difference is None

    loaded = pair.settled("prefill-0").transfers_of("host", "load").bytes - before
    in_chunks = blocks(pair.prompts[prompt], BLOCK) // 2 * 2
    assert loaded == (in_chunks - 3) * layout.block_bytes


@every_shape
def test_nothing_is_held_afterwards(pair: Pair) -> None:
    for name in ("prefill-0", "decode-0"):
        assert not any(each.inflight for each in pair.settled(name).transfers)
