"""Who this engine is: what its feed says first."""

from __future__ import annotations

import os
import time
import uuid
from importlib import metadata
from typing import Any

from . import semconv
from .config import Options
from .wire import PROTOCOL_MAJOR, PROTOCOL_MINOR, Hello


def data_parallel_rank(vllm_config: Any) -> int:
    """Of this engine core. The index, since vLLM resets the rank for models without experts."""
    return int(getattr(vllm_config.parallel_config, "data_parallel_index", 0) or 0)


def hello(options: Options, vllm_config: Any) -> Hello:
    """The feed's first message for an engine core that begins its life now."""
    engine_id = str(vllm_config.kv_transfer_config.engine_id)
    rank = data_parallel_rank(vllm_config)
    return Hello(
        protocol=(PROTOCOL_MAJOR, PROTOCOL_MINOR),
        incarnation=uuid.uuid4().hex,
        started=time.time_ns(),
        instance=f"{engine_id}:{rank}",
        name=options.instance or engine_id,
        role=options.role,
        pid=os.getpid(),
        resource={
            semconv.RESOURCE_TOPOLOGY: options.topology,
            semconv.RESOURCE_ROLE: options.role,
            semconv.RESOURCE_MODEL: str(vllm_config.model_config.model),
            semconv.RESOURCE_VLLM: version("vllm"),
        },
    )


def version(distribution: str) -> str:
    """Of an installed distribution; empty where it is not there."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""
