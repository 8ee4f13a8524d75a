"""What one key of the file cannot know of another. Each problem names the key to change."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from kvctl.topology.fields import whole_number
from kvctl.topology.flags import SIZES, merged
from kvctl.topology.layout import needed_gpus, router_metrics_port, router_port, slots
from kvctl.topology.models import Instance, Topology
from kvctl.topology.values import Path

MAX_PORT = 65535
MAX_SIZE = 4096

# Variables whose value all processes of the plan must agree on.
_OURS = {
    "KVCTL_RUNTIME_DIR": "set it in the environment of kvctl itself",
    "KVCTL_RUN_ID": "kvctl marks its processes with it",
    "VLLM_NIXL_SIDE_CHANNEL_PORT": "ports.base moves all ports",
}
_MEMORY_SHARES = ("gpu-memory-utilization", "kv-cache-memory-bytes")

Found = Iterator[tuple[Path, str]]


def problems(topology: Topology) -> Found:
    """Every contradiction in a topology whose keys are each fine, as (path, message)."""
    sizes = list(_sizes(topology))
    yield from sizes
    yield from _roles(topology)
    yield from _nodes(topology)
    yield from _env(topology)
    yield from _timeouts(topology)
    if not sizes:  # GPUs and ports are counted with them
        yield from _gpus(topology)
        yield from _shared_gpus(topology)
        yield from _ports(topology)


def _sizes(topology: Topology) -> Found:
    levels: list[tuple[Path, dict[str, Any]]] = [(("args",), topology.args)]
    levels += [(("instances", name, "args"), one.args) for name, one in topology.instances.items()]
    for path, flags in levels:
        for flag in SIZES:
            if flag not in flags:
                continue
            try:
                if not 1 <= whole_number(flags[flag]) <= MAX_SIZE:
                    yield (*path, flag), f"must be from 1 to {MAX_SIZE}"
            except ValueError as error:
                yield (*path, flag), str(error)


def _roles(topology: Topology) -> Found:
    roles = {instance.role for instance in topology.instances.values()}
    for role in ("prefill", "decode"):
        if role not in roles:
            yield ("instances",), f"no instance with role: {role}; a pair needs one at least"


def _nodes(topology: Topology) -> Found:
    known = ", ".join(topology.nodes)
    places: list[tuple[Path, str | None]] = [
        (("instances", name, "node"), one.node) for name, one in topology.instances.items()
    ]
    for path, node in places:
        if topology.nodes and node is None:
            yield path, f"missing; with nodes every instance says where it runs: {known}"
    if topology.router is not None:
        places.append((("router", "node"), topology.router.node))
    for path, node in places:
        if node is not None and node not in topology.nodes:
            yield (
                path,
                f"there is no node {node}; "
                + (f"there are {known}" if known else "nodes: gives names and addresses"),
            )
    if len(topology.nodes) > 1 and topology.transfer.offer_key is None:
        yield (
            ("nodes",),
            "several nodes need one key for prefill's offers: name its file in transfer.offer_key",
        )


def _env(topology: Topology) -> Found:
    levels: list[tuple[Path, dict[str, str]]] = [(("env",), topology.env)]
    levels += [(("instances", name, "env"), one.env) for name, one in topology.instances.items()]
    for path, env in levels:
        for variable in _OURS.keys() & env.keys():
            yield (*path, variable), f"not here: {_OURS[variable]}"
    for name, instance in topology.instances.items():
        if instance.gpus and "CUDA_VISIBLE_DEVICES" in {**topology.env, **instance.env}:
            yield (
                ("instances", name, "gpus"),
                "CUDA_VISIBLE_DEVICES is set in env too: keep one of them",
            )


def _timeouts(topology: Topology) -> Found:
    for name, instance in topology.instances.items():
        drain = merged(topology.args, instance.args).get("shutdown-timeout")
        if isinstance(drain, int | float) and drain >= topology.stop_timeout:
            where: Path = ("instances", name) if "shutdown-timeout" in instance.args else ()
            yield (
                (*where, "args", "shutdown-timeout"),
                "must be shorter than stop_timeout, after which the engine is killed",
            )
            if not where:
                return


def _gpus(topology: Topology) -> Found:
    for name, instance in topology.instances.items():
        path: Path = ("instances", name, "gpus")
        if instance.gpus is None:
            continue
        needed, listed = needed_gpus(topology, instance), len(instance.gpus)
        if needed != listed:
            yield path, f"{listed} listed, {needed} needed: {_sum(instance, needed)}"
            continue
        size = needed // instance.replicas
        for start in range(0, needed, size):
            own = instance.gpus[start : start + size]
            if len(set(own)) < len(own):
                yield path, f"one engine would get a GPU twice: {', '.join(own)}"
                break


def _sum(instance: Instance, needed: int) -> str:
    size = needed // instance.replicas
    engines = "1 replica" if instance.replicas == 1 else f"{instance.replicas} replicas"
    return f"{engines} × {size} (tensor × pipeline × data parallel size)"


def _shared_gpus(topology: Topology) -> Found:
    """Two engines on one GPU: without a share each, the second one fails for want of memory."""
    told = set()
    for users in shared_gpus(topology).values():
        for slot in users:
            if slot.instance in told or any(flag in slot.flags for flag in _MEMORY_SHARES):
                continue
            told.add(slot.instance)
            names = " and ".join(user.name for user in users)
            advice = "give each a part of its memory: args: {gpu-memory-utilization: 0.45}"
            yield ("instances", slot.instance, "gpus"), f"{names} share a GPU; {advice}"


def shared_gpus(topology: Topology) -> dict[tuple[str | None, str], list[Any]]:
    """(node, GPU) → the engines that use it, where they are several."""
    users = defaultdict(list)
    for slot in slots(topology):
        for gpu in dict.fromkeys(slot.gpus):
            users[slot.node, gpu].append(slot)
    return {gpu: several for gpu, several in users.items() if len(several) > 1}


def _ports(topology: Topology) -> Found:
    engines = slots(topology)
    last = engines[-1].end - 1
    if last > MAX_PORT:
        yield (
            ("ports", "base"),
            f"{len(engines)} engines need the ports up to {last}, and there are {MAX_PORT}",
        )
        return
    if topology.router is None or topology.router.port is None:
        return
    port = router_port(topology)
    if port == router_metrics_port(topology):
        yield ("router", "port"), f"{port} is the port of the router's metrics (ports.base + 1)"
    for slot in engines:
        if slot.port <= port < slot.end:
            yield ("router", "port"), f"{port} belongs to {slot.name} (ports.base moves its block)"
