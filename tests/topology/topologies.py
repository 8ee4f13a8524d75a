"""Factories for the tests of topologies: each test states only what it is about."""

from __future__ import annotations

from pathlib import Path

from kvctl.engine.environment import EngineEnvironment
from kvctl.topology.load import load
from kvctl.topology.models import Topology
from kvctl.topology.plan import Plan, Process, make_plan

PAIR = "  prefill: {role: prefill}\n  decode: {role: decode}\n"
GPU_PAIR = "  prefill: {role: prefill, gpus: [0]}\n  decode: {role: decode, gpus: [1]}\n"
CONNECTOR = Path("/state/connector/1")


def make_topology(
    rest: str = "", *, instances: str = PAIR, name: str = "qwen", model: str = "some/model"
) -> Topology:
    """A topology of the given instances (YAML, indented) and further lines."""
    text = f"name: {name}\nmodel: {model}\ninstances:\n{instances}{rest}"
    return load("kvctl.yaml", text=text)


def make_engine(platform: str = "cpu", *, router: Path | None = Path("/r/vllm-router")) -> (
    EngineEnvironment
):  # fmt: skip
    return EngineEnvironment(Path("/opt/vllm/bin/python"), "0.32.0", "1.5.1", platform, router)


def plan_of(
    rest: str = "",
    *,
    instances: str = PAIR,
    platform: str = "cpu",
    node: str | None = None,
    cores: tuple[int, ...] = (0, 1),
) -> Plan:
    return make_plan(
        make_topology(rest, instances=instances),
        engine=make_engine(platform),
        connector_path=CONNECTOR,
        offer_key=Path("/key"),
        node=node,
        cores=cores,
    )


def process(plan: Plan, name: str) -> Process:
    return next(one for one in plan.processes if one.name == name)
