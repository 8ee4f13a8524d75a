"""Offers that cannot lie: signed by prefill, bound to the prompt, used once, from known peers.

``kv_transfer_params`` is client input: upstream believes it, and answers a request with whatever
KV it points at (another prompt's, a reused block's), with HTTP 200. Prefill's scheduler half
therefore signs what it offers, together with a digest of the prompt, and decode's believes
nothing else. A refused offer is no offer: ``do_remote_prefill`` is set to false before any child
sees the request, which is then loaded from a local tier or computed. Nothing is sent to prefill,
whose lease belongs to the rightful reader.

The signature is an HMAC-SHA256 over integers and strings only: routers parse and write the JSON
anew, and not all of them keep a float as it was.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import json
import os
import struct
import time
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .bounded import trim
from .config import ConfigError

KEY_FILE = "KVCTL_OFFER_KEY_FILE"  # one key a line; the first signs, all of them are accepted
LEASE = "kvctl_lease"  # granted at, duration, extension by a heartbeat: whole milliseconds
SIGNATURE = "kvctl_signature"
# A second signature, without the prompt: a request that decode's API server rejects reaches the
# scheduler without its prompt, only to tell prefill that the blocks are free (async_llm.py
# 0.32.0, notify_kv_transfer_request_rejected).
RELEASE_SIGNATURE = "kvctl_release"
RELEASE = b"release"
MIN_KEY = 16  # characters
LIMIT = 65_536  # offers remembered as used

# What decode acts on (NIXL/pull_scheduler.py 0.32.0: request_finished makes it): where the blocks
# are, and numbers, as far as the release tells them. The time until which a second turn may read
# them back is a float, and stays unsigned; it can only have less read (_is_turn2_read_expired).
_NAMES = ("remote_engine_id", "remote_request_id", "remote_host")
_SIZES = ("tp_size", "dcp_size", "pp_size", "remote_block_size")
_COUNTS = ("remote_num_tokens", "remote_registration_generation")
_SIGNED = (*_NAMES, "remote_port", "remote_block_ids", *_SIZES, *_COUNTS, LEASE)


class Grant(NamedTuple):
    """Prefill's promise to keep the blocks. Whole milliseconds, Unix time and durations."""

    granted: int
    duration: int
    extension: int

    @property
    def end(self) -> int:
        """When it runs out unless a heartbeat extends it."""
        return self.granted + self.duration


class Verdict(NamedTuple):
    """What became of a request's offer.

    Attributes:
        refused: a reason of ``semconv.REASONS``; empty: it is believed.
        signed: believed because of its signature, not for want of a key.
    """

    refused: str = ""
    signed: bool = False


def read_keys(path: str) -> tuple[bytes, ...]:
    """The keys of a key file, the signing one first.

    Raises:
        ConfigError: it cannot be read, others may read it, or it holds no key of a decent length.
    """
    try:
        file = Path(path)
        if file.stat().st_mode & 0o077:
            raise ConfigError(f"{KEY_FILE}: others may read {path}; chmod 600 it")
        lines = [line.strip() for line in file.read_text().splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{KEY_FILE}: {path} cannot be read: {error}") from error
    keys = tuple(line.encode() for line in lines if line)
    if not keys or min(map(len, keys)) < MIN_KEY:
        raise ConfigError(f"{KEY_FILE}: {path} must hold keys of {MIN_KEY} characters or more")
    return keys


def prompt_digest(request: Any) -> bytes:
    """What the KV of a prompt depends on: its tokens or embeddings, cache salt, adapter, images.

    A difference also finds out prefill and decode that tokenize or template differently.
    """
    digest = hashlib.sha256()
    tokens = request.prompt_token_ids or ()
    digest.update(struct.pack(f"<q{len(tokens)}i", len(tokens), *tokens))
    adapter = getattr(request, "lora_request", None)
    extras = [
        getattr(request, "cache_salt", None) or "",
        getattr(adapter, "lora_name", "") or "",
        *(str(feature.identifier) for feature in getattr(request, "mm_features", None) or ()),
    ]
    digest.update(json.dumps(extras).encode())
    if (embeds := getattr(request, "prompt_embeds", None)) is not None:
        # Shape (tokens, hidden size). Every smaller type has a float32 of its own for each value.
        digest.update(json.dumps(list(embeds.shape)).encode())
        digest.update(embeds.float().cpu().numpy().tobytes())
    return digest.digest()


def signature(key: bytes, params: dict[str, Any], digest: bytes) -> str:
    """The signature of an offer for one purpose, in hex.

    Args:
        digest: of the prompt that may be answered from it, or `RELEASE`.

    Raises:
        TypeError, ValueError: the offer holds what JSON does not.
    """
    signed = [params.get(name) for name in _SIGNED]
    text = json.dumps(signed, separators=(",", ":"), allow_nan=False)
    return hmac.new(key, digest + text.encode(), hashlib.sha256).hexdigest()


def grant_of(params: dict[str, Any]) -> Grant | None:
    """The grant in an offer; None where there is none that can be read."""
    raw = params.get(LEASE)
    if isinstance(raw, list) and len(raw) == 3 and all(type(part) is int for part in raw):
        return Grant(*raw)
    return None


class Peers:
    """The hosts whose engines may be talked to. Without a list, all are.

    Raises:
        ConfigError: an entry is a network with host bits set, or none at all.
    """

    def __init__(self, allowed: Sequence[str]) -> None:
        self._names = set(allowed)
        self._networks = []
        for entry in allowed:
            try:
                self._networks.append(ipaddress.ip_network(entry))
            except ValueError as error:
                if "/" in entry:  # no host name, but a network with a mistake in it
                    raise ConfigError(f"kvctl.peers: {entry}: {error}") from error

    def allow(self, host: object) -> bool:
        """Whether an offer's host is one of them; what is no text is nobody."""
        if not self._names:
            return True
        if not isinstance(host, str):
            return False
        if host in self._names:
            return True
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            return False
        return any(address in network for network in self._networks)


class Offers:
    """Signs on prefill, judges on decode.

    Args:
        keys: shared by both sides; empty: nothing is signed and unsigned offers are accepted.
        required: refuse what is not signed.
        peers: whom decode talks to.
        lease, extension: what prefill grants, in ms.
    """

    def __init__(
        self,
        keys: Sequence[bytes],
        *,
        required: bool,
        peers: Peers,
        lease: int,
        extension: int,
    ) -> None:
        self._keys = keys
        self._required = required
        self._peers = peers
        self._lease, self._extension = lease, extension
        self._digests: OrderedDict[str, bytes] = OrderedDict()
        self._used: OrderedDict[tuple[object, object], int] = OrderedDict()

    def expect_to_offer(self, request: Any) -> None:
        """Remembers a prompt that prefill will offer, before vLLM may shorten it."""
        if self._keys:
            self._digests[request.request_id] = prompt_digest(request)
            trim(self._digests, LIMIT)

    def grant(self, request: Any, params: dict[str, Any] | None) -> None:
        """Adds grant and signature to what vLLM is about to return for a remote decode."""
        digest = self._digests.pop(request.request_id, None)
        if params is None or not params.get("do_remote_prefill"):
            return
        params[LEASE] = list(self.own_grant())
        if self._keys:
            digest = digest or prompt_digest(request)
            params[SIGNATURE] = signature(self._keys[0], params, digest)
            params[RELEASE_SIGNATURE] = signature(self._keys[0], params, RELEASE)

    def own_grant(self) -> Grant:
        """What this engine would grant now."""
        return Grant(_now(), self._lease, self._extension)

    def leads_to_a_peer(self, params: dict[str, Any]) -> bool:
        """Whether what an unsigned offer names could be blocks of an engine that is allowed."""
        return (
            self._peers.allow(params.get("remote_host"))
            and _is_formed(params)
            and _are_blocks(params.get("remote_block_ids"))
        )

    def judge(self, request: Any) -> Verdict | None:
        """Decides about the offer in a request; whoever asks takes a refused one out of it.

        Returns:
            None where the request has no offer.
        """
        params = request.kv_transfer_params
        if not isinstance(params, dict) or not params.get("do_remote_prefill"):
            return None
        try:
            return self._verdict(params, request)
        except Exception:
            # A client's input: whatever is wrong with its form, prefill has not made it so, and
            # it must not reach the engine as an exception.
            return Verdict("offer_mismatch")

    def _verdict(self, params: dict[str, Any], request: Any) -> Verdict:
        if not self._peers.allow(params.get("remote_host")):
            return Verdict("peer_not_allowed")
        if not _is_formed(params) or not _are_blocks(params.get("remote_block_ids")):
            return Verdict("offer_mismatch")  # of these the engine dies, signed or not
        releases = bool(getattr(request, "abort_immediately", False))
        claimed = params.get(RELEASE_SIGNATURE if releases else SIGNATURE)
        signed = bool(self._keys) and isinstance(claimed, str)
        if not signed and self._required:
            return Verdict("offer_unsigned")
        if signed:
            digest = RELEASE if releases else prompt_digest(request)
            if not any(
                hmac.compare_digest(signature(key, params, digest), str(claimed))
                for key in self._keys
            ):
                return Verdict("offer_mismatch")
        now = _now()
        grant = grant_of(params)
        if grant is not None and grant.end <= now:
            return Verdict("lease_expired")
        until = grant.end if grant else now + self._lease
        if not releases and not self._first_use(params, until=until, now=now):
            return Verdict("offer_reused")
        return Verdict(signed=signed)

    def _first_use(self, params: dict[str, Any], *, until: int, now: int) -> bool:
        name = (params.get("remote_engine_id"), params.get("remote_request_id"))
        while self._used:
            oldest = next(iter(self._used))
            if self._used[oldest] > now and len(self._used) < LIMIT:
                break
            del self._used[oldest]
        if self._used.get(name, 0) > now:
            return False
        self._used[name] = until
        self._used.move_to_end(name)
        return True


def _are_blocks(offered: object) -> bool:
    """Whether an offer names blocks in a form that vLLM makes: lists by KV group, or one list."""
    if not isinstance(offered, list | tuple) or not offered:
        return False
    groups = offered if isinstance(offered[0], list | tuple) else [offered]
    if not all(isinstance(group, list | tuple) for group in groups) or not any(groups):
        return False
    return all(type(block) is int and 0 <= block < 2**31 for group in groups for block in group)


def _is_formed(params: dict[str, Any]) -> bool:
    """Whether an offer says where its blocks are, in the types that vLLM gives and takes.

    What is missing or of another type ends in an exception in one of NIXL's threads, or in a
    request that waits for ever (NIXL/base_scheduler.py 0.32.0, ``ReqMeta``).
    """
    port = params.get("remote_port")
    sizes, counts = (
        [params[name] for name in names if params.get(name) is not None]
        for names in (_SIZES, _COUNTS)
    )
    return (
        all(isinstance(params.get(name), str) and params[name] for name in _NAMES)
        and type(port) is int
        and 0 < port < 2**16
        and all(type(size) is int and 0 < size < 2**31 for size in sizes)
        and all(type(count) is int and 0 <= count < 2**31 for count in counts)
    )


def _now() -> int:
    return time.time_ns() // 1_000_000


def keys_from_environment() -> tuple[bytes, ...]:
    """The keys of the file that ``KVCTL_OFFER_KEY_FILE`` names; empty where it is not set.

    Raises:
        ConfigError: the file cannot be used.
    """
    path = os.environ.get(KEY_FILE)
    return read_keys(path) if path else ()
