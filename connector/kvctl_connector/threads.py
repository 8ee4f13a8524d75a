"""Keeps NIXL's spinning progress thread off the core that runs the model (CPU platform).

NIXL's agent polls without a pause (nixl_agent_config, ``pthrDelay`` 0), at 100 % of a core, and
its thread inherits the pinning of the worker that makes it. vLLM's NIXL worker moves the
worker's main thread to the last core of each NUMA node (NIXL/base_worker.py 0.32.0:701); the
threads born with the connector have to follow it there, or a pair on two cores stalls.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_TASKS = Path("/proc/self/task")


@contextmanager
def move_new_threads_along() -> Iterator[None]:
    """Moves the threads born inside the block to the cores of the thread that ran it."""
    before = _threads()
    yield
    cores = os.sched_getaffinity(0)
    for thread in _threads() - before:
        with suppress(OSError):  # it has ended already
            os.sched_setaffinity(thread, cores)


def _threads() -> set[int]:
    return {int(task.name) for task in _TASKS.iterdir()}
