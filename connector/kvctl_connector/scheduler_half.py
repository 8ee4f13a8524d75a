"""The scheduler's half, in the engine core: joins the facts, records them, serves the feed.

It sees each request's offers, allocation and completion, and, with every step's output, the
facts that the workers stamped. Of the engine's business it decides one thing: which offers of KV
are believed.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from . import __version__, guard, paths, semconv
from .config import ConfigError, Options
from .facts import Fact, Joiner
from .feed import Feed
from .guard import guarded
from .host_tier import HostTier
from .identity import data_parallel_rank, hello, version
from .lease import Lease
from .offers import KEY_FILE, Offers, Peers, Verdict, grant_of, keys_from_environment
from .recorder import Recorder
from .wire import Transfer, Wait

LIMIT = 65_536  # requests remembered at once
_MS = 1_000_000  # ns
DEFAULT_LEASE = 30  # s, vLLM's own (NIXL/base_scheduler.py 0.32.0)

# Reasons that can end a transfer of a tier: their failure counters start at 0.
_REASONS = {
    "peer": semconv.REASONS,
    "host": ("io_error", "unknown"),
}


@dataclass
class _Load:
    """One request that waits for KV. `start` is Unix ns."""

    tier: str
    tokens: int
    start: int


class SchedulerHalf:
    """What one engine core knows about its transfers.

    Args:
        options: who this engine is.
        vllm_config: vLLM's configuration object.
        tiers: the tier of each child, in the order of the children.
        children: the child connectors, scheduler role.
        child_configs: their ``KVTransferConfig``s, in the same order.
    """

    def __init__(
        self,
        options: Options,
        vllm_config: Any,
        tiers: list[str],
        children: list[Any],
        child_configs: list[Any],
    ) -> None:
        self.recorder = Recorder()
        self._tiers = tiers
        self._loads: OrderedDict[str, _Load] = OrderedDict()
        self._external: OrderedDict[str, int] = OrderedDict()
        self._sends: OrderedDict[str, int] = OrderedDict()
        self._stores: set[int] = set()
        self._arrived: OrderedDict[str, int] = OrderedDict()
        self._leases: dict[str, Lease] = {}
        self._margin = options.clock_margin_ms
        self._offers_made = _offers(options, child_configs)
        self._second_turns = any(
            (config.kv_connector_extra_config or {}).get("bidirectional_kv_xfer")
            for config in child_configs
        )
        self._joiner = Joiner()
        self._dropped: dict[str, int] = {}
        found = map(HostTier.find, children, child_configs)
        self._host_tier = next((tier for tier in found if tier is not None), None)
        self._hello = hello(options, vllm_config)
        self._start_at_zero(children, options)
        rank = data_parallel_rank(vllm_config)
        self.feed = Feed(
            self.recorder,
            self._hello,
            paths.feed_path(options.topology, self._hello.name, rank),
        )
        self.feed.start()

    # What the connector tells, in the order of a request's life.

    def arrived(self, request: Any) -> None:
        """A request is new here: is its offer to be believed? Once a request.

        Not guarded: an offer that could not be judged must not be believed.
        """
        name = request.request_id
        if name in self._arrived:
            return
        _keep(self._arrived, name, 0)
        params = request.kv_transfer_params
        if not isinstance(params, dict):
            return
        if params.get("do_remote_decode"):
            if not self._second_turns:
                _take_out_offer_of_second_turn(params)
            self._expect_to_offer(request)
            return
        verdict = self._offers_made.judge(request)
        if verdict is not None and not verdict.refused:
            self._note_lease(name, params)
        self._count_verdict(verdict)

    @guarded
    def allocated(self, request: str, child: int, tokens: int, *, waits: bool) -> None:
        """Blocks were allocated, and a child begins to load `tokens` into them.

        `waits`: the request is parked until the load is complete.
        """
        tier = self._tiers[child]
        _keep(self._external, request, self._external.get(request, 0) + tokens)
        if not waits:
            self.recorder.add(semconv.PROMPT_TOKENS, tokens, tier)
            return
        self._loads[request] = _Load(tier, tokens, time.time_ns())
        if len(self._loads) > LIMIT:
            self._loads.popitem(last=False)
        self._gauge_waiting()

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
    def announced(self, store_jobs: Iterable[int]) -> None:
        """Store jobs that the workers are about to be given."""
        self._stores.update(store_jobs)
        self.recorder.set(semconv.TRANSFER_INFLIGHT, len(self._stores), "host", "store")

    @guarded
    def completed(self, facts: Iterable[Fact], received: Iterable[str], strays: int) -> None:
        """One step's output: facts of the workers, and the requests whose loads are complete."""
        outcomes: dict[str, str] = {}
        for share in facts:
            fact = self._joiner.add(share)
            if fact is not None:
                self._record(fact)
                if fact.direction in ("recv", "load") and fact.request:
                    outcomes[fact.request] = fact.outcome
        for request in received:
            self._end_wait(request, outcomes.get(request, "ok"))
        if strays:
            self.recorder.add(semconv.TELEMETRY_DROPPED, strays, "recorder", "stray_completion")
        self._count_drops("rank_missing", self._joiner.dropped)
        self._count_drops("hook_failed", sum(guard.failures.values()))

    @guarded
    def offer(self, request: Any, params: dict[str, Any] | None) -> None:
        """vLLM is about to return `params` for a request that has ended: grant and sign."""
        self._offers_made.grant(request, params)

    def take_leases(self) -> dict[str, Lease]:
        """Leases that the workers do not know yet, by request."""
        leases, self._leases = self._leases, {}
        return leases

    @guarded
    def finished(self, request: str, *, offered: bool) -> None:
        """A request ended here; `offered`: its blocks are held for another engine to read."""
        if request in self._loads:
            self._end_wait(request, "aborted")
        self._external.pop(request, None)
        self._arrived.pop(request, None)
        if offered:
            _keep(self._sends, request, time.time_ns())
            self.recorder.set(semconv.TRANSFER_INFLIGHT, len(self._sends), "peer", "send")

    def close(self) -> None:
        """Ends the feed."""
        self.feed.close()

    @guarded
    def _expect_to_offer(self, request: Any) -> None:
        self._offers_made.expect_to_offer(request)

    @guarded
    def _count_verdict(self, verdict: Verdict | None) -> None:
        if verdict is None:
            return
        kind = "refused" if verdict.refused else "signed" if verdict.signed else "unsigned"
        self.recorder.add(semconv.OFFERS, 1, kind)
        if verdict.refused:
            self.recorder.add(semconv.TRANSFER_FAILURES, 1, "peer", "recv", "", verdict.refused, "")

    def _note_lease(self, request: str, params: dict[str, Any]) -> None:
        """Ships the lease to the workers, who will judge the pull's end by it.

        A prefill that does not run our connector grants nothing; then our own lease counts from
        the arrival here, which is weaker. So it does for a grant from our future: the clocks lie
        too far apart to believe either of them.
        """
        now = time.time_ns()
        grant = grant_of(params)
        if grant is None or grant.granted * _MS > now + self._margin * _MS:
            grant = self._offers_made.own_grant()
        remote = str(params.get("remote_request_id"))
        self._leases[request] = Lease(remote, grant.end * _MS, grant.extension * _MS)

    def _record(self, fact: Fact) -> None:
        recorder = self.recorder
        peer = recorder.peer(fact.peer)
        labels = (fact.tier, fact.direction, fact.outcome)
        recorder.add(semconv.TRANSFER_COUNT, 1, *labels, peer)
        start = fact.start or self._sends.get(fact.request, 0) or fact.end
        if fact.direction == "send":
            # How much was read, and when the read began, only the reader knows.
            self._sends.pop(fact.request, None)
            recorder.set(semconv.TRANSFER_INFLIGHT, len(self._sends), "peer", "send")
        else:
            recorder.add(semconv.TRANSFER_BYTES, fact.bytes, *labels, peer)
            recorder.observe(semconv.TRANSFER_SIZE, fact.bytes, *labels)
            recorder.observe(semconv.TRANSFER_DURATION, (fact.end - start) / 1e9, *labels)
        if fact.outcome != "ok":
            recorder.add(
                semconv.TRANSFER_FAILURES, 1,
                fact.tier, fact.direction, fact.phase, fact.reason, peer,
            )  # fmt: skip
        if fact.direction == "store":
            self._stores.discard(int(fact.key))
            recorder.set(semconv.TRANSFER_INFLIGHT, len(self._stores), "host", "store")
        if fact.tier == "host":
            self._gauge_tier()
        recorder.put(
            Transfer(
                seq=0, tier=fact.tier, direction=fact.direction, outcome=fact.outcome,
                request=fact.request, start=start, end=fact.end, bytes=fact.bytes,
                peer=peer, phase=fact.phase, reason=fact.reason,
            )
        )  # fmt: skip

    def _end_wait(self, request: str, outcome: str) -> None:
        load = self._loads.pop(request, None)
        if load is None:
            return
        now = time.time_ns()
        self.recorder.observe(semconv.REQUEST_WAIT, (now - load.start) / 1e9, load.tier, outcome)
        if outcome == "ok":
            self.recorder.add(semconv.PROMPT_TOKENS, load.tokens, load.tier)
        else:
            self._external.pop(request, None)
        self.recorder.put(Wait(0, load.tier, outcome, request, load.start, now))
        self._gauge_waiting()

    def _gauge_waiting(self) -> None:
        remote = sum(load.tier == "peer" for load in self._loads.values())
        local = len(self._loads) - remote
        self.recorder.set(semconv.REQUEST_WAITING, remote, "remote_kv")
        self.recorder.set(semconv.REQUEST_WAITING, local, "offload_load")
        self.recorder.set(semconv.TRANSFER_INFLIGHT, remote, "peer", "recv")
        self.recorder.set(semconv.TRANSFER_INFLIGHT, local, "host", "load")

    def _gauge_tier(self) -> None:
        if self._host_tier is not None:
            self.recorder.set(semconv.TIER_USED, self._host_tier.used, "host")

    def _count_drops(self, cause: str, total: int) -> None:
        if new := total - self._dropped.get(cause, 0):
            self._dropped[cause] = total
            self.recorder.add(semconv.TELEMETRY_DROPPED, new, "recorder", cause)

    def _start_at_zero(self, children: list[Any], options: Options) -> None:
        for tier in sorted(set(self._tiers)):
            for reason in _REASONS.get(tier, ()):
                self.recorder.add(semconv.TRANSFER_FAILURES, 0, tier, "", "", reason, "")
        if self._host_tier is not None:
            self.recorder.set(semconv.TIER_CAPACITY, self._host_tier.capacity, "host")
            self.recorder.set(semconv.TIER_USED, 0, "host")
        self._gauge_waiting()
        self.recorder.set(
            semconv.CONNECTOR_INFO, 1,
            __version__, version("vllm"), version("nixl"),
            "+".join(type(child).__name__ for child in children), options.mode, "",
        )  # fmt: skip

    @guarded
    def missing(self, hooks: list[str]) -> None:
        """Hooks that the workers did not find: their absence is counted, once."""
        for hook in hooks:
            self.recorder.add(semconv.TELEMETRY_DROPPED, 1, "hook", hook)


def _keep(table: OrderedDict[str, int], request: str, value: int) -> None:
    table[request] = value
    if len(table) > LIMIT:
        table.popitem(last=False)


def _take_out_offer_of_second_turn(params: dict[str, Any]) -> None:
    """Prefill takes no offers: vLLM would promise to load them, and park the request for ever.

    Upstream answers the query for blocks of an earlier turn without checking whether it may pull
    them (NIXL/pull_scheduler.py 0.32.0:66), but only plans the pull with ``bidirectional_kv_xfer``.
    """
    if params.get("remote_block_ids"):
        params["remote_block_ids"] = None


def _offers(options: Options, child_configs: list[Any]) -> Offers:
    """Raises ConfigError: signatures are required and there is no key, or it cannot be used."""
    keys = keys_from_environment()
    if options.offers == "signed" and not keys:
        raise ConfigError(
            f'kvctl.offers is "signed", and {KEY_FILE} names no key file: '
            "write the same random line of 16 characters or more into a file of mode 0600 for "
            "prefill and decode"
        )
    lease = next(
        (
            int(extra["kv_lease_duration"])
            for config in child_configs
            if "kv_lease_duration" in (extra := config.kv_connector_extra_config or {})
        ),
        DEFAULT_LEASE,
    )
    return Offers(
        keys,
        required=options.offers == "signed",
        peers=Peers(options.peers),
        lease=lease * 1000,
        # What a heartbeat adds (NIXL/base_worker.py 0.32.0:532, whole seconds).
        extension=lease * 2 // 3 * 1000,
    )
