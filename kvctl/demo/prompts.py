"""The demo's prompts, and the order that makes their KV travel through every tier.

A group of prompts is sent once; then its first half is sent again, in the same order. Between
the two visits of a prompt the others of its group need more blocks than the device cache has.
A free block is reused when it is the one that was touched the longest ago, so by then every
block of that prompt has been overwritten, and its KV can only come back from host memory.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

SEED = 3
SHORTEST, LONGEST = 40, 1500  # tokens: less than one block of 128, and nearly twelve
BYTES = 256  # the tokenizer's symbols; the ids above them are special
GROUP = 24  # prompts sent before some of them come again
FEWEST = 10  # prompts that need more blocks than the device cache has, with some to spare
DEFAULT_COUNT = 24


@dataclass(frozen=True)
class Visit:
    """One request: which prompt it sends, and whether that prompt was sent before."""

    prompt: int
    again: bool


def make_prompts(count: int, seed: int = SEED) -> list[list[int]]:
    """Token ids of `count` prompts. Every group spans all lengths, in a shuffled order."""
    source = random.Random(seed)
    prompts: list[list[int]] = []
    for size in _group_sizes(count):
        step = (LONGEST - SHORTEST) / max(size - 1, 1)
        lengths = [SHORTEST + round(step * index) for index in range(size)]
        source.shuffle(lengths)
        prompts += [source.choices(range(BYTES), k=length) for length in lengths]
    return prompts


def make_schedule(count: int) -> list[Visit]:
    """The order of the requests: each group once, then its first half again."""
    visits: list[Visit] = []
    first = 0
    for size in _group_sizes(count):
        group = range(first, first + size)
        visits += [Visit(prompt, again=False) for prompt in group]
        visits += [Visit(prompt, again=True) for prompt in group[: (size + 1) // 2]]
        first += size
    return visits


def blocks_between(
    visits: list[Visit], prompts: list[list[int]], block_size: int
) -> dict[int, int]:
    """Per prompt that comes again: blocks that other prompts fill between its two visits.

    The prompt is out of a device cache of at most that many blocks, and still in a host tier
    that holds at least that many and its own.
    """
    first = {visit.prompt: index for index, visit in enumerate(visits) if not visit.again}
    return {
        visit.prompt: sum(
            blocks(prompts[other], block_size)
            for other in {between.prompt for between in visits[first[visit.prompt] + 1 : index]}
        )
        for index, visit in enumerate(visits)
        if visit.again
    }


def blocks(prompt: list[int], block_size: int) -> int:
    """Full blocks of the prompt: the ones that are cached, stored and found again."""
    return len(prompt) // block_size


def _group_sizes(count: int) -> list[int]:
    """Splits the prompts into groups of at most `GROUP`, of nearly the same size."""
    groups = -(-count // GROUP)
    return [count // groups + (index < count % groups) for index in range(groups)]
