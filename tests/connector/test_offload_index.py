"""What a failed job does to the real manager of the host tier, in the form of any release."""

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

from kvctl_connector.offload_failures import FailedJob
from kvctl_connector.offload_index import OffloadIndex, base

ROWS = 4
KEYS = [base.make_offload_key(bytes([number]) * 8, 0) for number in range(8)]
POLICIES = pytest.mark.parametrize("policy", ["lru", "arc"])


class Tier:
    """A manager, and the jobs that upstream's scheduler half would have with it."""

    def __init__(self, policy: str) -> None:
        self.manager: Any = CPUOffloadingManager(ROWS, cache_policy=policy, enable_events=True)
        self.jobs: dict[int, Any] = {}
        self.index = OffloadIndex(SimpleNamespace(manager=self.manager, _jobs=self.jobs))
        self._context = _context()

    def store(self, number: int, keys: list[Any]) -> Any:
        """Begins a store; None if there is no room."""
        self.jobs[number] = SimpleNamespace(keys=set(keys))
        return self.manager.prepare_store(keys, self._context)

    def load(self, number: int, keys: list[Any]) -> None:
        self.jobs[number] = SimpleNamespace(keys=set(keys))
        self.manager.prepare_load(keys, self._context)

    def fail(self, number: int, *, store: bool) -> None:
        self.index.failed(FailedJob(0, store, number))

    def end(self, number: int, complete: Callable[..., Any]) -> None:
        keys = self.jobs.pop(number).keys
        takes_context = (
            "req_context" in inspect.signature(CPUOffloadingManager.complete_load).parameters
        )
        complete(keys, *((self._context,) if takes_context else ()))

    def hits(self, keys: list[Any]) -> list[bool]:
        hit = getattr(getattr(base, "LookupResult", None), "HIT", True)
        return [self.manager.lookup(key, self._context) == hit for key in keys]

    def events(self) -> list[tuple[bool, int]]:
        """(removed, how many keys) of what a router would hear."""
        return [
            (event.removed, len(event.keys))
            for event in self.manager.take_events()
            if not getattr(event, "metadata_only", False)  # from 0.33.0 on, for bookkeeping
        ]


def _context() -> Any:
    named = "req_id" in inspect.signature(base.ReqContext).parameters  # not in 0.20.2
    return base.ReqContext("r") if named else base.ReqContext()


@POLICIES
def test_keys_of_a_failed_store_are_gone_and_their_rows_are_free(policy: str) -> None:
    tier = Tier(policy)
    tier.store(1, KEYS[:2])
    tier.store(2, KEYS[2:4])
    assert tier.hits(KEYS[:4]) == [False] * 4
    tier.fail(1, store=True)
    assert tier.hits(KEYS[:2]) == [False] * 2, "not complete on all ranks"
    tier.end(1, tier.manager.complete_store)
    tier.end(2, tier.manager.complete_store)
    assert tier.hits(KEYS[:4]) == [False, False, True, True]
    assert tier.events() == [(False, 2)]
    assert tier.store(3, KEYS[4:6]).evicted_keys == []


@POLICIES
def test_keys_of_a_failed_load_are_gone_once_nobody_reads_them(policy: str) -> None:
    tier = Tier(policy)
    tier.store(1, KEYS[:4])
    tier.end(1, tier.manager.complete_store)
    tier.load(2, KEYS[:2])
    tier.load(3, KEYS[1:3])
    tier.fail(2, store=False)
    assert tier.hits(KEYS[:4]) == [False, False, True, True]
    tier.end(2, tier.manager.complete_load)
    assert tier.store(4, KEYS[4:5]).evicted_keys == [], "the first one's row is free"
    assert tier.hits(KEYS[:2]) == [False, False]
    tier.end(3, tier.manager.complete_load)
    tier.end(4, tier.manager.complete_store)
    assert tier.store(5, KEYS[1:2]).evicted_keys == [], "and now the second one's"
    tier.end(5, tier.manager.complete_store)
    assert tier.hits(KEYS[:5]) == [False, True, True, True, True]
    assert tier.events() == [(False, 4), (True, 1), (True, 1), (False, 1), (False, 1)]


@POLICIES
def test_books_are_right_after_many_failures(policy: str) -> None:
    """As many rows can be given out again as there are: none is lost, none given twice."""
    tier = Tier(policy)
    for number in range(0, 200, 2):
        keys = [KEYS[(number + shift) % len(KEYS)] for shift in range(2)]
        if not (stored := tier.store(number, keys)) or not stored.keys_to_store:
            continue
        tier.jobs[number].keys = set(stored.keys_to_store)
        if number % 6 == 0:
            tier.fail(number, store=True)
        tier.end(number, tier.manager.complete_store)
        if all(tier.hits(keys)):
            tier.load(number + 1, keys)
            if number % 4 == 0:
                tier.fail(number + 1, store=False)
            tier.end(number + 1, tier.manager.complete_load)
    assert not tier.index._unwritten
    fresh = [base.make_offload_key(bytes([100 + number]) * 8, 0) for number in range(ROWS)]
    rows = tier.store(1000, fresh).store_spec.block_ids
    assert sorted(int(row) for row in rows) == list(range(ROWS))


def test_a_reset_forgets_everything() -> None:
    tier = Tier("lru")
    if not hasattr(tier.manager, "reset_cache"):  # 0.20.2
        assert not tier.index.missing
        return
    tier.store(1, KEYS[:2])
    tier.fail(1, store=True)
    tier.jobs.clear()
    tier.manager.reset_cache()
    tier.store(2, KEYS[:2])
    tier.end(2, tier.manager.complete_store)
    assert tier.hits(KEYS[:2]) == [True, True]
