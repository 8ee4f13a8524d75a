"""Requests that are parked until their KV is loaded: how many, since when, and until when at most.

A load that passes the deadline is given up: its request is answered some other way. But what was
posted may still write, so the request's blocks stay reserved, by a reference of our own in vLLM's
block pool, until every rank has reported that the load has ended. Only then are they free.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from . import semconv
from .completion import GivenUp
from .guard import logger
from .recorder import Recorder
from .wire import Wait

LIMIT = 65_536  # requests remembered at once


class Part(NamedTuple):
    """What one child loads for a request."""

    child: int
    tier: str
    tokens: int


@dataclass
class _Load:
    """One parked request.

    Attributes:
        start, since: when it was parked: Unix ns, and ns of a clock that nobody sets.
        open: tiers that have not reported their part.
        outcome: the worst of the parts that have.
    """

    parts: tuple[Part, ...]
    blocks: Any
    start: int
    since: int
    open: set[str]
    outcome: str = "ok"

    @property
    def tier(self) -> str:
        """The label of the wait; of two tiers the peer's, which decides how long it is."""
        tiers = {part.tier for part in self.parts}
        return "peer" if "peer" in tiers else self.parts[0].tier


@dataclass
class _Held:
    blocks: list[Any]
    ranks: int  # that have not reported yet


class Waits:
    """The parked requests of one engine.

    Args:
        ranks: of the engine; each reports the end of a load that was given up.
        deadline: seconds; 0: none.
        tiers: of the engine's children.
        let_go: has a child, by its index, go on without the load that it makes for a request;
            False: it cannot, so the load is waited for. Not asked of a pull.
    """

    def __init__(
        self,
        recorder: Recorder,
        ranks: int,
        deadline: float,
        tiers: Iterable[str],
        let_go: Callable[[int, str], bool],
    ) -> None:
        self._recorder = recorder
        self._ranks = ranks
        self._let_go = let_go
        self._deadline = int(deadline * 1e9)
        self._loads: OrderedDict[str, _Load] = OrderedDict()
        self._waiting: Counter[str] = Counter(dict.fromkeys(tiers, 0))
        self._aborted: OrderedDict[str, int] = OrderedDict()
        self._held: dict[int, _Held] = {}
        self._number = 0
        self._blocks_held = 0
        self.block_pool: Any = None
        self.gauge()

    def __contains__(self, request: object) -> bool:
        return request in self._loads

    @property
    def holds(self) -> bool:
        """Whether blocks are reserved for loads that were given up and have not ended."""
        return bool(self._held)

    def begin(self, request: str, parts: tuple[Part, ...], blocks: Any) -> None:
        """A request is parked until all parts are loaded into its `blocks` (KVCacheBlocks)."""
        self._drop(request)
        load = self._loads[request] = _Load(
            parts, blocks, time.time_ns(), time.monotonic_ns(),
            {part.tier for part in parts},
        )  # fmt: skip
        self._count(load, 1)
        if len(self._loads) > LIMIT:
            self._drop(next(iter(self._loads)))
        self.gauge()

    def part_ended(self, request: str, tier: str, outcome: str) -> None:
        """One tier's part of a load has ended, on all ranks."""
        if (load := self._loads.get(request)) is not None:
            load.open.discard(tier)
            if outcome != "ok":
                load.outcome = outcome

    def end(self, request: str) -> tuple[Part, ...]:
        """vLLM is told that the load is complete; returns the parts that served the request."""
        if blocks := self._aborted.pop(request, 0):
            self._count_held(-blocks)
        load = self._drop(request)
        if load is None:
            return ()
        self._record(request, load, load.outcome)
        return load.parts if load.outcome == "ok" else ()

    def abort(self, request: str) -> None:
        """The client is gone. vLLM keeps the blocks until the load is complete."""
        load = self._drop(request)
        if load is not None:
            self._aborted[request] = sum(map(len, load.blocks.blocks))
            self._count_held(self._aborted[request])
            if len(self._aborted) > LIMIT:
                self._count_held(-self._aborted.popitem(last=False)[1])
            self._record(request, load, "aborted")

    def give_up_overdue(self) -> dict[str, GivenUp]:
        """Reserves the blocks of every load that has passed the deadline, and names them.

        To be called once a step, after the children's metadata was built and before it is shipped.
        """
        if not self._deadline or self.block_pool is None:
            return {}
        overdue: dict[str, GivenUp] = {}
        latest = time.monotonic_ns() - self._deadline
        passed = itertools.takewhile(lambda item: item[1].since <= latest, self._loads.items())
        for request, load in list(passed):
            local = [part for part in load.parts if part.tier in load.open and part.tier != "peer"]
            if not all(self._let_go(part.child, request) for part in local):
                continue
            self._drop(request)
            number = self._hold(load)
            self._record(request, load, "failed")
            for tier in load.open:
                self._recorder.add(
                    semconv.TRANSFER_FAILURES,
                    1,
                    tier,
                    _direction(tier),
                    "move",
                    "wait_deadline",
                    "",
                )
            logger.warning(
                "kvctl: %s has waited %.0f s for its KV (%s): it is answered without it, and its "
                "blocks stay reserved until the transfer has ended",
                request, (time.time_ns() - load.start) / 1e9, " and ".join(sorted(load.open)),
            )  # fmt: skip
            children = tuple(part.child for part in load.parts)
            overdue[request] = GivenUp(number, children, tuple(load.open))
        return overdue

    def loads_ended(self, numbers: Iterable[int]) -> None:
        """Loads that were given up have ended on one rank each; on the last, they are freed."""
        for number in numbers:
            held = self._held.get(number)
            if held is None:
                continue
            held.ranks -= 1
            if held.ranks <= 0:
                del self._held[number]
                self.block_pool.free_blocks(held.blocks)
                self._count_held(-len(held.blocks))

    def gauge(self) -> None:
        """Sets the gauges of what waits."""
        remote, waiting = self._waiting["peer"], len(self._loads)
        self._recorder.set(semconv.REQUEST_WAITING, remote, "remote_kv")
        self._recorder.set(semconv.REQUEST_WAITING, waiting - remote, "offload_load")
        for tier, count in self._waiting.items():
            self._recorder.set(semconv.TRANSFER_INFLIGHT, count, tier, _direction(tier))

    def _drop(self, request: str) -> _Load | None:
        load = self._loads.pop(request, None)
        if load is not None:
            self._count(load, -1)
        return load

    def _count(self, load: _Load, by: int) -> None:
        """Counted as they come and go: thousands may wait, and each step changes some."""
        for tier in {part.tier for part in load.parts}:
            self._waiting[tier] += by

    def _hold(self, load: _Load) -> int:
        blocks = [
            block
            for group in load.blocks.blocks
            for block in group
            if not block.is_null and block.block_hash is None
        ]
        for block in blocks:
            block.ref_cnt += 1  # what BlockPool.touch does to a block that is in use
        self._number += 1
        self._held[self._number] = _Held(blocks, self._ranks)
        self._count_held(len(blocks))
        return self._number

    def _record(self, request: str, load: _Load, outcome: str) -> None:
        now = time.time_ns()
        self._recorder.observe(semconv.REQUEST_WAIT, (now - load.start) / 1e9, load.tier, outcome)
        self._recorder.put(Wait(0, load.tier, outcome, request, load.start, now))
        self.gauge()

    def _count_held(self, blocks: int) -> None:
        self._blocks_held += blocks
        self._recorder.set(semconv.BLOCKS_HELD, self._blocks_held, "abort")


def _direction(tier: str) -> str:
    """Which way the KV of a waiting request comes."""
    return "recv" if tier == "peer" else "load"
