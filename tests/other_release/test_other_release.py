"""Prefill, decode and host tier on another release of vLLM: whatever KV goes where, the answers are
those of one plain engine. In this order: the last test leaves decode without its prefill."""

from __future__ import annotations

import json
import os
import urllib.request

import pytest
from late_read import late_read
from misbehaviour import PLANT
from pair import Pair, kill_session, wait_for

from kvctl.demo.setting import DEADLINE
from kvctl.demo.traffic import ask
from kvctl.sources.snapshot import EngineSnapshot

pytestmark = pytest.mark.engine

BLOCK = 128  # tokens
FIRST = range(12)  # prompts that go through both engines at the start
FILLING = (2, 6, 10, 1, 11)  # of those, together twice what a device cache holds
PLANTED = 9  # of those, the one that a wrong block is planted into
SHORT = 16  # less than a block: nothing of it is stored
# Long prompts that decode must not have in its host tier before their tests, and one for prefill.
MISMATCHED, COMPOSED, LATE, ORPHANED, OFFERED = 22, 14, 15, 21, 18


def use_up(pair: Pair) -> None:
    """Sends other prompts through both, so that every block that is free has been used again."""
    for prompt in FILLING:
        assert pair.ask(prompt).difference is None


def test_the_engines_are_of_that_release(pair: Pair) -> None:
    for url in (pair.prefill_url, pair.decode_url):
        with urllib.request.urlopen(f"{url}/version", timeout=DEADLINE) as answer:
            version = json.load(answer)["version"]
        assert version.partition("+")[0] == os.environ["KVCTL_TEST_RELEASE"]


def test_kv_is_pulled_and_answers_are_right(pair: Pair) -> None:
    for prompt in FIRST:
        assert pair.ask(prompt).difference is None
    # A pull that a busy machine has stalled for its whole lease is expired, not wrong.
    pulled = settled(pair, "decode-0").transfers_of("peer", "recv")
    assert pulled.ok >= len(FIRST) - 2, pulled.counts
    assert pulled.bytes > 0


def test_what_was_evicted_is_reloaded_and_right(pair: Pair) -> None:
    before = settled(pair, "prefill-0")
    assert before.transfers_of("host", "store").bytes > 0

    assert pair.ask(FILLING[0]).difference is None

    after = settled(pair, "prefill-0").transfers_of("host", "load")
    assert after.bytes > before.transfers_of("host", "load").bytes
    assert after.not_ok == 0


def test_a_wrong_block_turns_the_comparison_red(pair: Pair) -> None:
    """The self-test of every "answers are right" here: one block of one load is another."""
    (pair.flags / PLANT).touch()
    found = pair.take(PLANTED, None)
    assert not (pair.flags / PLANT).exists(), "no load came from host memory"
    assert found.difference is not None, f"unnoticed; deviation {found.deviation}"


def test_another_prompts_offer_is_no_offer(pair: Pair) -> None:
    before = pair.refused("offer_mismatch")
    assert pair.take(MISMATCHED, pair.offer(OFFERED)).difference is None
    assert pair.refused("offer_mismatch") == before + 1


def test_a_prefix_from_host_memory_and_the_rest_from_prefill(pair: Pair) -> None:
    """Decode has stored the first blocks of a prompt, and then gets an offer for all of it."""
    prefix = pair.prompts[COMPOSED][: 2 * BLOCK + 1]
    ask(pair.decode_url, prefix, model=pair.model, deadline=DEADLINE)
    use_up(pair)
    before = composed(pair)
    assert pair.ask(COMPOSED).difference is None
    assert composed(pair) == before + 1


def test_a_late_read_is_not_answered_from(pair: Pair) -> None:
    before = pair.refused("lease_expired")
    assert late_read(pair, LATE).difference is None
    assert pair.refused("lease_expired") > before


def test_nothing_is_held_afterwards(pair: Pair) -> None:
    for name in ("prefill-0", "decode-0"):
        assert not any(each.inflight for each in settled(pair, name).transfers)


def test_without_its_prefill_decode_computes(pair: Pair) -> None:
    offer = pair.offer(ORPHANED)
    kill_session(pair.record("prefill-0")["pid"])
    failed = settled(pair, "decode-0").transfers_of("peer", "recv").not_ok
    assert pair.take(ORPHANED, offer).difference is None
    assert settled(pair, "decode-0").transfers_of("peer", "recv").not_ok > failed
    assert pair.take(OFFERED, None).difference is None


def settled(pair: Pair, name: str) -> EngineSnapshot:
    """What an engine says once nothing of it is in flight.

    It is kept busy meanwhile: vLLM 0.20.2 takes steps only while it has requests to run, and
    hears in a step that its blocks were read or stored.
    """
    url = {"prefill-0": pair.prefill_url, "decode-0": pair.decode_url}[name]

    def quiet() -> EngineSnapshot | None:
        ask(url, pair.prompts[SHORT], model=pair.model, deadline=DEADLINE)
        seen = pair.seen(name)
        return None if any(each.inflight for each in seen.transfers) else seen

    return wait_for(quiet, f"{name} has transfers in flight")


def composed(pair: Pair) -> int:
    """Requests that decode has loaded from both tiers."""
    return sum(each.count for each in pair.seen("decode-0").choices if each.tier == "composed")
