"""KV caches and job descriptions as vLLM hands them to an offload worker, in every release."""

from __future__ import annotations

from typing import Any

import torch

try:
    from vllm.v1.kv_offload.base import (
        CanonicalKVCacheRef,
        CanonicalKVCaches,
        CanonicalKVCacheTensor,
        GPULoadStoreSpec,
    )
    from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
except ImportError:  # vLLM 0.20.2
    from vllm.v1.kv_offload.mediums import CPULoadStoreSpec, GPULoadStoreSpec
    from vllm.v1.kv_offload.spec import (
        CanonicalKVCacheRef,
        CanonicalKVCaches,
        CanonicalKVCacheTensor,
    )

__all__ = ["PAGE", "CPULoadStoreSpec", "device", "make_caches", "pages"]

PAGE = 8  # bytes


def make_caches(*, tensors: int = 2, blocks: int = 16, groups: list[list[int]]) -> Any:
    """Block b of tensor t is filled with 16 t + b, so that every page is told apart."""
    return CanonicalKVCaches(
        tensors=[
            CanonicalKVCacheTensor(
                torch.arange(blocks, dtype=torch.int8).add(16 * t).repeat_interleave(PAGE).view(
                    blocks, PAGE
                ),
                PAGE,
            )
            for t in range(tensors)
        ],
        group_data_refs=[[CanonicalKVCacheRef(t, PAGE) for t in group] for group in groups],
    )  # fmt: skip


def pages(caches: Any, tensor: int, blocks: list[int]) -> list[int]:
    """What fills these blocks, one number a block."""
    found = caches.tensors[tensor].tensor.numpy()[blocks]
    assert (found == found[:, :1]).all(), "a page is torn"
    return found[:, 0].tolist()


def device(
    blocks: list[int], sizes: list[int] | None = None, first: list[int] | None = None
) -> Any:
    """Blocks of the KV cache: of one group, or of groups of these sizes."""
    sizes = sizes or [len(blocks)]
    return GPULoadStoreSpec(blocks, group_sizes=sizes, block_indices=first or [0] * len(sizes))
