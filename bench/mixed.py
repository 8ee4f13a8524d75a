"""Runs requests of every kind on a pair of this machine's hardware, and compares each answer.

Usage: python bench/mixed.py [REQUESTS]

On GPUs with full CUDA graphs, which ``kvctl demo`` leaves out. Both engines run kvctl's connector
with NIXL and a host tier, and load from both tiers wherever they can. Prints, as JSON lines, how
many answers were wrong, how each kind went, and how fast KV moved. Exit code 1 if an answer was
wrong, a request failed, or a kind did not come.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import yaml
from figure import emit

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "end_to_end"))

from mixed import branching_prompts, run_mixed
from pair import START, STOP, Pair, free_block, session_of, wait_for

from kvctl.demo.compare import Comparison
from kvctl.demo.model import SERVED_NAME, tiny_model
from kvctl.demo.prompts import LONGEST
from kvctl.demo.reference import Question, pins_of, reference_answers
from kvctl.demo.setting import LEASE, Setting, setting_for
from kvctl.engine.environment import find
from kvctl.engine.hardware import visible_gpus

PROMPTS = 32


def main() -> int:
    requests = int(sys.argv[1]) if len(sys.argv) > 1 else 50
    with tempfile.TemporaryDirectory() as folder:
        os.environ["KVCTL_STATE_DIR"] = f"{folder}/state"
        os.environ["KVCTL_RUNTIME_DIR"] = f"{folder}/run"
        with made_pair(Path(folder)).running() as pair:
            return 0 if all([*each_kind(pair), *all_at_once(pair, requests)]) else 1


def made_pair(folder: Path) -> Pair:
    environment = find(os.environ.get("KVCTL_ENGINE_PYTHON"))
    setting = setting_for(environment.platform, gpus=visible_gpus())
    args = {**setting.args}
    if environment.platform != "cpu":
        del args["enforce-eager"]
    model = tiny_model(environment.python, log=folder / "model.log")
    prompts = branching_prompts(PROMPTS, setting.block_size, LONGEST)
    question = Question(
        prompts, setting.reference_arguments(), setting.reference_env(), environment.platform,
        pins_of(environment.python),
    )  # fmt: skip
    references = reference_answers(
        question, model=model, python=environment.python, log=folder / "reference.log"
    )
    file = folder / "mixed.yaml"
    file.write_text(yaml.safe_dump(topology(setting, args, model, environment.python)))
    flags = folder / "flags"
    flags.mkdir()
    tool = Path(sys.executable).with_name("kvctl")
    if not tool.exists():
        tool = folder / "kvctl"
        tool.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m kvctl "$@"\n')
        tool.chmod(0o755)
    return Pair(
        tool, file, "", SERVED_NAME, prompts, references, flags, name="mixed", deadline=60.0,
        bound=setting.bound,
    )  # fmt: skip


def topology(setting: Setting, args: dict[str, Any], model: Path, python: Path) -> dict[str, Any]:
    gpus = setting.gpus or {}
    return {
        "version": 1,
        "name": "mixed",
        "model": str(model),
        "engine": {"python": str(python)},
        "args": args,
        "env": dict(setting.env),
        "transfer": {"kv_lease_duration": f"{LEASE}s", "composed_hits": "always"},
        "offload": {"host": 2 * setting.host_bytes},
        "instances": {
            role: {"role": role, **({"gpus": [gpus[role]]} if gpus else {})}
            for role in ("prefill", "decode")
        },
        "ports": {"base": free_block()},
        "start_timeout": f"{2 * START:.0f}s",
        "stop_timeout": f"{STOP:.0f}s",
    }


def each_kind(pair: Pair) -> list[bool]:
    """One kind after the other, on prompts of the longer half."""
    long = sorted(range(PROMPTS), key=lambda prompt: -len(pair.prompts[prompt]))[: PROMPTS // 2]

    def evicted(prompt: int) -> None:
        """The other prompts take decode's and prefill's device cache, and stay in host memory."""
        for other in long:
            if other != prompt:
                pair.ask(other)

    first = [pair.ask(prompt) for prompt in long]
    again = []
    for prompt in long[:4]:
        evicted(prompt)
        again.append(pair.take(prompt, pair.offer(prompt)))
    local = []
    for prompt in long[4:8]:
        evicted(prompt)
        local.append(pair.take(prompt, None))
    foreign = [pair.take(long[n], pair.offer(long[n + 1])) for n in range(4)]
    used = []
    for prompt in long[8:11]:
        offer = pair.offer(prompt)
        pair.take(prompt, dict(offer))
        evicted(prompt)
        used.append(pair.take(prompt, dict(offer)))
    late = [late_read(pair, prompt) for prompt in long[11:13]]
    decode = pair.settled("decode-0")
    chosen: Counter[str] = Counter()
    for choice in decode.choices:
        chosen[choice.tier] += choice.count
    reasons = {each.reason: each.count for each in decode.failures}
    kinds = {
        "prefill to decode": first, "from both tiers or one": again, "from host memory": local,
        "another prompt's offer": foreign, "an offer used twice": used, "read too late": late,
    }  # fmt: skip
    right = [
        emit(f"wrong answers, {kind}", wrong(answers), "{answer}", limit=0, of=len(answers))
        for kind, answers in kinds.items()
    ]
    emit("tier choices", sum(chosen.values()), "{request}", by_tier=dict(chosen), refused=reasons)
    for each in decode.transfers:
        if each.bandwidth:
            figure = f"{each.tier} {each.direction} on decode"
            emit(figure, each.bandwidth, "By/s", transfers=each.ok)
    came = {"composed", "peer"} <= set(chosen) and {"offer_mismatch", "offer_reused"} <= set(
        reasons
    )
    return [*right, came]


def late_read(pair: Pair, prompt: int) -> Comparison:
    """Decode's engine stands still for longer than the lease while prefill computes others."""
    offer = pair.offer(prompt)
    answers: list[Comparison] = []
    asking = threading.Thread(target=lambda: answers.append(pair.take(prompt, offer)))
    server = pair.record("decode-0")["pid"]  # it takes the request, for the others to find
    engine = [pid for pid in session_of(server) if pid != server]
    for pid in engine:
        os.kill(pid, signal.SIGSTOP)
    try:
        asking.start()
        time.sleep(LEASE + 2)
        for other in range(PROMPTS):
            pair.compute(other)
    finally:
        for pid in engine:
            os.kill(pid, signal.SIGCONT)
    asking.join(pair.deadline)
    wait_for(lambda: answers, "no answer")
    return answers[0]


def all_at_once(pair: Pair, requests: int) -> list[bool]:
    right = []
    for clients in (1, 8):
        began = time.monotonic()
        tally = run_mixed(pair, requests, clients=clients, seed=clients)
        emit(
            f"wrong answers, mixed, {clients} clients", len(tally.wrong), "{answer}", limit=0,
            asked=dict(tally.asked), failed=tally.failed, deviation=tally.deviation,
            seconds=round(time.monotonic() - began, 1),
        )  # fmt: skip
        right += [not tally.wrong, not tally.failed]
    return right


def wrong(answers: list[Comparison]) -> int:
    return sum(each.difference is not None for each in answers)


if __name__ == "__main__":
    sys.exit(main())
