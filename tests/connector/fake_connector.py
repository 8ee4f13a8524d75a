"""The connector class over the installed vLLM, with children and halves that a test scripts."""

from types import SimpleNamespace
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import base

from kvctl_connector import connector as connector_module
from kvctl_connector.connector import MultiConnector
from kvctl_connector.nixl_probe import NixlProbe
from kvctl_connector.scheduler_half import SchedulerHalf
from kvctl_connector.speeds import Speeds
from kvctl_connector.tier_choice import TierChoice


class FakeChild:
    """One child; a test sets what it answers."""

    def __init__(self) -> None:
        self.matched: tuple[int | None, bool] = (0, False)
        self.results = base.KVConnectorTransferResults()
        self.allocated: list[tuple[str, int]] = []
        self.connector_scheduler = SimpleNamespace(_current_batch_allocated_block_ids=set())
        self.worker_meta: Any = None
        self.events: list[str] = []
        self.seen: list[dict[str, Any]] = []

    def get_num_new_matched_tokens(self, request: Any, computed: int) -> tuple[int | None, bool]:
        return self.matched

    def update_state_after_alloc(self, request: Any, blocks: Any, tokens: int) -> None:
        self.allocated.append((request.request_id, tokens))

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        return SimpleNamespace(store_jobs={})

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set()

    def on_new_request(self, request: Any) -> None:
        self.seen.append(dict(request.kv_transfer_params))

    def bind_connector_metadata(self, metadata: Any) -> None: ...

    def get_transfer_results(self, finished: set[str]) -> Any:
        return self.results

    def build_connector_worker_meta(self) -> Any:
        return self.worker_meta

    def take_events(self) -> list[str]:
        return self.events


class RecordingHalf:
    """Stands for the scheduler half and remembers what it was told; it chooses like the real one,
    over the fake children, the first of which pulls."""

    loads = SchedulerHalf.loads

    def __init__(self, children: list[FakeChild]) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.arrivals = SimpleNamespace(take_leases=dict)
        self.choice = TierChoice(
            children, ["peer", *["host"] * (len(children) - 1)], speeds=Speeds(),
            bytes_per_token=1, block=128, composition=None, lookup_deadline=0,
        )  # fmt: skip

    def choose(self, request: Any, computed: int) -> Any:
        return self.choice.choose(request, computed)

    def give_up_overdue(self) -> dict[str, Any]:
        return {}

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: self.calls.append((name, *args, *kwargs.values()))


def make_connector(children: int = 2, *, worker: bool = False) -> Any:
    made: Any = object.__new__(MultiConnector)
    made._connectors = [FakeChild() for _ in range(children)]
    made._requests_to_connector = {}
    made._extra_async_saves = {}
    made._connector_metadata = None
    made._choices, made._new_loads = {}, {}
    made._composes = made._chooses = True
    made._begin(1)
    made._scheduler_half = None if worker else RecordingHalf(made._connectors)
    made._worker_half = None
    if worker:
        half: Any = connector_module.WorkerHalf([], [], 0, 1, 500)
        half._children = made._connectors
        half._nixl[0] = NixlProbe(0, 1)  # the first child is the one that pulls
        made._worker_half = half
    return made


def make_request(name: str = "r") -> Any:
    return SimpleNamespace(request_id=name, kv_transfer_params=None)


def make_blocks(*numbers: int) -> Any:
    return SimpleNamespace(blocks=([SimpleNamespace(block_id=number) for number in numbers],))


def step(made: Any) -> Any:
    return made.build_connector_meta(SimpleNamespace(scheduled_new_reqs=[]))
