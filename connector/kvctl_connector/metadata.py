"""What the two halves of the connector send each other with every step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import multi_connector as upstream

from .completion import GivenUp
from .facts import Fact
from .lease import Lease
from .offload_failures import FailedJob


@dataclass
class Metadata(upstream.MultiKVConnectorMetadata):
    """Scheduler half → workers: upstream's, the loads that begin (request → children), the
    leases of requests that have just arrived, the loads that are given up, and who still saves
    the requests that have ended."""

    loads: dict[str, tuple[int, ...]] = field(default_factory=dict)
    leases: dict[str, Lease] = field(default_factory=dict)
    given_up: dict[str, GivenUp] = field(default_factory=dict)
    saves: dict[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass
class WorkerMetadata(upstream.MultiKVConnectorWorkerMetadata):
    """Workers → scheduler half: upstream's, and what this step's transfers were."""

    facts: list[Fact] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    strays: int = 0  # reports of completions that nobody awaited
    ended: list[int] = field(default_factory=list)  # numbers of given-up loads
    own_saves: list[tuple[int, str]] = field(default_factory=list)  # child and request, each rank's
    failed: set[FailedJob] = field(default_factory=set)  # of offload children

    def aggregate(self, other: Any) -> WorkerMetadata:
        """Joins two ranks; the first one's type decides, so every rank sends this type."""
        joined = super().aggregate(other)
        return WorkerMetadata(
            metadata=joined.metadata,
            facts=[*self.facts, *other.facts],
            missing=sorted({*self.missing, *other.missing}),
            strays=self.strays + other.strays,
            ended=[*self.ended, *other.ended],
            own_saves=[*self.own_saves, *other.own_saves],
            failed=self.failed | other.failed,
        )
