"""A topology → the processes to start, with every port, variable and argument decided.

Pure: the same file and engine environment give the same plan on every node. Nothing is looked
up on the network and nothing is bound.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvctl.engine.environment import EngineEnvironment
from kvctl.errors import UsageError
from kvctl.topology import variables
from kvctl.topology.connector import host_shares, transfer_config
from kvctl.topology.flags import to_argv
from kvctl.topology.layout import (
    LOOPBACK,
    Slot,
    router_metrics_port,
    router_node,
    router_port,
    slots,
)
from kvctl.topology.models import Role, Router, Topology
from kvctl_connector.offers import KEY_FILE
from kvctl_connector.paths import feed_path, runtime_dir

ROUTER = "vllm-router"
_ANY = {"0.0.0.0": LOOPBACK, "::": "::1"}  # what reaches a server that listens everywhere


@dataclass(frozen=True)
class Process:
    """One process of a plan.

    Attributes:
        env: added to the environment that is inherited.
        url: base URL where it answers; GET ``url/health`` is 200 when it is ready. None: a
            process that is never asked (a relay).
        ports: every port that it binds, by what for.
        feeds: feed sockets, one for each data-parallel rank: those an engine makes, or the one
            a relay reads.
        log: file name inside the run's log folder.
    """

    name: str
    kind: Literal["engine", "relay", "router"]
    role: Role | None
    argv: tuple[str, ...]
    env: Mapping[str, str]
    url: str | None
    ports: Mapping[str, int]
    feeds: tuple[str, ...]
    log: str


@dataclass(frozen=True)
class Plan:
    """What `kvctl launch` starts on one node, in this order: engines, each with its relays, then
    the router, which is started when all engines are ready. Timeouts are in seconds. `offer_key` is
    the file with the key by which prefill signs its offers."""

    name: str
    processes: tuple[Process, ...]
    start_timeout: float
    stop_timeout: float
    model: str
    engine: EngineEnvironment
    node: str | None
    file: str
    offer_key: Path


def make_plan(
    topology: Topology,
    *,
    engine: EngineEnvironment,
    connector_path: Path,
    offer_key: Path,
    node: str | None = None,
    cores: Sequence[int] | None = None,
) -> Plan:
    """The plan of one node.

    Args:
        engine: the environment that vLLM is started from.
        connector_path: folder that holds a copy of ``kvctl_connector`` and nothing else.
        offer_key: the key file for prefill's offers where the topology names none.
        node: which node of the file; None where the file has none.
        cores: for the workers of CPU engines; by default this machine's.

    Raises:
        UsageError: the node is not in the file, or the file does not fit the engine's platform.
    """
    _check_node(topology, node)
    engines = slots(topology)
    here = [slot for slot in engines if slot.node == node]
    _check_gpus(topology, here, engine.platform)
    key = Path(topology.transfer.offer_key or offer_key)
    planner = _Planner(topology, engine, connector_path, key)
    devices = variables.of_devices(topology, here, platform=engine.platform, cores=cores)
    shares = dict(zip((slot.name for slot in engines), host_shares(topology, engines), strict=True))
    processes: list[Process] = []
    for slot, own in zip(here, devices, strict=True):
        process = planner.engine(slot, own, shares[slot.name])
        processes += [process, *planner.relays(process)]
    if topology.router is not None and router_node(topology) == node:
        processes.append(planner.router(topology.router, engines, node))
    return Plan(
        name=topology.name,
        processes=tuple(processes),
        start_timeout=topology.start_timeout,
        stop_timeout=topology.stop_timeout,
        model=topology.model,
        engine=engine,
        node=node,
        file=topology.source,
        offer_key=key,
    )


class _Planner:
    def __init__(
        self,
        topology: Topology,
        engine: EngineEnvironment,
        connector_path: Path,
        offer_key: Path,
    ) -> None:
        self._topology = topology
        self._offer_key = offer_key
        self._engine = engine
        self._connector_path = connector_path
        self._runtime_dir = runtime_dir()

    def engine(self, slot: Slot, devices: Mapping[str, str], host_bytes: int | None) -> Process:
        topology = self._topology
        config = transfer_config(
            topology, slot, host_bytes=host_bytes, platform=self._engine.platform
        )
        # Started as a module, so that no console script has to be installed.
        argv = [str(self._engine.python), "-m", "vllm.entrypoints.cli.main", "serve"]
        argv += [topology.model, "--host", slot.address, "--port", str(slot.port)]
        argv += [*to_argv(slot.flags), "--kv-transfer-config", config]
        ports = {"api": slot.port}
        for rank in range(slot.ranks):
            ports[f"side_channel.{rank}" if rank else "side_channel"] = slot.side_channel(rank)
        return Process(
            name=slot.name,
            kind="engine",
            role=slot.role,
            argv=tuple(argv),
            env={
                **variables.of_every_process(self._runtime_dir),
                **variables.of_engine(topology, slot, devices, self._connector_path),
                KEY_FILE: str(self._offer_key),
            },
            url=_url(slot.address, slot.port),
            ports=ports,
            feeds=tuple(
                str(feed_path(topology.name, slot.name, rank, self._runtime_dir))
                for rank in range(slot.ranks)
            ),
            log=f"{slot.name}.log",
        )

    def relays(self, engine: Process) -> Iterator[Process]:
        """One for each rank of the engine, where telemetry is exported."""
        otlp = self._topology.telemetry.otlp
        if otlp is None:
            return
        env = {**variables.of_every_process(self._runtime_dir), **variables.of_relay(otlp)}
        for rank, feed in enumerate(engine.feeds):
            name = f"{engine.name}.relay" + (f"-{rank}" if len(engine.feeds) > 1 else "")
            yield Process(
                name=name,
                kind="relay",
                role=None,
                argv=(sys.executable, "-m", "kvctl_connector.relay", "--feed", feed),
                env=env,
                url=None,
                ports={},
                feeds=(feed,),
                log=f"{name}.log",
            )

    def router(self, router: Router, engines: Sequence[Slot], node: str | None) -> Process:
        port, metrics = router_port(self._topology), router_metrics_port(self._topology)
        argv = [str(self._engine.router or ROUTER), "--vllm-pd-disaggregation"]
        argv += ["--kv-connector", "nixl"]
        for slot in engines:
            argv += [f"--{slot.role}", _url(slot.address, slot.port)]
        argv += ["--policy", router.policy, "--host", router.host, "--port", str(port)]
        argv += ["--prometheus-host", LOOPBACK, "--prometheus-port", str(metrics)]
        if node is not None:  # engines of other nodes may still be loading
            argv += ["--worker-startup-timeout-secs", str(math.ceil(self._topology.start_timeout))]
        return Process(
            name="router",
            kind="router",
            role=None,
            argv=tuple(argv),
            env={},
            url=_url(_ANY.get(router.host, router.host), port),
            ports={"api": port, "metrics": metrics},
            feeds=(),
            log="router.log",
        )


def _url(address: str, port: int) -> str:
    return f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"


def _check_node(topology: Topology, node: str | None) -> None:
    known = ", ".join(topology.nodes)
    if topology.nodes and node is None:
        raise UsageError(
            f"{topology.place('nodes')}: this topology has several nodes: {known}",
            hint="say which one this is: --node NAME",
        )
    if node is not None and node not in topology.nodes:
        raise UsageError(
            f"{topology.place('nodes')}: there is no node {node} in {topology.source}",
            hint=f"there are: {known}" if known else "it has no nodes: leave --node out",
        )


def _check_gpus(topology: Topology, engines: Sequence[Slot], platform: str) -> None:
    for slot in engines:
        place = topology.place("instances", slot.instance, "gpus")
        if platform == "cpu" and slot.gpus:
            raise UsageError(
                f"{place}: instances.{slot.instance}.gpus: the engine environment is built for "
                "CPUs",
                hint="leave gpus out, or name an environment with a GPU build in engine.python",
            )
        env = {**topology.env, **topology.instances[slot.instance].env}
        if platform in ("cuda", "rocm") and not slot.gpus and "CUDA_VISIBLE_DEVICES" not in env:
            raise UsageError(
                f"{place}: instances.{slot.instance}.gpus: missing; without it all engines would "
                "take the same GPUs",
                hint=f"list the GPUs of its replicas, for example gpus: [{_example(slot)}]",
            )


def _example(slot: Slot) -> str:
    return ", ".join(map(str, range(slot.world)))
