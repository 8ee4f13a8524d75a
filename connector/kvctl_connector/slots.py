"""What several children give and each must get back: kept apart by the child's place in the list.

Upstream hands one child's events or handshake data on as if it were everybody's. These carriers
cross the processes in its place; whoever receives one takes out what each child gave.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_events import KVConnectorKVEvents
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata


class ChildHandshakes(KVConnectorHandshakeMetadata):
    """One worker's handshake metadata, by child."""

    def __init__(self, by_child: dict[int, Any]) -> None:
        self.by_child = by_child


class ChildEvents(KVConnectorKVEvents):
    """One step's KV events of the workers' side, by child.

    vLLM joins the ranks by ``add_events(other.get_all_events())`` and ``increment_workers(1)``
    (kv_connector/utils.py, KVOutputAggregator, 0.20.2 to 0.33.0). Which ranks had events differs
    from child to child, so each child's workers are counted where its events are added.
    """

    def __init__(self, by_child: dict[int, Any]) -> None:
        self.by_child = by_child

    def get_all_events(self) -> list[Any]:
        """Pairs of a child's place and its container, as `add_events` takes them."""
        return list(self.by_child.items())

    def add_events(self, events: list[Any]) -> None:
        for child, given in events:
            mine = self.by_child.get(child)
            if mine is None:
                self.by_child[child] = given
            else:
                mine.add_events(given.get_all_events())
                mine.increment_workers(given.get_number_of_workers())

    def increment_workers(self, count: int = 1) -> None:
        """Nothing: see the class."""

    def get_number_of_workers(self) -> int:
        return max(events.get_number_of_workers() for events in self.by_child.values())

    def aggregate(self) -> ChildEvents:
        for events in self.by_child.values():
            events.aggregate()
        return self

    def clear_events(self) -> None:
        for events in self.by_child.values():
            events.clear_events()
