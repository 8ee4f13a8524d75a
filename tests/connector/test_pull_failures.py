"""A read that cannot be posted, in the books of NIXL's worker as they are from release to release.
On real workers: tests/releases/contract_checks_trust.py."""

from __future__ import annotations

import queue
from types import SimpleNamespace
from typing import Any

import pytest

from kvctl_connector.pull_failures import HOOK, UNFIT, contain


class FakeWorker:
    """NIXL's worker, whose read ends in an assertion."""

    def __init__(self, release: str) -> None:
        self.failures: list[tuple[str, str]] = []
        self._recving_transfers: dict[str, list[int]] = {"r": []}
        self._failed_recv_reqs: Any = set() if release == "0.20.2" else queue.Queue()
        self._invalid_block_ids: Any = set() if release == "0.20.2" else queue.Queue()
        if release == "0.32.0":
            self._recv_failures: set[str] = set()

    def _log_failure(self, failure_type: str, req_id: str, **_: Any) -> None:
        self.failures.append((failure_type, req_id))

    def _read_blocks_for_req(self, req_id: str, meta: Any) -> None:
        raise AssertionError


def taken(book: Any) -> list[Any]:
    return list(book) if isinstance(book, set) else list(book.queue)


@pytest.mark.parametrize("release", ["0.20.2", "0.28.0", "0.32.0"])
def test_an_assertion_out_of_a_read_fails_its_request(release: str) -> None:
    worker = FakeWorker(release)
    assert contain(worker)
    worker._read_blocks_for_req("r", SimpleNamespace(local_block_ids=([4, 5],)))
    assert worker.failures == [(UNFIT, "r")]
    assert taken(worker._failed_recv_reqs) == ["r"]
    assert worker._recving_transfers == {}, "not done, but failed"
    unread = {"0.20.2": [4, 5], "0.28.0": [{4, 5}], "0.32.0": []}
    assert taken(worker._invalid_block_ids) == unread[release]


def test_what_is_still_being_read_stays_in_the_books() -> None:
    worker = FakeWorker("0.32.0")
    worker._recving_transfers["r"] = [17]
    contain(worker)
    worker._read_blocks_for_req("r", SimpleNamespace(local_block_ids=([4],)))
    assert worker._recving_transfers == {"r": [17]}


def test_nobody_waits_for_a_mere_notification() -> None:
    worker = FakeWorker("0.32.0")
    contain(worker)
    worker._read_blocks_for_req("r", SimpleNamespace(local_block_ids=()))
    assert worker.failures and taken(worker._failed_recv_reqs) == []


@pytest.mark.parametrize("without", [HOOK, "_failed_recv_reqs"])
def test_a_worker_of_another_form_is_left_as_it_is(without: str) -> None:
    worker = FakeWorker("0.32.0")
    setattr(worker, "_read_blocks_for_req", None) if without == HOOK else delattr(worker, without)
    before = worker._read_blocks_for_req
    assert not contain(worker)
    assert worker._read_blocks_for_req == before
