"""How full the host tier is, for the gauges."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class HostTier:
    """How full the host tier is, from upstream's manager.

    Private names (v1/kv_offload/cpu/manager.py; chunks from 0.30.0, blocks before): without
    them the occupancy is not exported.
    """

    manager: Any
    unit: str
    capacity: int  # bytes

    @property
    def used(self) -> float:
        """Bytes of the chunks that hold blocks."""
        total = getattr(self.manager, f"_num_{self.unit}")
        free = getattr(self.manager, f"_get_num_free_{self.unit}")()
        return float(self.capacity * (total - free) / total)

    @classmethod
    def find(cls, child: Any, config: Any) -> HostTier | None:
        """The tier of one child connector; None where it has none, or does not say."""
        manager = getattr(getattr(child, "connector_scheduler", None), "manager", None)
        capacity = int((config.kv_connector_extra_config or {}).get("cpu_bytes_to_use", 0))
        for unit in ("chunks", "blocks"):
            known = getattr(manager, f"_num_{unit}", 0)
            if capacity and known and hasattr(manager, f"_get_num_free_{unit}"):
                return cls(manager, unit, capacity)
        return None
