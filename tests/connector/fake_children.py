"""Children that do what a test sets, built by the installed vLLM's MultiConnector itself.

They subclass vLLM's real base class and are registered as vLLM's own are, so the configuration,
the lookup and the constructor of whatever release is installed are the real ones.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorRole,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from kvctl_connector.connector import MultiConnector


class FakeConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """One child: remembers what it was told, answers what the test has set."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.engine_id = vllm_config.kv_transfer_config.engine_id
        self.connector_scheduler: Any = None
        self.connector_worker: Any = None
        self.ended: tuple[bool, dict[str, Any] | None] = (False, None)
        self.sent: set[str] = set()
        self.takes_tails = False
        self.events: Any = None
        self.handshake: Any = None
        self.stats: Any = None
        self.layers: Any = None
        self.told: dict[str, Any] = {}
        self.outputs: list[tuple[Any, Any, Any]] = []

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None: ...

    def get_num_new_matched_tokens(self, request: Any, computed: int) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, tokens: int) -> None: ...

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        return SimpleNamespace()

    def request_finished(self, request: Any, block_ids: Any) -> Any:
        return self.ended

    def register_finished_partial_tail(self, request: Any, block_ids: Any, tails: Any) -> bool:
        return self.takes_tails

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        sent, self.sent = self.sent, set()
        return sent, set()

    def get_kv_connector_kv_cache_events(self) -> Any:
        return self.events

    def get_kv_connector_stats(self) -> Any:
        return self.stats

    def get_handshake_metadata(self) -> Any:
        return self.handshake

    def set_xfer_handshake_metadata(self, metadata: Any) -> None:
        self.told["handshakes"] = metadata

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self.told["pool"] = gpu_block_pool

    def register_cross_layers_kv_cache(self, kv_cache: Any, attn_backend: Any) -> None:
        self.told["cross layers"] = kv_cache

    def update_connector_output(self, connector_output: Any) -> None:
        self.outputs.append(
            (
                connector_output.kv_connector_worker_meta,
                connector_output.kv_cache_events,
                connector_output.finished_sending,
            )
        )


class FakePpAwareConnector(FakeConnector):
    """One that knows pipeline stages, as NIXL does from vLLM 0.26.0 on."""

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Any) -> None:
        self.told["handshakes"] = metadata


class FakePiecewiseConnector(FakeConnector):
    """One that cannot live with full CUDA graphs."""

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        return True


class FakeUnregisteredConnector(FakeConnector):
    """One that vLLM can only find by its module."""


class NixlFakeConnector(FakeConnector):
    """One that the connector takes for NIXL, by its name."""


class OffloadingFakeConnector(FakeConnector):
    """One that the connector takes for the offload connector, by its name."""


class FakeHandshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    def __init__(self, of: str) -> None:
        self.of = of


class FakeStats(KVConnectorStats):  # type: ignore[misc]
    """Statistics that add up."""

    def aggregate(self, other: Any) -> Any:
        self.data = {"sum": self.data["sum"] + other.data["sum"]}
        return self

    def is_empty(self) -> bool:
        return not self.data


for _class in (
    FakeConnector,
    FakePpAwareConnector,
    FakePiecewiseConnector,
    NixlFakeConnector,
    OffloadingFakeConnector,
):
    KVConnectorFactory.register_connector(_class.__name__, __name__, _class.__name__)


def entry(name: str, **more: Any) -> dict[str, Any]:
    return {"kv_connector": name, "kv_role": "kv_both", **more}


def make_config(
    *children: dict[str, Any], ranks: int = 1, mode: str = "compose", **transfer: Any
) -> Any:
    """As much of a VllmConfig as the wrapper and the fake children read."""
    return SimpleNamespace(
        kv_transfer_config=KVTransferConfig(
            kv_connector="MultiConnector",
            kv_role="kv_both",
            kv_connector_module_path="kvctl_connector.connector",
            engine_id="engine",
            kv_connector_extra_config={"connectors": list(children), "kvctl": {"mode": mode}},
            **transfer,
        ),
        device_config=SimpleNamespace(device_type="cuda"),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=True),
        parallel_config=SimpleNamespace(rank=0, world_size=ranks, data_parallel_index=0),
        model_config=SimpleNamespace(model="tiny"),
    )


def make_groups(*specs: Any) -> Any:
    groups = [SimpleNamespace(kv_cache_spec=spec, layer_names=["layer"]) for spec in specs]
    return SimpleNamespace(kv_cache_groups=groups)


def build(*names: str, worker: bool = False, ranks: int = 1, **transfer: Any) -> Any:
    """The connector with fake children, in the scheduler's or in the worker's role."""
    config = make_config(*map(entry, names), ranks=ranks, **transfer)
    role = KVConnectorRole.WORKER if worker else KVConnectorRole.SCHEDULER
    return MultiConnector(config, role, make_groups())
