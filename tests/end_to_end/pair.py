"""The one pair of real engines that the end-to-end tests share, used as an operator would."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import misbehaviour

from kvctl.demo.compare import Answer, Comparison, compare
from kvctl.demo.reference import MAX_TOKENS, TOP
from kvctl.demo.setting import CPU_BOUND, DEADLINE, Setting
from kvctl.demo.traffic import ask, parse
from kvctl.sources.feed import read_snapshot
from kvctl.sources.snapshot import EngineSnapshot

OTHERS = range(12, 24)  # prompts that tests use only to fill the caches with
START = 180.0  # seconds
STOP = 30.0  # seconds


@dataclass
class Pair:
    """What the tests need of it.

    Attributes:
        kvctl: the command, of an environment that holds the wheel and no vLLM.
        state: ``kvctl ps --json``'s view when it was ready.
        prompts, references: token ids, and what one plain engine answers.
        flags: the folder of the files that make engines misbehave (see misbehaviour.py).
        name: of the topology.
        deadline: seconds that a request has.
        bound: how far logprobs of right answers may lie apart.
    """

    kvctl: Path
    file: Path
    url: str
    model: str
    prompts: list[list[int]]
    references: list[Answer]
    flags: Path
    shared_memory_before: set[Path] = field(default_factory=set)
    name: str = "e2e"
    deadline: float = DEADLINE
    bound: float = CPU_BOUND
    prefill_url: str = ""
    decode_url: str = ""

    @contextmanager
    def running(self) -> Iterator[Pair]:
        """Launches it, waits until it is ready, and stops it at the end of the block."""
        launched = self.run("launch", "-d", str(self.file), timeout=START + STOP)
        assert launched.returncode == 0, launched.stdout + launched.stderr
        self.url = self.record("router")["url"]
        self.prefill_url = self.record("prefill-0")["url"]
        self.decode_url = self.record("decode-0")["url"]
        try:
            yield self
        finally:
            stopped = self.run("stop", "-p", self.name, timeout=3 * STOP)
        assert stopped.returncode == 0, stopped.stdout + stopped.stderr

    def run(self, *arguments: str, timeout: float = STOP) -> subprocess.CompletedProcess[str]:
        """Runs a kvctl command to its end."""
        return subprocess.run(
            [self.kvctl, *arguments], capture_output=True, text=True, timeout=timeout
        )

    def ask(self, prompt: int) -> Comparison:
        """Sends one prompt through the router and compares the answer with its reference."""
        answer = ask(self.url, self.prompts[prompt], model=self.model, deadline=self.deadline)
        return compare(self.references[prompt], answer, bound=self.bound)

    def offer(self, prompt: int) -> dict[str, Any]:
        """Has prefill compute a prompt, and returns what it offers decode."""
        first = {
            "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None,
            "remote_block_ids": None, "remote_host": None, "remote_port": None,
        }  # fmt: skip
        answer = self.complete(self.prefill_url, self.prompts[prompt], first, max_tokens=1)
        return dict(answer["kv_transfer_params"])

    def compute(self, prompt: int, first: int | None = None) -> None:
        """Has prefill compute a prompt, or its `first` tokens, for itself; its blocks are free
        again afterwards."""
        self.complete(self.prefill_url, self.prompts[prompt][:first], None, max_tokens=1)

    def take(
        self, prompt: int, offer: dict[str, Any] | None, *, max_tokens: int = MAX_TOKENS
    ) -> Comparison:
        """Asks decode for a prompt with an offer, whosever it is, and compares the answer."""
        (compared,) = self.take_several([prompt], offer, max_tokens=max_tokens)
        return compared

    def take_several(
        self,
        prompts: list[int],
        offer: dict[str, Any] | None,
        *,
        max_tokens: int = MAX_TOKENS,
    ) -> list[Comparison]:
        """Several prompts in one completion, over one offer; compares what the references have."""
        texts = [self.prompts[prompt] for prompt in prompts]
        answer = self.complete(self.decode_url, texts, offer, max_tokens=max_tokens)
        choices = sorted(answer["choices"], key=lambda choice: choice["index"])
        return [
            compare(
                self.references[prompt],
                beginning(parse({"choices": [choice]}), MAX_TOKENS),
                bound=self.bound,
            )
            for prompt, choice in zip(prompts, choices, strict=True)
        ]

    def body(self, prompt: Any, params: Any, *, max_tokens: int = MAX_TOKENS) -> dict[str, Any]:
        """A completion, greedy, with logprobs."""
        return {
            "model": self.model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0.0,
            "ignore_eos": True, "logprobs": TOP, "return_tokens_as_token_ids": True,
            "kv_transfer_params": params,
        }  # fmt: skip

    def complete(self, url: str, prompt: Any, params: Any, max_tokens: int) -> dict[str, Any]:
        """Asks one engine.

        Raises:
            OSError: it does not answer, or with an error.
        """
        body = self.body(prompt, params, max_tokens=max_tokens)
        request = urllib.request.Request(
            f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=2 * self.deadline) as response:
            return dict(json.load(response))

    @contextmanager
    def flag(self, name: str) -> Iterator[None]:
        """Has the engines misbehave in one way, see misbehaviour.py."""
        file = self.flags / name
        file.touch()
        try:
            yield
        finally:
            file.unlink(missing_ok=True)

    def use_up_prefills_cache(self) -> None:
        """Has prefill compute other prompts, so that every block it has freed is used again."""
        for prompt in self._long_others():
            self.compute(prompt)

    def forget_on_decode(self, *, host: bool = True) -> None:
        """Empties decode's prefix cache, and its host tier too."""
        wait_for(lambda: self.reset_on_decode(host=host), "decode's caches cannot be reset")

    def forget_on_prefill(self) -> None:
        """Empties prefill's prefix cache, but not its host tier."""
        wait_for(lambda: self._reset(self.prefill_url, host=False), "prefill's cache is in use")

    def reset_on_decode(self, *, host: bool) -> bool:
        """Empties decode's, if no block is in use right now; whether it was done."""
        return self._reset(self.decode_url, host=host)

    def _reset(self, engine: str, *, host: bool) -> bool:
        url = f"{engine}/reset_prefix_cache?reset_external={str(host).lower()}"
        with urllib.request.urlopen(urllib.request.Request(url, b""), timeout=DEADLINE) as answer:
            return bool(json.load(answer)["success"])

    def _long_others(self) -> list[int]:
        return [prompt for prompt in OTHERS if len(self.prompts[prompt]) > 600]

    def refused(self, reason: str) -> int:
        """How many offers decode has refused for that reason."""
        failures = self.seen("decode-0").failures
        return sum(each.count for each in failures if each.reason == reason)

    def record(self, name: str) -> dict[str, Any]:
        """The state file's record of one process."""
        (found,) = (each for each in self.records() if each["name"] == name)
        return found

    def records(self) -> list[dict[str, Any]]:
        folder = Path(os.environ["KVCTL_STATE_DIR"]) / "runs" / self.name
        return list(json.loads((folder / "state.json").read_text())["processes"])

    def print_stacks(self) -> None:
        """Where each process of its engines hangs, for the log of a test that failed."""
        dump = [Path(sys.executable).with_name("py-spy"), "dump", "--pid"]
        for record in self.records():
            for pid in session_of(record["pid"]) if record["kind"] == "engine" else ():
                try:
                    dumped = subprocess.run([*dump, str(pid)], capture_output=True, timeout=30)
                except subprocess.TimeoutExpired:
                    print(f"{record['name']}, pid {pid}: no stack within 30 s")
                else:
                    print((dumped.stdout or dumped.stderr).decode(errors="replace"))

    def seen(self, name: str) -> EngineSnapshot:
        """What an engine says on its feed right now."""
        return read_snapshot(self.record(name)["feeds"][0], timeout=10)

    def settled(self, name: str) -> EngineSnapshot:
        """The same, once nothing of it is in flight: the last facts come with a later step."""

        def quiet() -> EngineSnapshot | None:
            snapshot = self.seen(name)
            return None if any(each.inflight for each in snapshot.transfers) else snapshot

        return wait_for(quiet, f"{name} has transfers in flight")


def topology(
    name: str, setting: Setting, model: Path, python: Path, flags: Path, path: Sequence[Path] = ()
) -> dict[str, Any]:
    """What every pair of the tests is launched from, as the content of a topology file.

    Args:
        flags: see `Pair`.
        path: folders that come first on the engines' ``PYTHONPATH``.
    """
    return {
        "version": 1,
        "name": name,
        "model": str(model),
        "engine": {"python": str(python)},
        "args": dict(setting.args),
        "env": {
            **setting.env,
            "PYTHONPATH": os.pathsep.join(map(str, [*path, misbehaviour.HERE])),
            misbehaviour.FOLDER: str(flags),
            "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
        },
        "transfer": {},
        "offload": {
            "host": 2 * setting.host_bytes,
            "extra": {"spec_name": "PlantingHostSpec", "spec_module_path": "planting_spec"},
        },
        "instances": {"prefill": {"role": "prefill"}, "decode": {"role": "decode"}},
        "ports": {"base": free_block()},
        "start_timeout": f"{START:.0f}s",
        "stop_timeout": f"{STOP:.0f}s",
    }


def beginning(answer: Answer, tokens: int) -> Answer:
    """The first tokens of an answer."""
    return Answer(answer.tokens[:tokens], answer.logprobs[:tokens], answer.top[:tokens])


def wait_for(condition: Callable[[], Any], what: str, timeout: float = DEADLINE) -> Any:
    """Polls until the condition gives something true."""
    ends = time.monotonic() + timeout
    while True:
        if found := condition():
            return found
        assert time.monotonic() < ends, f"after {timeout:.0f} s: {what}"
        time.sleep(0.1)


def transfers(snapshot: EngineSnapshot, tier: str, direction: str) -> Any:
    """The transfers of one tier and direction; None when there were none."""
    return next((t for t in snapshot.transfers if (t.tier, t.direction) == (tier, direction)), None)


def bytes_of(snapshot: EngineSnapshot, tier: str, direction: str) -> int:
    found = transfers(snapshot, tier, direction)
    return found.bytes if found else 0


def session_of(pid: int) -> list[int]:
    """Every living process of the session that this process leads."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == pid and fields[0] != "Z":
                found.append(int(entry.name))
    return found


def worker_of(pid: int) -> int:
    """The worker process of an engine."""
    (worker,) = (
        member
        for member in session_of(pid)
        if (Path("/proc") / str(member) / "comm").read_text().startswith("VLLM::Worker")
    )
    return worker


def kill_session(pid: int) -> None:
    """SIGKILL for a whole tree at once, as an out-of-memory killer or a node's end would."""
    for member in session_of(pid):
        os.kill(member, signal.SIGKILL)


def free_block(size: int = 100) -> int:
    """The first of `size` ports that are free on loopback, below the ephemeral ones."""
    for base in range(20_000, 32_000, size):
        if all(is_free(port) for port in range(base, base + size)):
            return base
    raise AssertionError("no free block of ports")


def is_free(port: int) -> bool:
    """Whether a loopback port can be bound."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
