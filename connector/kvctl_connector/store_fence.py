"""Blocks that are still being stored, and who is told when they are written again.

vLLM's OffloadingConnector keeps copying blocks of finished requests and waits for such a copy
when its block is allocated again, but up to 0.32.0 it does not see allocations for another
child's load (vllm-project/vllm issue 46951): that load would overwrite a block while it is being
stored, and the offload tier would keep it under the old block's hash.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any


def fence(child: Any, blocks: Collection[int]) -> None:
    """Tells a child that somebody else is about to write `blocks` (their ids)."""
    scheduler = getattr(child, "connector_scheduler", None)
    # offloading/scheduler.py 0.24.0 to 0.33.0: judged when the step's metadata is built.
    allocated = getattr(scheduler, "_current_batch_allocated_block_ids", None)
    if allocated is not None:
        allocated.update(blocks)
        return
    # 0.22.1: judged at once, at each allocation that it sees.
    stores = getattr(scheduler, "_block_id_to_pending_jobs", None)
    flush = getattr(scheduler, "_current_batch_jobs_to_flush", None)
    if stores and flush is not None:
        flush.update(job for block in blocks for job in stores.get(block, ()))


def fenced(child: Any) -> bool:
    """Whether a child that stores can be told, or needs not be.

    0.20.2 needs not: it holds the blocks of a finished request until they are stored.
    """
    scheduler = getattr(child, "connector_scheduler", None)
    if scheduler is None or hasattr(scheduler, "_reqs_being_stored"):
        return True
    return hasattr(scheduler, "_current_batch_allocated_block_ids") or (
        hasattr(scheduler, "_block_id_to_pending_jobs")
        and hasattr(scheduler, "_current_batch_jobs_to_flush")
    )


def never_ran(child: Any, request: str) -> None:
    """Has an offload child store nothing of a request that has ended before it ran.

    vLLM 0.26.0 looks for the blocks of its whole prompt, finds that it never had any, and ends
    the engine (offloading/scheduler.py 0.26.0:975, _build_store_jobs). To be called when the
    child has been told that the request ended.
    """
    requests = getattr(getattr(child, "connector_scheduler", None), "_req_status", None)
    status = requests.get(request) if isinstance(requests, dict) else None
    for group in getattr(status, "group_states", ()):
        # 0.24.0 and 0.28.0 to 0.33.0 have the same fields, and nothing to store either.
        if getattr(group, "block_ids", None) == [] and hasattr(group, "next_stored_chunk_idx"):
            group.next_stored_chunk_idx = max(group.next_stored_chunk_idx, len(group.offload_keys))
