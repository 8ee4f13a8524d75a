"""The scheduler's side of a load: which child makes it, with which blocks, and who is told.

What is chosen is decided in tier_choice.py; here it is put into vLLM's questions and answers.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Collection
from typing import Any

from .forwarding import FAILS_REQUESTS, Forwarding
from .scheduler_half import SchedulerHalf
from .store_fence import fence
from .tier_choice import Choice, Offer


class Choosing(Forwarding):
    """Answers vLLM's queries for KV, and starts the loads.

    Without a scheduler half everything is upstream's.
    """

    _chooses = False  # until the options have been read
    _scheduler_half: SchedulerHalf | None = None

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._heard: list[Offer | None] = [None] * len(self._connectors)
        self._choices: dict[str, Choice] = {}
        self._last_loads: tuple[str, dict[int, tuple[int, Any]]] = ("", {})
        self._new_loads: dict[str, tuple[int, ...]] = {}

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        # What vLLM calls up to 0.28.0.
        super().bind_gpu_block_pool(gpu_block_pool)
        self._keep_block_pool(gpu_block_pool)

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        # And from 0.30.0 on.
        super().bind_kv_cache_manager(kv_cache_manager)
        self._keep_block_pool(getattr(kv_cache_manager, "block_pool", None))

    def _keep_block_pool(self, pool: Any) -> None:
        # A load can only be given up where a request can be reported as failed as a whole: a list
        # of blocks would have it recomputed in the blocks that may still be written.
        if self._scheduler_half is not None and FAILS_REQUESTS:
            self._scheduler_half.waits.block_pool = pool

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        half = self._scheduler_half
        if half is None:
            return super().get_num_new_matched_tokens(request, num_computed_tokens)
        half.arrived(request)  # vLLM 0.20.2 does not announce new requests
        name = request.request_id
        if self._composes:
            # A choice of an earlier query must not outlive it when this one finds nothing.
            self._requests_to_connector.pop(name, None)
        if self._chooses:
            choice = half.choose(request, num_computed_tokens)
            if choice.child is not None:
                self._requests_to_connector[name] = choice.child
        else:
            self._heard = [None] * len(self._connectors)
            tokens, waits = super().get_num_new_matched_tokens(request, num_computed_tokens)
            child = self._requests_to_connector.get(name)
            choice = Choice(child, tokens, waits, "upstream", tuple(self._heard))
        self._choices[name] = choice
        return choice.tokens, choice.waits

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        half = self._scheduler_half
        name = request.request_id
        choice = self._choices.pop(name, None) if half is not None else None
        if half is None or choice is None:
            # The second time for a load, when its request is no longer parked.
            super().update_state_after_alloc(request, blocks, num_external_tokens)
            return
        loads = half.loads(choice, num_external_tokens, blocks)
        self._last_loads = (name, loads)
        if loads and choice.waits:
            self._new_loads[name] = tuple(loads)
        half.admitted(request, choice, loads, blocks)
        if not self._composes:
            super().update_state_after_alloc(request, blocks, num_external_tokens)
            return
        self._tell_reused_blocks(loads, blocks)
        for index, child in enumerate(self._connectors):
            tokens, shown = loads.get(index, (0, blocks))
            if len(loads) > 1:
                _load_asynchronously(child, name)
            child.update_state_after_alloc(request, shown, tokens)

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        chosen = self._requests_to_connector.get(request.request_id)
        if chosen is None:
            return ()  # upstream raises KeyError
        groups = tuple(self._connectors[chosen].get_loaded_kv_cache_group_ids(request))
        # Asked before the blocks are allocated (SCHED 0.32.0:1265): a plan may still fall through.
        choice = self._choices.get(request.request_id)
        if choice is None or choice.plan is None:
            return groups
        local = self._connectors[choice.plan.local].get_loaded_kv_cache_group_ids(request)
        return tuple(group for group in groups if group in local)

    def get_external_cache_hit_sources(
        self, request: Any, num_external_tokens: int
    ) -> dict[Any, int]:
        name, loads = self._last_loads  # asked right after the blocks were allocated
        if name != request.request_id or len(loads) < 2:
            return super().get_external_cache_hit_sources(request, num_external_tokens)
        sources: Counter[Any] = Counter()
        for index, (tokens, _) in loads.items():
            child = self._connectors[index]
            sources.update(child.get_external_cache_hit_sources(request, tokens))
        return dict(sources)

    def _hear_offers(self) -> None:
        """Where upstream chooses: listens to what each child answers, to record it."""
        for index, child in enumerate(self._connectors):
            child.get_num_new_matched_tokens = self._hearing(
                index, child.get_num_new_matched_tokens
            )

    def _hearing(self, index: int, ask: Callable[..., tuple[int | None, bool]]) -> Any:
        @functools.wraps(ask)
        def get_num_new_matched_tokens(*args: Any, **kwargs: Any) -> tuple[int | None, bool]:
            answer = ask(*args, **kwargs)
            self._heard[index] = Offer(*answer)
            return answer

        return get_num_new_matched_tokens

    def _tell_reused_blocks(self, loads: Collection[int], blocks: Any) -> None:
        """Tells the offload children which blocks other children are about to write (D8)."""
        if not loads:
            return
        written = {block.block_id for group in blocks.blocks for block in group}
        for index, child in enumerate(self._connectors):
            if any(loader != index for loader in loads):
                fence(child, written)


def _load_asynchronously(child: Any, request: str) -> None:
    """Takes the request out of an offload child's loads that the next step would wait for.

    A composed load waits for NIXL anyway (OFF/scheduler.py 0.33.0, _current_batch_sync_loads).
    """
    batch = getattr(getattr(child, "connector_scheduler", None), "_current_batch_sync_loads", None)
    if batch is not None:
        batch.discard(request)
