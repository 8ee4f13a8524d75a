"""Who still reads a finished request's blocks: the map that settles when they are freed.

When a request ends, each child says whether it still saves or sends its blocks, and the blocks
are free when all of those have reported. Upstream ships a count of the *additional* savers with
the next step's metadata (multi_connector.py 0.20.2 to 0.33.0, `_extra_async_saves`): a child that
reports before the count has arrived passes for the last one, and the blocks are given away while
another child still reads them. Here a report counts only against an announcement, which names
the children, and one that comes early waits for it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

from .bounded import trim

Saves = Mapping[str, tuple[int, ...]]  # request id -> indices of the children that save it

LIMIT = 65_536  # requests whose reports wait for an announcement


class SaveMap:
    """One worker's side: expected reports, and those that came before they were expected."""

    def __init__(self) -> None:
        self._pending: dict[str, set[int]] = {}
        self._early: OrderedDict[str, set[int]] = OrderedDict()
        self._saved: set[str] = set()

    def expect(self, saves: Saves) -> None:
        """Takes what the scheduler half has announced in this step."""
        for request, children in saves.items():
            pending = set(children) - self._early.pop(request, set())
            if pending:
                self._pending[request] = pending
            else:
                self._saved.add(request)

    def report(self, child: int, requests: Iterable[str]) -> None:
        """One child has saved these requests."""
        for request in requests:
            pending = self._pending.get(request)
            if pending is None:
                self._early.setdefault(request, set()).add(child)
                trim(self._early, LIMIT)
                continue
            pending.discard(child)
            if not pending:
                del self._pending[request]
                self._saved.add(request)

    def pass_on(self, requests: Iterable[str]) -> None:
        """Requests that are saved by somebody else's account."""
        self._saved.update(requests)

    def take(self) -> set[str]:
        """Requests that all of their children have saved, each once."""
        if not self._saved:
            return set()
        saved, self._saved = self._saved, set()
        return saved


class OwnReports:
    """What one child alone has saved, counted over the ranks: for a child that must know.

    Args:
        ranks: how many workers report each save.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._counts: dict[tuple[int, str], int] = {}

    def add(self, reports: Iterable[tuple[int, str]]) -> dict[int, set[str]]:
        """Takes a step's reports (child, request), one a rank; returns what is now complete."""
        complete: dict[int, set[str]] = {}
        for report in reports:
            count = self._counts.get(report, 0) + 1
            if count < self._ranks:
                self._counts[report] = count
                continue
            self._counts.pop(report, None)
            child, request = report
            complete.setdefault(child, set()).add(request)
        return complete


def saves_by_name(child: Any) -> bool:
    """D9: a child that takes its stores as done when their request is reported as sent.

    OffloadingConnector of 0.20.2 (offloading/scheduler.py:526). It must not wait until another
    child has sent the request too, for its blocks cannot be loaded from the tier before.
    """
    return hasattr(getattr(child, "connector_scheduler", None), "_reqs_being_stored") or hasattr(
        getattr(child, "connector_worker", None), "_finished_reqs_waiting_for_store"
    )
