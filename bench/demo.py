"""Measures ``kvctl demo``: the first time, with an empty cache, and once the reference exists.

Usage: python bench/demo.py [OPTION OF kvctl demo]...

Prints the whole time of each run and what the second one says of itself. Exit code 1 if a run
fails or is over its limit. The limits are for two cores and a set-up environment.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

from figure import emit


def main() -> int:
    within = []
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "KVCTL_CACHE_DIR": cache}
        for figure, limit in (("kvctl demo, first time", 180.0), ("kvctl demo, again", 120.0)):
            seconds, report = run(environment)
            within.append(emit(figure, seconds, "s", limit=limit, steps=report["seconds"]))
    within.append(report["ok"])
    requests, answers = report["requests"], report["answers"]
    emit("kvctl demo, request p50", requests["p50_seconds"], "s", requests=requests["sent"])
    emit("kvctl demo, request p99", requests["p99_seconds"], "s", requests=requests["sent"])
    emit("kvctl demo, answers equal", answers["equal"], "{answer}", of=answers["compared"])
    for moved in report["transfers"]:
        if moved["bytes_per_second"]:
            figure = f"kvctl demo, {moved['tier']} {moved['direction']} on {moved['engine']}"
            emit(figure, moved["bytes_per_second"], "By/s", transfers=moved["count"])
    return 0 if all(within) else 1


def run(environment: dict[str, str]) -> tuple[float, dict[str, Any]]:
    """Seconds that one demo took, and its report."""
    command = [sys.executable, "-m", "kvctl", "demo", "--json", *sys.argv[1:]]
    began = time.perf_counter()
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    seconds = time.perf_counter() - began
    if not done.stdout:
        sys.exit(done.returncode)
    return seconds, json.loads(done.stdout)


if __name__ == "__main__":
    sys.exit(main())
