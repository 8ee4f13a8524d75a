"""How the demo's engines run, by the hardware they find: the same for the pair and the reference.

float32 everywhere: in bfloat16 two right computations differ more than one wrong block shows.
The device cache is made small enough that the prompts have to leave it and come back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvctl.demo.model import KV_BYTES_PER_TOKEN, SERVED_NAME
from kvctl.errors import UnreachableError

DEVICE_TOKENS = 3072  # what the device cache holds: two prompts of the longest kind
MAX_MODEL_LEN = 2048
HOST_TOKENS = 24_576  # per engine: more than one group of prompts needs, so that it comes back
LEASE = 10  # seconds
CLIENTS = 2
DEADLINE = LEASE + 10.0  # seconds per request: a lost notification may cost one lease

# Two right computations agree within 2e-6 on CPUs (1 285 comparisons on three vLLM releases). On
# GPUs, where prefill and decode use other kernels, they differ by up to 5e-3. KV of another
# prompt in one block of 16 tokens moves a logprob of this model by 0.15 and more, in one of 128 by
# 0.6 and more (bench/wrong_block.py).
CPU_BOUND = 1e-4
GPU_BOUND = 2e-2

_COMMON_ENV = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
_CPU_ENV = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",  # the first request takes 0.2 s instead of 4.7 s
}
# The sampler of flashinfer is compiled on its first use, which needs a CUDA toolkit.
_GPU_ENV = {"VLLM_USE_FLASHINFER_SAMPLER": "0"}


@dataclass(frozen=True)
class Setting:
    """How engines run on one kind of hardware.

    Attributes:
        args: flags of ``vllm serve``.
        env: environment of every engine.
        gpus: the one of each role, by number or UUID; None on CPUs.
        block_size: tokens a block.
        bound: how far logprobs of right answers may lie apart.
    """

    args: Mapping[str, Any]
    env: Mapping[str, str]
    gpus: Mapping[str, str] | None
    block_size: int
    bound: float

    @property
    def host_bytes(self) -> int:
        """Host tier of one engine."""
        return HOST_TOKENS * KV_BYTES_PER_TOKEN

    def reference_arguments(self) -> dict[str, Any]:
        """Arguments of ``vllm.LLM`` for the same computation in one process."""
        names = {flag.replace("-", "_"): value for flag, value in self.args.items()}
        return {**names, "distributed_executor_backend": "uni"}

    def reference_env(self) -> dict[str, str]:
        """Environment of that process; its engine core stays in it."""
        one_gpu = {} if self.gpus is None else {"CUDA_VISIBLE_DEVICES": self.gpus["prefill"]}
        return {**self.env, **one_gpu, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


def setting_for(platform: str, *, gpus: Sequence[str]) -> Setting:
    """The setting for an engine environment's platform.

    Args:
        gpus: those that may be used, by number or UUID.

    Raises:
        UnreachableError: the demo does not run on that platform, or there is no GPU.
    """
    if platform == "cpu":
        return Setting(_args(128), {**_COMMON_ENV, **_CPU_ENV}, None, 128, CPU_BOUND)
    if platform not in ("cuda", "rocm"):
        raise UnreachableError(
            f"the demo does not know how to run on the platform {platform}",
            hint="it runs on CPUs (vllm-cpu) and on NVIDIA or AMD GPUs",
        )
    if not gpus:
        raise UnreachableError(
            f"this vLLM was built for {platform}, and no GPU was found",
            hint="name an environment with vllm-cpu: kvctl demo --engine PYTHON",
        )
    shared = len(gpus) == 1
    placed = {"prefill": gpus[0], "decode": gpus[0 if shared else 1]}
    memory = {"gpu-memory-utilization": 0.3} if shared else {}
    env = {**_COMMON_ENV, **_GPU_ENV}
    return Setting({**_args(16), **memory}, env, placed, 16, GPU_BOUND)


def _args(block_size: int) -> dict[str, Any]:
    return {
        "served-model-name": SERVED_NAME,
        "enforce-eager": True,
        "dtype": "float32",
        "max-model-len": MAX_MODEL_LEN,
        "block-size": block_size,
        "num-gpu-blocks-override": DEVICE_TOKENS // block_size,
    }
