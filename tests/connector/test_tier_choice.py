"""Which tier a request is loaded from: D2, D3, D4 and the choice by time, over fake children."""

import time
from types import SimpleNamespace
from typing import Any

import pytest

from kvctl_connector.composed import Composition
from kvctl_connector.speeds import Speeds
from kvctl_connector.tier_choice import Choice, TierChoice

BLOCK = 128


class FakeNixl:
    """A child that answers what a test sets."""

    def __init__(self, tokens: int | None = 0) -> None:
        self.tokens = tokens
        self.asked = 0

    def get_num_new_matched_tokens(self, request: Any, computed: int) -> tuple[int | None, bool]:
        self.asked += 1
        return self.tokens, bool(self.tokens)


class FakeOffloading(FakeNixl):
    connector_scheduler = SimpleNamespace(config=SimpleNamespace(kv_group_configs=(object(),)))


class SimpleCPUOffloadFake(FakeNixl):
    pass


def make_request(tokens: int = 1000, **params: Any) -> Any:
    known = {
        "do_remote_prefill": True, "remote_engine_id": "p",
        "remote_block_ids": [list(range(-(-tokens // BLOCK)))],
    }  # fmt: skip
    return SimpleNamespace(
        request_id="r", prompt_token_ids=[0] * tokens, kv_transfer_params=known | params
    )


def measured(peer: float | None, host: float | None) -> Speeds:
    speeds = Speeds()
    if peer:
        speeds.add("peer", "recv", "p", int(peer), 1.0)
    if host:
        speeds.add("host", "load", "", int(host), 1.0)
    return speeds


def make_choice(
    *children: Any, speeds: Speeds | None = None, composed: str = "never", deadline: float = 0
) -> TierChoice:
    tiers = ["peer" if type(child) is FakeNixl else "host" for child in children]
    composition = None
    if composed != "never":
        composition = Composition(list(children), (BLOCK,), always=composed == "always")
    return TierChoice(
        children, tiers, speeds=speeds or Speeds(), bytes_per_token=1, block=BLOCK,
        composition=composition, lookup_deadline=deadline,
    )  # fmt: skip


def answer(choice: Choice) -> tuple[int | None, int | None, str]:
    return choice.child, choice.tokens, choice.why


def test_nothing_on_offer() -> None:
    assert answer(make_choice(FakeNixl(), FakeOffloading()).choose(make_request(), 0)) == (
        None, 0, "none",
    )  # fmt: skip


@pytest.mark.parametrize("peer_first", [True, False])
def test_one_block_in_host_memory_does_not_suppress_a_pull(peer_first: bool) -> None:
    """D2: upstream takes the first child in the order of the configuration."""
    nixl, host = FakeNixl(1000), FakeOffloading(BLOCK)
    children = (nixl, host) if peer_first else (host, nixl)
    choice = make_choice(*children, speeds=measured(1, 1000)).choose(make_request(), 0)
    assert (choice.tokens, choice.why) == (1000, "more")
    assert children[choice.child or 0] is nixl


def test_the_larger_of_two_local_hits() -> None:
    small, large = FakeOffloading(BLOCK), FakeOffloading(5 * BLOCK)
    choice = make_choice(FakeNixl(), small, large).choose(make_request(), 0)
    assert answer(choice) == (2, 5 * BLOCK, "only")


def test_nixl_while_a_speed_is_unknown() -> None:
    for speeds in (measured(None, 1000), measured(1, None)):
        made = make_choice(FakeNixl(1000), FakeOffloading(7 * BLOCK), speeds=speeds)
        assert answer(made.choose(make_request(), 0)) == (0, 1000, "unmeasured")


def test_the_faster_tier_where_both_have_every_whole_block() -> None:
    for peer, host, expected in ((100, 1000, 1), (1000, 100, 0)):
        made = make_choice(FakeNixl(1000), FakeOffloading(7 * BLOCK), speeds=measured(peer, host))
        choice = made.choose(make_request(), 0)
        assert (choice.child, choice.why) == (expected, "faster")


def test_speeds_of_another_peer_tell_nothing() -> None:
    made = make_choice(FakeNixl(1000), FakeOffloading(7 * BLOCK), speeds=measured(1, 1000))
    assert made.choose(make_request(remote_engine_id="q"), 0).why == "unmeasured"


def test_a_tier_that_does_not_know_yet_does_not_hold_back_a_pull() -> None:
    """D3: upstream answers None as soon as any child does."""
    made = make_choice(FakeNixl(1000), FakeOffloading(None))
    assert answer(made.choose(make_request(), 0)) == (0, 1000, "only")
    assert made.pending == 0


def test_without_another_offer_a_pending_lookup_is_waited_for() -> None:
    host = FakeOffloading(None)
    made = make_choice(FakeNixl(), host)
    assert made.choose(make_request(), 0).tokens is None
    assert made.pending == 1
    host.tokens = BLOCK
    assert answer(made.choose(make_request(), 0)) == (1, BLOCK, "only")
    assert made.pending == 0


def test_a_lookup_is_not_waited_for_longer_than_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = make_choice(FakeNixl(), FakeOffloading(None), deadline=5)
    now = time.monotonic_ns()
    monkeypatch.setattr(time, "monotonic_ns", lambda: now)
    assert made.choose(make_request(), 0).tokens is None
    now += 4_000_000_000
    assert made.choose(make_request(), 0).tokens is None
    now += 2_000_000_000
    assert answer(made.choose(make_request(), 0)) == (None, 0, "deadline")


def test_a_request_that_ends_is_no_longer_pending() -> None:
    made = make_choice(FakeNixl(), FakeOffloading(None))
    made.choose(make_request(), 0)
    made.forget("r")
    assert made.pending == 0


def test_a_request_that_is_admitted_is_no_longer_pending() -> None:
    made = make_choice(FakeNixl(), FakeOffloading(None), deadline=5)
    made.choose(make_request(), 0)
    made.admitted("r")
    assert made.pending == 0


def test_the_offloading_child_is_asked_every_time() -> None:
    host = FakeOffloading(BLOCK)
    made = make_choice(FakeNixl(1000), host)
    for _ in range(3):
        made.choose(make_request(), 0)
    assert host.asked == 3


def test_a_child_whose_offers_cost_is_asked_only_where_nobody_else_offers() -> None:
    """D4: SimpleCPUOffloadConnector pins blocks with each offer."""
    nixl, simple = FakeNixl(1000), SimpleCPUOffloadFake(BLOCK)
    made = make_choice(nixl, simple)
    assert answer(made.choose(make_request(), 0)) == (0, 1000, "only")
    assert simple.asked == 0
    nixl.tokens = 0
    assert answer(made.choose(make_request(), 0)) == (1, BLOCK, "only")


def test_a_tier_that_failed_a_request_is_not_asked_for_it_again() -> None:
    made = make_choice(FakeNixl(), FakeOffloading(BLOCK))
    made.avoid("r", "host")
    assert answer(made.choose(make_request(), 0)) == (None, 0, "none")
    made.forget("r")
    assert made.choose(make_request(), 0).child == 1


def test_every_offer_is_in_the_choice() -> None:
    choice = make_choice(FakeNixl(1000), FakeOffloading(BLOCK)).choose(make_request(), 0)
    assert [offer and offer.tokens for offer in choice.offers] == [1000, BLOCK]


# Composed


def test_a_prefix_from_the_faster_local_tier_and_the_rest_from_the_peer() -> None:
    made = make_choice(
        FakeNixl(1000), FakeOffloading(3 * BLOCK), speeds=measured(100, 1000), composed="faster"
    )
    choice = made.choose(make_request(), 0)
    assert answer(choice) == (0, 1000, "composed")
    assert choice.plan is not None
    assert (choice.plan.peer, choice.plan.local, choice.plan.prefix) == (0, 1, 3 * BLOCK)


@pytest.mark.parametrize(("peer", "host"), [(1000, 100), (None, 100), (100, None)])
def test_not_composed_where_the_local_tier_is_slower_or_unknown(
    peer: float | None, host: float | None
) -> None:
    made = make_choice(
        FakeNixl(1000), FakeOffloading(3 * BLOCK), speeds=measured(peer, host), composed="faster"
    )
    assert made.choose(make_request(), 0).plan is None


REASONS = {
    "no offer of a prefill": {"do_remote_prefill": False},
    "a second turn": {"do_remote_decode": True},
    "other block sizes": {"remote_block_ids": [[1, 2, 3, 4]]},
    "other groups": {"remote_block_ids": [list(range(8)), list(range(8))]},
    "no blocks": {"remote_block_ids": None},
}


@pytest.mark.parametrize("why", REASONS)
def test_the_gates(why: str) -> None:
    made = make_choice(FakeNixl(1000), FakeOffloading(3 * BLOCK), composed="always")
    assert made.choose(make_request(), 0).plan is not None, "without it, composed"
    assert made.choose(make_request(**REASONS[why]), 0).plan is None


def test_not_composed_inside_a_block() -> None:
    made = make_choice(FakeNixl(1000), FakeOffloading(3 * BLOCK + 5), composed="always")
    assert made.choose(make_request(), 0).plan is None


def test_not_composed_where_the_local_tier_leaves_groups_out() -> None:
    host = FakeOffloading(3 * BLOCK)
    config = SimpleNamespace(kv_group_configs=())
    host.connector_scheduler = SimpleNamespace(config=config)
    made = make_choice(FakeNixl(1000), host, composed="always")
    assert made.choose(make_request(), 0).plan is None


def of_two_local(first: tuple[str, int], second: tuple[str, int], **speeds: float) -> int | None:
    """Which of two local tiers is taken; what they have in tokens, and how fast they are."""
    known = Speeds()
    for tier, speed in speeds.items():
        known.add(tier, "load", "", int(speed), 1.0)
    choice = TierChoice(
        [FakeOffloading(first[1]), FakeOffloading(second[1])], [first[0], second[0]],
        speeds=known, bytes_per_token=1, block=BLOCK, composition=None, lookup_deadline=0,
    )  # fmt: skip
    return choice.choose(make_request(do_remote_prefill=False), 0).child


def test_of_local_tiers_that_have_the_same_the_fastest_is_taken() -> None:
    assert of_two_local(("disk", 256), ("host", 256), disk=1e3, host=1e9) == 1
    assert of_two_local(("host", 256), ("disk", 256), disk=1e9, host=1e3) == 1
    assert of_two_local(("host", 256), ("disk", 384), disk=1e3, host=1e9) == 1, "it has more"


def test_a_disk_of_unknown_speed_is_preferred_to_nothing() -> None:
    assert of_two_local(("disk", 384), ("host", 256), host=1e9) == 1
    assert of_two_local(("disk", 384), ("host", 256)) == 1
    assert of_two_local(("disk", 384), ("host", 0)) == 0, "there is nothing else"


class FakeBlocks:
    """vLLM's KVCacheBlocks, as far as a view needs it."""

    def __init__(self, blocks: Any) -> None:
        self.blocks = blocks


def make_block(number: int, *, cached: bool = False, null: bool = False) -> Any:
    return SimpleNamespace(
        block_id=number, block_hash=b"h" if cached else None, is_null=null, ref_cnt=1
    )


def test_in_the_peers_view_the_local_tiers_blocks_are_cached() -> None:
    made = make_choice(FakeNixl(900), FakeOffloading(2 * BLOCK), composed="always")
    choice = made.choose(make_request(), BLOCK)
    assert choice.plan is not None
    group = [make_block(n, cached=n == 0) for n in range(8)]
    view = made.view(choice.plan, FakeBlocks((group,)))
    assert isinstance(view, FakeBlocks)
    assert [b.block_id for b in view.blocks[0]] == list(range(8))
    assert [b.block_hash is not None for b in view.blocks[0]] == [True] * 3 + [False] * 5
    assert [b.block_hash for b in group[1:]] == [None] * 7, "the real ones stay as they are"


def test_padding_stays_padding_in_the_view() -> None:
    made = make_choice(FakeNixl(1000), FakeOffloading(4 * BLOCK), composed="always")
    choice = made.choose(make_request(), 0)
    assert choice.plan is not None
    group = [make_block(0, null=True), make_block(0, null=True), *map(make_block, range(1, 7))]
    view = made.view(choice.plan, FakeBlocks((group,)))
    assert view.blocks[0][0] is group[0]


def test_no_view_where_a_group_would_have_nothing_left_to_pull() -> None:
    made = make_choice(FakeNixl(1000), FakeOffloading(4 * BLOCK), composed="always")
    choice = made.choose(make_request(), 0)
    assert choice.plan is not None
    assert made.view(choice.plan, FakeBlocks(([make_block(n) for n in range(4)],))) is None
