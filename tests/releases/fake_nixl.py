"""A NIXL agent inside one process: engines that share it move real bytes with no transport.

It stands in for ``nixl._api.nixl_agent`` where an installed NIXL does not fit the release under
test (0.20.2 wants 0.10, 0.33.0 wants 1.5), and needs no threads.
"""

from __future__ import annotations

import ctypes
import itertools
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

Region = tuple[int, int]  # address, bytes


@dataclass
class _Transfer:
    pairs: list[tuple[Region, Region]]  # (local, remote)
    agent: str
    message: bytes | None
    posted: bool = False


@dataclass
class _Side:
    """A prepared descriptor list: whose memory, and which regions."""

    agent: str
    regions: list[Region]


class FakeNixlAgent:
    """One agent.

    Attributes:
        agents: all agents of this process, by name.
        slow: transfers that have been posted are not done while this is set.
        refuses: posting a transfer raises.
        unreachable: sending a notification raises.
    """

    agents: ClassVar[dict[str, FakeNixlAgent]] = {}
    slow = False
    refuses = False
    unreachable = False

    def __init__(self, name: str, *_: Any) -> None:
        self.name = name
        self.agents[name] = self
        self._notifications: dict[str, list[bytes]] = {}
        self._numbers = itertools.count(1)
        self._sides: dict[int, _Side] = {}
        self._transfers: dict[int, _Transfer] = {}

    # Set-up

    def get_reg_descs(self, regions: Any, memory: str) -> list[Any]:
        return list(regions)

    def register_memory(self, descriptors: Any, backends: Any = None) -> None: ...

    def deregister_memory(self, descriptors: Any) -> None: ...

    def get_xfer_descs(self, blocks: Any, memory: str) -> list[Any]:
        return list(blocks)

    def prep_xfer_dlist(self, agent: str, blocks: Any, mem_type: str = "DRAM") -> int:
        owner = self.name if agent in ("", "NIXL_INIT_AGENT") else agent
        side = _Side(owner, list(itertools.chain(*map(_regions, blocks))))
        number = next(self._numbers)
        self._sides[number] = side
        return number

    def release_dlist_handle(self, side: int) -> None:
        self._sides.pop(side, None)

    def get_agent_metadata(self) -> bytes:
        return self.name.encode()

    def add_remote_agent(self, metadata: bytes) -> str:
        return metadata.decode()

    def check_remote_metadata(self, agent: str) -> bool:
        return agent in self.agents

    def remove_remote_agent(self, agent: str) -> None: ...

    # Transfers

    def make_prepped_xfer(
        self,
        operation: str,
        local: int,
        local_numbers: Any,
        remote: int,
        remote_numbers: Any,
        notif_msg: bytes | None = None,
    ) -> int:
        assert operation == "READ" and len(local_numbers) == len(remote_numbers)
        here, there = self._sides[local], self._sides[remote]
        pairs = [
            (here.regions[mine], there.regions[theirs])
            for mine, theirs in zip(local_numbers, remote_numbers, strict=True)
        ]
        number = next(self._numbers)
        self._transfers[number] = _Transfer(pairs, there.agent, notif_msg)
        return number

    def transfer(self, handle: int) -> str:
        if self.refuses:
            raise RuntimeError("NIXL_ERR_REMOTE_DISCONNECT")
        self._transfers[handle].posted = True
        return "PROC"

    def check_xfer_state(self, handle: int) -> str:
        self._progress()
        return "PROC" if self._transfers[handle].posted else "DONE"

    @classmethod
    def _progress(cls) -> None:
        """What NIXL's own threads do: transfers end whether or not anybody asks."""
        if cls.slow:
            return
        for agent in cls.agents.values():
            for transfer in agent._transfers.values():
                if transfer.posted:
                    transfer.posted = False
                    for (local, size), (remote, remote_size) in transfer.pairs:
                        assert size == remote_size
                        ctypes.memmove(local, remote, size)
                    if transfer.message is not None:
                        agent.send_notif(transfer.agent, notif_msg=transfer.message)

    def get_xfer_telemetry(self, handle: int) -> Any:
        transfer = self._transfers[handle]
        return SimpleNamespace(
            xferDuration=20,
            postDuration=10,
            totalBytes=sum(size for (_, size), _ in transfer.pairs),
            descCount=len(transfer.pairs),
        )

    def release_xfer_handle(self, handle: int) -> None:
        del self._transfers[handle]

    # Notifications

    def send_notif(self, agent: str, notif_msg: bytes) -> None:
        if self.unreachable:
            raise RuntimeError("NIXL_ERR_REMOTE_DISCONNECT")
        inbox = self.agents[agent]._notifications
        inbox.setdefault(self.name, []).append(notif_msg)

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        self._progress()
        arrived, self._notifications = self._notifications, {}
        return arrived


def _regions(row: Any) -> list[Region]:
    """Of (address, bytes, device), or NIXL's strided (address, bytes, device, stride, count)."""
    address, size, _, *strided = (int(value) for value in row)
    stride, count = strided or (0, 1)
    return [(address + number * stride, size) for number in range(count)]
