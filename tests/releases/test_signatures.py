"""The snapshots are those of the pinned releases, and say what changed between them."""

from __future__ import annotations

from itertools import pairwise

import pytest
import signatures
import sources
from signatures import committed, drift


@pytest.mark.parametrize("version", sources.RELEASES)
def test_the_committed_snapshot_is_that_of_the_release(version: str) -> None:
    found = signatures.snapshot(sources.release(version) / "vllm")
    stale = drift(committed(version), found)
    assert stale == [], "run: python tests/releases/signatures.py"
    assert (signatures.FOLDER / f"{version}.json").read_text() == signatures.written(found)


def test_no_snapshot_is_left_of_a_release_that_is_not_pinned() -> None:
    kept = {path.stem for path in signatures.FOLDER.glob("*.json")}
    assert kept == set(sources.RELEASES)


# What the changes between releases are known to have been: each is a case in the connector.
@pytest.mark.parametrize(
    ("since", "line"),
    [
        ("0.22.1", "changed KVConnectorBase_V1.__init__: "),
        ("0.22.1", "added KVConnectorBase_V1.on_new_request: method (request)"),
        ("0.22.1", "added MultiConnector._aggregate_request_finished: "),
        ("0.22.1", "added Offloading metadata.store_jobs: "),
        ("0.24.0", "added KVConnectorBase_V1.set_xfer_handshake_metadata_pp_aware: "),
        ("0.24.0", "added Offloading scheduler._current_batch_allocated_block_ids: "),
        ("0.26.0", "removed CPUOffloadingSpec.get_handlers: "),
        ("0.26.0", "added OffloadingWorker.submit_load: abstract method"),
        ("0.28.0", "added KVConnectorBase_V1.requires_kv_delivery: property"),
        ("0.30.0", "added KVConnectorBase_V1.get_transfer_results: "),
        ("0.30.0", "removed KVConnectorBase_V1.prefer_cross_layer_blocks: "),
        ("0.30.0", "removed KVConnectorBase_V1.register_cross_layers_kv_cache: "),
        ("0.30.0", "added CPUOffloadingManager._num_chunks: "),
        ("0.32.0", "added KVConnectorBase_V1.get_loaded_kv_cache_group_ids: "),
        ("0.33.0", "added KVConnectorBase_V1.supports_sleep_mode: classmethod"),
        ("0.33.0", "changed OffloadingWorker.submit_load: "),
    ],
)
def test_a_known_change_is_named_in_the_release_that_made_it(since: str, line: str) -> None:
    by_release = {
        new: drift(committed(old), committed(new)) for old, new in pairwise(sources.RELEASES)
    }
    named = [
        version for version, lines in by_release.items() if any(x.startswith(line) for x in lines)
    ]
    assert named == [since]


def test_the_constructor_takes_its_third_argument_from_0_22_1_on() -> None:
    old, new = (committed(v)["KVConnectorBase_V1"]["__init__"] for v in ("0.20.2", "0.22.1"))
    assert old.endswith("kv_cache_config=None)")
    assert new.endswith("kv_cache_config)")


def test_what_was_added_removed_and_changed_is_told_apart() -> None:
    old = {"A": {"gone": "attr", "kept": "attr", "other": "method (a)"}}
    new = {"A": {"kept": "attr", "other": "method (a, b)"}, "B": {"born": "property ()"}}
    assert drift(old, new) == [
        "removed A.gone: attr",
        "changed A.other: method (a) -> method (a, b)",
        "added B.born: property ()",
    ]
    assert drift(new, new) == []
