from __future__ import annotations

import math

import pytest

from kvctl.demo.compare import Answer, compare

BOUND = 1e-4


def make_answer(
    tokens: tuple[int, ...] = (7, 8, 9),
    logprobs: tuple[float, ...] = (-1.0, -1.5, -2.0),
    others: tuple[dict[int, float], ...] = ({3: -2.5}, {4: -2.5}, {5: -2.5}),
) -> Answer:
    top = tuple(
        {**other, token: logprob}
        for token, logprob, other in zip(tokens, logprobs, others, strict=True)
    )
    return Answer(tokens, logprobs, top)


def test_the_same_answer_is_equal() -> None:
    found = compare(make_answer(), make_answer(), bound=BOUND)
    assert (found.difference, found.compared, found.deviation) == (None, 3, 0.0)
    assert not found.near_tie


def test_noise_within_the_bound_is_equal_and_reported() -> None:
    got = make_answer(logprobs=(-1.0, -1.5 + 2e-6, -2.0))
    found = compare(make_answer(), got, bound=BOUND)
    assert found.difference is None
    assert found.deviation == pytest.approx(2e-6)


def test_one_token_off_is_a_difference_with_what_was_expected() -> None:
    got = make_answer(tokens=(7, 1, 9))
    difference = compare(make_answer(), got, bound=BOUND).difference
    assert difference is not None
    assert (difference.position, difference.expected_token, difference.token) == (1, 8, 1)
    assert (difference.expected_logprob, difference.logprob) == (-1.5, -1.5)


def test_one_logprob_off_by_twice_the_bound_is_a_difference() -> None:
    got = make_answer(logprobs=(-1.0, -1.5, -2.0 + 2e-4))
    difference = compare(make_answer(), got, bound=BOUND).difference
    assert difference is not None
    assert (difference.position, difference.token) == (2, 9)
    assert difference.logprob == pytest.approx(-2.0 + 2e-4)


def test_a_candidate_that_was_not_chosen_counts_too() -> None:
    got = make_answer(others=({3: -2.5}, {4: -2.4}, {5: -2.5}))
    difference = compare(make_answer(), got, bound=BOUND).difference
    assert difference is not None
    assert (difference.position, difference.token) == (1, 4)


def test_not_a_number_is_a_difference() -> None:
    got = make_answer(logprobs=(-1.0, math.nan, -2.0))
    difference = compare(make_answer(), got, bound=BOUND).difference
    assert difference is not None
    assert difference.position == 1


@pytest.mark.parametrize("short", [0, 2])
def test_a_shorter_answer_differs_where_it_ends(short: int) -> None:
    whole, cut = make_answer(), make_answer()
    cut = Answer(cut.tokens[:short], cut.logprobs[:short], cut.top[:short])
    for expected, got in ((whole, cut), (cut, whole)):
        difference = compare(expected, got, bound=BOUND).difference
        assert difference is not None
        assert difference.position == short
        assert (difference.token is None) == (got is cut)


def test_a_near_tie_ends_the_comparison_as_equal() -> None:
    expected = make_answer(others=({3: -2.5}, {4: -1.50005}, {5: -2.5}))
    got = make_answer(
        tokens=(7, 4, 2),
        logprobs=(-1.0, -1.50003, -9.0),
        others=({3: -2.5}, {8: -1.50004}, {1: -9.5}),
    )
    found = compare(expected, got, bound=BOUND)
    assert found.difference is None
    assert found.near_tie
    assert found.compared == 2


def test_a_near_tie_does_not_hide_a_wrong_logprob_beside_it() -> None:
    expected = make_answer(others=({3: -2.5}, {4: -1.50005, 6: -3.0}, {5: -2.5}))
    got = make_answer(
        tokens=(7, 4, 2),
        logprobs=(-1.0, -1.50003, -9.0),
        others=({3: -2.5}, {8: -1.50004, 6: -3.1}, {1: -9.5}),
    )
    difference = compare(expected, got, bound=BOUND).difference
    assert difference is not None
    assert (difference.position, difference.token) == (1, 6)


def test_the_token_after_a_clear_winner_is_no_near_tie() -> None:
    expected = make_answer(others=({3: -2.5}, {4: -1.6}, {5: -2.5}))
    got = make_answer(tokens=(7, 4, 9), logprobs=(-1.0, -1.6, -2.0))
    assert compare(expected, got, bound=BOUND).difference is not None
