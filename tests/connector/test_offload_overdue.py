"""A load that is given up under an offload child: what moves, and what stays. On real schedulers:
tests/releases/contract_checks_tiers.py."""

from types import SimpleNamespace
from typing import Any

import pytest

from kvctl_connector.offload_overdue import let_go


class FakeGroup:
    def __init__(self) -> None:
        self.block_ids: list[int] = []


def child() -> tuple[Any, Any, dict[int, Any]]:
    """A child, the state of its request "r", and its jobs: load 1 and store 2."""
    group = FakeGroup()
    group.block_ids = [7]
    state = SimpleNamespace(
        req=SimpleNamespace(is_finished=lambda: False), transfer_jobs={1, 2},
        finished_signaled=False, group_states=(group,), req_context="context",
    )  # fmt: skip
    jobs = {
        1: SimpleNamespace(req_id="r", is_store=False),
        2: SimpleNamespace(req_id="r", is_store=True),
    }
    scheduler = SimpleNamespace(_req_status={"r": state}, _jobs=jobs)
    return SimpleNamespace(connector_scheduler=scheduler), state, jobs


def test_the_load_gets_a_state_of_its_own_which_ends_with_it() -> None:
    made, state, jobs = child()
    assert let_go(made, "r")
    assert (state.transfer_jobs, jobs[2].req_id) == ({2}, "r"), "the store is the request's still"
    alone = made.connector_scheduler._req_status[jobs[1].req_id]
    assert alone is not state
    assert (alone.transfer_jobs, alone.finished_signaled) == ({1}, True)
    assert alone.req_context == "context", "by which the manager knows who reads"
    assert alone.req.is_finished(), "so a reset of the cache forgets it"
    assert [group.block_ids for group in alone.group_states] == [[]]
    assert (state.group_states[0].block_ids, state.finished_signaled) == ([7], False)


@pytest.mark.parametrize("without", ["_req_status", "_jobs", "connector_scheduler"])
def test_a_child_of_another_form_cannot(without: str) -> None:
    made, state, _ = child()
    delattr(made if without == "connector_scheduler" else made.connector_scheduler, without)
    assert not let_go(made, "r")
    assert state.transfer_jobs == {1, 2}


def test_nor_can_one_that_does_not_know_the_request() -> None:
    assert not let_go(child()[0], "another")
