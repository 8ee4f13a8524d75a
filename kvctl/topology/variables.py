"""The environment variables of a plan's processes. What the file sets wins over all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import quote

from kvctl.topology.checks import shared_gpus
from kvctl.topology.cores import available, bindings
from kvctl.topology.layout import Slot
from kvctl.topology.models import Otlp, Topology
from kvctl.topology.text import converted, joined
from kvctl_connector.paths import RUNTIME_DIR

# Block hashes depend on it, and must agree across engines and restarts: stored blocks are found
# by them. vLLM derives them from PYTHONHASHSEED where it is set (v1/core/kv_cache_utils.py).
HASH_SEED = "0"
_DEVICES = {"xpu": "ZE_AFFINITY_MASK"}  # vLLM takes CUDA_VISIBLE_DEVICES on CUDA and ROCm


def of_every_process(runtime_dir: Path) -> dict[str, str]:
    # `python -m` would take modules from the current folder first: a checkout of vLLM lying
    # there must not be what is run. Python before 3.11 does not know the variable.
    return {RUNTIME_DIR: str(runtime_dir), "PYTHONSAFEPATH": "1"}


def of_engine(
    topology: Topology, slot: Slot, devices: Mapping[str, str], connector_path: Path
) -> dict[str, str]:
    """What an engine gets besides `of_every_process`; the file's ``env`` included.

    Args:
        devices: its part of `of_devices`.
        connector_path: the one folder that is put on its module path; what the file's
            ``PYTHONPATH`` names follows it, an inherited one does not.
    """
    chosen = {**topology.env, **topology.instances[slot.instance].env}
    path = [str(connector_path)]
    if more := chosen.pop("PYTHONPATH", ""):
        path += [":", more]
    return {
        "PYTHONHASHSEED": HASH_SEED,
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": slot.address,
        "VLLM_NIXL_SIDE_CHANNEL_HOST": slot.address,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(slot.side_channel(0)),
        **devices,
        **chosen,
        "PYTHONPATH": joined(*path),
    }


def of_devices(
    topology: Topology, engines: Sequence[Slot], *, platform: str, cores: Sequence[int] | None
) -> list[dict[str, str]]:
    """What tells each engine of one node which cores or GPUs are its own.

    Args:
        cores: for CPU engines; None: this machine's.
    """
    if platform == "cpu":
        if not engines:
            return []
        bound = bindings([slot.world for slot in engines], cores or available())
        return [_cpu(slot, own) for slot, own in zip(engines, bound, strict=True)]
    shared = {slot.name for users in shared_gpus(topology).values() for slot in users}
    return [_gpu(slot, platform, shared=slot.name in shared) for slot in engines]


def of_relay(otlp: Otlp) -> dict[str, str]:
    """The standard variables of OpenTelemetry's SDKs."""
    env = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": otlp.endpoint,
        "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc" if otlp.protocol == "grpc" else "http/protobuf",
        "OTEL_METRIC_EXPORT_INTERVAL": str(max(1, round(otlp.interval * 1000))),
    }
    if otlp.headers:
        pieces: list[str] = []
        for name, value in otlp.headers.items():
            # Keys and values are percent-encoded there, as in W3C Baggage.
            encoded = converted(value, lambda piece: quote(piece, safe=""))
            pieces += [",", quote(name, safe=""), "=", encoded]
        env["OTEL_EXPORTER_OTLP_HEADERS"] = joined(*pieces[1:])
    return env


def _cpu(slot: Slot, cores: Mapping[str, str]) -> dict[str, str]:
    env = dict(cores)
    if slot.on_loopback:  # else UCX listens on the machine's own addresses
        env |= {"UCX_NET_DEVICES": "lo", "UCX_TLS": "tcp,sm,self"}
    return env


def _gpu(slot: Slot, platform: str, *, shared: bool) -> dict[str, str]:
    env = {}
    if slot.gpus:
        env[_DEVICES.get(platform, "CUDA_VISIBLE_DEVICES")] = ",".join(slot.gpus)
    if shared:
        # Without it UCX reads between two processes on one GPU over TCP: 0.4 GB/s, and no
        # message says so. With it 440 GB/s were measured for the same read.
        env["UCX_CUDA_IPC_ENABLE_GET_ZCOPY"] = "on"
    return env
