"""Offers: what prefill signs and what decode believes."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvctl_connector import offers as offers_module
from kvctl_connector.config import ConfigError
from kvctl_connector.offers import Grant, Offers, Peers, grant_of, prompt_digest, read_keys

KEY, OTHER_KEY = b"a key of prefill's", b"somebody else's key"
PROMPT = list(range(300))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    now = SimpleNamespace(ms=1_000_000)
    monkeypatch.setattr(offers_module, "_now", lambda: now.ms)
    return now


@pytest.fixture(autouse=True)
def _clock(clock: SimpleNamespace) -> None: ...


def make_offers(*keys: bytes, required: bool = True, peers: tuple[str, ...] = ()) -> Offers:
    return Offers(
        keys or (KEY,), required=required, peers=Peers(peers), lease=30_000, extension=20_000
    )


def make_request(
    prompt: list[int] | None = None, *, params: Any = None, name: str = "r", **extra: Any
) -> Any:
    return SimpleNamespace(
        request_id=name, prompt_token_ids=prompt or PROMPT, kv_transfer_params=params, **extra
    )


def make_offer(*keys: bytes, prompt: list[int] | None = None, name: str = "p1") -> dict[str, Any]:
    """What a client gets from prefill, after its JSON went through a router."""
    prefill = (
        make_offers(*keys)
        if keys != (b"",)
        else Offers((), required=False, peers=Peers(()), lease=30_000, extension=20_000)
    )
    request = make_request(prompt, name=name)
    params = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": "prefill",
        "remote_request_id": name,
        "remote_block_ids": ([1, 2, 3],),
        "remote_host": "10.0.0.1",
        "remote_port": 5600,
        "tp_size": 1,
    }
    prefill.expect_to_offer(request)
    prefill.grant(request, params)
    return dict(json.loads(json.dumps(params)))


def judge(decode: Offers, params: Any, prompt: list[int] | None = None, **extra: Any) -> str:
    """The reason for which an offer is refused; empty: believed."""
    request = make_request(prompt, params=params, **extra)
    verdict = decode.judge(request)
    assert verdict is not None
    return verdict.refused


def test_an_offer_is_believed_for_its_own_prompt() -> None:
    assert judge(make_offers(), make_offer()) == ""


def test_another_prompts_offer_is_refused() -> None:
    assert judge(make_offers(), make_offer(), [*PROMPT[:-1], 7]) == "offer_mismatch"
    assert judge(make_offers(), make_offer(), PROMPT[:-1]) == "offer_mismatch"


@pytest.mark.parametrize(
    "extra",
    [
        {"cache_salt": "tenant b"},
        {"lora_request": SimpleNamespace(lora_name="adapter")},
        {"mm_features": [SimpleNamespace(identifier="an image")]},
    ],
)
def test_what_else_the_kv_depends_on_is_bound_too(extra: dict[str, Any]) -> None:
    assert judge(make_offers(), make_offer(), **extra) == "offer_mismatch"


def test_an_offer_is_used_once() -> None:
    decode = make_offers()
    assert judge(decode, make_offer()) == ""
    assert judge(decode, make_offer(), name="second") == "offer_reused"
    assert judge(decode, make_offer(name="p2"), name="third") == ""


def test_several_prompts_over_one_offer_get_it_once_at_most() -> None:
    decode = make_offers()
    prompts = [PROMPT, [5, 6, 7], PROMPT]
    told = [judge(decode, make_offer(), prompt, name=str(n)) for n, prompt in enumerate(prompts)]
    assert told == ["", "offer_mismatch", "offer_reused"]


@pytest.mark.parametrize(
    "change",
    [
        {"remote_block_ids": [[1, 2]]},
        {"remote_block_ids": [[1, 2, 3, 4, 5, 6, 7]]},
        {"remote_block_ids": None},
        {"remote_block_ids": "all of them"},
        {"remote_block_ids": [[float("nan")]]},
        {"remote_engine_id": "a stale engine"},
        {"remote_request_id": "another request"},
        {"remote_host": "169.254.169.254"},
        {"remote_port": 22},
        {"tp_size": 2},
        {"dcp_size": 2},
        {"pp_size": 2},
        {"remote_num_tokens": 100},
        {"remote_block_size": 16},
        {"kvctl_lease": [1_000_000, 999_999_999, 20_000]},
        {"kvctl_signature": "00"},
        {"kvctl_signature": "é"},
    ],
    ids=str,
)
def test_an_altered_offer_is_refused(change: dict[str, Any]) -> None:
    assert judge(make_offers(), make_offer() | change) == "offer_mismatch"


def test_a_network_with_a_mistake_is_no_host_name() -> None:
    with pytest.raises(ConfigError, match=r"10\.0\.0\.5/24.*host bits"):
        Peers(["10.0.0.5/24"])


def test_a_prompt_of_embeddings_is_its_embeddings() -> None:
    first, second = torch.zeros(4, 8, dtype=torch.bfloat16), torch.zeros(4, 8, dtype=torch.bfloat16)
    second[3, 7] = 1e-3
    digests = {
        prompt_digest(make_request([0], prompt_embeds=embeds))
        for embeds in (None, first, second, first.reshape(8, 4), first.clone())
    }
    assert len(digests) == 4


@pytest.mark.parametrize("value", [None, "", 7, -1, 2**40, True, "x", [], {}, 1.5], ids=repr)
@pytest.mark.parametrize(
    "field",
    ["remote_engine_id", "remote_request_id", "remote_host", "remote_port", "remote_block_ids",
     "tp_size", "pp_size", "remote_num_tokens"],
)  # fmt: skip
def test_without_a_key_only_what_vllm_can_take_is_believed(field: str, value: Any) -> None:
    """NIXL's threads end in a KeyError or TypeError of the rest, and the request waits for ever."""
    decode = Offers((), required=False, peers=Peers(()), lease=30_000, extension=20_000)
    right = {"remote_port": [7], "tp_size": [None, 7], "pp_size": [None, 7],
             "remote_num_tokens": [None, 7], "remote_engine_id": ["x"],
             "remote_request_id": ["x"], "remote_host": ["x"]}.get(field, [])  # fmt: skip
    verdict = judge(decode, make_offer(b"") | {field: value})
    assert (verdict == "") == any(value is one or value == one for one in right)


@pytest.mark.parametrize("value", [None, 7, ["a"], {}])
def test_no_signature_is_refused_where_one_is_required(value: Any) -> None:
    assert judge(make_offers(), make_offer() | {"kvctl_signature": value}) == "offer_unsigned"
    assert judge(make_offers(), make_offer(b"")) == "offer_unsigned"


def test_unsigned_offers_are_accepted_and_told_apart_without_a_key() -> None:
    decode = Offers((), required=False, peers=Peers(()), lease=30_000, extension=20_000)
    request = make_request(params=make_offer(b""))
    verdict = decode.judge(request)
    assert verdict == ("", False)


def test_a_wrong_signature_is_refused_even_where_none_is_required() -> None:
    decode = make_offers(required=False)
    assert judge(decode, make_offer(OTHER_KEY)) == "offer_mismatch"


def test_a_key_can_change_while_engines_run() -> None:
    old, new = make_offer(KEY), make_offer(OTHER_KEY, name="p2")
    decode = make_offers(OTHER_KEY, KEY)
    assert judge(decode, old) == ""
    assert judge(decode, new) == ""
    assert judge(make_offers(OTHER_KEY), make_offer(KEY)) == "offer_mismatch"


def test_an_offer_whose_lease_is_over_is_refused(clock: SimpleNamespace) -> None:
    decode, offer, again = make_offers(), make_offer(), make_offer()
    assert judge(decode, again) == ""
    clock.ms += 30_000
    assert judge(decode, offer, name="late") == "lease_expired"


def test_used_offers_are_forgotten_when_their_lease_is_over(clock: SimpleNamespace) -> None:
    decode = make_offers()
    for number in range(100):
        clock.ms += 1000
        assert judge(decode, make_offer(name=f"p{number}"), name=str(number)) == ""
    assert len(decode._used) == 30


def test_a_rejected_request_may_release_its_own_blocks_only() -> None:
    decode = make_offers()
    rejected = {"prompt": [0], "abort_immediately": True}
    assert judge(decode, make_offer(), **rejected) == ""
    assert judge(decode, make_offer() | {"remote_request_id": "not mine"}, **rejected) == (
        "offer_mismatch"
    )
    assert judge(decode, make_offer()) == "", "a release is no use"


def test_prefill_signs_the_prompt_as_it_came() -> None:
    prefill = make_offers()
    request = make_request(list(PROMPT))
    prefill.expect_to_offer(request)
    request.prompt_token_ids = PROMPT[:-1]  # vLLM shortens it for some models
    params: dict[str, Any] = {
        "do_remote_prefill": True, "remote_request_id": "r", "remote_block_ids": [[1]],
        "remote_engine_id": "prefill", "remote_host": "10.0.0.1", "remote_port": 5600,
    }  # fmt: skip
    prefill.grant(request, params)
    assert judge(make_offers(), params) == ""


def test_what_cannot_even_be_digested_is_refused() -> None:
    assert judge(make_offers(), make_offer(), [1 << 40]) == "offer_mismatch"


def test_what_is_no_offer_is_not_judged() -> None:
    for params in (None, {}, {"do_remote_prefill": False}, "text", {"do_remote_decode": True}):
        assert make_offers().judge(make_request(params=params)) is None


def test_plain_answers_carry_nothing_of_ours() -> None:
    params: dict[str, Any] = {"do_remote_decode": True}
    make_offers().grant(make_request(), params)
    make_offers().grant(make_request(), None)
    assert params == {"do_remote_decode": True}


def test_the_grant_is_in_whole_milliseconds() -> None:
    assert grant_of(make_offer()) == Grant(1_000_000, 30_000, 20_000)
    for raw in (None, [1, 2], [1, 2, 3.5], [True, 1, 2], "x"):
        assert grant_of({"kvctl_lease": raw}) is None


@pytest.mark.parametrize(
    ("host", "allowed"),
    [("10.0.0.7", True), ("node-b", True), ("::1", True), ("10.0.1.7", False), ("node-c", False),
     (None, False), (7, False)],
)  # fmt: skip
def test_peers_are_hosts_and_networks(host: object, allowed: bool) -> None:
    assert Peers(["10.0.0.0/24", "node-b", "::1"]).allow(host) is allowed
    assert Peers([]).allow(host)


def test_a_stranger_is_refused_before_anything_else() -> None:
    decode = make_offers(peers=("127.0.0.1",))
    assert judge(decode, make_offer()) == "peer_not_allowed"


def test_key_files(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("the first key, which signs\n\n the second, still accepted \n")
    file.chmod(0o600)
    assert read_keys(str(file)) == (
        b"the first key, which signs",
        b"the second, still accepted",
    )
    file.chmod(0o644)
    with pytest.raises(ConfigError, match="others may read"):
        read_keys(str(file))
    file.chmod(0o600)
    file.write_text("short\n")
    with pytest.raises(ConfigError, match="16 characters"):
        read_keys(str(file))
    with pytest.raises(ConfigError, match="cannot be read"):
        read_keys(str(tmp_path / "missing"))


def test_a_digest_tells_prompts_apart_that_look_alike() -> None:
    digests = {
        prompt_digest(make_request(tokens, cache_salt=salt))
        for tokens, salt in (([1, 2], None), ([1], "2"), ([1, 2, 0], None), ([2, 1], None))
    }
    assert len(digests) == 4


@pytest.mark.parametrize(
    "blocks", [None, [], [[]], [None], [[1], 5], [["1"]], [[-1]], [[True]], "12", 7, {"0": [1]}]
)
def test_blocks_in_a_form_that_vllm_does_not_make(blocks: Any) -> None:
    """Upstream's engine dies of some; without a key nothing else would stop them."""
    decode = Offers((), required=False, peers=Peers(()), lease=30_000, extension=20_000)
    assert judge(decode, make_offer(b"") | {"remote_block_ids": blocks}) == "offer_mismatch"


@pytest.mark.parametrize("blocks", [[[1, 2]], ([1], []), [3, 4], [[0]]])
def test_blocks_in_the_forms_that_it_makes(blocks: Any) -> None:
    decode = Offers((), required=False, peers=Peers(()), lease=30_000, extension=20_000)
    assert judge(decode, make_offer(b"") | {"remote_block_ids": blocks}) == ""
