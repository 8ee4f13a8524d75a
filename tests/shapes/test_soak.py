"""Thousands of requests in a row: nothing that an engine takes for one may stay."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from disorder import nothing_is_left
from layouts import SOAK, shaped
from mixed import run_mixed
from pair import Pair, session_of

pytestmark = pytest.mark.soak

WARM_UP, COUNT, ROUNDS = 400, 500, 4
MIB = 1 << 20
ENGINES = ("prefill-0", "decode-0")
# By which a process may have grown at the end, of one record of 8 KiB kept for each request: its
# allocators round up. A worker keeps the scratch memory of its largest batch, too.
GROWTH = {"VLLM::EngineCor": 16 * MIB, "VLLM::Worker": 64 * MIB}
OTHERS = 16 * MIB


@dataclass(frozen=True)
class Taken:
    """What one process has."""

    engine: str
    name: str
    files: int
    resident: int  # bytes


def taken(pair: Pair) -> dict[int, Taken]:
    """By pid, of both engines."""
    found = {}
    for engine in ENGINES:
        for pid in session_of(pair.record(engine)["pid"]):
            folder = Path("/proc") / str(pid)
            found[pid] = Taken(
                engine,
                (folder / "comm").read_text().strip(),
                len(list((folder / "fd").iterdir())),
                int((folder / "statm").read_text().split()[1]) * 4096,
            )
    return found


@shaped(SOAK)
def test_two_thousand_requests_in_a_row_leave_nothing(pair: Pair) -> None:
    """After a warm-up that fills every cache and pool."""
    assert run_mixed(pair, WARM_UP, clients=2).wrong == []
    nothing_is_left(pair)
    before = taken(pair)

    for number in range(ROUNDS):
        tally = run_mixed(pair, COUNT, clients=2, seed=3 + number)
        assert tally.wrong == []
        assert tally.failed == []
        nothing_is_left(pair)
        print(f"\n{(number + 1) * COUNT} requests, largest deviation {tally.deviation:.1e}")
        for pid, now in taken(pair).items():
            grown = (now.resident - before[pid].resident) / MIB
            print(f"  {now.engine} {now.name}: {now.files} files, {grown:+.1f} MiB")

    for pid, now in taken(pair).items():
        assert now.files <= before[pid].files + 4, f"{now}: connections of the last clients"
        allowed = GROWTH.get(now.name, OTHERS)
        assert now.resident <= before[pid].resident + allowed, (before[pid], now)
