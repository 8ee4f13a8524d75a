"""The shapes of model and engine that a pair of this tier runs in, and what its KV weighs there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from late_read import LEASE

from kvctl.demo.cache import entry, key_of
from kvctl.demo.compare import Answer
from kvctl.demo.engine_script import FOLDER as SCRIPTS
from kvctl.demo.engine_script import run_script
from kvctl.demo.model import TIMEOUT, model_key, tiny_model

BLOCK = 128  # tokens, on CPUs
LAYER = (
    2 * 2 * 64 * 4 * BLOCK
)  # bytes of a block in one layer: K and V, KV heads, head size, float32

# A prompt that is computed at once needs its blocks in all six groups at the same time, those
# that will have left the window included: 101 blocks for 2 048 tokens.
GROUP_BLOCKS = 112
HYBRID_SCRIPT = Path(__file__).with_name("write_hybrid_model.py")


@dataclass(frozen=True)
class Layout:
    """One shape.

    Attributes:
        name: of the topology.
        hybrid: the model has layers with a sliding window.
        groups: KV groups that vLLM makes of its layers.
        block_bytes: what one block weighs, over all layers of its group and all ranks.
        device_blocks: what the device cache of each engine holds.
        args: flags of both engines.
        prefill, decode: flags of one of them.
        offload: further settings of the host tier.
        transfer: further settings of the transfer.
        env: further variables of both engines.
        host_bytes: of both engines together; the default holds all that these tests store.
        lease: seconds.
        patience: further seconds that a request has.
        composed: when a load comes from two tiers.
        branching: prompts that share beginnings, instead of the demo's.
    """

    name: str
    hybrid: bool = False
    groups: int = 1
    block_bytes: int = 4 * LAYER
    device_blocks: int = 24
    args: Mapping[str, Any] = field(default_factory=dict)
    prefill: Mapping[str, Any] = field(default_factory=dict)
    decode: Mapping[str, Any] = field(default_factory=dict)
    offload: Mapping[str, Any] = field(default_factory=dict)
    transfer: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    host_bytes: int = 400_000_000
    lease: int = int(LEASE)
    patience: float = 10.0
    composed: str = "faster"
    branching: int = 0


@dataclass(frozen=True)
class Known:
    """A layout's model, and what one plain engine answers with it."""

    model: Path
    prompts: list[list[int]]
    references: list[Answer]


GROUPS = Layout("groups", hybrid=True, groups=6, block_bytes=LAYER, device_blocks=GROUP_BLOCKS)
ONE_GROUP = Layout(
    "one-group",
    hybrid=True,
    block_bytes=6 * LAYER,
    args={"disable-hybrid-kv-cache-manager": True},
)
# Three workers, each of which polls at 100 %: on two cores a pull may take longer than ten seconds.
TO_MORE = Layout("to-more", decode={"tensor-parallel-size": 2}, lease=30)
TO_FEWER = Layout("to-fewer", prefill={"tensor-parallel-size": 2}, lease=30)
# In tokens, which all releases understand; newer ones also take blocks_per_chunk.
CHUNKS = Layout("chunks", offload={"block_size": 2 * BLOCK})

ONE_PROCESS = Layout("one-process")

# A host tier that has to evict, and prompts of which it holds the beginnings.
MIXED = Layout(
    "mixed",
    device_blocks=40,
    host_bytes=60_000_000,
    lease=5,
    patience=85.0,
    composed="always",
    branching=48,
)
# torch keeps a kernel for each of up to 1 024 shapes of its input (oneDNN's primitive cache), and
# glibc an arena for each thread: a worker grows by 150 MB over its first 1 250 prompts of any
# length, and by 1 MB without them. So what is left tells of the engine and its connector.
SOAK = replace(
    MIXED,
    name="soak",
    env={
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "0",
        "MALLOC_ARENA_MAX": "1",
        "MALLOC_MMAP_THRESHOLD_": "1000000",
        "MALLOC_TRIM_THRESHOLD_": "1000000",
    },
)
FAILING = Layout("failing", transfer={"kv_load_failure_policy": "fail"}, patience=30.0)
PLAIN = Layout("plain", patience=30.0)


def shaped(*layouts: Layout) -> pytest.MarkDecorator:
    """The shapes that a test runs in."""
    names = [layout.name for layout in layouts]
    return pytest.mark.parametrize("layout", layouts, ids=names, indirect=True, scope="module")


def model_of(layout: Layout, python: Path, *, log: Path) -> tuple[Path, str]:
    """The folder of the layout's model, and what it was made from."""
    if not layout.hybrid:
        return tiny_model(python, log=log), model_key()
    key = key_of([HYBRID_SCRIPT.read_text(), model_key()])

    def make(folder: Path) -> None:
        env = {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(SCRIPTS)}
        run_script(python, str(HYBRID_SCRIPT), [folder], env=env, log=log, timeout=TIMEOUT)

    return entry("hybrid-model", key, make), key
