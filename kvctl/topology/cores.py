"""Which cores the workers of CPU engines run on: each has its own.

vLLM's NIXL worker moves the thread that runs a worker to the last core of the NUMA node
(nixl/base_worker.py 0.32.0, ``rsv_cores_for_kv``), for every engine the same one, and NIXL's
progress thread, which spins at 100 %, is born there. With two engines on a core the threads that
yield while they poll (vLLM's message queue, UCX) hardly get to run beside those that only spin:
a pull takes seconds, or as long as its lease. Measured on two cores, 36 requests a round: 7 s
with a core for each engine, 21 to 44 s with both on the last one, a third of them slower than 4 s.
So each worker gets cores of its own, and the connector puts it and NIXL's threads back there.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from pathlib import Path

from kvctl_connector.threads import TRANSFER_CORES


def available(nodes: Path = Path("/sys/devices/system/node")) -> tuple[int, ...]:
    """The cores of this process's affinity mask, those of one NUMA node beside each other."""
    usable = sorted(os.sched_getaffinity(0))
    node_of = {
        core: int(folder.name.removeprefix("node"))
        for folder in nodes.glob("node[0-9]*")
        for core in _cores(folder)
    }
    return tuple(sorted(usable, key=lambda core: (node_of.get(core, 0), core)))


def bindings(workers: Sequence[int], cores: Sequence[int]) -> list[dict[str, str]]:
    """The variables of each engine that say which cores its workers use.

    The cores are dealt out evenly and in order. A worker's last core is for its main thread and
    NIXL's, the others for computing; with one core it does all. Where there are fewer cores than
    workers, those of one engine share the engine's; with fewer cores than engines all share them.

    Args:
        workers: how many workers each engine has.
    """
    return [
        {
            "VLLM_CPU_OMP_THREADS_BIND": "|".join(_written(one[:-1] or one) for one in own),
            TRANSFER_CORES: "|".join(str(one[-1]) for one in own),
        }
        for own in _dealt(workers, cores)
    ]


def _dealt(workers: Sequence[int], cores: Sequence[int]) -> list[list[Sequence[int]]]:
    """The cores of each worker of each engine."""
    if each := len(cores) // sum(workers):
        firsts = iter(range(0, len(cores), each))
        return [
            [cores[first : first + each] for first in itertools.islice(firsts, count)]
            for count in workers
        ]
    if engine := len(cores) // len(workers):
        return [
            [(cores[index * engine + rank % engine],) for rank in range(count)]
            for index, count in enumerate(workers)
        ]
    every = itertools.cycle(cores)
    return [[(next(every),) for _ in range(count)] for count in workers]


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
