"""Where a request's KV is loaded from: NIXL's offer, a local tier, or both.

Upstream takes the first child in the order of the configuration that offers anything, and waits
for any child that does not know yet. So one block in host memory, listed first, suppresses the
pull of a whole prompt, and a lookup on disk holds back a request that NIXL could serve at once
(MULTI 0.32.0, get_num_new_matched_tokens). Here the tier is chosen by the time that it will take.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

from .bounded import trim
from .composed import Composition, Plan
from .speeds import Speeds

LIMIT = 65_536  # requests whose lookup is pending, remembered at once

# Offers that cost: SimpleCPUOffloadConnector pins blocks for each offer that it makes
# (SIM/manager.py 0.33.0:448), so it is asked only where nobody else has the whole.
_ASK_LAST = "SimpleCPUOffload"


class Offer(NamedTuple):
    """What one child has.

    Attributes:
        tokens: beyond what is computed; None: it does not know yet.
        waits: the request is parked until the load is complete.
    """

    tokens: int | None
    waits: bool


class Choice(NamedTuple):
    """What is taken of it.

    Attributes:
        child: whose offer; None: nobody's.
        tokens, waits: the answer to vLLM's query.
        why: of ``semconv.WHYS``.
        offers: of all children in their order; None: not asked.
        plan: for a load from two tiers; then `child` is the peer's.
    """

    child: int | None
    tokens: int | None
    waits: bool
    why: str
    offers: tuple[Offer | None, ...]
    plan: Plan | None = None


class TierChoice:
    """Asks the children of one engine and chooses.

    Args:
        children: the child connectors, scheduler role, and `tiers` of each.
        bytes_per_token: of one rank's KV, over all layers.
        block: tokens of the largest block, of any group.
        composition: for loads from two tiers; None: never.
        lookup_deadline: seconds that a lookup may stay pending; 0: for ever.
    """

    def __init__(
        self,
        children: Sequence[Any],
        tiers: Sequence[str],
        *,
        speeds: Speeds,
        bytes_per_token: float,
        block: int,
        composition: Composition | None,
        lookup_deadline: float,
    ) -> None:
        self._children = children
        self._tiers = tiers
        self._speeds = speeds
        self._bytes_per_token = bytes_per_token
        self._block = block
        self._composition = composition
        self._deadline = int(lookup_deadline * 1e9)
        self._peers = [index for index, tier in enumerate(tiers) if tier == "peer"]
        local = [index for index, tier in enumerate(tiers) if tier != "peer"]
        self._local = sorted(
            local, key=lambda index: type(children[index]).__name__.startswith(_ASK_LAST)
        )
        self._pending: OrderedDict[str, int] = OrderedDict()
        self._avoided: OrderedDict[str, set[str]] = OrderedDict()

    @property
    def pending(self) -> int:
        """Requests that wait for a lookup."""
        return len(self._pending)

    def choose(self, request: Any, computed: int) -> Choice:
        """Answers vLLM's query; it comes every step until the request is admitted.

        Every child is asked every time, since some keep state by it (OffloadingConnector up to
        0.22.1, and its step lock in 0.33.0).
        """
        offers: list[Offer | None] = [None] * len(self._children)
        peer = self._ask(self._peers, offers, request, computed)
        local = self._ask(self._local, offers, request, computed)
        choice = self._decide(request, computed, offers, peer, local)
        if choice.tokens is None:
            return self._still_pending(request.request_id, choice)
        self._pending.pop(request.request_id, None)
        return choice

    def view(self, plan: Plan, blocks: Any) -> Any:
        """The blocks as the peer's child is to see them; None: it has to load them all."""
        return None if self._composition is None else self._composition.view(plan, blocks)

    def avoid(self, request: str, tier: str) -> None:
        """A load of this request from that tier has failed: it is not tried again.

        Otherwise it could go round for ever, since vLLM asks anew after each failure.
        """
        self._avoided.setdefault(request, set()).add(tier)
        trim(self._avoided, LIMIT)

    def admitted(self, request: str) -> None:
        """The request has its blocks: whatever it asked for is settled."""
        self._pending.pop(request, None)

    def forget(self, request: str) -> None:
        """The request has ended, however."""
        self._pending.pop(request, None)
        self._avoided.pop(request, None)

    def seconds(self, child: int, tokens: int, request: Any) -> float | None:
        """How long it should take to load that from this child's tier; None: unknown."""
        if self._tiers[child] == "peer":
            engine = str((request.kv_transfer_params or {}).get("remote_engine_id"))
            speed = self._speeds.of("peer", "recv", engine)
        else:
            speed = self._speeds.of(self._tiers[child], "load")
        return None if speed is None else tokens * self._bytes_per_token / speed

    def _ask(
        self, children: Sequence[int], offers: list[Offer | None], request: Any, computed: int
    ) -> int | None:
        """Asks these children; returns the best: the one with the most tokens, of equals the
        fastest, then the earliest. A disk of unknown speed is no better than any other tier."""
        for index in children:
            child = self._children[index]
            if type(child).__name__.startswith(_ASK_LAST) and any(o and o.tokens for o in offers):
                continue
            offer = Offer(*child.get_num_new_matched_tokens(request, computed))
            if self._tiers[index] in self._avoided.get(request.request_id, ()):
                offer = Offer(0, False)
            offers[index] = offer
        having = {
            index: told.tokens for index in children if (told := offers[index]) and told.tokens
        }
        if len(having) < 2:
            return next(iter(having), None)

        def worth(index: int) -> tuple[bool, int, float]:
            tokens = having[index]
            seconds = self.seconds(index, tokens, request)
            slow = seconds is None and self._tiers[index] == "disk"
            return not slow, tokens, -(seconds if seconds is not None else float("inf"))

        return max(having, key=worth)

    def _decide(
        self,
        request: Any,
        computed: int,
        offers: list[Offer | None],
        peer: int | None,
        local: int | None,
    ) -> Choice:
        def take(child: int, why: str, plan: Plan | None = None) -> Choice:
            offer = offers[child]
            assert offer is not None
            return Choice(child, offer.tokens, offer.waits, why, tuple(offers), plan)

        if peer is None and local is None:
            unknown = any(offer is not None and offer.tokens is None for offer in offers)
            return Choice(None, None if unknown else 0, False, "none", tuple(offers))
        if peer is None:
            assert local is not None
            return take(local, "only")
        if local is None:
            return take(peer, "only")
        pull, load = offers[peer], offers[local]
        assert pull is not None and load is not None and pull.tokens and load.tokens
        pulling = self.seconds(peer, pull.tokens, request)
        loading = self.seconds(local, load.tokens, request)
        if (composition := self._composition) is not None and load.tokens < pull.tokens:
            same = self.seconds(peer, load.tokens, request)
            faster = loading is not None and same is not None and loading <= same
            if (faster or composition.always) and composition.possible(
                request, peer, local, computed + load.tokens
            ):
                plan = Plan(peer, local, computed, load.tokens, pull.tokens)
                return take(peer, "composed", plan)._replace(waits=True)
        # The rest of a block has to be computed anyway where the local tier keeps whole ones.
        if load.tokens + self._block <= pull.tokens:
            return take(peer, "more")
        if pulling is None or loading is None:
            return take(peer, "unmeasured")
        return take(local if loading < pulling else peer, "faster")

    def _still_pending(self, request: str, choice: Choice) -> Choice:
        now = time.monotonic_ns()
        since = self._pending.setdefault(request, now)
        trim(self._pending, LIMIT)
        if self._deadline and now - since > self._deadline:
            return choice._replace(tokens=0, why="deadline")
        return choice
