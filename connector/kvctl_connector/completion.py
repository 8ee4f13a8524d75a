"""Who must still report before a load is complete: the one map that settles it.

Upstream unites the reports of all children without asking who was loading, so a child that was
never asked can complete a request (and the scheduler then dies of an assertion or decodes over
unwritten blocks). Here nothing completes but what the scheduler half announced: a map from
request to the children that must report, filled only for asynchronous loads with tokens, shipped
to the workers in the connector's metadata.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

Loads = Mapping[str, tuple[int, ...]]  # request id -> indices of the children that load for it


class GivenUp(NamedTuple):
    """A load that nobody waits for any more, though it may still be written.

    Attributes:
        number: by which its end is reported.
        children: that loaded.
        tiers: that had not loaded their part.
    """

    number: int
    children: tuple[int, ...]
    tiers: tuple[str, ...] = ()


@dataclass
class Released:
    """Requests whose loads are complete, and those among them of which a part failed."""

    received: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)


class CompletionMap:
    """The worker's side of the map.

    Attributes:
        strays: how many reports were dropped since nobody awaited them: from a child that was not
            loading, or for a request that was not announced.
    """

    def __init__(self) -> None:
        self._awaited: dict[str, set[int]] = {}
        self._failed: set[str] = set()
        self._given_up: dict[tuple[str, int], int] = {}
        self._open: dict[int, int] = {}
        self._ended: list[int] = []
        self._at_once: list[str] = []
        self.strays = 0

    def __len__(self) -> int:
        return len(self._awaited)

    def expect(self, loads: Loads) -> None:
        """Takes what the scheduler half has announced in this step."""
        for request, children in loads.items():
            self._awaited[request] = set(children)
            self._failed.discard(request)

    def give_up(self, loads: Mapping[str, GivenUp]) -> None:
        """Releases these requests as failed with the next `release_given_up`.

        What their children report from now on ends the load, but completes nothing.
        """
        for request, load in loads.items():
            awaited = self._awaited.get(request)
            if awaited is None or not awaited <= set(load.children):
                self._ended.append(load.number)  # it was complete before this was known
                continue
            del self._awaited[request]
            self._failed.discard(request)
            self._at_once.append(request)
            self._open[load.number] = len(awaited)
            for child in awaited:
                self._given_up[request, child] = load.number

    def release_given_up(self, released: Released) -> None:
        """Adds what was given up since the last call."""
        released.received.update(self._at_once)
        released.failed.update(self._at_once)
        self._at_once.clear()

    def take_ended(self) -> list[int]:
        """Numbers of loads that were given up and have ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def report(
        self, child: int, received: Iterable[str], failed: Iterable[str], released: Released
    ) -> None:
        """Takes one child's report; what is complete by it goes to `released`, once.

        A failed request counts as reported: the child is done with its blocks.
        """
        failed = set(failed)
        for request in {*received, *failed}:
            if (number := self._given_up.pop((request, child), None)) is not None:
                self._end_one(number)
                continue
            awaited = self._awaited.get(request)
            if awaited is None or child not in awaited:
                self.strays += 1
                continue
            if request in failed:
                self._failed.add(request)
            awaited.discard(child)
            if not awaited:
                del self._awaited[request]
                released.received.add(request)
                if request in self._failed:
                    self._failed.discard(request)
                    released.failed.add(request)

    def _end_one(self, number: int) -> None:
        self._open[number] -= 1
        if not self._open[number]:
            del self._open[number]
            self._ended.append(number)
