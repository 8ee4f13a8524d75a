"""Measures how long kvctl takes to start: ``kvctl --help`` and ``kvctl launch --dry-run``.

Usage: python bench/startup.py [RUNS]

Each command runs RUNS times (default 11) after one that is not counted; the figure is the
median. Exit code 1 if one is over its limit.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from figure import emit

KVCTL = [sys.executable, "-m", "kvctl"]


def main() -> int:
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 11
    with tempfile.TemporaryDirectory() as folder:
        topology = Path(folder) / "kvctl.yaml"
        subprocess.run([*KVCTL, "init", "-f", topology], check=True, stdout=subprocess.DEVNULL)
        within = [
            measure("kvctl --help", ["--help"], runs, limit=0.3),
            measure(
                "kvctl launch --dry-run", ["launch", "--dry-run", "-f", topology], runs, limit=0.5
            ),
        ]
    return 0 if all(within) else 1


def measure(figure: str, arguments: list[str | Path], runs: int, *, limit: float) -> bool:
    seconds = [_time(arguments) for _ in range(runs + 1)][1:]
    return emit(
        figure,
        statistics.median(seconds),
        "s",
        limit=limit,
        runs=runs,
        fastest=round(min(seconds), 4),
        slowest=round(max(seconds), 4),
    )


def _time(arguments: list[str | Path]) -> float:
    began = time.perf_counter()
    subprocess.run([*KVCTL, *arguments], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


if __name__ == "__main__":
    sys.exit(main())
