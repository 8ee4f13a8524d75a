"""Who answers each member of vLLM's connector interface, decided once per member.

A member that is not in this table has not been decided on. The base class answers everything
with a default, so a wrapper that does not know a member answers for its children without having
asked them: that must never happen by accident.
"""

from __future__ import annotations

OURS = "ours"  # kvctl's class overrides it
UPSTREAM = "upstream"  # vLLM's own MultiConnector, which kvctl's class extends
BASE = "base"  # the base class's answer stands; the text says why that is right

HANDLED: dict[str, tuple[str, str]] = {
    # Both halves
    "role": (BASE, "a fact of the wrapper itself"),
    "shutdown": (OURS, "ends the feed, then every child"),
    "reset_cache": (UPSTREAM, "every child"),
    "get_kv_connector_stats": (OURS, "of every child, by its class"),
    # What the configuration decides; class methods, some asked in the API server
    "get_required_kvcache_layout": (UPSTREAM, "the children must agree"),
    "requires_piecewise_for_cudagraph": (UPSTREAM, "if a child does"),
    "requires_kv_delivery": (UPSTREAM, "if a child does"),
    "supports_divergent_local_hybrid_hits": (UPSTREAM, "if all children do"),
    "supports_sleep_mode": (UPSTREAM, "if all children do"),
    "prefer_cross_layer_blocks": (UPSTREAM, "if all children do"),
    "build_kv_connector_stats": (UPSTREAM, "from the children's, by class name"),
    "build_prom_metrics": (
        OURS,
        "of every child that has some",
    ),
    # Scheduler half
    "bind_gpu_block_pool": (OURS, "every child, then our waits"),
    "bind_kv_cache_manager": (OURS, "every child, then our waits"),
    "set_xfer_handshake_metadata": (OURS, "the child that made it"),
    "set_xfer_handshake_metadata_pp_aware": (OURS, "the child that made it"),
    "on_new_request": (OURS, "judges the offer, then every child"),
    "get_num_new_matched_tokens": (OURS, "every child; then the tier is chosen"),
    "update_state_after_alloc": (OURS, "announces the load, then every child"),
    "get_loaded_kv_cache_group_ids": (OURS, "the chosen child; what both load of a composed hit"),
    "get_external_cache_hit_sources": (OURS, "every child that loads, for its own tokens"),
    "build_connector_meta": (OURS, "a slot for every child, and ours"),
    "update_connector_output": (OURS, "every child with its own slot, then our records"),
    "request_finished": (OURS, "every child; what they return is joined, granted and signed"),
    "request_finished_all_groups": (UPSTREAM, "every child; what they return is joined"),
    "register_finished_partial_tail": (OURS, "if a child accepts it, counted as a save"),
    "has_pending_push_work": (OURS, "if a child has, or blocks are reserved"),
    "has_pending_block_frees": (UPSTREAM, "if a child has"),
    "take_events": (OURS, "of every child, as a list"),
    "get_finished_count": (UPSTREAM, "None: what the children say must not differ"),
    # Worker half
    "register_kv_caches": (OURS, "every child, then our hooks"),
    "register_cross_layers_kv_cache": (OURS, "every child, then our hooks"),
    "unregister_kv_caches": (UPSTREAM, "every child"),
    "restore_kv_caches": (UPSTREAM, "every child"),
    "get_mem_pool_context": (UPSTREAM, "of the one child that has one"),
    "set_host_xfer_buffer_ops": (UPSTREAM, "every child"),
    "get_handshake_metadata": (OURS, "of the child that has some, with its place"),
    "handle_preemptions": (UPSTREAM, "every child with its own slot"),
    "bind_connector_metadata": (OURS, "every child with its own slot, and our map"),
    "has_connector_metadata": (BASE, "the wrapper's own is set together with the children's"),
    "clear_connector_metadata": (UPSTREAM, "every child"),
    "start_load_kv": (UPSTREAM, "every child"),
    "wait_for_layer_load": (UPSTREAM, "every child"),
    "save_kv_layer": (UPSTREAM, "every child"),
    "wait_for_save": (UPSTREAM, "every child"),
    "finish_forward": (UPSTREAM, "every child"),
    "reset_capture_state": (UPSTREAM, "every child"),
    "get_finished": (OURS, "every child; only what was announced passes"),
    "get_transfer_results": (OURS, "every child; only what was announced passes"),
    "get_block_ids_with_load_errors": (OURS, "of every child, and those of late pulls"),
    "get_kv_connector_kv_cache_events": (OURS, "of every child, merged"),
    "build_connector_worker_meta": (OURS, "a slot for every child, and our facts"),
}

# A member of one release that its MultiConnector leaves to the base class, and why that is right.
LEFT_TO_THE_BASE = {
    ("0.20.2", "request_finished_all_groups"): (
        "0.20.2 asks only connectors that are SupportsHMA, and its MultiConnector is not"
    ),
}
