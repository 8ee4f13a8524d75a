"""Thousands of requests in a row: nothing that an engine takes for one may stay."""

from __future__ import annotations

from pathlib import Path

import pytest
from disorder import nothing_is_left
from layouts import MIXED, shaped
from mixed import run_mixed
from pair import Pair, session_of

pytestmark = pytest.mark.soak

WARM_UP, COUNT = 400, 2000
MIB = 1 << 20


def taken(pair: Pair) -> dict[str, tuple[int, int]]:
    """Open files and resident bytes of each engine, all its processes together."""
    found = {}
    for name in ("prefill-0", "decode-0"):
        pids = [Path("/proc") / str(pid) for pid in session_of(pair.record(name)["pid"])]
        files = sum(len(list((pid / "fd").iterdir())) for pid in pids)
        pages = sum(int((pid / "statm").read_text().split()[1]) for pid in pids)
        found[name] = (files, pages * 4096)
    return found


@shaped(MIXED)
def test_two_thousand_requests_in_a_row_leave_nothing(pair: Pair) -> None:
    """After a warm-up that fills every cache and pool."""
    assert run_mixed(pair, WARM_UP, clients=2).wrong == []
    nothing_is_left(pair)
    before = taken(pair)

    tally = run_mixed(pair, COUNT, clients=2, seed=3)

    assert tally.wrong == []
    assert tally.failed == []
    nothing_is_left(pair)
    after = taken(pair)
    print(before, after)
    for name, (files, resident) in after.items():
        assert files <= before[name][0] + 4, "connections of the last clients"
        assert resident <= before[name][1] + 24 * MIB
