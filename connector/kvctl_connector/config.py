"""The connector's own options: ``kv_connector_extra_config["kvctl"]``, parsed once.

``kvctl launch`` writes them; an engine started by hand may leave them out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_ALLOWED = {
    "mode": ("compose", "observe"),
    "role": ("prefill", "decode", "both"),
    "offers": ("accept", "signed"),
    "tier_policy": ("fastest", "upstream"),
    "composed": ("never", "faster", "always"),
}
_NUMBERS = ("clock_margin_ms", "wait_deadline_ms", "quarantine_ms")


class ConfigError(ValueError):
    """The connector's configuration is wrong; the message says what to write instead."""


@dataclass(frozen=True)
class Options:
    """Who this engine is, in the words of its topology.

    Attributes:
        topology: name of the topology; part of the feed's path.
        instance: name of the instance; empty: the engine id.
        role: ``prefill``, ``decode`` or ``both``.
        mode: ``compose``: our completion map, our choice of tier and our fixes; ``observe``:
            upstream's behaviour, only measured.
        tier_policy: ``fastest``: by the time that a load should take; ``upstream``: the first
            child with an offer, in the order of the configuration.
        composed: loads from two tiers at once: ``never``; ``faster``, where the local tier is no
            slower than the peer; ``always``.
        offers: ``signed``: decode refuses an offer without a valid signature; ``accept``: it
            takes unsigned ones and counts them.
        peers: hosts and networks whose engines decode talks to; empty: all.
        clock_margin_ms: how far the clocks of two hosts may lie apart.
        wait_deadline_ms: how long a request waits for KV before it is answered without; 0: for
            ever.
        quarantine_ms: how long a peer whose pulls keep failing is left alone at first; 0: never.
    """

    topology: str = "default"
    instance: str = ""
    role: str = "both"
    mode: str = "compose"
    offers: str = "accept"
    peers: tuple[str, ...] = ()
    tier_policy: str = "fastest"
    composed: str = "faster"
    clock_margin_ms: int = 500
    wait_deadline_ms: int = 20_000
    quarantine_ms: int = 10_000

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> Options:
        """Reads the options.

        Raises:
            ConfigError: an unknown option, or a value that is not allowed.
        """
        known = set(cls.__dataclass_fields__)
        if unknown := sorted(set(raw) - known):
            raise ConfigError(
                f'kv_connector_extra_config["kvctl"] has unknown options {unknown}; '
                f"known are {sorted(known)}"
            )
        values = dict(raw)
        peers = values.pop("peers", [])
        if not isinstance(peers, list) or not all(isinstance(peer, str) for peer in peers):
            raise ConfigError(f"kvctl.peers must be a list of hosts and networks, not {peers!r}")
        numbers = {name: values.pop(name) for name in _NUMBERS if name in values}
        for name, number in numbers.items():
            if type(number) is not int or number < 0:
                raise ConfigError(f"kvctl.{name} must be whole milliseconds, not {number!r}")
        for name, value in values.items():
            if not isinstance(value, str):
                raise ConfigError(f"kvctl.{name} must be a string, not {value!r}")
            if name in _ALLOWED and value not in _ALLOWED[name]:
                raise ConfigError(
                    f"kvctl.{name} is {value!r}; allowed are {', '.join(_ALLOWED[name])}"
                )
        return cls(**values, **numbers, peers=tuple(peers))
