"""The engines that the contract checks use, and what they all do with them.

A pytest plugin, loaded with ``-p contract_engines``, so that one process makes each engine once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import engine_rig
import pytest
from engine_rig import BLOCK, Engine, contents, expected
from vllm.v1.request import RequestStatus

from kvctl_connector import guard
from kvctl_connector.offers import KEY_FILE

NIXL = {
    "kv_connector": "NixlConnector",
    "kv_role": "kv_both",
    "kv_buffer_device": "cpu",
    "kv_connector_extra_config": {"kv_lease_duration": 30},
}
HOST = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {
        "cpu_bytes_to_use": 1 << 20,
        "spec_name": "HostMemorySpec",
        "spec_module_path": "kvctl_connector.host_memory",
    },
}
CHILDREN = [NIXL, HOST]

PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}
numbers = itertools.count()


@pytest.fixture(scope="session")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """This process, prepared as a worker's."""
    with pytest.MonkeyPatch.context() as patch:
        engine_rig.prepare(patch, tmp_path_factory.mktemp("run"))
        yield


@pytest.fixture(scope="session")
def make(
    process: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Engine]]:
    model = tmp_path_factory.mktemp("model")  # one path: NIXL compares it between engines
    key = model / "key"
    key.write_text("sixteen characters or more")
    key.chmod(0o600)
    engines: list[Engine] = []

    def make(name: str, **options: Any) -> Engine:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(KEY_FILE, str(key))
            engines.append(Engine(name, model, CHILDREN, **options))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture(scope="session")
def prefill(make: Callable[..., Engine]) -> Engine:
    return make("prefill", role="prefill", offers="signed")


@pytest.fixture(scope="session")
def decode(make: Callable[..., Engine]) -> Engine:
    return make("decode", role="decode", offers="signed")


@pytest.fixture
def no_hook_fails() -> Iterator[None]:
    guard.failures.clear()
    yield
    assert guard.failures == {}, "a hook raised; its traceback is in the log above"


def make_prompt() -> list[int]:
    """A prompt of four blocks and two tokens that no other test has."""
    first = next(numbers)
    return [(first * 7 + place * (first + 3)) % 250 for place in range(4 * BLOCK + 2)]


def offer(prefill: Engine, prompt: list[int]) -> dict[str, Any]:
    """What prefill answers for a request that another engine is to decode."""
    name = f"prefill-{next(numbers)}"
    prefill.add(name, prompt, dict(PREFILL))
    params = prefill.run(name).kv_transfer_params
    assert params is not None and params["do_remote_prefill"]
    return dict(params)


def start(engine: Engine, prompt: list[int], params: dict[str, Any] | None) -> str:
    """A request whose blocks have been allocated."""
    name = f"decode-{next(numbers)}"
    engine.add(name, prompt, params)
    engine.step()
    return name


def is_held(prefill: Engine, params: dict[str, Any]) -> bool:
    """Whether prefill still keeps the blocks of an offer."""
    return params["remote_request_id"] in prefill.scheduler.requests


def free_blocks(engine: Engine) -> int:
    return int(engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())


def is_computed(engine: Engine, name: str) -> bool:
    """Whether a request has ended with the KV that its own prompt gives."""
    request = engine.scheduler.requests.get(name)
    if request is not None and request.num_computed_tokens > 0:
        blocks = engine.blocks(name)
        wanted = expected(list(request.prompt_token_ids))
        running = request.status is RequestStatus.RUNNING
        assert not running or contents(engine, blocks)[: len(wanted)] == wanted
    return name in engine.finished


def stored(engine: Engine, prompt: list[int]) -> None:
    """Has an engine compute a prompt and store it, and empties its device cache."""
    stores = engine.value("transfer.count", "store", "ok")
    engine.run(start(engine, prompt, None))
    engine.run(start(engine, make_prompt(), None))  # stores are submitted a step late
    engine.until(lambda: engine.value("transfer.count", "store", "ok") > stores, "stored")
    engine.until(engine.scheduler.reset_prefix_cache, "no request holds blocks")
