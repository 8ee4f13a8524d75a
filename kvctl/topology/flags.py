"""``args``: flags of ``vllm serve`` as the file writes them, and the argv they become.

A value reaches vLLM as it is written. ``true`` gives ``--flag``, ``false`` ``--no-flag``, a
mapping JSON, and a list what vLLM's own config file does with it: the flag once, then the items
(vllm/utils/argparse_utils.py, ``load_config_file``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from kvctl.topology.fields import spelling
from kvctl.topology.text import Text, joined, json_text

TENSOR, PIPELINE, DATA = "tensor-parallel-size", "pipeline-parallel-size", "data-parallel-size"
PREFILL_CONTEXT = "prefill-context-parallel-size"
SIZES = (TENSOR, PIPELINE, PREFILL_CONTEXT, DATA)

_FLAG = re.compile(r"[A-Za-z][A-Za-z0-9_-]*(?:\.[A-Za-z0-9_.-]+\+?)?")

# Lists that vLLM takes differently (vllm/entrypoints/launchers/cli_args.py): as one JSON
# document, or with the flag repeated.
_JSON_LISTS = {"allowed-origins", "allowed-methods", "allowed-headers"}
_REPEATED = {"middleware"}

_ONE_NODE = "an instance runs on one node, and kvctl starts its ranks there"
_TLS = "kvctl and the router speak plain HTTP to the engines; encrypt in front of the router"
_REFUSED = {
    "host": "kvctl sets it: the address of the node, see nodes",
    "port": "kvctl sets it: ports.base moves all ports",
    "uds": "engines are reached by TCP: ports.base moves all ports",
    "model": "write model at the top level",
    "config": "write the flags here, under args",
    "kv-transfer-config": "kvctl writes it: see transfer and offload",
    "kv-events-config": "kvctl does not publish KV events yet",
    "kv-offloading-size": "write offload.host",
    "kv-offloading-backend": "kvctl offloads with the OffloadingConnector: see offload",
    "grpc": "kvctl and the router speak HTTP to the engines",
    "headless": _ONE_NODE,
    "nnodes": _ONE_NODE,
    "node-rank": _ONE_NODE,
    "master-addr": _ONE_NODE,
    "master-port": _ONE_NODE,
    "data-parallel-size-local": _ONE_NODE,
    "data-parallel-address": _ONE_NODE,
    "data-parallel-rank": _ONE_NODE,
    "data-parallel-start-rank": _ONE_NODE,
    "data-parallel-rpc-port": _ONE_NODE,
    "data-parallel-external-lb": _ONE_NODE,
    "data-parallel-hybrid-lb": _ONE_NODE,
    "data-parallel-multi-port-external-lb": _ONE_NODE,
    "ssl-keyfile": _TLS,
    "ssl-certfile": _TLS,
}
# vLLM's short forms that would change what is planned if they went by unseen.
_SHORT = {
    "tp": TENSOR,
    "pp": PIPELINE,
    "dp": DATA,
    "pcp": PREFILL_CONTEXT,
    "n": "nnodes",
    "r": "node-rank",
    "dpl": "data-parallel-size-local",
    "dpn": "data-parallel-rank",
    "dpr": "data-parallel-start-rank",
    "dpa": "data-parallel-address",
}


def flag_name(written: Any) -> str:
    """The flag as vLLM's help spells it, without the dashes in front.

    Raises:
        ValueError: kvctl sets that flag itself, or it is not a full flag name.
    """
    name = str(written)
    head, dot, rest = name.partition(".")
    head = head.replace("_", "-")
    if name.startswith("-"):
        raise ValueError(f'write it without the dashes: "{name.lstrip("-")}"')
    if not _FLAG.fullmatch(name):
        raise ValueError("not a flag of vllm serve")
    if head in _SHORT:
        raise ValueError(f'write the flag in full: "{_SHORT[head]}"')
    if head in _REFUSED:
        raise ValueError(f"not here: {_REFUSED[head]}")
    if head.startswith("no-"):
        raise ValueError(f'write "{head[3:]}: false"')
    # argparse takes any unambiguous beginning of a flag; ours must not slip through that way.
    for full in (*SIZES, *_REFUSED):
        if full.startswith(head) and head not in SIZES and len(head) > 2:
            raise ValueError(f'write the flag in full; if this means "{full}": {_advice(full)}')
    return head + dot + rest


def flag_value(value: Any) -> Any:
    """The value unchanged; a `Text` that is a boolean becomes one.

    Raises:
        ValueError: there is nothing that vLLM could be given.
    """
    if isinstance(value, Text) and value.plain and value in ("true", "false"):
        return str(value) == "true"
    if value is None:
        raise ValueError("null: write a value; true for a flag without one")
    if isinstance(value, list) and not value:
        raise ValueError("an empty list: leave the flag out")
    return value


def each_once(flags: Any) -> Any:
    """The mapping unchanged.

    Raises:
        ValueError: one flag stands in it in two spellings, ``max_len`` and ``max-len``.
    """
    seen: dict[str, str] = {}
    for name in flags if isinstance(flags, dict) else ():
        head, dot, rest = str(name).partition(".")
        first = seen.setdefault(head.replace("_", "-") + dot + rest, name)
        if first != name:
            raise ValueError(f"{first} and {name} are the same flag")
    return flags


def merged(common: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """The flags of an instance: those of the file, each replaced by the instance's own."""
    return {**common, **own}


def to_argv(flags: Mapping[str, Any]) -> list[str]:
    """The flags in order, ready for ``vllm serve``."""
    argv: list[str] = []
    for name, value in flags.items():
        argv += _one(name, value)
    return argv


def _one(name: str, value: Any) -> list[str]:
    flag = f"--{name}"
    if isinstance(value, bool):
        return [flag] if value else [f"--no-{name}"]
    if isinstance(value, Mapping) or (isinstance(value, list) and name in _JSON_LISTS):
        return [flag, json_text(value)]
    if isinstance(value, list):
        items = [_word(item) for item in value]
        if name in _REPEATED:
            return [word for item in items for word in (flag, item)]
        return [flag, *items]
    word = _word(value)
    # A word that begins with a dash would be taken for the next flag, unless it is a number.
    return [joined(flag, "=", word)] if word.startswith("-") and not _number(word) else [flag, word]


def _word(value: Any) -> str:
    if isinstance(value, Mapping | list):
        return json_text(value)
    return value if isinstance(value, str) else spelling(value)


def _number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _advice(full: str) -> str:
    return _REFUSED.get(full, "kvctl has to see it")
