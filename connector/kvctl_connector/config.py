"""The connector's own options: ``kv_connector_extra_config["kvctl"]``, parsed once.

``kvctl launch`` writes them; an engine started by hand may leave them out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MODES = ("compose",)


class ConfigError(ValueError):
    """The connector's configuration is wrong; the message says what to write instead."""


@dataclass(frozen=True)
class Options:
    """Who this engine is, in the words of its topology.

    Attributes:
        topology: name of the topology; part of the feed's path.
        instance: name of the instance; empty: the engine id.
        role: ``prefill``, ``decode`` or ``both``.
        mode: ``compose``: our completion map and our fixes.
    """

    topology: str = "default"
    instance: str = ""
    role: str = "both"
    mode: str = "compose"

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
        for name, value in raw.items():
            if not isinstance(value, str):
                raise ConfigError(f"kvctl.{name} must be a string, not {value!r}")
        options = cls(**raw)
        if options.mode not in MODES:
            raise ConfigError(f"kvctl.mode is {options.mode!r}; allowed is {' or '.join(MODES)}")
        if options.role not in ("prefill", "decode", "both"):
            raise ConfigError(
                f"kvctl.role is {options.role!r}; allowed are prefill, decode and both"
            )
        return options
