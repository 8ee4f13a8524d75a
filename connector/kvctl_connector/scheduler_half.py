"""The scheduler's half, in the engine core: follows each request, and records what its KV did.

It sees each request's offers, allocation and completion, and, with every step's output, the
facts that the workers stamped. Of the engine's business it decides which offers of KV are
believed, which tier is taken, and when a load is given up.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

from . import __version__, guard, paths, semconv
from .arrivals import Arrivals
from .bounded import trim
from .completion import GivenUp
from .composed import Composition
from .config import Options
from .facts import Fact
from .feed import Feed
from .guard import guarded, logger
from .host_tier import HostTier
from .identity import data_parallel_rank, hello, version
from .offload_overdue import let_go
from .recorder import Recorder
from .tier_choice import Choice, TierChoice
from .transfers import Transfers
from .waits import Part, Waits
from .wire import Choice as ChoiceItem

LIMIT = 65_536  # requests remembered at once

# Reasons that can end a transfer of a tier: their failure counters start at 0.
_REASONS = {
    "peer": semconv.REASONS,
    "host": ("io_error", "no_space", "wait_deadline", "unknown"),
    "disk": ("io_error", "no_space", "wait_deadline", "unknown"),
}


class SchedulerHalf:
    """What one engine core knows about its transfers.

    Args:
        options: who this engine is, and how it is to choose.
        vllm_config, kv_cache_config: vLLM's configuration objects.
        tiers: the tier of each child, in the order of the children.
        children: the child connectors, scheduler role.
        child_configs: their ``KVTransferConfig``s, in the same order.
    """

    def __init__(
        self,
        options: Options,
        vllm_config: Any,
        kv_cache_config: Any,
        tiers: list[str],
        children: list[Any],
        child_configs: list[Any],
    ) -> None:
        self.recorder = Recorder()
        self._options = options
        self._tiers = tiers
        self._external: OrderedDict[str, int] = OrderedDict()
        self._missing: set[str] = set()
        self._dropped: dict[str, int] = {}
        found = map(HostTier.find, children, child_configs)
        self._host_tier = next((tier for tier in found if tier is not None), None)
        self.arrivals = Arrivals(options, child_configs, self.recorder)
        self.waits = Waits(
            self.recorder,
            vllm_config.parallel_config.world_size,
            options.wait_deadline_ms / 1000 if options.mode == "compose" else 0,
            tiers,
            let_go=lambda child, request: let_go(children[child], request),
        )
        self.transfers = Transfers(self.recorder, self._host_tier)
        self.choice = self._tier_choice(vllm_config, kv_cache_config, children)
        self._hello = hello(options, vllm_config)
        self._start_at_zero(children)
        rank = data_parallel_rank(vllm_config)
        self.feed = Feed(
            self.recorder,
            self._hello,
            paths.feed_path(options.topology, self._hello.name, rank),
        )
        self.feed.start()

    # What the connector tells, in the order of a request's life.

    def arrived(self, request: Any) -> None:
        """A request is new here: is its offer to be believed? Not guarded: see Arrivals."""
        self.arrivals.arrived(request)

    def choose(self, request: Any, computed: int) -> Choice:
        """Answers vLLM's query: what is loaded, and from where?"""
        choice = self.choice.choose(request, computed)
        self.recorder.set(semconv.REQUEST_WAITING, self.choice.pending, "lookup")
        return choice

    def loads(self, choice: Choice, tokens: int, blocks: Any) -> dict[int, tuple[int, Any]]:
        """Splits what vLLM has allocated `blocks` for: tokens and blocks by child that loads."""
        if not tokens or choice.child is None:
            return {}
        plan = choice.plan
        # vLLM may take fewer tokens than it was told (SCHED 0.33.0): then the peer alone.
        if plan is not None and tokens == plan.tokens:
            view = self.choice.view(plan, blocks)
            if view is not None:
                rest = plan.tokens - plan.prefix
                return {plan.local: (plan.prefix, blocks), plan.peer: (rest, view)}
        return {choice.child: (tokens, blocks)}

    @guarded
    def admitted(
        self, request: Any, choice: Choice, loads: dict[int, tuple[int, Any]], blocks: Any
    ) -> None:
        """The request has its blocks, and children begin to load into them."""
        parts = tuple(
            Part(child, self._tiers[child], tokens) for child, (tokens, _) in loads.items()
        )
        self._record_choice(request.request_id, choice, parts)
        self.choice.admitted(request.request_id)
        if not parts:
            return
        name = request.request_id
        self._external[name] = self._external.get(name, 0) + sum(part.tokens for part in parts)
        trim(self._external, LIMIT)
        if choice.waits:
            self.waits.begin(name, parts, blocks)
        else:
            self._count_tokens(parts)

    @guarded
    def scheduled(self, new_requests: Iterable[Any]) -> None:
        """Requests run for the first time: where does the KV of their prompts come from?"""
        for new in new_requests:
            external = self._external.pop(new.req_id, 0)
            local = max(0, new.num_computed_tokens - external)
            prompt = len(new.prompt_token_ids or ())
            self.recorder.add(semconv.PROMPT_TOKENS, local, "local")
            computed = max(0, prompt - new.num_computed_tokens)
            self.recorder.add(semconv.PROMPT_TOKENS, computed, "computed")

    @guarded
    def announced(self, child: int, stores: Iterable[int | str]) -> None:
        """Stores that a child's workers are about to be given, as `Transfers.announced` wants
        them."""
        self.transfers.announced(self._tiers[child], stores)

    def give_up_overdue(self) -> dict[str, GivenUp]:
        """Loads that the workers are to give up, by request. Not guarded: blocks depend on it."""
        overdue = self.waits.give_up_overdue()
        for request, load in overdue.items():
            self._external.pop(request, None)
            for tier in load.tiers:
                self.choice.avoid(request, tier)
            if "peer" in load.tiers:
                self.arrivals.pulled(request, "", well=False)
        return overdue

    @guarded
    def completed(
        self,
        facts: Iterable[Fact],
        received: Iterable[str],
        strays: int,
        ended: Iterable[int] = (),
    ) -> None:
        """One step's output: facts of the workers, the requests whose loads are complete, and the
        numbers of given-up loads that have ended."""
        self.waits.loads_ended(ended)
        for fact in self.transfers.ended(facts, self.waits):
            if fact.direction in ("recv", "load") and fact.request:
                self._part_ended(fact)
        for request in received:
            parts = self.waits.end(request)
            self._count_tokens(parts)
            if not parts:
                self._external.pop(request, None)
        if strays:
            self.recorder.add(semconv.TELEMETRY_DROPPED, strays, "recorder", "stray_completion")
        self._count_drops("rank_missing", self.transfers.dropped)
        self._count_drops("hook_failed", sum(guard.failures.values()))

    def _part_ended(self, fact: Fact) -> None:
        self.waits.part_ended(fact.request, fact.tier, fact.outcome)
        if fact.outcome != "ok" and self.arrivals.knows(fact.request):
            self.choice.avoid(fact.request, fact.tier)
        # An offer that does not fit tells of whoever brought it, not of the peer that it names.
        judged = fact.outcome in ("ok", "failed") and fact.reason != "offer_mismatch"
        if fact.tier == "peer" and judged:
            self.arrivals.pulled(fact.request, fact.peer, well=fact.outcome == "ok")

    @guarded
    def offer(self, request: Any, params: dict[str, Any] | None) -> None:
        """vLLM is about to return `params` for a request that has ended: grant and sign."""
        self.arrivals.offer(request, params)

    @guarded
    def finished(self, request: str, *, offered: bool) -> None:
        """A request ended here; `offered`: its blocks are held for another engine to read."""
        self.waits.abort(request)
        self._external.pop(request, None)
        self.arrivals.forget(request)
        self.choice.forget(request)
        self.recorder.set(semconv.REQUEST_WAITING, self.choice.pending, "lookup")
        if offered:
            self.transfers.offered(request)

    def close(self) -> None:
        """Ends the feed."""
        self.feed.close()

    @guarded
    def missing(self, hooks: list[str]) -> None:
        """Hooks that were not found here or in a worker: each is counted, and named, once."""
        new = set(hooks) - self._missing
        for hook in sorted(new):
            self.recorder.add(semconv.TELEMETRY_DROPPED, 1, "hook", hook)
        if new:
            self._set_info(0)  # what it said before is no longer so
            self._missing |= new
            self._set_info(1)

    def _tier_choice(
        self, vllm_config: Any, kv_cache_config: Any, children: list[Any]
    ) -> TierChoice:
        options = self._options
        sizes = tuple(
            int(group.kv_cache_spec.block_size) for group in kv_cache_config.kv_cache_groups
        )
        composition = None
        if options.composed != "never":
            obstacle = Composition.obstacle(vllm_config, kv_cache_config, children)
            if obstacle:
                logger.info("kvctl: no loads from two tiers at once: there is %s", obstacle)
            else:
                composition = Composition(children, sizes, always=options.composed == "always")
        return TierChoice(
            children,
            self._tiers,
            speeds=self.transfers.speeds,
            bytes_per_token=_bytes_per_token(kv_cache_config),
            block=max(sizes, default=1),
            composition=composition,
            lookup_deadline=options.wait_deadline_ms / 1000,
        )

    def _record_choice(self, request: str, choice: Choice, parts: tuple[Part, ...]) -> None:
        if choice.why == "deadline":
            for tier, offer in zip(self._tiers, choice.offers, strict=True):
                if offer is not None and offer.tokens is None:
                    self.recorder.add(
                        semconv.TRANSFER_FAILURES, 1, tier, "load", "queue", "wait_deadline", ""
                    )
        offers: dict[str, int] = {}
        for tier, offer in zip(self._tiers, choice.offers, strict=False):
            if offer is not None:
                offers[tier] = max(offers.get(tier, 0), offer.tokens or 0)
        if not parts and not any(offers.values()) and choice.why != "deadline":
            return
        taken = "composed" if len(parts) > 1 else parts[0].tier if parts else "none"
        why = choice.why if (len(parts) > 1) == (choice.plan is not None) else "more"
        self.recorder.add(semconv.TIER_CHOICES, 1, taken, why)
        self.recorder.put(ChoiceItem(0, request, taken, why, offers))

    def _count_tokens(self, parts: Iterable[Part]) -> None:
        for part in parts:
            self.recorder.add(semconv.PROMPT_TOKENS, part.tokens, part.tier)

    def _count_drops(self, cause: str, total: int) -> None:
        if new := total - self._dropped.get(cause, 0):
            self._dropped[cause] = total
            self.recorder.add(semconv.TELEMETRY_DROPPED, new, "recorder", cause)

    def _start_at_zero(self, children: list[Any]) -> None:
        for tier in sorted(set(self._tiers)):
            for reason in _REASONS.get(tier, ()):
                self.recorder.add(semconv.TRANSFER_FAILURES, 0, tier, "", "", reason, "")
        if self._host_tier is not None:
            self.recorder.set(semconv.TIER_CAPACITY, self._host_tier.capacity, "host")
            self.recorder.set(semconv.TIER_USED, 0, "host")
        self.recorder.set(semconv.BLOCKS_HELD, 0, "abort")
        self._children = "+".join(type(child).__name__ for child in children)
        self._set_info(1)

    def _set_info(self, value: int) -> None:
        self.recorder.set(
            semconv.CONNECTOR_INFO, value,
            __version__, version("vllm"), version("nixl"), self._children, self._options.mode,
            "+".join(sorted(self._missing)),
        )  # fmt: skip


def _bytes_per_token(kv_cache_config: Any) -> float:
    """Of one rank's KV, over all layers."""
    total = 0.0
    for group in kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        total += len(group.layer_names) * spec.page_size_bytes / spec.block_size
    return total
