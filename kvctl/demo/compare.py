"""Compares an answer of the pair with the answer of one plain engine.

Token ids alone prove little: two candidates may be so close that either is right, and a wrong
block may leave the most likely token in place. So the logprobs of all candidates that both
answers name are compared too, within a bound that is far above what two right computations
differ by and far below what one wrong block does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Answer:
    """What an engine generated for one prompt.

    Attributes:
        tokens: ids, in order.
        logprobs: natural logarithm of the probability of each of them.
        top: per position the most likely candidates, the generated one among them.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    top: tuple[Mapping[int, float], ...]


@dataclass(frozen=True)
class Difference:
    """The first place where an answer is wrong. A token that is None: there is none there."""

    position: int
    expected_token: int | None
    token: int | None
    expected_logprob: float | None
    logprob: float | None


@dataclass(frozen=True)
class Comparison:
    """How an answer compares with its reference.

    Attributes:
        difference: None when they are equal.
        compared: positions that were compared.
        deviation: the largest difference of two logprobs of the same candidate.
        near_tie: the comparison ended early at two candidates that are equally likely within
            the bound: from there on the two answers continue different texts.
    """

    difference: Difference | None
    compared: int
    deviation: float
    near_tie: bool = False


def compare(expected: Answer, got: Answer, *, bound: float) -> Comparison:
    """Compares position by position, up to the first difference or near tie."""
    deviation = 0.0
    for position in range(max(len(expected.tokens), len(got.tokens))):
        if position >= min(len(expected.tokens), len(got.tokens)):
            return Comparison(_difference(expected, got, position, None), position, deviation)
        token, worst = _worst(expected.top[position], got.top[position])
        deviation = max(deviation, worst)
        if worst > bound:
            found = _difference(expected, got, position, token)
            return Comparison(found, position + 1, deviation)
        if expected.tokens[position] != got.tokens[position]:
            if _is_near_tie(expected, got, position, bound):
                return Comparison(None, position + 1, deviation, near_tie=True)
            found = _difference(expected, got, position, None)
            return Comparison(found, position + 1, deviation)
    return Comparison(None, len(expected.tokens), deviation)


def _worst(expected: Mapping[int, float], got: Mapping[int, float]) -> tuple[int | None, float]:
    """The candidate whose logprob differs most, and by how much."""
    differences = {
        token: _distance(expected[token], got[token]) for token in expected.keys() & got.keys()
    }
    token = max(differences, key=lambda token: differences[token], default=None)
    return token, 0.0 if token is None else differences[token]


def _distance(expected: float, got: float) -> float:
    distance = abs(expected - got)
    return math.inf if math.isnan(distance) else distance


def _is_near_tie(expected: Answer, got: Answer, position: int, bound: float) -> bool:
    candidates = expected.top[position]
    other = candidates.get(got.tokens[position])
    return other is not None and expected.logprobs[position] - other <= bound


def _difference(expected: Answer, got: Answer, position: int, token: int | None) -> Difference:
    """Describes the position by `token` where its logprob differs, else by the chosen ones."""
    if token is not None:
        return Difference(
            position, token, token, expected.top[position][token], got.top[position][token]
        )
    theirs = position < len(expected.tokens)
    ours = position < len(got.tokens)
    return Difference(
        position,
        expected.tokens[position] if theirs else None,
        got.tokens[position] if ours else None,
        expected.logprobs[position] if theirs else None,
        got.logprobs[position] if ours else None,
    )
