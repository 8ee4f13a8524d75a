"""A host tier that fails when it is told to, for the tests of what follows from it.

The engine finds it as an offloading spec, like any other. One process holds all ranks here, so
what is to fail is a list of this module.
"""

import errno
import threading
from dataclasses import dataclass
from typing import Any

from kvctl_connector.host_memory import HostMemorySpec, HostMemoryWorker

DIRECTIONS = ("store", "load")
HOWS = ("EIO", "ENOSPC", "short", "exception", "refused", "raises", "lost report")


@dataclass
class Fault:
    """The next job of that direction, on that rank, fails like this."""

    direction: str
    how: str
    rank: int = 0
    times: int = 1


FAULTS: list[Fault] = []
HELD: dict[int, threading.Event] = {}  # rank → until this is set, its copies wait


class FailingHostWorker(HostMemoryWorker):
    """There are as many of these as ranks; the test says which is which."""

    rank = 0
    loads = 0  # begun

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._admit("store") and super().submit_store(job_id, src_spec, dst_spec)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, **options: Any) -> bool:
        self.loads += 1
        return self._admit("load") and super().submit_load(job_id, src_spec, dst_spec, **options)

    def get_finished(self) -> Any:
        for direction in DIRECTIONS:
            if self._fault(direction, "lost report"):
                raise RuntimeError("planted: the report is lost")
        return super().get_finished()

    def _admit(self, direction: str) -> bool:
        if self._fault(direction, "raises"):
            raise OSError(errno.EIO, "planted")
        return not self._fault(direction, "refused")

    def _copy(self, device: Any, host: Any, *, to_host: bool) -> int:
        direction = "store" if to_host else "load"
        if self.rank in HELD:
            assert HELD[self.rank].wait(30), "held for ever"
        if self._fault(direction, "EIO"):
            raise OSError(errno.EIO, "planted")
        if self._fault(direction, "ENOSPC"):
            raise OSError(errno.ENOSPC, "planted")
        if self._fault(direction, "exception"):
            raise ValueError("planted")
        if self._fault(direction, "short"):
            return 1
        return super()._copy(device, host, to_host=to_host)

    def _fault(self, direction: str, how: str) -> bool:
        for fault in FAULTS:
            if (fault.direction, fault.how, fault.rank) == (direction, how, self.rank):
                fault.times -= 1
                if not fault.times:
                    FAULTS.remove(fault)
                return True
        return False


class FailingHostSpec(HostMemorySpec):
    worker_class = FailingHostWorker
