"""One engine in a single process, as a GPU without tensor parallel has it: scheduler and worker
hand each other their objects, and hear of each other in fewer steps than two processes do."""

from __future__ import annotations

import json
import os
import select
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from layouts import ONE_PROCESS, Known, shaped
from misbehaviour import FOLDER, HERE, PLANT
from pair import START, STOP, free_block

from kvctl.demo.compare import Comparison, compare
from kvctl.demo.engine_script import FOLDER as SCRIPTS
from kvctl.demo.reference import MAX_TOKENS, TOP, answer_of
from kvctl.demo.setting import CPU_BOUND, DEADLINE, setting_for
from kvctl.launch.connector_copy import lay_connector
from kvctl.sources.feed import read_snapshot
from kvctl.sources.snapshot import EngineSnapshot
from kvctl.topology.cores import available, bindings
from kvctl_connector.paths import feed_path

pytestmark = [pytest.mark.shapes, shaped(ONE_PROCESS)]

SCRIPT = Path(__file__).with_name("one_engine.py")
FIRST_ROUND = range(12)


class Engine(NamedTuple):
    """The running engine: what it answers, what it says on its feed, and the folder of flags."""

    ask: Callable[[int], Comparison]
    seen: Callable[[], EngineSnapshot]
    flags: Path


def connector() -> dict[str, Any]:
    """What ``kvctl launch`` would write, but for the signatures: nobody is offered anything."""
    host = {
        "spec_name": "PlantingHostSpec",
        "spec_module_path": "planting_spec",
        "cpu_bytes_to_use": 200_000_000,
    }
    return {
        "kv_connector": "MultiConnector",
        "kv_connector_module_path": "kvctl_connector.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "connectors": [
                {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"},
                {
                    "kv_connector": "OffloadingConnector",
                    "kv_role": "kv_both",
                    "kv_connector_extra_config": host,
                },
            ],
            "kvctl": {"topology": "one", "instance": "one-0"},
        },
    }


def environment(flags: Path) -> dict[str, str]:
    folders = [lay_connector(), HERE, SCRIPTS]
    (cores,) = bindings([1], available())
    return {
        **os.environ,
        **setting_for("cpu", gpus=()).reference_env(),
        **cores,
        FOLDER: str(flags),
        "PYTHONPATH": os.pathsep.join(map(str, folders)),
        "PYTHONHASHSEED": "0",
        "UCX_NET_DEVICES": "lo",
        "UCX_TLS": "tcp,sm,self",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_block()),
    }


@pytest.fixture(scope="module")
def engine(known: Known, places: Path, engine_python: Path) -> Iterator[Engine]:
    flags = places / "one-flags"
    flags.mkdir()
    arguments = places / "one.json"
    setting = setting_for("cpu", gpus=())
    asked = {
        **setting.reference_arguments(),
        "model": str(known.model),
        "kv_transfer_config": connector(),
    }
    arguments.write_text(json.dumps(asked))
    read, write = os.pipe()
    command = [engine_python, SCRIPT, arguments, str(MAX_TOKENS), str(TOP), str(write)]
    with (places / "one.log").open("wb") as log, os.fdopen(read) as answers:
        running = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            text=True,
            pass_fds=(write,),
            env=environment(flags),
        )
        os.close(write)

        def next_line(timeout: float) -> str:
            ready, _, _ = select.select([answers], [], [], timeout)
            line = answers.readline() if ready else ""
            assert line, f"no line within {timeout:.0f} s; its log: {log.name}"
            return line

        def ask(prompt: int) -> Comparison:
            assert running.stdin is not None
            running.stdin.write(json.dumps(known.prompts[prompt]) + "\n")
            running.stdin.flush()
            answer = answer_of(json.loads(next_line(DEADLINE)))
            return compare(known.references[prompt], answer, bound=CPU_BOUND)

        try:
            assert next_line(START) == "ready\n"
            yield Engine(ask, lambda: read_snapshot(str(feed_path("one", "one-0", 0))), flags)
        finally:
            try:
                running.communicate(timeout=STOP)
            except subprocess.TimeoutExpired:
                running.kill()
                running.wait()
        assert running.returncode == 0


def longest(known: Known, among: range) -> int:
    return max(among, key=lambda prompt: len(known.prompts[prompt]))


def test_it_is_one_process(engine: Engine) -> None:
    """The feed is served by the engine core, the children are the two of a pair."""
    assert engine.seen().connector["children"] == "NixlPullConnector+OffloadingConnector"


def test_what_was_stored_and_evicted_is_reloaded_and_right(engine: Engine, known: Known) -> None:
    for prompt in FIRST_ROUND:
        assert engine.ask(prompt).difference is None
    assert engine.ask(longest(known, FIRST_ROUND[:4])).difference is None
    seen = engine.seen()
    stored, loaded = seen.transfers_of("host", "store"), seen.transfers_of("host", "load")
    assert stored.bytes > 0
    assert loaded.bytes > 0
    assert stored.not_ok == loaded.not_ok == 0


def test_a_wrong_block_turns_the_comparison_red(engine: Engine, known: Known) -> None:
    (engine.flags / PLANT).touch()
    found = engine.ask(longest(known, FIRST_ROUND[4:8]))
    assert not (engine.flags / PLANT).exists(), "no load came from host memory"
    assert found.difference is not None, f"unnoticed; deviation {found.deviation}"


def test_every_load_was_completed_once(engine: Engine) -> None:
    seen = engine.seen()
    waits = sum(wait.duration.count for wait in seen.waits if wait.outcome == "ok")
    assert waits == seen.transfers_of("host", "load").ok == 2
    assert not {each.cause for each in seen.dropped} & {"stray_completion", "hook_failed"}
