"""What of vLLM the connector builds on: the names whose shape is snapshotted for each release.

Private names are listed one by one: each is one that ``kvctl_connector`` reads, calls or stands
in front of. A name that a release lacks is missing in its snapshot, and the drift says so.
"""

from __future__ import annotations

from dataclasses import dataclass

CONNECTORS = "distributed/kv_transfer/kv_connector"
NIXL = f"{CONNECTORS}/v1/nixl/*.py"
OFFLOADING = f"{CONNECTORS}/v1/offloading/*.py"


@dataclass(frozen=True)
class Watched:
    """One class.

    Attributes:
        files: glob below ``vllm/`` in which the class, and those it extends, are looked for.
        classes: its names over the releases; the first that is found counts.
        public: whether every public member counts.
        names: further members that count.
    """

    files: str
    classes: tuple[str, ...]
    public: bool = False
    names: tuple[str, ...] = ()


CLASSES = {
    "KVConnectorBase_V1": Watched(
        f"{CONNECTORS}/v1/base.py",
        ("KVConnectorBase_V1",),
        public=True,
        names=("__init__", "_connector_metadata", "_get_connector_metadata", "_cache_hit_source"),
    ),
    "KVConnectorRole": Watched(f"{CONNECTORS}/v1/base.py", ("KVConnectorRole",), public=True),
    "SupportsHMA": Watched(f"{CONNECTORS}/v1/base.py", ("SupportsHMA",), public=True),
    "KVConnectorWorkerMetadata": Watched(
        f"{CONNECTORS}/v1/base.py", ("KVConnectorWorkerMetadata",), public=True
    ),
    "KVConnectorTransferResults": Watched(
        f"{CONNECTORS}/v1/base.py", ("KVConnectorTransferResults",), public=True
    ),
    "MultiConnector": Watched(
        f"{CONNECTORS}/v1/multi_connector.py",
        ("MultiConnector",),
        public=True,
        names=(
            "__init__",
            "_connectors",
            "_requests_to_connector",
            "_extra_async_saves",
            "_ktc_kv_transfer_config",
            "_get_connector_classes_and_configs",
            "_aggregate_request_finished",
        ),
    ),
    "MultiKVConnectorMetadata": Watched(
        f"{CONNECTORS}/v1/multi_connector.py", ("MultiKVConnectorMetadata",), public=True
    ),
    "MultiKVConnectorWorkerMetadata": Watched(
        f"{CONNECTORS}/v1/multi_connector.py", ("MultiKVConnectorWorkerMetadata",), public=True
    ),
    "MultiKVConnectorStats": Watched(
        f"{CONNECTORS}/v1/multi_connector.py", ("MultiKVConnectorStats",), public=True
    ),
    "KVConnectorFactory": Watched(
        f"{CONNECTORS}/factory.py", ("KVConnectorFactory",), public=True, names=("_registry",)
    ),
    "KVTransferConfig": Watched("config/kv_transfer.py", ("KVTransferConfig",), public=True),
    "KVConnectorOutput": Watched("v1/outputs.py", ("KVConnectorOutput",), public=True),
    "NewRequestData": Watched(
        "v1/core/sched/output.py",
        ("NewRequestData",),
        names=("req_id", "prompt_token_ids", "num_computed_tokens"),
    ),
    "SchedulerOutput": Watched(
        "v1/core/sched/output.py",
        ("SchedulerOutput",),
        names=("scheduled_new_reqs", "kv_connector_metadata", "finished_req_ids"),
    ),
    "Request": Watched(
        "v1/request.py",
        ("Request",),
        names=(
            "request_id",
            "prompt_token_ids",
            "kv_transfer_params",
            "cache_salt",
            "lora_request",
            "mm_features",
            "trace_headers",
        ),
    ),
    # NIXL: one class up to 0.22.1, a base and one each for pull and push from 0.24.0 on.
    "NIXL connector": Watched(
        NIXL,
        ("NixlPullConnector", "NixlConnector"),
        public=True,
        names=("connector_scheduler", "connector_worker"),
    ),
    "NIXL scheduler": Watched(
        NIXL,
        ("NixlPullConnectorScheduler", "NixlConnectorScheduler"),
        names=(
            "get_num_new_matched_tokens",
            "update_state_after_alloc",
            "build_connector_meta",
            "request_finished",
            "on_new_request",
            "update_connector_output",
            "_stop_heartbeat",
        ),
    ),
    "NIXL worker": Watched(
        NIXL,
        ("NixlPullConnectorWorker", "NixlConnectorWorker"),
        names=(
            "nixl_wrapper",
            "start_load_kv",
            "get_finished",
            "get_transfer_results",
            "get_block_ids_with_load_errors",
            "add_remote_agent",
            "_read_blocks",
            "_read_blocks_for_req",
            "_log_failure",
            "_nixl_handshake",
            "_background_nixl_handshake",
            "_pop_done_transfers",
            "_handle_failed_transfer",
            "_get_new_notifs",
            "_send_heartbeats",
            "_handle_heartbeat",
            "_recving_metadata",
            "_recving_transfers",
            "_remote_agents",
            "xfer_stats",
        ),
    ),
    "NIXL metadata": Watched(NIXL, ("NixlConnectorMetadata",), names=("reqs_to_recv",)),
    "NIXL pull": Watched(NIXL, ("ReqMeta",), public=True),
    "Offloading connector": Watched(
        f"{CONNECTORS}/v1/offloading_connector.py",
        ("OffloadingConnector",),
        public=True,
        names=("connector_scheduler", "connector_worker"),
    ),
    "Offloading scheduler": Watched(
        OFFLOADING,
        ("OffloadingConnectorScheduler",),
        names=(
            "manager",
            "config",
            "_current_batch_allocated_block_ids",
            "_current_batch_jobs_to_flush",
            "_block_id_to_pending_jobs",
            "_current_batch_sync_loads",
            "on_new_request",
            "get_num_new_matched_tokens",
            "update_state_after_alloc",
            "build_connector_meta",
            "update_connector_output",
            "request_finished",
        ),
    ),
    "Offloading worker half": Watched(
        OFFLOADING,
        ("OffloadingConnectorWorker",),
        names=(
            "worker",
            "spec",
            "handle_preemptions",
            "start_kv_transfers",
            "prepare_store_kv",
            "get_finished",
            "build_connector_worker_meta",
        ),
    ),
    "Offloading metadata": Watched(OFFLOADING, ("OffloadingConnectorMetadata",), public=True),
    "Offloading job": Watched(OFFLOADING, ("TransferJob",), public=True),
    "CPUOffloadingSpec": Watched(
        "v1/kv_offload/**/*.py",
        ("CPUOffloadingSpec",),
        public=True,
        names=("__init__", "_worker", "_handlers"),
    ),
    "CPUOffloadingManager": Watched(
        "v1/kv_offload/cpu/manager.py",
        ("CPUOffloadingManager",),
        names=(
            "_num_blocks",
            "_num_chunks",
            "_get_num_free_blocks",
            "_get_num_free_chunks",
            "complete_store",
            "complete_load",
        ),
    ),
    "OffloadingWorker": Watched("v1/kv_offload/**/*.py", ("OffloadingWorker",), public=True),
    "OffloadingHandler": Watched("v1/kv_offload/**/*.py", ("OffloadingHandler",), public=True),
    "TransferResult": Watched("v1/kv_offload/**/*.py", ("TransferResult",), public=True),
    "GPULoadStoreSpec": Watched(
        "v1/kv_offload/**/*.py", ("GPULoadStoreSpec",), public=True, names=("__init__",)
    ),
    "CPULoadStoreSpec": Watched(
        "v1/kv_offload/**/*.py", ("CPULoadStoreSpec",), public=True, names=("__init__",)
    ),
    "CanonicalKVCaches": Watched("v1/kv_offload/**/*.py", ("CanonicalKVCaches",), public=True),
    "CanonicalKVCacheTensor": Watched(
        "v1/kv_offload/**/*.py", ("CanonicalKVCacheTensor",), public=True
    ),
    "CanonicalKVCacheRef": Watched("v1/kv_offload/**/*.py", ("CanonicalKVCacheRef",), public=True),
}

# Objects behind which we stand: how vLLM calls them. A call by keyword must stay one.
CALLS = {
    "calls of the NIXL wrapper": (NIXL, "nixl_wrapper", ()),
    "calls of the NIXL worker": (NIXL, "self", ("_read_blocks", "_log_failure")),
    "calls of the offload worker": (f"{CONNECTORS}/v1/offloading/worker.py", "worker", ()),
}
