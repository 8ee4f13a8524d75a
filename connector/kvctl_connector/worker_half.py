"""The worker's half: the completion map, the probes, and the facts that ride with each step."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from .completion import CompletionMap, GivenUp, Loads, Released
from .facts import Fact
from .guard import guarded, logger
from .lease import Lease, LeaseGuard
from .nixl_probe import NixlProbe
from .offload_failures import FailedJob, OffloadFailures
from .offload_probe import OffloadProbe
from .pull_failures import HOOK, contain

MAX_FACTS = 4096  # facts kept until the step that ships them; older ones are dropped


class WorkerHalf:
    """What one worker knows about its transfers.

    Args:
        tiers: the tier of each child, in the order of the children.
        children: the child connectors, worker role.
        rank, ranks: of this worker, and of all workers of the engine.
        clock_margin_ms: by which a lease must still hold when its pull has ended.
        observes: everything passes as upstream would have it, and is only measured.
        by_block: whether a failed load is told by its blocks: up to 0.28.0, which have no way to
            say that a request's load failed.
    """

    def __init__(
        self,
        tiers: list[str],
        children: list[Any],
        rank: int,
        ranks: int,
        clock_margin_ms: int,
        *,
        observes: bool = False,
        by_block: bool = True,
    ) -> None:
        self._observes = observes
        self.completion = CompletionMap()
        self.leases = LeaseGuard(clock_margin_ms * 1_000_000)
        self._blocks: dict[str, list[int]] = {}
        self._unreadable: set[int] = set()
        self._children = children
        self._out: deque[Fact] = deque(maxlen=MAX_FACTS)
        self._nixl: dict[int, NixlProbe] = {}
        self._offload: dict[int, OffloadProbe] = {}
        self._failures: dict[int, OffloadFailures] = {}
        for index, (tier, child) in enumerate(zip(tiers, children, strict=True)):
            worker = getattr(child, "connector_worker", None)
            if tier == "peer":
                probe = self._nixl[index] = NixlProbe(
                    rank, ranks, self.leases.heartbeat_sent, gives_grace=not observes
                )
                probe.install(worker)
                if not observes and not contain(worker):
                    probe.missing.append(HOOK)
            elif worker is not None:
                self._offload[index] = OffloadProbe(tier, rank, ranks, self._out)
                if not observes:
                    self._failures[index] = OffloadFailures(index, by_block=by_block)

    @guarded
    def caches_registered(self) -> None:
        """The offload workers exist now."""
        for index, probe in self._offload.items():
            worker = self._children[index].connector_worker
            if (failures := self._failures.get(index)) is not None:
                failures.install(worker, between=probe.install)
            else:
                probe.install(worker)

    def bound(
        self,
        loads: Loads | None,
        leases: Mapping[str, Lease] | None,
        given_up: Mapping[str, GivenUp] | None,
        metadata: tuple[Any, ...],
    ) -> None:
        """A step's metadata: which loads begin, under which leases, which are given up, and whom
        the jobs serve."""
        if leases:
            self.leases.granted(leases)
        if loads:
            self.completion.expect(loads)
        if given_up:
            self.completion.give_up(given_up)
        for index in self._nixl:
            for request, meta in (getattr(metadata[index], "reqs_to_recv", None) or {}).items():
                self._blocks[request] = [b for group in meta.local_block_ids for b in group]
        for index, probe in self._offload.items():
            child = metadata[index]
            if jobs := getattr(child, "store_jobs", None):
                probe.announce(jobs)
            if jobs := getattr(child, "load_jobs", None):
                probe.announce(jobs)

    def reported(
        self, child: int, sent: set[str], received: set[str], failed: set[str], released: Released
    ) -> None:
        """One child's transfer results: what is complete by them goes to `released`."""
        if received and child in self._failures:
            failed = failed | self._failures[child].failed_of(received)
        if received or failed:
            late = self._late(child, received - failed)
            self._note_received(child, received, failed, late)
            if self._observes:
                released.received.update(received)
                released.failed.update(failed)
            else:
                self.completion.report(child, received, failed | late, released)
        if sent:
            self._note_sent(child, sent)

    def take_facts(self) -> list[Fact]:
        """The facts since the last step."""
        facts = []
        while self._out:
            facts.append(self._out.popleft())
        return facts

    def take_missing(self) -> list[str]:
        """Hooks that the installed vLLM does not have; each is told once."""
        missing: list[str] = []
        for hooks in (self._nixl, self._offload, self._failures):
            for hook in hooks.values():
                missing += hook.missing
                hook.missing.clear()
        return missing

    def take_strays(self) -> int:
        """Completions dropped since the last step because nobody awaited them."""
        strays, self.completion.strays = self.completion.strays, 0
        return strays

    def take_unreadable(self) -> set[int]:
        """Blocks that late pulls have written since the last call: nobody may read them."""
        blocks, self._unreadable = self._unreadable, set()
        return blocks

    def take_unwritten(self) -> set[int]:
        """Blocks that failed loads have not written since the last call, where only blocks tell."""
        return {each for failures in self._failures.values() for each in failures.take_blocks()}

    def take_failed(self) -> set[FailedJob]:
        """Jobs of offload children that failed here since the last step."""
        return {job for failures in self._failures.values() for job in failures.take_failed()}

    def forget(self, requests: set[str]) -> None:
        """Requests that have ended, however."""
        for request in requests:
            self._blocks.pop(request, None)
            self.leases.forget(request)

    def _late(self, child: int, received: set[str]) -> set[str]:
        """Pulls that ended after their lease may have run out. Not guarded: see lease.py."""
        if child not in self._nixl:
            return set()
        late = {request: by for request in received if (by := self.leases.ended(request))}
        for request, by in late.items():
            blocks = self._blocks.get(request, [])
            if not self._observes:
                self._unreadable.update(blocks)
            logger.warning(
                "kvctl: the pull of %s ended %.1f s after its lease may have run out: its %d "
                "blocks are %s",
                request,
                by / 1e9,
                len(blocks),
                "used all the same (mode: observe)" if self._observes else "not used",
            )
        return set(late)

    @guarded
    def _note_received(
        self, child: int, received: set[str], failed: set[str], late: set[str]
    ) -> None:
        if (probe := self._nixl.get(child)) is not None:
            for request in {*received, *failed}:
                self._blocks.pop(request, None)
                self._out.append(
                    probe.received(request, failed=request in failed, late=request in late)
                )

    @guarded
    def _note_sent(self, child: int, sent: set[str]) -> None:
        if (probe := self._nixl.get(child)) is not None:
            self._out.extend(probe.sent(sent))
