"""What a new request brings along: is its offer believed, and until when does its lease hold?

Judged once a request, before any child sees it: NIXL begins to send heartbeats to where an offer
points as soon as it is told of the request.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import Any

from vllm import envs

from . import semconv
from .bounded import trim
from .config import ConfigError, Options
from .guard import guarded, logger
from .lease import Lease
from .offers import KEY_FILE, Offers, Peers, Verdict, grant_of, keys_from_environment
from .quarantine import Quarantine
from .recorder import Recorder

LIMIT = 65_536  # requests remembered at once
_MS = 1_000_000  # ns
DEFAULT_LEASE = 30  # s, vLLM's own (NIXL/base_scheduler.py 0.32.0)


class Arrivals:
    """The offers that this engine receives and makes.

    Args:
        child_configs: the ``KVTransferConfig`` of each child.

    Raises:
        ConfigError: signatures are required and there is no key, or it cannot be used.
    """

    def __init__(self, options: Options, child_configs: list[Any], recorder: Recorder) -> None:
        self._recorder = recorder
        self._margin = options.clock_margin_ms
        self._refuses = options.mode == "compose"
        self._offers = _offers(options, child_configs)
        self._quarantine = Quarantine(options.quarantine_ms / 1000)
        self._second_turns = any(
            (config.kv_connector_extra_config or {}).get("bidirectional_kv_xfer")
            for config in child_configs
        )
        self._arrived: OrderedDict[str, str] = OrderedDict()  # request -> peer of a signed offer
        self._leases: dict[str, Lease] = {}

    def arrived(self, request: Any) -> None:
        """A request is new here. Once a request; further calls change nothing.

        Not guarded: an offer that could not be judged must not be believed.
        """
        name = request.request_id
        if name in self._arrived:
            return
        self._arrived[name] = ""
        trim(self._arrived, LIMIT)
        params = request.kv_transfer_params
        if not isinstance(params, dict):
            return
        if params.get("do_remote_decode"):
            if self._refuses and params.get("do_remote_prefill"):
                # vLLM asserts that nobody asks for both (NIXL/pull_scheduler.py 0.32.0:186).
                params["do_remote_prefill"] = False
                self._count(Verdict("offer_mismatch"))
            if self._refuses and not (self._second_turns and self._offers.leads_to_a_peer(params)):
                _take_out_offer_of_second_turn(params)
            if self._refuses:
                self._expect_to_offer(request)
            return
        verdict = self._offers.judge(request)
        if verdict is None:
            return
        peer = str(params.get("remote_engine_id"))
        if not verdict.refused and self._refuses and not self._quarantine.admits(peer):
            verdict = Verdict("peer_quarantined")
        if verdict.refused and self._refuses:
            params["do_remote_prefill"] = False
        else:
            # An unsigned offer may name any address with a peer's id: that it fails tells of that
            # peer only if something was read.
            self._arrived[name] = peer if verdict.signed else ""
            self._note_lease(name, params, signed=verdict.signed)
        self._count(verdict)

    def take_leases(self) -> dict[str, Lease]:
        """Leases that the workers do not know yet, by request."""
        leases, self._leases = self._leases, {}
        return leases

    def knows(self, request: str) -> bool:
        """Whether the request is still here."""
        return request in self._arrived

    @guarded
    def pulled(self, request: str, peer: str, *, well: bool) -> None:
        """A pull for this request has ended, or was given up; it may be gone by now.

        `peer`: its engine id, if something was read; else the one that a signed offer named.
        """
        peer = peer or self._arrived.get(request, "")
        if not peer or not self._refuses:
            return
        change = self._quarantine.ended(peer, well=well)
        if change is None:
            return
        self._recorder.set(semconv.PEER_QUARANTINED, int(change), self._recorder.peer(peer))
        logger.warning(
            "kvctl: pulls from %s keep failing: it is left alone for a while"
            if change
            else "kvctl: pulls from %s work again",
            peer,
        )

    @guarded
    def offer(self, request: Any, params: dict[str, Any] | None) -> None:
        """vLLM is about to return `params` for a request that has ended: grant and sign."""
        if self._refuses:
            self._offers.grant(request, params)

    def forget(self, request: str) -> None:
        """The request has ended, however."""
        self._arrived.pop(request, None)

    @guarded
    def _expect_to_offer(self, request: Any) -> None:
        self._offers.expect_to_offer(request)

    @guarded
    def _count(self, verdict: Verdict) -> None:
        kind = "refused" if verdict.refused else "signed" if verdict.signed else "unsigned"
        self._recorder.add(semconv.OFFERS, 1, kind)
        if verdict.refused:
            self._recorder.add(
                semconv.TRANSFER_FAILURES, 1, "peer", "recv", "", verdict.refused, ""
            )

    def _note_lease(self, request: str, params: dict[str, Any], *, signed: bool) -> None:
        """Ships the lease to the workers, who will judge the pull's end by it.

        A prefill that does not run our connector grants nothing; then our own lease counts from
        the arrival here, which is weaker. So it does for a grant from our future: the clocks lie
        too far apart to believe either of them. And so it does where nothing but the client says
        that prefill grants more than we would.
        """
        now, own = time.time_ns(), self._offers.own_grant()
        grant = grant_of(params) or own
        if grant.granted * _MS > now + self._margin * _MS or (not signed and grant.end > own.end):
            grant = own
        remote = str(params.get("remote_request_id"))
        self._leases[request] = Lease(remote, grant.end * _MS, grant.extension * _MS)


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
    if options.offers == "signed" and not keys and options.mode == "compose":
        raise ConfigError(
            f'kvctl.offers is "signed", and {KEY_FILE} names no key file: '
            "write the same random line of 16 characters or more into a file of mode 0600 for "
            "prefill and decode"
        )
    lease = _lease(child_configs)
    return Offers(
        keys,
        required=options.offers == "signed" and bool(keys),
        peers=Peers(options.peers),
        lease=lease * 1000,
        # What a heartbeat adds (NIXL/base_worker.py 0.32.0:532, whole seconds).
        extension=lease * 2 // 3 * 1000,
    )


def _lease(child_configs: list[Any]) -> int:
    """Seconds for which prefill keeps blocks for their reader.

    vLLM 0.20.2 has no option for it, but one time for all (envs.py), and no heartbeats that
    would extend it.
    """
    fixed = getattr(envs, "VLLM_NIXL_ABORT_REQUEST_TIMEOUT", None)
    if fixed is not None:
        return int(fixed)
    for config in child_configs:
        extra = config.kv_connector_extra_config or {}
        if "kv_lease_duration" in extra:
            return int(extra["kv_lease_duration"])
    return DEFAULT_LEASE
