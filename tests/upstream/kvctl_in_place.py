"""A pytest plugin for vLLM's own tests: kvctl's class in the place of vLLM's MultiConnector.

Wherever those tests, or vLLM for them, look the class up in its module they get ours, with
upstream's order of tiers: they configure no kvctl options, and assert that order.
"""

from collections.abc import Mapping
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import multi_connector

from kvctl_connector.config import Options
from kvctl_connector.connector import MultiConnector


def pytest_configure() -> None:
    """Before the tests are imported."""
    multi_connector.MultiConnector = MultiConnector
    Options.parse = classmethod(_in_upstreams_order)  # type: ignore[assignment,method-assign]


_parse = Options.parse.__func__  # type: ignore[attr-defined]


def _in_upstreams_order(cls: type[Options], raw: Mapping[str, Any]) -> Any:
    order = {"tier_policy": "upstream"} if "tier_policy" in cls.__dataclass_fields__ else {}
    return _parse(cls, {**order, **raw})
