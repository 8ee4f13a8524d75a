"""KV of real engines over NIXL, to host memory and back, and what is told about it. The order of
these tests counts: each leaves the pair as the next one needs it."""

import json
import os
from pathlib import Path

import pytest
from misbehaviour import PLANT
from otlp_receiver import OtlpReceiver
from pair import Pair, bytes_of, transfers

from kvctl.demo.model import KV_BYTES_PER_TOKEN
from kvctl.demo.prompts import blocks
from kvctl.demo.setting import DEVICE_TOKENS
from kvctl.sources.snapshot import Transfers

pytestmark = pytest.mark.engine

BLOCK = 128  # tokens, on CPUs
DEVICE_BLOCKS = DEVICE_TOKENS // BLOCK
FIRST_ROUND = range(12)


def test_launch_says_that_everything_is_ready(pair: Pair) -> None:
    listed = pair.run("ps", "--json", "-p", "e2e")
    assert listed.returncode == 0, listed.stderr
    phases = {each["name"]: each["phase"] for each in pair.records()}
    assert phases["prefill-0"] == phases["decode-0"] == phases["router"] == "ready"


def test_the_engine_runs_the_connector_of_the_wheel(pair: Pair) -> None:
    """Two environments: the engine's own kvctl, if it has one, is not what it loads."""
    pid = pair.record("prefill-0")["pid"]
    environ = dict(
        entry.split("=", 1)
        for entry in Path(f"/proc/{pid}/environ").read_text().split("\0")
        if "=" in entry
    )
    first = Path(environ["PYTHONPATH"].split(":")[0])
    assert first.is_relative_to(os.environ["KVCTL_STATE_DIR"])
    assert [entry.name for entry in first.iterdir()] == ["kvctl_connector"]


def test_kv_is_pulled_over_nixl_and_answers_are_right(pair: Pair) -> None:
    """A pull that a busy machine has stalled for its whole lease is expired, not wrong."""
    in_time = 0
    for prompt in FIRST_ROUND:
        before = recv(pair)
        assert pair.ask(prompt).difference is None
        after = recv(pair)
        assert sum(after.counts.values()) == sum(before.counts.values()) + 1
        if after.ok > before.ok:
            in_time += 1
            # Every block of the prompt, the last one begun included, at its full size.
            tokens = -(-len(pair.prompts[prompt]) // BLOCK) * BLOCK
            assert after.bytes - before.bytes == tokens * KV_BYTES_PER_TOKEN
    assert in_time >= len(FIRST_ROUND) - 2


def recv(pair: Pair) -> Transfers:
    """What decode has pulled so far."""
    found = transfers(pair.settled("decode-0"), "peer", "recv")
    return found or Transfers("peer", "recv")


def test_prefill_was_told_of_every_pull(pair: Pair) -> None:
    sent = transfers(pair.settled("prefill-0"), "peer", "send")
    pulled = recv(pair)
    assert sum(sent.counts.values()) == sum(pulled.counts.values())
    assert sent.ok >= pulled.ok


def test_full_blocks_are_stored_in_host_memory(pair: Pair) -> None:
    stored = bytes_of(pair.settled("prefill-0"), "host", "store")
    full = sum(blocks(pair.prompts[prompt], BLOCK) for prompt in FIRST_ROUND)
    assert stored == full * BLOCK * KV_BYTES_PER_TOKEN


def test_what_the_device_cache_evicted_is_reloaded_and_right(pair: Pair) -> None:
    """The first prompts have left the device cache of prefill, and come back from its host."""
    used = sum(blocks(pair.prompts[prompt], BLOCK) for prompt in FIRST_ROUND)
    assert used > 2 * DEVICE_BLOCKS, "these prompts would not evict anything"
    longest = max(FIRST_ROUND[:4], key=lambda prompt: len(pair.prompts[prompt]))
    before = pair.settled("prefill-0")

    assert pair.ask(longest).difference is None

    after = pair.settled("prefill-0")
    loaded = bytes_of(after, "host", "load") - bytes_of(before, "host", "load")
    assert loaded > 0
    assert loaded % (BLOCK * KV_BYTES_PER_TOKEN) == 0
    assert bytes_of(after, "host", "store") == bytes_of(before, "host", "store")


def test_a_wrong_block_turns_the_comparison_red(pair: Pair) -> None:
    """The self-test of every "answers are equal" above: one block of one load is another."""
    (pair.flags / PLANT).touch()
    evicted = max(FIRST_ROUND[4:8], key=lambda prompt: len(pair.prompts[prompt]))

    found = pair.ask(evicted)

    assert not (pair.flags / PLANT).exists(), "no load came from host memory"
    assert found.difference is not None, f"unnoticed; deviation {found.deviation}"


def test_figures_by_otlp_are_those_of_the_feed(pair: Pair, receiver: OtlpReceiver) -> None:
    for name in ("prefill-0", "decode-0"):
        snapshot = pair.settled(name)
        for each in snapshot.transfers:
            wanted = {
                "kvctl.instance": snapshot.instance,
                "tier": each.tier,
                "direction": each.direction,
                "outcome": "ok",
            }
            receiver.wait_for(
                lambda wanted=wanted, each=each: (
                    receiver.value("kvctl.transfer.count", **wanted) == each.ok
                )
            )
            if each.direction != "send":
                assert receiver.value("kvctl.transfer.bytes", **wanted) == each.bytes
                duration = receiver.find("kvctl.transfer.duration", **wanted)
                assert duration is not None
                assert duration.count == each.duration.count == each.ok
                assert duration.value == pytest.approx(each.duration.total)


def test_status_agrees(pair: Pair) -> None:
    shown = pair.run("status", "--json", "-p", "e2e")
    assert shown.returncode == 0, shown.stdout + shown.stderr
    status = json.loads(shown.stdout)
    assert status["version"] == 1
    pulled = transfers(pair.seen("decode-0"), "peer", "recv")
    assert f'"bytes": {pulled.bytes}' in json.dumps(status)
