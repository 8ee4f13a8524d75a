from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvctl.topology.cores import Cores, available, bindings


def machine(tmp_path: Path, *nodes: range) -> Path:
    for number, cores in enumerate(nodes):
        for core in cores:
            (tmp_path / f"node{number}" / f"cpu{core}").mkdir(parents=True)
        (tmp_path / f"node{number}" / "cpulist").write_text("")
        (tmp_path / f"node{number}" / "cpufreq").write_text("")
    return tmp_path


@pytest.mark.parametrize(
    ("usable", "nodes", "expected"),
    [
        ({0, 1}, [range(2)], Cores((0,), (1,))),
        ({0, 1, 2, 3}, [range(4)], Cores((0, 1, 2), (3,))),
        (set(range(8)), [range(4), range(4, 8)], Cores((0, 1, 2, 4, 5, 6), (3, 7))),
        ({0, 1, 2}, [range(8)], Cores((0, 1), (2,))),  # the node's last core is not ours
        ({5}, [range(8)], Cores((5,), (5,))),
        ({0, 1}, [], Cores((0,), (1,))),  # no NUMA in /sys
    ],
)
def test_the_last_core_of_a_node_is_for_transfers(
    usable: set[int],
    nodes: list[range],
    expected: Cores,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: usable)
    assert available(machine(tmp_path, *nodes)) == expected


@pytest.mark.parametrize(
    ("workers", "compute", "expected"),
    [
        ([1, 1], (0,), ["0", "0"]),  # a pair on two cores: measured, no stall
        ([1, 2], (0,), ["0", "0|1"]),  # two workers of one engine on one core would wait in turn
        ([1, 1], (0, 1, 2), ["0", "1"]),
        ([1, 1], tuple(range(15)), ["0-6", "7-13"]),
        ([2, 1], (0, 1, 2, 8, 9, 10), ["0-1|2,8", "9-10"]),
        ([1, 1, 1], (0, 1), ["0", "1", "0"]),
    ],
)
def test_bindings(workers: list[int], compute: tuple[int, ...], expected: list[str]) -> None:
    assert bindings(workers, Cores(compute, (compute[-1] + 1,))) == expected
