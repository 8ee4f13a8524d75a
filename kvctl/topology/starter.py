"""What ``kvctl init`` writes: a topology file that fits this machine, and explains itself."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from kvctl.engine.environment import EngineEnvironment
from kvctl.engine.hardware import visible_gpus
from kvctl.engine.machine import GIB, look
from kvctl.topology.free_ports import free_base
from kvctl.topology.resolved import written_size

MIB = 1024**2
_PLAIN = re.compile(r"[A-Za-z/.~][A-Za-z0-9/._~-]*")


@dataclass(frozen=True)
class Setting:
    """What the file depends on.

    Attributes:
        python: of the engine environment; None where it is kvctl's own, or none was found.
        model: path of a model that is there; None for a placeholder.
        gpus: by number or UUID; empty on CPUs.
        memory: bytes that are available.
        base: first port of a free block.
    """

    name: str
    python: Path | None
    model: Path | None
    gpus: tuple[str, ...]
    memory: int
    base: int


def setting_here(environment: EngineEnvironment | None, *, model: Path | None = None) -> Setting:
    """The setting of this machine and the current folder.

    Args:
        environment: that engines are to be started from, where one was found.
        model: what to write as the model on a machine without GPUs.

    Raises:
        UnreachableError: there is no free block of ports.
    """
    on_cpus = environment is not None and environment.platform == "cpu"
    gpus = () if on_cpus else visible_gpus()
    if environment is not None and not on_cpus and not gpus:
        gpus = ("0", "1")  # of the machine that the file is for
    python = environment.python if environment else None
    return Setting(
        name=_name(Path.cwd().name),
        python=None if python == Path(sys.executable) else python,
        model=None if gpus else model,
        gpus=gpus,
        memory=look(Path.cwd()).memory_available,
        base=free_base(2 * max(1, len(gpus) // 2)),
    )


def starter(setting: Setting) -> str:
    """The text of the file. It loads without errors, and can be planned."""
    engine = f"engine: {{python: {_scalar(str(setting.python))}}}\n" if setting.python else ""
    return _TEMPLATE.format(
        name=setting.name,
        model=_model(setting),
        engine=engine,
        args=_args(setting),
        env=_env(setting),
        host=written_size(host_bytes(setting)),
        instances="\n".join(_instances(setting)),
        base=setting.base,
    )


def host_bytes(setting: Setting) -> int:
    """A host tier for this machine: a power of two, at most a quarter of what is available, an
    eighth where the model and its device cache live in the same memory; at most 64 GiB."""
    limit = min(64 * GIB, setting.memory // (4 if setting.gpus else 8))
    size = 256 * MIB
    while size * 2 <= limit:
        size *= 2
    return size


def _model(setting: Setting) -> str:
    if setting.gpus:
        return "# A Hugging Face id, or a path (beginning with / or ./).\nmodel: Qwen/Qwen3-0.6B"
    if setting.model is not None:
        return (
            "# The tiny model with random weights that kvctl demo has made. Put in your own: a\n"
            f"# path, or a Hugging Face id.\nmodel: {_scalar(str(setting.model))}"
        )
    return (
        "# A path (beginning with / or ./), or a Hugging Face id. No model at hand? kvctl demo\n"
        "# makes a tiny one, in ~/.cache/kvctl/tiny-model-*; name that folder here.\n"
        "model: ./model"
    )


def _args(setting: Setting) -> str:
    if len(setting.gpus) == 1:
        return (
            "args:\n"
            "  max-model-len: 8192\n"
            "  # Both engines live on one GPU: a part of its memory each, and room for the rest.\n"
            "  gpu-memory-utilization: 0.4"
        )
    return "args:\n  max-model-len: 8192" if setting.gpus else "args:\n  max-model-len: 2048"


def _env(setting: Setting) -> str:
    if setting.gpus:
        return '# env: {UCX_NET_DEVICES: "mlx5_0:1"}'
    space = max(1, min(16, setting.memory // (16 * GIB)))
    return f"env:\n  VLLM_CPU_KVCACHE_SPACE: {space}     # GiB of KV cache in each engine"


def _instances(setting: Setting) -> list[str]:
    gpus = setting.gpus
    if not gpus:
        return ["  prefill: {role: prefill}", "  decode: {role: decode}"]
    half = len(gpus) // 2
    shares = (gpus, gpus) if len(gpus) == 1 else (gpus[:half], gpus[half : 2 * half])
    lines = []
    for role, share in zip(("prefill", "decode"), shares, strict=True):
        replicas = f"replicas: {len(share)}, " if len(share) > 1 else ""
        lines.append(f"  {role}: {{role: {role}, {replicas}gpus: [{', '.join(share)}]}}")
    return lines


def _name(folder: str) -> str:
    """The folder's name as a topology may be called."""
    return re.sub(r"[^a-z0-9]+", "-", folder.lower())[:40].strip("-") or "pair"


def _scalar(text: str) -> str:
    """The text as YAML, in quotes where it needs them."""
    escaped = text.replace("$", "$$")
    return escaped if _PLAIN.fullmatch(escaped) else json.dumps(escaped, ensure_ascii=False)


_TEMPLATE = """\
# A topology for kvctl: one prefill/decode deployment of vLLM.
# Check it with kvctl config, see what it would start with kvctl launch --dry-run.
version: 1

# Names it on the command line (kvctl stop -p NAME), in paths and in telemetry.
name: {name}

{model}

{engine}\
# Flags of vllm serve, for every engine; an instance may have its own.
{args}

# Environment of every engine. ${{NAME}} takes a value from kvctl's environment.
{env}

# Decode pulls KV from prefill over NIXL. Prefill keeps a finished request's KV that long for a
# decode that has not asked for it.
transfer:
  kv_lease_duration: 30s
  kv_load_failure_policy: recompute

# Host memory for KV blocks that leave the device cache, shared out over the engines.
offload:
  host: {host}

# Metrics of every transfer, by OTLP to a collector.
# telemetry:
#   otlp: {{endpoint: "http://localhost:4318"}}

instances:
{instances}

# vllm-router, in front of them. Clients use ports.base unless a port stands here.
router:
  policy: round_robin

# First port of the block that belongs to this topology. It was free when this was written.
ports:
  base: {base}

start_timeout: 15m
stop_timeout: 30s
"""
