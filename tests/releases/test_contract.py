"""Every public member of the connector interface is handled on purpose, in every release.

By the committed snapshots and the parsed source of our class; nothing of vLLM is imported.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import sources
from handled import BASE, HANDLED, LEFT_TO_THE_BASE, OURS, UPSTREAM
from signatures import Shape, Snapshot, committed, shape
from watched import CLASSES, Watched

CONNECTOR = Path(__file__).parents[2] / "connector/kvctl_connector"
OUR_CLASS = shape(
    CONNECTOR,
    Watched("*.py", ("MultiConnector",), public=True, names=CLASSES["MultiConnector"].names),
)


def interface(release: Snapshot) -> list[str]:
    """The public members that vLLM may call."""
    members = {**release["KVConnectorBase_V1"], **release["SupportsHMA"]}
    return [member for member in members if not member.startswith("_")]


def undecided(version: str, release: Snapshot, ours: Shape) -> list[str]:
    """The members that are not handled as the table says, one line each."""
    found = []
    for member in interface(release):
        who, _ = HANDLED.get(member, ("", ""))
        actual = OURS if member in ours else UPSTREAM if member in release["MultiConnector"] else ""
        if not who:
            found.append(f"vLLM {version}: {member} is new: decide who answers it in handled.py")
        elif who in (actual, BASE if not actual else ""):
            continue
        elif actual or (version, member) not in LEFT_TO_THE_BASE:
            found.append(
                f"vLLM {version}: {member} is answered by {actual or BASE}, handled.py says {who}"
            )
    return found


@pytest.mark.parametrize("version", sources.RELEASES)
def test_every_member_is_answered_by_whom_the_table_says(version: str) -> None:
    assert undecided(version, committed(version), OUR_CLASS) == []


def test_a_new_member_is_named() -> None:
    newest = committed(sources.RELEASES[-1])
    newest["KVConnectorBase_V1"]["drain_to_tape"] = "method () -> None"
    (line,) = undecided("0.99.0", newest, OUR_CLASS)
    assert line == "vLLM 0.99.0: drain_to_tape is new: decide who answers it in handled.py"


def test_a_member_that_upstream_stops_forwarding_is_named() -> None:
    newest = committed(sources.RELEASES[-1])
    del newest["MultiConnector"]["wait_for_save"]
    (line,) = undecided("0.99.0", newest, OUR_CLASS)
    assert "wait_for_save is answered by base, handled.py says upstream" in line


def test_the_table_has_no_member_that_no_release_has() -> None:
    known = {member for version in sources.RELEASES for member in interface(committed(version))}
    assert set(HANDLED) - known == set()
    assert {member for _, member in LEFT_TO_THE_BASE} - known == set()


@pytest.mark.parametrize("version", sources.RELEASES)
def test_our_overrides_take_what_the_release_passes(version: str) -> None:
    theirs = committed(version)["MultiConnector"]
    for member, text in OUR_CLASS.items():
        # The attributes that __init__ sets, and members that other releases have.
        if "(" in text and member in theirs:
            assert parameters(text) == parameters(theirs[member]), member


def parameters(text: str) -> str:
    """The part in the parentheses."""
    return text[text.index("(") :].partition(") ->")[0].removesuffix(")")


@pytest.mark.parametrize("version", sources.RELEASES)
def test_what_our_class_extends_and_reads_is_there(version: str) -> None:
    release = committed(version)
    # Without these the class cannot work; everything else is probed.
    needed = {"_connectors", "_requests_to_connector", "_extra_async_saves"}
    assert needed | {"_ktc_kv_transfer_config"} <= release["MultiConnector"].keys()
    assert {"metadata", "extra_async_saves"} <= release["MultiKVConnectorMetadata"].keys()
    assert {"metadata", "aggregate"} <= release["MultiKVConnectorWorkerMetadata"].keys()
    assert {"connector_scheduler", "connector_worker"} <= release["NIXL connector"].keys()
    assert "nixl_wrapper" in release["NIXL worker"]


# The probe's hooks by the releases whose shape they fit; the others are counted as missing.
@pytest.mark.parametrize("version", sources.RELEASES)
def test_the_hooks_on_nixl_see_what_they_need(version: str) -> None:
    release = committed(version)
    worker, wrapper = release["calls of the NIXL worker"], release["calls of the NIXL wrapper"]
    for call in worker["_read_blocks"].split(" or "):
        assert "request_id=" in call and "dst_engine_id=" in call
    for call in worker["_log_failure"].split(" or "):
        assert "failure_type=" in call and "req_id=" in call
    assert all("notif_msg=" in call for call in wrapper["send_notif"].split(" or "))
    assert {
        "make_prepped_xfer",
        "transfer",
        "check_xfer_state",
        "get_xfer_telemetry",
        "release_xfer_handle",
        "get_new_notifs",
        "send_notif",
    } <= wrapper.keys()
    assert "reqs_to_recv" in release["NIXL metadata"]
    assert "local_block_ids" in release["NIXL pull"]
