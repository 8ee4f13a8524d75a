import os
import threading
from collections.abc import Iterator

import pytest

from kvctl_connector.threads import TRANSFER_CORES, kept_together


@pytest.fixture
def stop() -> Iterator[threading.Event]:
    cores = os.sched_getaffinity(0)
    event = threading.Event()
    yield event
    os.sched_setaffinity(0, cores)
    event.set()


def test_new_threads_follow_the_one_that_vllm_has_moved(
    stop: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(TRANSFER_CORES, raising=False)
    cores = os.sched_getaffinity(0)
    last = {max(cores)}
    older, born = (threading.Thread(target=stop.wait, daemon=True) for _ in range(2))
    older.start()
    with kept_together(0):
        born.start()  # inherits all cores
        os.sched_setaffinity(0, last)  # as vLLM's NIXL worker does, in its constructor
    assert os.sched_getaffinity(born.native_id or 0) == last
    assert os.sched_getaffinity(older.native_id or 0) == cores


def test_a_worker_with_a_core_of_its_own_takes_its_threads_there(
    stop: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    cores = sorted(os.sched_getaffinity(0))
    monkeypatch.setenv(TRANSFER_CORES, f"{cores[-1]}|{cores[0]}")
    born = threading.Thread(target=stop.wait, daemon=True)
    with kept_together(1):
        born.start()
        os.sched_setaffinity(0, {cores[-1]})
    assert os.sched_getaffinity(0) == os.sched_getaffinity(born.native_id or 0) == {cores[0]}


@pytest.mark.parametrize("dealt", ["", "nonsense", "9999"])
def test_a_core_that_cannot_be_had_changes_nothing(
    stop: threading.Event, monkeypatch: pytest.MonkeyPatch, dealt: str
) -> None:
    monkeypatch.setenv(TRANSFER_CORES, dealt)
    before = os.sched_getaffinity(0)
    with kept_together(0):
        pass
    assert os.sched_getaffinity(0) == before
