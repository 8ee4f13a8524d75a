from typing import Any

from kvctl_connector.facts import Fact, Joiner


def make_fact(**changes: Any) -> Fact:
    fact = Fact(
        rank=0, ranks=1, tier="peer", direction="recv", key="r", request="r",
        start=100, end=200, bytes=10, outcome="ok",
    )  # fmt: skip
    return fact._replace(**changes)


def test_one_rank_is_the_whole_transfer() -> None:
    fact = make_fact()
    assert Joiner().add(fact) is fact


def test_ranks_are_joined_from_first_post_to_last_completion() -> None:
    joiner = Joiner()
    assert joiner.add(make_fact(ranks=2, start=150, end=260, bytes=10, peer="p")) is None

    joined = joiner.add(make_fact(ranks=2, rank=1, start=120, end=240, bytes=7))

    assert joined == make_fact(start=120, end=260, bytes=17, peer="p")


def test_one_failed_rank_fails_the_transfer_with_its_reason() -> None:
    joiner = Joiner()
    joiner.add(make_fact(ranks=2))
    joined = joiner.add(make_fact(ranks=2, outcome="failed", phase="post", reason="setup_failed"))
    assert joined is not None
    assert (joined.outcome, joined.phase, joined.reason) == ("failed", "post", "setup_failed")


def test_a_rank_that_moved_nothing_does_not_stretch_the_transfer() -> None:
    joiner = Joiner()
    joiner.add(make_fact(ranks=2, start=0, end=190, bytes=0))
    joined = joiner.add(make_fact(ranks=2))
    assert joined is not None
    assert (joined.start, joined.bytes) == (100, 10)


def test_directions_and_tiers_of_one_request_are_different_transfers() -> None:
    joiner = Joiner()
    assert joiner.add(make_fact(ranks=2)) is None
    assert joiner.add(make_fact(ranks=2, tier="host", direction="load")) is None


def test_a_transfer_whose_rank_died_does_not_stay_for_ever() -> None:
    joiner = Joiner(limit=3)
    for number in range(10):
        joiner.add(make_fact(ranks=2, key=str(number)))
    assert joiner.dropped == 7
    assert joiner.add(make_fact(ranks=2, key="9")) is not None  # the newest are still there
