"""The worker's half: the completion map, the probes, and the facts that ride with each step."""

from __future__ import annotations

from collections import deque
from typing import Any

from .completion import CompletionMap, Loads, Released
from .facts import Fact
from .guard import guarded
from .nixl_probe import NixlProbe
from .offload_probe import OffloadProbe

MAX_FACTS = 4096  # facts kept until the step that ships them; older ones are dropped


class WorkerHalf:
    """What one worker knows about its transfers.

    Args:
        tiers: the tier of each child, in the order of the children.
        children: the child connectors, worker role.
        rank, ranks: of this worker, and of all workers of the engine.
    """

    def __init__(self, tiers: list[str], children: list[Any], rank: int, ranks: int) -> None:
        self.completion = CompletionMap()
        self._children = children
        self._out: deque[Fact] = deque(maxlen=MAX_FACTS)
        self._nixl: dict[int, NixlProbe] = {}
        self._offload: dict[int, OffloadProbe] = {}
        for index, (tier, child) in enumerate(zip(tiers, children, strict=True)):
            worker = getattr(child, "connector_worker", None)
            if tier == "peer":
                probe = self._nixl[index] = NixlProbe(rank, ranks)
                probe.install(worker)
            elif worker is not None:
                self._offload[index] = OffloadProbe(tier, rank, ranks, self._out)

    @guarded
    def caches_registered(self) -> None:
        """The offload workers exist now."""
        for index, probe in self._offload.items():
            probe.install(self._children[index].connector_worker)

    def bound(self, loads: Loads | None, metadata: tuple[Any, ...]) -> None:
        """A step's metadata: which loads begin, and which requests the offload jobs serve."""
        if loads:
            self.completion.expect(loads)
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
        if received or failed:
            self._note_received(child, received, failed)
            self.completion.report(child, received, failed, released)
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
        probes: list[NixlProbe | OffloadProbe] = [*self._nixl.values(), *self._offload.values()]
        for probe in probes:
            missing += probe.missing
            probe.missing.clear()
        return missing

    def take_strays(self) -> int:
        """Completions dropped since the last step because nobody awaited them."""
        strays, self.completion.strays = self.completion.strays, 0
        return strays

    @guarded
    def _note_received(self, child: int, received: set[str], failed: set[str]) -> None:
        if (probe := self._nixl.get(child)) is not None:
            for request in {*received, *failed}:
                self._out.append(probe.received(request, failed=request in failed))

    @guarded
    def _note_sent(self, child: int, sent: set[str]) -> None:
        if (probe := self._nixl.get(child)) is not None:
            self._out.extend(probe.sent(sent))
