"""Thousands of requests in a row: nothing that an engine takes for one may stay."""

from __future__ import annotations

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


def processes(pair: Pair, name: str) -> list[Path]:
    return [Path("/proc") / str(pid) for pid in session_of(pair.record(name)["pid"])]


def open_files(pair: Pair, name: str) -> int:
    """Of an engine, all its processes together."""
    return sum(len(list((pid / "fd").iterdir())) for pid in processes(pair, name))


def resident(pair: Pair, name: str) -> int:
    """Bytes, likewise."""
    return sum(int((pid / "statm").read_text().split()[1]) * 4096 for pid in processes(pair, name))


@shaped(SOAK)
def test_two_thousand_requests_in_a_row_leave_nothing(pair: Pair) -> None:
    """After a warm-up that fills every cache and pool."""
    assert run_mixed(pair, WARM_UP, clients=2).wrong == []
    nothing_is_left(pair)
    files = {name: open_files(pair, name) for name in ENGINES}
    memory = {name: [resident(pair, name)] for name in ENGINES}

    for number in range(ROUNDS):
        tally = run_mixed(pair, COUNT, clients=2, seed=3 + number)
        assert tally.wrong == []
        assert tally.failed == []
        nothing_is_left(pair)
        for name in ENGINES:
            memory[name].append(resident(pair, name))
        print({name: [each // MIB for each in memory[name]] for name in ENGINES})

    for name in ENGINES:
        assert open_files(pair, name) <= files[name] + 4, "connections of the last clients"
        assert memory[name][-1] <= memory[name][0] + 24 * MIB
