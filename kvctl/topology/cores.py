"""Which cores the workers of CPU engines compute on.

NIXL's progress thread spins at 100 % of a core in every engine, and vLLM's NIXL worker puts the
threads that transfer on the last core of each NUMA node (nixl/base_worker.py,
``rsv_cores_for_kv``). A worker that computes on such a core stalls, so those stay free of them,
and engines share no core while there is one for each worker.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Cores:
    """The cores that may be used, by what for."""

    compute: tuple[int, ...]
    transfer: tuple[int, ...]


def available(nodes: Path = Path("/sys/devices/system/node")) -> Cores:
    """The cores of this process's affinity mask; the last one of each NUMA node is for NIXL."""
    usable = sorted(os.sched_getaffinity(0))
    last = {max(cores) for folder in nodes.glob("node[0-9]*") if (cores := _cores(folder))}
    transfer = sorted(last & set(usable)) or usable[-1:]
    compute = [core for core in usable if core not in transfer]
    return Cores(tuple(compute or usable[:1]), tuple(transfer))


def bindings(workers: Sequence[int], cores: Cores) -> list[str]:
    """``VLLM_CPU_OMP_THREADS_BIND`` of each engine: one list of cores a worker, joined by ``|``.

    The computing cores are dealt out evenly and in order; what is left over stays free for API
    servers and engine cores. Where they are too few, engines share them; the workers of one
    engine wait for each other, so they rather use a core of NIXL's than one together.

    Args:
        workers: how many workers each engine has.
    """
    share = len(cores.compute) // sum(workers)
    lists = []
    taken = 0
    for count in workers:
        if share:
            starts = range(taken * share, (taken + count) * share, share)
            own = [cores.compute[start : start + share] for start in starts]
        else:
            enough = count <= len(cores.compute)
            pool = cores.compute if enough else (*cores.compute, *cores.transfer)
            start = taken if enough else 0
            own = [(pool[(start + index) % len(pool)],) for index in range(count)]
        taken += count
        lists.append("|".join(_written(worker) for worker in own))
    return lists


def _written(cores: Sequence[int]) -> str:
    """``0-3,8``."""
    runs: list[list[int]] = []
    for core in cores:
        if runs and core == runs[-1][-1] + 1:
            runs[-1].append(core)
        else:
            runs.append([core])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _cores(folder: Path) -> list[int]:
    names = [path.name.removeprefix("cpu") for path in folder.glob("cpu[0-9]*")]
    return [int(name) for name in names if name.isdigit()]
