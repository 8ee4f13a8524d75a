"""What decode must not answer from: offers that are not its own, and blocks read too late.

Upstream answers each of these with another prompt's KV and HTTP 200, or dies of it. Each guard is
switched off once, by the tests' own module in the engine, to show that these tests can go red.
"""

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from late_read import late_read
from misbehaviour import NO_LEASE_GUARD, NO_OFFER_CHECK
from pair import Pair

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def long(pair: Pair) -> list[int]:
    """Prompts of six blocks and more, longest first, that these tests ask for."""
    first = sorted(range(12), key=lambda prompt: -len(pair.prompts[prompt]))
    return [prompt for prompt in first if len(pair.prompts[prompt]) >= 6 * 128]


def test_another_prompts_offer_is_no_offer(pair: Pair, long: list[int]) -> None:
    before = pair.refused("offer_mismatch")
    pair.forget_on_decode()
    assert pair.take(long[1], pair.offer(long[0])).difference is None
    assert pair.refused("offer_mismatch") == before + 1


def test_without_the_check_it_is_answered_wrong(pair: Pair, long: list[int]) -> None:
    pair.forget_on_decode()
    with pair.flag(NO_OFFER_CHECK):
        assert pair.take(long[1], pair.offer(long[0])).difference is not None
    # What it has now cached under that prompt's hashes is wrong: nobody may find it.
    pair.forget_on_decode()
    assert pair.ask(long[1]).difference is None


def test_an_offer_used_twice(pair: Pair, long: list[int]) -> None:
    before = pair.refused("offer_reused")
    offer = pair.offer(long[0])
    assert pair.take(long[0], dict(offer)).difference is None
    pair.use_up_prefills_cache()
    pair.forget_on_decode()
    again = pair.take(long[0], dict(offer))
    assert again.difference is None
    told = pair.refused("offer_reused") - before + pair.refused("lease_expired")
    assert told >= 1


def test_several_prompts_over_one_offer(pair: Pair, long: list[int]) -> None:
    pair.forget_on_decode()
    compared = pair.take_several([long[0], long[1], long[0]], pair.offer(long[0]))
    assert [each.difference for each in compared] == [None] * 3


ALTERED: dict[str, Callable[[dict[str, Any]], Any]] = {
    "too few blocks": lambda offer: offer["remote_block_ids"][0].pop(),
    "no blocks": lambda offer: offer.update(remote_block_ids=[[]]),
    "blocks missing": lambda offer: offer.pop("remote_block_ids"),
    "far too many blocks": lambda offer: offer.update(remote_block_ids=[list(range(5000))]),
    "a stale engine": lambda offer: offer.update(remote_engine_id="0" * 36),
    "a longer lease": lambda offer: offer.update(kvctl_lease=[0, 1 << 50, 1]),
    "no signature": lambda offer: offer.pop("kvctl_signature"),
    "a wrong signature": lambda offer: offer.update(kvctl_signature="0" * 64),
    "a host of nobody's": lambda offer: offer.update(remote_host="192.0.2.1"),
    "a closed port": lambda offer: offer.update(remote_port=9),
    "another size": lambda offer: offer.update(pp_size=2),
}
UNSIGNED = ("no signature",)
NOT_ALLOWED = ("a host of nobody's",)


@pytest.mark.parametrize("how", ALTERED)
def test_an_altered_offer_is_computed_instead(pair: Pair, long: list[int], how: str) -> None:
    offer = pair.offer(long[0])
    ALTERED[how](offer)
    reason = "offer_unsigned" if how in UNSIGNED else "offer_mismatch"
    if how in NOT_ALLOWED:
        reason = "peer_not_allowed"
    before = pair.refused(reason)
    assert pair.take(long[0], offer).difference is None
    assert pair.refused(reason) == before + 1


@pytest.mark.parametrize("engine", ["decode-0", "prefill-0"])
def test_who_asks_for_both_sides_ends_no_engine(pair: Pair, long: list[int], engine: str) -> None:
    both = {"do_remote_prefill": True, "do_remote_decode": True}
    url = pair.record(engine)["url"]
    for params in (both, {**pair.offer(long[0]), **both}):
        pair.complete(url, pair.prompts[long[0]], params, max_tokens=1)
    assert pair.ask(long[1]).difference is None


def test_another_service_at_the_offers_address(pair: Pair, long: list[int]) -> None:
    """The router's port, on an allowed host."""
    port = int(pair.url.rpartition(":")[2])
    before = pair.refused("offer_mismatch")
    offer = {**pair.offer(long[0]), "remote_port": port}
    assert pair.take(long[0], offer).difference is None
    assert pair.refused("offer_mismatch") == before + 1


def test_a_strangers_port_holds_up_nobody(pair: Pair, long: list[int]) -> None:
    """A silent service on an allowed host: without a signature it is not even connected to."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        silent.settimeout(0.5)
        stranger = {
            **pair.offer(long[0]), "remote_port": silent.getsockname()[1],
            "remote_engine_id": "stranger",
        }  # fmt: skip
        assert pair.take(long[0], stranger).difference is None
        with pytest.raises(TimeoutError):
            silent.accept()
    assert pair.ask(long[1]).difference is None


def test_a_late_read_is_not_answered_from(pair: Pair, long: list[int]) -> None:
    pair.forget_on_decode()
    before = pair.refused("lease_expired")

    assert late_read(pair, long[0]).difference is None

    assert pair.refused("lease_expired") > before
    log = Path(os.environ["KVCTL_STATE_DIR"]) / "runs" / "e2e" / "logs" / "decode-0.log"
    assert "after its lease may have run out" in log.read_text()


def test_without_the_guard_it_is_answered_wrong(pair: Pair, long: list[int]) -> None:
    pair.forget_on_decode()
    with pair.flag(NO_LEASE_GUARD):
        assert late_read(pair, long[0]).difference is not None
    pair.forget_on_decode()
    assert pair.ask(long[0]).difference is None


def test_nothing_is_held_afterwards(pair: Pair) -> None:
    for name in ("prefill-0", "decode-0"):
        assert not any(each.inflight for each in pair.settled(name).transfers)
