"""A host tier that misbehaves when told to, for the tests and the self-test of their comparison.

The engine finds it because a topology of the tests names this module. Being loaded in the engine
core and in the workers, it can also switch off the guards there, to show that the tests of the
guards go red without them. What can be asked of it: misbehaviour.py. The wrong block of a load is
its last one, also in the place of its first.
"""

import errno
import os
import time
from pathlib import Path
from typing import Any

from misbehaviour import (
    FAIL,
    FOLDER,
    LOADS_HANG,
    NO_LEASE_GUARD,
    NO_OFFER_CHECK,
    PLANT,
    SLOW_COPIES,
)

from kvctl_connector.host_memory import HostMemorySpec, HostMemoryWorker
from kvctl_connector.lease import LeaseGuard
from kvctl_connector.offers import Offers, Verdict


def _flag(name: str) -> Path:
    return Path(os.environ[FOLDER]) / name


def _taken(name: str) -> bool:
    """Whether the flag was up; it is down now, and up for one rank only."""
    try:
        _flag(name).unlink()
    except FileNotFoundError:
        return False
    return True


def _without_guards() -> None:
    ended, judge = LeaseGuard.ended, Offers.judge

    def believe_the_pull(self: LeaseGuard, request: str) -> int:
        late = ended(self, request)
        return 0 if _flag(NO_LEASE_GUARD).exists() else late

    def believe_the_offer(self: Offers, request: Any) -> Verdict | None:
        return None if _flag(NO_OFFER_CHECK).exists() else judge(self, request)

    LeaseGuard.ended = believe_the_pull  # type: ignore[method-assign]
    Offers.judge = believe_the_offer  # type: ignore[method-assign]


if FOLDER in os.environ:  # in an engine
    _without_guards()


def _fail(how: str) -> int:
    """What a copy that fails like this says; a short one tells how little it has moved."""
    if how == "short":
        return 1
    if how in ("EIO", "ENOSPC"):
        raise OSError(getattr(errno, how), "planted")
    raise RuntimeError(f"planted: {how}")


class PlantingHostWorker(HostMemoryWorker):
    def _copy(self, device: Any, host: Any, *, to_host: bool) -> int:
        if _flag(SLOW_COPIES).exists():
            time.sleep(0.3)
        while not to_host and _flag(LOADS_HANG).exists():
            time.sleep(0.05)
        fail = _flag(FAIL["store" if to_host else "load"])
        if fail.exists():
            how = fail.read_text()
            fail.unlink()
            return _fail(how)
        if to_host or not _taken(PLANT):
            return super()._copy(device, host, to_host=to_host)
        first, last = (_rows(int(host.block_ids[at]), self._blocks_per_chunk) for at in (0, -1))
        assert first != last, "this load has one block only"
        right = [rows[first].copy() for rows in self._host]
        for rows in self._host:
            rows[first] = rows[last]
        copied = super()._copy(device, host, to_host=to_host)
        for rows, kept in zip(self._host, right, strict=True):
            rows[first] = kept  # the next load is right again
        return copied


def _rows(chunk: int, size: int) -> slice:
    return slice(chunk * size, (chunk + 1) * size)


class PlantingHostSpec(HostMemorySpec):
    worker_class = PlantingHostWorker
