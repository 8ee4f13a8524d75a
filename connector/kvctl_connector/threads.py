"""Keeps a worker and NIXL's spinning progress thread where they disturb nobody (CPU platform).

NIXL's agent polls without a pause (nixl_agent_config, ``pthrDelay`` 0), at 100 % of a core, and
vLLM's NIXL worker moves the thread that builds it to the last core of each NUMA node
(NIXL/base_worker.py 0.32.0:701), for every engine the same one. Two engines there stall each
other: threads that yield while they poll hardly run beside those that only spin, and a pull takes
as long as its lease. So each engine's threads go to a core of the engine's own where launch has
given it one; else the threads born with the connector follow the one that vLLM has moved.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

TRANSFER_CORES = "KVCTL_TRANSFER_CORES"  # "0|1": one core a worker, by rank
_TASKS = Path("/proc/self/task")


@contextmanager
def kept_together(rank: int) -> Iterator[None]:
    """Moves this thread, and those born inside the block, to this worker's core.

    Without a core of its own, the new threads follow this one to wherever it was moved.
    """
    before = _threads()
    yield
    with suppress(OSError):  # a core that is not ours
        if own := _own_core(rank):
            os.sched_setaffinity(0, own)
    cores = os.sched_getaffinity(0)
    for thread in _threads() - before:
        with suppress(OSError):  # it has ended already
            os.sched_setaffinity(thread, cores)


def _own_core(rank: int) -> set[int]:
    dealt = os.environ.get(TRANSFER_CORES, "").split("|")
    if rank < len(dealt) and dealt[rank].isdigit():
        return {int(dealt[rank])}
    return set()


def _threads() -> set[int]:
    return {int(task.name) for task in _TASKS.iterdir()}
