"""Which engines a topology has, and which GPUs and ports each gets: a pure function of the file.

Ports, from ``ports.base``:

* +0 router (unless ``router.port`` says otherwise), +1 the router's metrics, +2 to +9 unused;
* from +10 on a block for each engine, in the order of the file, its size rounded up to tens:
  API, then one port per data-parallel rank for NIXL's side channel, then as many for KV events
  and as many for the peer-to-peer tier. The last two are kept free, nothing binds them yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvctl.topology.flags import DATA, SIZES, merged
from kvctl.topology.models import Instance, Role, Topology

LOOPBACK = "127.0.0.1"
STEP = 10
PORTS_OF_A_RANK = 3  # side channel, KV events, peer-to-peer tier


@dataclass(frozen=True)
class Slot:
    """One engine: a replica of an instance.

    Attributes:
        world: devices that it uses, tensor × pipeline × prefill-context × data parallel size.
        ranks: engine cores in it, its data-parallel size.
        flags: of ``vllm serve``, the file's and the instance's together.
        port: its API; its other ports follow.
    """

    name: str
    instance: str
    role: Role
    node: str | None
    address: str
    world: int
    ranks: int
    gpus: tuple[str, ...]
    flags: Mapping[str, Any]
    port: int

    def side_channel(self, rank: int) -> int:
        """NIXL adds the rank to the port that it is given (nixl/base_scheduler.py)."""
        return self.port + 1 + rank

    @property
    def on_loopback(self) -> bool:
        return self.address in ("localhost", "::1") or self.address.startswith("127.")

    @property
    def end(self) -> int:
        """One past its last port."""
        return self.port + _block(self.ranks)


def slots(topology: Topology) -> list[Slot]:
    """Every engine of the topology, on all nodes, in the order of the file."""
    found: list[Slot] = []
    port = topology.ports.base + STEP
    for name, instance in topology.instances.items():
        flags = merged(topology.args, instance.args)
        world, ranks = _product(flags), size_of(flags, DATA)
        for replica in range(instance.replicas):
            slot = Slot(
                name=f"{name}-{replica}",
                instance=name,
                role=instance.role,
                node=instance.node,
                address=address_of(topology, instance.node),
                world=world,
                ranks=ranks,
                gpus=tuple((instance.gpus or ())[replica * world : (replica + 1) * world]),
                flags=flags,
                port=port,
            )
            found.append(slot)
            port = slot.end
    return found


def address_of(topology: Topology, node: str | None) -> str:
    """Where a node's engines listen: its address, or loopback where there are no nodes."""
    return topology.nodes[node].address if node in topology.nodes else LOOPBACK


def router_port(topology: Topology) -> int:
    """Port for clients; only meaningful where there is a router."""
    router = topology.router
    return router.port if router and router.port else topology.ports.base


def router_metrics_port(topology: Topology) -> int:
    return topology.ports.base + 1


def router_node(topology: Topology) -> str | None:
    """The node that the router runs on; None where there are no nodes."""
    chosen = topology.router.node if topology.router else None
    return chosen or next(iter(topology.nodes), None)


def size_of(flags: Mapping[str, Any], flag: str) -> int:
    """The value of a parallel size; 1 where it is not given."""
    return int(flags.get(flag, 1))


def needed_gpus(topology: Topology, instance: Instance) -> int:
    return instance.replicas * _product(merged(topology.args, instance.args))


def _product(flags: Mapping[str, Any]) -> int:
    product = 1
    for flag in SIZES:
        product *= size_of(flags, flag)
    return product


def _block(ranks: int) -> int:
    return -(-(1 + PORTS_OF_A_RANK * ranks) // STEP) * STEP
