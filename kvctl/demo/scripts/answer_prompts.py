"""Answers prompts with one plain engine, in this process and without any connector.

Run by the engine's Python. What it is asked for, and what it answers, are JSON files:

    {"engine": {…arguments of vllm.LLM…}, "prompts": [[token id, …], …],
     "max_tokens": 8, "top": 5}
    {"answers": [{"tokens": [id, …], "logprobs": [x, …], "top": [{"id": x, …}, …]}, …]}

Usage: python answer_prompts.py REQUEST.json ANSWERS.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams


def answer(engine: LLM, prompts: list[list[int]], max_tokens: int, top: int) -> list[Any]:
    """Generates greedily; the logprobs of every position's `top` candidates come along."""
    sampling = SamplingParams(
        temperature=0.0, max_tokens=max_tokens, logprobs=top, ignore_eos=True, detokenize=False
    )
    outputs = engine.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False
    )
    return [_answer(output.outputs[0]) for output in outputs]


def _answer(completion: Any) -> dict[str, Any]:
    tokens = list(completion.token_ids)
    positions = [
        {str(token): candidate.logprob for token, candidate in position.items()}
        for position in completion.logprobs
    ]
    chosen = [position[str(token)] for token, position in zip(tokens, positions, strict=True)]
    return {"tokens": tokens, "logprobs": chosen, "top": positions}


def main() -> None:
    source, target = map(Path, sys.argv[1:])
    request = json.loads(source.read_text())
    engine = LLM(**request["engine"])
    answers = answer(engine, request["prompts"], request["max_tokens"], request["top"])
    target.write_text(json.dumps({"answers": answers}))


if __name__ == "__main__":
    main()
