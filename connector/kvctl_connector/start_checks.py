"""What cannot work is refused when an engine starts, with the reason and what to write instead.

Everything is decided by what the installed vLLM can do, not by its version. Where the connector
changes nothing (KVCTL_CONNECTOR=off) a refusal becomes a warning: the engine then does what it
would do without kvctl.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.v1.kv_cache_interface import FullAttentionSpec

from . import store_fence
from .config import ConfigError
from .forwarding import registered
from .guard import logger


def listed(transfer: Any) -> None:
    """Raises ConfigError: there are no children, or one is not as vLLM wants it."""
    children = transfer.kv_connector_extra_config.get("connectors")
    if not children:
        raise ConfigError(
            'kv_connector_extra_config has no "connectors": list the children there, for instance '
            '[{"kv_connector": "NixlConnector", "kv_role": "kv_producer"}, '
            '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}]'
        )
    for child in children:
        if not child.get("kv_role"):
            raise ConfigError(
                f'the child {child.get("kv_connector")!r} has no "kv_role": write "kv_producer" '
                '(prefill), "kv_consumer" (decode) or "kv_both" into its entry of "connectors"'
            )


def before_building(
    vllm_config: Any, children: list[tuple[type, Any]], kv_cache_config: Any, *, enforced: bool
) -> None:
    """Checks the configuration.

    Args:
        vllm_config: vLLM's, of the whole engine.
        children: their classes, and the VllmConfig that each is built with.
        kv_cache_config: vLLM's KVCacheConfig: the model's groups of layers.
        enforced: a refusal is raised; else it is logged as a warning.

    Raises:
        ConfigError: the first refusal.
    """
    hybrid = not vllm_config.scheduler_config.disable_hybrid_kv_cache_manager
    for child, config in children:
        _refuse(_unregistered(child), enforced)
        _refuse(_alias(config.kv_transfer_config), enforced)
        _refuse(_pushes(child), enforced)
        _refuse(_failure_unseen(child, kv_cache_config, hybrid=hybrid), enforced)


def after_building(
    transfer: Any, children: Iterable[Any], configs: Iterable[Any], *, enforced: bool
) -> None:
    """Checks what the scheduler's process has built; here, once an engine, it also warns.

    Args:
        transfer: the engine's KVTransferConfig.
        children, configs: the child connectors, and their KVTransferConfigs.
        enforced: as above.

    Raises:
        ConfigError: the first refusal.
    """
    for child in children:
        _refuse(_stores_unfenced(child), enforced)
    loads = any(config.kv_role != "kv_producer" for config in configs)
    if loads and getattr(transfer, "kv_load_failure_policy", "fail") == "fail":
        logger.warning(  # D13
            'kvctl: kv_load_failure_policy is "fail", vLLM\'s default: a request whose KV could '
            "not be loaded (a peer gone, a lease run out) ends with an error at the client. "
            'Write "kv_load_failure_policy": "recompute" beside "kv_connector" to have it loaded '
            "from another tier or computed instead"
        )


def _refuse(reason: str | None, enforced: bool) -> None:
    if reason is None:
        return
    if enforced:
        raise ConfigError(reason)
    logger.warning("kvctl: %s", reason)


def _unregistered(child: type) -> str | None:
    """D12: the API server looks a child's class up by its name, and dies if it is not there."""
    if registered(child.__name__):
        return None
    return (
        f"the child class {child.__name__} ({child.__module__}) is not registered with vLLM: its "
        "statistics would end all output of the API server. Register it from a "
        "vllm.general_plugins entry point, which every process of vLLM loads: "
        f"KVConnectorFactory.register_connector({child.__name__!r}, {child.__module__!r}, "
        f"{child.__name__!r})"
    )


def _alias(config: Any) -> str | None:
    """D17: vLLM looks for NIXL by one of its two names (config/kv_transfer.py, has_connector)."""
    if config.kv_connector != "NixlPullConnector":
        return None
    return (
        'the child "NixlPullConnector" is the same class as "NixlConnector", but vLLM checks '
        "block sizes and context parallelism for the latter name only: write "
        '"kv_connector": "NixlConnector"'
    )


def _pushes(child: type) -> str | None:
    """Prefill writes into decode's blocks, and none of our guards sees it."""
    if not child.__name__.startswith("NixlPush"):
        return None
    return (
        "the child NixlPushConnector lets prefill write into decode's blocks. kvctl's lease guard "
        "and signed offers protect reads by decode; the registration that tells prefill where to "
        'write is not signed, and how a write ended is not watched. Write "NixlConnector" (pull), '
        "or start the engine with KVCTL_CONNECTOR=off to have vLLM's own behaviour, unguarded"
    )


def _failure_unseen(child: type, kv_cache_config: Any, *, hybrid: bool) -> str | None:
    """D13b: without a channel for failed requests, NIXL reports a failed pull as received.

    It names invalid blocks only where all groups are of full attention (nixl/base_worker.py
    0.28.0, `_handle_failed_transfer`), and vLLM has failed requests from 0.30.0 on.
    """
    if not child.__name__.startswith("Nixl") or hasattr(
        base.KVConnectorBase_V1, "get_transfer_results"
    ):
        return None
    groups = getattr(kv_cache_config, "kv_cache_groups", None) or []
    if not hybrid or all(isinstance(group.kv_cache_spec, FullAttentionSpec) for group in groups):
        return None
    return (
        f"this model has {len(groups)} KV cache group(s) that are not all of full attention, and "
        "this vLLM cannot say that a NIXL read for such a model failed: the request would go on "
        "over blocks that were never written. Upgrade vLLM to 0.30.0 or later, or start the "
        "engine with --disable-hybrid-kv-cache-manager"
    )


def _stores_unfenced(child: Any) -> str | None:
    """D8: blocks that are still being stored must not be overwritten unseen."""
    if not type(child).__name__.startswith("Offloading") or store_fence.fenced(child):
        return None
    return (
        "this vLLM's OffloadingConnector cannot be told that blocks which it still stores are "
        "about to be overwritten by another child's load: the tier would keep wrong KV. Use a "
        "vLLM release that docs/releases.md lists, or take one of the children out"
    )
