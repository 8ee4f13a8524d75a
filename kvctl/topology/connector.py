"""The JSON of ``--kv-transfer-config``: kvctl's composite, NIXL, and the host tier."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from kvctl.topology.layout import Slot, slots
from kvctl.topology.models import Topology
from kvctl.topology.text import json_text

# The composite's class bears upstream's name on purpose: vLLM tests for it in several places.
CLASS = "MultiConnector"
MODULE = "kvctl_connector.connector"
HOST_SPEC = {"spec_name": "HostMemorySpec", "spec_module_path": "kvctl_connector.host_memory"}


def transfer_config(
    topology: Topology, slot: Slot, *, host_bytes: int | None, platform: str
) -> str:
    """The configuration of one engine's connector, as one line of JSON.

    Args:
        host_bytes: the engine's part of `host_shares`.
    """
    role = "kv_producer" if slot.role == "prefill" else "kv_consumer"
    observes = topology.transfer.connector == "observe"
    children = [_nixl(topology, role, platform)]
    if host_bytes is not None:
        children.append(_offload(topology, slot, host_bytes, platform))
    return json_text(
        {
            "kv_connector": CLASS,
            "kv_connector_module_path": MODULE,
            "kv_role": role,
            "kv_load_failure_policy": topology.transfer.kv_load_failure_policy,
            "kv_connector_extra_config": {
                "connectors": children,
                "kvctl": {
                    "topology": topology.name,
                    "instance": slot.name,
                    "role": slot.role,
                    "mode": topology.transfer.connector,
                    "offers": "accept" if observes else "signed",
                    "peers": peers(topology),
                    "tier_policy": topology.transfer.tier_policy,
                    "composed": topology.transfer.composed_hits,
                    "wait_deadline_ms": round(1000 * topology.transfer.wait_deadline),
                },
            },
        }
    )


def peers(topology: Topology) -> list[str]:
    """The hosts whose engines a decode engine may be sent to: those of the prefill instances."""
    return sorted({slot.address for slot in slots(topology) if slot.role == "prefill"})


def host_shares(topology: Topology, engines: Sequence[Slot]) -> list[int | None]:
    """Bytes of host memory for each rank of each engine; None without a host tier.

    The file's figure is the node's: the ranks of its engines get an equal share each, except
    those whose instance has a figure of its own.
    """
    own = [topology.instances[slot.instance].offload for slot in engines]
    sharing: Counter[str | None] = Counter()
    for slot, offload in zip(engines, own, strict=True):
        if offload is None:
            sharing[slot.node] += slot.ranks
    common = topology.offload.host if topology.offload else None
    return [
        offload.host // slot.ranks if offload
        else common // sharing[slot.node] if common
        else None
        for slot, offload in zip(engines, own, strict=True)
    ]  # fmt: skip


def _nixl(topology: Topology, role: str, platform: str) -> dict[str, Any]:
    child: dict[str, Any] = {"kv_connector": "NixlConnector", "kv_role": role}
    if platform == "cpu":
        child["kv_buffer_device"] = "cpu"
    child["kv_connector_extra_config"] = {
        "kv_lease_duration": int(topology.transfer.kv_lease_duration),
        "backends": list(topology.transfer.backends),
    }
    return child


def _offload(topology: Topology, slot: Slot, host_bytes: int, platform: str) -> dict[str, Any]:
    config: dict[str, Any] = {"cpu_bytes_to_use": host_bytes}
    if platform == "cpu":  # vLLM's own offload workers refuse the CPU platform
        config |= HOST_SPEC
    for offload in (topology.offload, topology.instances[slot.instance].offload):
        config |= offload.extra if offload else {}
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": config,
    }
