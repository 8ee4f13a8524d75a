"""The answers of one plain engine, without connector or router: what the pair has to match."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvctl.demo.cache import entry, key_of
from kvctl.demo.compare import Answer
from kvctl.demo.engine_script import FOLDER, run_script
from kvctl.demo.model import model_key
from kvctl.errors import InstanceError, UnreachableError

SCRIPT = "answer_prompts.py"
ANSWERS = "answers.json"
MAX_TOKENS = 8
TOP = 5  # candidates a position: the most that the completions API gives
TIMEOUT = 300.0  # seconds

_PINS = """
import importlib.metadata as m, json
print(json.dumps({d: m.version(d) for d in ("vllm", "torch", "transformers")}))
"""


@dataclass(frozen=True)
class Question:
    """Everything that the reference answers depend on.

    Attributes:
        engine: arguments of ``vllm.LLM``, without the model.
        env: of the engine's process.
        pins: versions of what computes.
        model: what its weights were made from.
    """

    prompts: Sequence[Sequence[int]]
    engine: Mapping[str, Any]
    env: Mapping[str, str]
    platform: str
    pins: Mapping[str, str]
    model: str = field(default_factory=model_key)

    def key(self) -> str:
        """The name of the answers in the cache."""
        return key_of(
            {
                "model": self.model,
                "script": (FOLDER / SCRIPT).read_text(),
                "asked": [MAX_TOKENS, TOP],
                "prompts": self.prompts,
                "engine": dict(self.engine),
                "env": dict(self.env),
                "platform": self.platform,
                "pins": dict(self.pins),
            }
        )


def pins_of(python: Path) -> dict[str, str]:
    """Versions of vllm, torch and transformers in that Python's environment.

    Raises:
        UnreachableError: one is missing.
    """
    found = subprocess.run([python, "-c", _PINS], capture_output=True, text=True, timeout=60)
    if found.returncode:
        why = (found.stderr.strip().splitlines() or [f"exit code {found.returncode}"])[-1]
        raise UnreachableError(
            f"{python} is no engine environment that the demo can use: {why}",
            hint="install vllm with its requirements there, or name another with --engine PYTHON",
        )
    versions: dict[str, str] = json.loads(found.stdout)
    return versions


def reference_answers(question: Question, *, model: Path, python: Path, log: Path) -> list[Answer]:
    """One answer a prompt, from the cache or from an engine that runs for it.

    Raises:
        InstanceError: the engine failed to start or to answer.
        UnreachableError: the cache cannot be written.
    """

    def make(folder: Path) -> None:
        request = folder / "request.json"
        asked = {
            "engine": {**question.engine, "model": str(model)},
            "prompts": question.prompts,
            "max_tokens": MAX_TOKENS,
            "top": TOP,
        }
        request.write_text(json.dumps(asked))
        answers = folder / ANSWERS
        run_script(python, SCRIPT, [request, answers], env=question.env, log=log, timeout=TIMEOUT)
        if not answers.is_file():
            raise InstanceError("the reference engine wrote no answers", hint=f"its output: {log}")

    folder = entry("reference", question.key(), make)
    content = json.loads((folder / ANSWERS).read_text())
    return [answer_of(each) for each in content["answers"]]


def answer_of(raw: Mapping[str, Any]) -> Answer:
    """What the script has written for one prompt."""
    return Answer(
        tokens=tuple(raw["tokens"]),
        logprobs=tuple(raw["logprobs"]),
        top=tuple(
            {int(token): logprob for token, logprob in position.items()} for position in raw["top"]
        ),
    )
