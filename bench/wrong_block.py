"""Measures what the demo's comparison can see: how far one wrong block moves the logprobs.

Usage: ENGINE_PYTHON bench/wrong_block.py MODEL_FOLDER [TRIALS]

Run by the engine's Python (torch, transformers) on the model that ``kvctl demo`` made. In each
trial one block of a prompt's KV is replaced by that of another prompt, the reference's tokens are
forced, and the largest change of a logprob among them counts; the figures are the smallest and
the median of all trials. Beside it, what must not count: the same change when the inputs of every
matrix product are rounded to TF32, the largest of all trials.
"""

from __future__ import annotations

import random
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
from figure import emit
from transformers import LlamaForCausalLM

LENGTHS = (300, 900, 1500)
TOKENS = 8


def main() -> None:
    folder = sys.argv[1]
    trials = int(sys.argv[2]) if len(sys.argv) > 2 else 20
    torch.set_num_threads(1)
    model = LlamaForCausalLM.from_pretrained(folder).eval()
    rounded = round_inputs(LlamaForCausalLM.from_pretrained(folder).eval())
    for size in (16, 128):
        source = random.Random(1)
        moved = [one_block(model, source, size) for _ in range(trials)]
        emit(f"wrong block of {size} tokens, smallest change", min(moved), "1", trials=trials)
        emit(f"wrong block of {size} tokens, median", statistics.median(moved), "1", trials=trials)
    source = random.Random(1)
    noise = [change(model, rounded, prompt(source)) for _ in range(trials)]
    emit("TF32 inputs, largest change", max(noise), "1", trials=trials)


def prompt(source: random.Random) -> list[int]:
    return source.choices(range(256), k=source.choice(LENGTHS))


def one_block(model: Any, source: random.Random, size: int) -> float:
    """The largest change of a logprob when one block holds the KV of another prompt."""
    tokens = prompt(source)
    other = cache_of(model, source.choices(range(256), k=len(tokens)))
    first = source.randrange(len(tokens) // size) * size

    def plant(cache: Any) -> None:
        for layer, wrong in zip(cache.layers, other.layers, strict=True):
            layer.keys[:, :, first : first + size] = wrong.keys[:, :, first : first + size]
            layer.values[:, :, first : first + size] = wrong.values[:, :, first : first + size]

    return change(model, model, tokens, plant)


def change(
    model: Any, other: Any, tokens: list[int], plant: Callable[[Any], None] = lambda _: None
) -> float:
    """The largest difference of the logprobs that two models give the first one's tokens."""
    chosen, expected = generate(model, tokens)
    _, got = generate(other, tokens, forced=chosen, plant=plant)
    return max(abs(a - b) for a, b in zip(expected, got, strict=True))


@torch.no_grad()
def generate(
    model: Any,
    tokens: list[int],
    *,
    forced: list[int] | None = None,
    plant: Callable[[Any], None] = lambda _: None,
) -> tuple[list[int], list[float]]:
    """Tokens and their logprobs: greedy ones, or the forced ones."""
    cache = cache_of(model, tokens[:-1])
    plant(cache)
    chosen: list[int] = []
    logprobs: list[float] = []
    last = tokens[-1]
    for position in range(TOKENS):
        output = model(torch.tensor([[last]]), past_key_values=cache, use_cache=True)
        candidates = output.logits[0, -1].log_softmax(-1)
        last = forced[position] if forced else int(candidates.argmax())
        chosen.append(last)
        logprobs.append(float(candidates[last]))
    return chosen, logprobs


@torch.no_grad()
def cache_of(model: Any, tokens: list[int]) -> Any:
    return model(torch.tensor([tokens]), use_cache=True).past_key_values


def round_inputs(model: Any) -> Any:
    """The model with both inputs of every matrix product rounded to TF32's ten bits."""
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight.data = tf32(module.weight.data)
            module.register_forward_pre_hook(lambda _, inputs: (tf32(inputs[0]),))
    return model


def tf32(values: torch.Tensor) -> torch.Tensor:
    bits = values.contiguous().clone().view(torch.int32)
    return ((bits + 0x1000) & ~0x1FFF).view(torch.float32)


if __name__ == "__main__":
    main()
