"""What to do about failures that are known, by the words of the log that give them away."""

from __future__ import annotations

import re
import signal
from typing import NamedTuple

SHARED_MEMORY = (
    "make /dev/shm larger: docker run --shm-size=2g (or --ipc=host); "
    "on the machine itself: mount -o remount,size=2g /dev/shm"
)
MEMORY = (
    "the machine had no memory left, or a cgroup's limit was reached (dmesg says which): "
    "lower offload.host, VLLM_CPU_KVCACHE_SPACE or the number of instances"
)


class _Known(NamedTuple):
    pattern: str
    advice: str


# In order of precedence. They are looked for in the cause alone: a whole log also holds harmless
# lines with such words.
_KNOWN = (
    _Known(
        r"unrecognized arguments?: ",
        "this vLLM does not know the flag: correct `args:` in the topology file "
        "(vllm serve --help=all lists what it knows)",
    ),
    _Known(
        r"error: argument |error: .*expected|error: the following arguments",
        "correct the value in `args:` of the topology file",
    ),
    _Known(
        r"Address already in use|EADDRINUSE|AddrInUse",
        "another process has the port: ss -ltnp shows which; stop it, or choose another "
        "block with `ports: {base: N}`",
    ),
    _Known(
        r"Insufficient space in /dev/shm|/dev/shm.*No space left|No space left.*/dev/shm",
        SHARED_MEMORY,
    ),
    _Known(r"No space left on device", "free space on the disk that the message names"),
    _Known(
        r"CUDA out of memory|OutOfMemoryError: (CUDA|HIP|XPU)"
        r"|Free memory on device .* less than desired",
        "the GPU has too little free memory: nvidia-smi shows who uses it; end that, or lower "
        "`gpu-memory-utilization` in `args:`",
    ),
    _Known(
        r"Available memory on node .* less than requested memory for kv",
        "lower VLLM_CPU_KVCACHE_SPACE (GiB an engine) in `env:`",
    ),
    _Known(
        r"To serve at least one request|No available memory for the cache blocks",
        "lower `max-model-len` in `args:`, or give the device cache more memory",
    ),
    _Known(r"max_model_len .* is greater than", "lower `max-model-len` in `args:`"),
    _Known(
        r"Repo id must be in the form|Invalid repository ID or local directory"
        r"|not a valid model identifier|RepositoryNotFoundError|does not appear to have a file",
        "check `model:`: a folder with a config.json, or the id of a model on the hub",
    ),
    _Known(
        r"LocalEntryNotFoundError|outgoing traffic has been disabled|OfflineModeIsEnabled",
        "the model is not in the local hub cache and HF_HUB_OFFLINE is set: download it first, "
        "or unset HF_HUB_OFFLINE",
    ),
    _Known(r"GatedRepoError|401 Client Error", "log in to the hub: set HF_TOKEN"),
    _Known(
        r"No module named '(nixl|nixl_cu\w+)|NIXL is not available",
        "install NIXL into the engine's environment: pip install nixl",
    ),
    _Known(
        r"No module named 'kvctl_connector",
        "the connector did not reach the engine: does `env:` set PYTHONPATH? Take it out",
    ),
    _Known(
        r"Found no NVIDIA driver|Failed to infer device type|CUDA driver version is insufficient",
        "this vLLM build does not fit the machine: it found no device that it can use",
    ),
    _Known(r"Cannot allocate memory|MemoryError|bad_alloc|can't allocate memory", MEMORY),
    _Known(r"Too many open files", "raise the limit of open files: ulimit -n 65536"),
    _Known(r"ended without a message", f"most often {MEMORY}"),
)


def remedy(cause: str, log: str, exit_code: int | None) -> str | None:
    """What to do about a failure; None where nothing is known.

    Args:
        cause: the lines that were found to be the cause.
        log: the whole text, for what is said elsewhere in it.
        exit_code: as subprocess gives it, negative for a signal.
    """
    for pattern, advice in _KNOWN:
        if re.search(pattern, cause):
            return advice
    if exit_code == -signal.SIGKILL:
        return MEMORY
    if exit_code == -signal.SIGBUS or "Bus error" in log:
        return SHARED_MEMORY
    return None
