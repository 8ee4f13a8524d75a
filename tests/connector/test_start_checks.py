"""What is refused when an engine starts, and what is only warned of."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_children import (
    FakeUnregisteredConnector,
    NixlFakeConnector,
    OffloadingFakeConnector,
    entry,
    make_config,
    make_groups,
)
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

from kvctl_connector import start_checks
from kvctl_connector.config import ConfigError
from kvctl_connector.connector import SWITCH, MultiConnector

SHAPE = {"block_size": 16, "num_kv_heads": 2, "head_size": 16, "dtype": torch.float32}
FULL = FullAttentionSpec(**SHAPE)
SLIDING = SlidingWindowSpec(**SHAPE, sliding_window=64)


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCTL_RUNTIME_DIR", str(tmp_path))


def start(*children: dict[str, Any], groups: Any = None, hybrid: bool = False) -> Any:
    config = make_config(*children)
    config.scheduler_config.disable_hybrid_kv_cache_manager = not hybrid
    return MultiConnector(config, KVConnectorRole.SCHEDULER, groups or make_groups(FULL))


def objection(child: type, *specs: Any, hybrid: bool = False, name: str = "FakeConnector") -> str:
    """Why a child is refused; empty: it is not."""
    config = make_config(entry("FakeConnector"))
    config.scheduler_config.disable_hybrid_kv_cache_manager = not hybrid
    config.kv_transfer_config.kv_connector = name
    try:
        start_checks.before_building(config, [(child, config)], make_groups(*specs), enforced=True)
    except ConfigError as refused:
        return str(refused)
    return ""


def refusal(*children: dict[str, Any], **more: Any) -> str:
    with pytest.raises(ConfigError) as raised:
        start(*children, **more)
    return str(raised.value)


def test_no_children_is_said_with_an_example() -> None:
    assert '"kv_connector": "NixlConnector"' in refusal()


def test_a_child_without_a_role_is_named() -> None:
    told = refusal({"kv_connector": "FakeConnector"})
    assert "'FakeConnector'" in told
    assert "kv_role" in told


def test_a_child_that_vllm_cannot_look_up_is_refused_with_what_to_write() -> None:
    told = refusal(entry("FakeUnregisteredConnector", kv_connector_module_path="fake_children"))
    assert (
        "register_connector('FakeUnregisteredConnector', 'fake_children', "
        "'FakeUnregisteredConnector')"
    ) in told


def test_nixl_by_its_other_name_is_refused() -> None:
    told = objection(NixlFakeConnector, FULL, name="NixlPullConnector")
    assert 'write "kv_connector": "NixlConnector"' in told


def test_push_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_checks, "registered", lambda name: True)  # 0.22.1 has no push mode
    told = objection(type("NixlPushConnector", (NixlFakeConnector,), {}), FULL)
    assert "prefill write into decode's blocks" in told


@pytest.fixture
def failures_unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM as it was up to 0.28.0: workers cannot report that a request failed."""
    if hasattr(base.KVConnectorBase_V1, "get_transfer_results"):
        monkeypatch.delattr(base.KVConnectorBase_V1, "get_transfer_results")


@pytest.mark.usefixtures("failures_unseen")
@pytest.mark.parametrize("specs", [(FULL, SLIDING), (SLIDING,)])
def test_a_model_whose_failed_reads_nobody_sees_is_refused(specs: tuple[Any, ...]) -> None:
    told = refusal(entry("NixlFakeConnector"), groups=make_groups(*specs), hybrid=True)
    assert f"{len(specs)} KV cache group(s)" in told
    assert "0.30.0" in told
    assert "--disable-hybrid-kv-cache-manager" in told


@pytest.mark.usefixtures("failures_unseen")
@pytest.mark.parametrize(
    ("child", "specs", "hybrid"),
    [
        (NixlFakeConnector, (FULL, FULL), True),
        (NixlFakeConnector, (FULL, SLIDING), False),
        (OffloadingFakeConnector, (FULL, SLIDING), True),
    ],
)
def test_others_are_not_refused(child: type, specs: tuple[Any, ...], hybrid: bool) -> None:
    assert objection(child, *specs, hybrid=hybrid) == ""


def test_where_failed_requests_can_be_reported_the_hybrid_model_is_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        base.KVConnectorBase_V1, "get_transfer_results", lambda *_: None, raising=False
    )
    assert objection(NixlFakeConnector, FULL, SLIDING, hybrid=True) == ""


def test_an_offload_child_that_cannot_be_told_of_writes_is_refused() -> None:
    offload = type("OffloadingConnector", (), {})()
    offload.connector_scheduler = object()
    with pytest.raises(ConfigError, match="overwritten by another child's load"):
        start_checks.after_building(SimpleNamespace(), [offload], [], enforced=True)


@pytest.mark.parametrize(("switch", "mode"), [("off", "compose"), ("", "observe")])
def test_where_nothing_is_composed_a_refusal_is_a_warning(
    switch: str, mode: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(SWITCH, switch)
    stranger = entry("FakeUnregisteredConnector", kv_connector_module_path="fake_children")
    config = make_config(stranger, mode=mode)
    logging.getLogger("vllm").propagate = True
    with caplog.at_level(logging.WARNING, "vllm.kvctl"):
        made = MultiConnector(config, KVConnectorRole.SCHEDULER, make_groups(FULL))
    made.shutdown()
    assert type(made._connectors[0]) is FakeUnregisteredConnector
    assert "is not registered with vLLM" in caplog.text


@pytest.mark.parametrize(
    ("policy", "role", "warned"),
    [
        ("fail", "kv_consumer", True),
        ("fail", "kv_producer", False),
        ("recompute", "kv_consumer", False),
    ],
)
def test_the_policy_that_fails_requests_is_warned_of(
    policy: str, role: str, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    config = make_config(
        {"kv_connector": "FakeConnector", "kv_role": role}, kv_load_failure_policy=policy
    )
    logging.getLogger("vllm").propagate = True
    with caplog.at_level(logging.WARNING, "vllm.kvctl"):
        made = MultiConnector(config, KVConnectorRole.SCHEDULER, make_groups(FULL))
    made.shutdown()
    assert ('Write "kv_load_failure_policy": "recompute"' in caplog.text) is warned
