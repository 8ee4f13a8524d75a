"""No late read: a pull that ended after its lease may have run out is never decoded from.

When a lease runs out, prefill frees the blocks and uses them again; decode, whose heartbeats
were late, would read them all the same and answer from them with HTTP 200. Decode alone decides
here, and trusts nothing that it cannot prove: the grant that prefill put into its offer, moved
only by heartbeats that were sent, without an error, while the lease surely held. Prefill does its
part by not reaping a lease before it has surely read the heartbeats that were sent for it.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

LIMIT = 65_536  # leases remembered by one worker
_MS = 1_000_000  # ns


class Lease(NamedTuple):
    """A lease as the scheduler half ships it to the workers.

    Attributes:
        remote_request: the request's id on prefill, by which heartbeats name it.
        end: Unix ns at which it runs out without a heartbeat.
        extension: ns from a heartbeat's sending to its new end.
    """

    remote_request: str
    end: int
    extension: int


@dataclass
class _Watched:
    lease: Lease
    end: int


class LeaseGuard:
    """The leases of one worker's pulls.

    Args:
        margin: ns by which a lease must still hold to be believed; covers clocks that differ.
    """

    def __init__(self, margin: int) -> None:
        self._margin = margin
        self._by_request: OrderedDict[str, _Watched] = OrderedDict()
        self._by_remote: dict[str, _Watched] = {}

    def granted(self, leases: Mapping[str, Lease]) -> None:
        """Learns the leases of requests that have just arrived."""
        for request, lease in leases.items():
            watched = _Watched(lease, lease.end)
            self._by_request[request] = watched
            self._by_remote[lease.remote_request] = watched
            if len(self._by_request) > LIMIT:
                self.forget(next(iter(self._by_request)))

    def heartbeat_sent(self, message: bytes, sent: int) -> None:
        """A heartbeat (``HB:id,id``) was posted without an error at Unix ns `sent`.

        Prefill reads its notifications before it reaps leases (NIXL/base_worker.py 0.32.0,
        get_transfer_results), and ignores a heartbeat for a lease that is gone. So one that was
        sent while the lease held has extended it, from its sending at least.
        """
        for remote in message[3:].decode("utf-8", "replace").split(","):
            watched = self._by_remote.get(remote)
            if watched is not None and sent < watched.end - self._margin:
                watched.end = max(watched.end, sent + watched.lease.extension)

    def ended(self, request: str) -> int:
        """A pull has ended: by how many ns it was too late; 0 when it was in time.

        A pull without a known lease cannot be judged and passes.
        """
        watched = self._by_request.get(request)
        if watched is None:
            return 0
        self.forget(request)
        return max(0, time.time_ns() - (watched.end - self._margin))

    def forget(self, request: str) -> None:
        """The request has ended, however."""
        watched = self._by_request.pop(request, None)
        if watched is None:
            return
        if self._by_remote.get(watched.lease.remote_request) is watched:
            del self._by_remote[watched.lease.remote_request]


class Grace:
    """Prefill's side: an expired lease gets a second look before it is reaped.

    Where prefill was stopped, or its machine was, the heartbeats that reached it meanwhile still
    lie in the transport when it goes on. Reaped at once, the lease would end although decode
    rightly believes that it was extended.

    Args:
        leases: NIXL's own table, request to the ``time.perf_counter`` of its end
            (``_reqs_to_send``, NIXL/base_worker.py 0.32.0:809; the same in all releases).
    """

    SECONDS = 1.0

    def __init__(self, leases: dict[str, float]) -> None:
        self._leases = leases
        self._given: dict[str, float] = {}  # request -> the end that its grace has set

    def notifications_read(self) -> None:
        """To be called right after prefill has read its notifications, and before it reaps."""
        if not self._leases:
            self._given.clear()
            return
        now = time.perf_counter()
        for request in [name for name, end in self._leases.items() if end <= now]:
            # Anew for each end: a heartbeat may have moved it since the last grace.
            if self._given.get(request) != self._leases[request]:
                self._given[request] = self._leases[request] = now + self.SECONDS
        if len(self._given) > 2 * len(self._leases):
            self._given = {name: end for name, end in self._given.items() if name in self._leases}
