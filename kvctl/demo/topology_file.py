"""The demo's topology: an ordinary file, as a person would write it, for the engines at hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvctl.demo.setting import LEASE, Setting

NAME = "demo"
START_TIMEOUT = 300  # seconds; a pair takes 30 to 50 on two cores

_HEADER = """\
# Written by `kvctl demo`, which starts it as `kvctl launch -d -f` would: one prefill engine, one
# decode engine and the router, on a tiny model with random weights. It is overwritten each time.
"""


def topology_text(setting: Setting, *, model: Path, python: Path, base: int) -> str:
    """The file's content.

    Args:
        python: of the engine's environment.
        base: first port of a free block.
    """
    import yaml  # 20 ms, and only this needs it

    def instance(role: str) -> dict[str, Any]:
        gpus = {} if setting.gpus is None else {"gpus": [_gpu(setting.gpus[role])]}
        return {"role": role, **gpus, "offload": {"host": setting.host_bytes}}

    content = {
        "version": 1,
        "name": NAME,
        "model": _literal(model),
        "engine": {"python": _literal(python)},
        "args": dict(setting.args),
        "env": dict(setting.env),
        "transfer": {"kv_load_failure_policy": "recompute", "kv_lease_duration": f"{LEASE}s"},
        "instances": {role: instance(role) for role in ("prefill", "decode")},
        "ports": {"base": base},
        "start_timeout": f"{START_TIMEOUT}s",
    }
    return _HEADER + yaml.safe_dump(content, sort_keys=False)


def _gpu(name: str) -> int | str:
    return int(name) if name.isdigit() else name


def _literal(path: Path) -> str:
    """A path as the file's ``${NAME}`` syntax takes it: a dollar sign is written twice."""
    return str(path).replace("$", "$$")
