"""One load from two tiers: a prefix from the local tier, the remainder from the peer.

NIXL reads all blocks that it is shown without a hash, and pairs them with the tail of the offered
ones (NIXL/pull_scheduler.py 0.32.0:149, base_worker.py:3451; 0.20.2 scheduler.py:339). An offload
child loads ``[computed, computed + tokens)`` of the request's full list. So the offload child gets
the real blocks with its own count, and NIXL a view of them in which the offload child's look as if
they were cached already.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Plan(NamedTuple):
    """A load from both: tokens after the `computed` ones, counted from there.

    Attributes:
        peer, local: the children.
        prefix: tokens that the local tier loads.
        tokens: that both load together.
    """

    peer: int
    local: int
    computed: int
    prefix: int
    tokens: int


class _AsIfCached:
    """A block that NIXL is to take for one of the prefix cache."""

    __slots__ = ("block_hash", "block_id", "is_null")

    def __init__(self, block: Any) -> None:
        self.block_id = block.block_id
        self.is_null = False
        self.block_hash = b"kvctl"  # anything but None; its value is never read


class Composition:
    """What makes a composed load possible in this engine.

    Attributes:
        always: whatever the tiers' speeds are.
    """

    def __init__(self, children: list[Any], block_sizes: tuple[int, ...], *, always: bool) -> None:
        self._children = children
        self._block_sizes = block_sizes
        self.always = always

    @staticmethod
    def obstacle(vllm_config: Any, kv_cache_config: Any, children: list[Any]) -> str:
        """Why this engine never composes; empty: nothing stands in the way."""
        parallel = vllm_config.parallel_config
        if getattr(parallel, "decode_context_parallel_size", 1) > 1:
            return "decode context parallelism"
        if getattr(parallel, "pipeline_parallel_size", 1) > 1:
            return "pipeline parallelism"
        for group in kv_cache_config.kv_cache_groups:
            name = type(group.kv_cache_spec).__name__
            if name not in _PLAIN:
                return f"a KV cache group of the kind {name}"
            if getattr(group, "host_resident", False):
                return "a KV cache group that lives in host memory"
            if getattr(group, "is_eagle_group", False):
                return "a KV cache group of a draft model"
        names = [type(child).__name__ for child in children]
        if not any(name in _PULLS for name in names):
            return f"no child that pulls (of {names})"
        if not any(name == "OffloadingConnector" for name in names):
            return f"no OffloadingConnector (of {names})"
        return ""

    def possible(self, request: Any, peer: int, local: int, boundary: int) -> bool:
        """Whether this request's KV may come from both, split at that token of the prompt."""
        params = request.kv_transfer_params or {}
        if not params.get("do_remote_prefill") or params.get("do_remote_decode"):
            return False
        if any(boundary % size for size in self._block_sizes):
            return False  # the local tier offers a part of a block
        return self._covers_all_groups(local) and self._same_blocks(request, params)

    def view(self, plan: Plan, blocks: Any) -> Any:
        """The request's blocks (vLLM's ``KVCacheBlocks``) as NIXL is to see them.

        Returns:
            None where a group would have nothing left to pull: NIXL takes an empty list of blocks
            for all of them.
        """
        boundary = plan.computed + plan.prefix
        groups = []
        for size, group in zip(self._block_sizes, blocks.blocks, strict=True):
            shown = [
                _AsIfCached(block)
                if (index + 1) * size <= boundary and not block.is_null and block.block_hash is None
                else block
                for index, block in enumerate(group)
            ]
            if all(block.is_null or block.block_hash is not None for block in shown):
                return None
            groups.append(shown)
        return type(blocks)(tuple(groups))

    def _covers_all_groups(self, local: int) -> bool:
        # Otherwise the prefix of a group that the offload child leaves out stays unwritten.
        config = getattr(self._children[local].connector_scheduler, "config", None)
        offloaded = getattr(config, "kv_group_configs", None)
        return offloaded is not None and len(offloaded) == len(self._block_sizes)

    def _same_blocks(self, request: Any, params: dict[str, Any]) -> bool:
        """Whether prefill's blocks have the size of ours, told from how many it offers.

        Groups with a window offer fewer; at least one offers all.
        """
        offered = params.get("remote_block_ids")
        if not isinstance(offered, (list, tuple)) or not offered:
            return False
        if isinstance(offered[0], int):  # vLLM 0.20.2 and earlier with one group
            offered = (offered,)
        if len(offered) != len(self._block_sizes):
            return False
        tokens = len(request.prompt_token_ids or ())
        needed = [-(-tokens // size) for size in self._block_sizes]
        counts = [len(group) for group in offered]
        return all(count <= need for count, need in zip(counts, needed, strict=True)) and any(
            count == need for count, need in zip(counts, needed, strict=True)
        )


# Kinds of groups whose blocks hold tokens in order (v1/kv_cache_interface.py 0.32.0). Recurrent
# state, cross attention and replayed groups are none of them.
_PLAIN = {
    "FullAttentionSpec",
    "MLAAttentionSpec",
    "SlidingWindowSpec",
    "ChunkedLocalAttentionSpec",
}
_PULLS = {"NixlConnector", "NixlPullConnector"}
