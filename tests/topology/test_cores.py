from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvctl.topology.cores import available, bindings
from kvctl_connector import threads
from kvctl_connector.threads import TRANSFER_CORES


def machine(tmp_path: Path, *nodes: list[int]) -> Path:
    for number, cores in enumerate(nodes):
        for core in cores:
            (tmp_path / f"node{number}" / f"cpu{core}").mkdir(parents=True)
        (tmp_path / f"node{number}" / "cpulist").write_text("")
        (tmp_path / f"node{number}" / "cpufreq").write_text("")
    return tmp_path


@pytest.mark.parametrize(
    ("usable", "nodes", "expected"),
    [
        ({0, 1}, [[0, 1]], (0, 1)),
        ({0, 1, 2, 3}, [[0, 2], [1, 3]], (0, 2, 1, 3)),  # one node's cores beside each other
        ({1, 5}, [list(range(8))], (1, 5)),
        ({0, 1}, [], (0, 1)),  # no NUMA in /sys
    ],
)
def test_the_cores_that_may_be_used(
    usable: set[int],
    nodes: list[list[int]],
    expected: tuple[int, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: usable)
    assert available(machine(tmp_path, *nodes)) == expected


@pytest.mark.parametrize(
    ("workers", "cores", "compute", "transfer"),
    [
        ([1, 1], (0, 1), ["0", "1"], ["0", "1"]),  # a pair on two cores: measured, no stall
        ([1, 1], (0, 1, 2), ["0", "1"], ["0", "1"]),
        ([1, 1], tuple(range(16)), ["0-6", "8-14"], ["7", "15"]),
        ([2, 1], (0, 1, 2), ["0|1", "2"], ["0|1", "2"]),
        ([2, 1], (0, 1, 2, 8, 9, 10), ["0|2", "9"], ["1|8", "10"]),
        ([1, 2], (0, 1), ["0", "1|1"], ["0", "1|1"]),  # too few: each engine still has its own
        ([4, 2], (0, 1, 2, 3), ["0|1|0|1", "2|3"], ["0|1|0|1", "2|3"]),
        ([2, 1, 1], (0, 1), ["0|1", "0", "1"], ["0|1", "0", "1"]),  # fewer than engines
        ([1, 1], (5,), ["5", "5"], ["5", "5"]),
    ],
)
def test_every_worker_has_cores_of_its_own(
    workers: list[int], cores: tuple[int, ...], compute: list[str], transfer: list[str]
) -> None:
    variables = bindings(workers, cores)
    assert [each["VLLM_CPU_OMP_THREADS_BIND"] for each in variables] == compute
    assert [each[TRANSFER_CORES] for each in variables] == transfer


def test_the_connector_reads_the_variable_that_launch_sets() -> None:
    (variables,) = bindings([1], (0,))
    assert variables[threads.TRANSFER_CORES] == "0"
