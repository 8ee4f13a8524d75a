"""The feed over a real socket."""

import os
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvctl_connector import feed as feed_module
from kvctl_connector import semconv
from kvctl_connector.feed import Feed
from kvctl_connector.recorder import Recorder
from kvctl_connector.wire import Delta, Hello, Unframer, Wait, items_of

DEADLINE = 30.0  # seconds, on a busy machine


def make_hello(**changes: Any) -> Hello:
    known = {
        "protocol": (1, 0), "incarnation": "i", "started": 1, "instance": "e:0",
        "name": "prefill-0", "role": "prefill", "pid": os.getpid(),
    }  # fmt: skip
    return Hello(**(known | changes))


class Reader:
    """A client of the feed that waits for what a test expects."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(DEADLINE)
        self.socket.connect(str(path))
        self.unframer = Unframer()
        self.messages: list[Hello | Delta] = []

    def until(self, condition: Any) -> Any:
        ends = time.monotonic() + DEADLINE
        while time.monotonic() < ends:
            if (found := condition(self.messages)) is not None:
                return found
            data = self.socket.recv(65536)
            assert data, "the feed closed"
            self.messages += self.unframer.feed(data)
        raise AssertionError(f"not seen within {DEADLINE} s: {self.messages}")

    def value(self, metric: str, wanted: float) -> bool:
        return bool(
            self.until(
                lambda messages: (
                    any(
                        series.metric == metric and series.value == wanted
                        for message in messages
                        if isinstance(message, Delta)
                        for series in message.series
                    )
                    or None
                )
            )
        )


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVCTL_RUNTIME_DIR", str(tmp_path / "run"))
    return tmp_path / "run" / "e.sock"


@pytest.fixture
def served(path: Path) -> Iterator[tuple[Recorder, Feed]]:
    recorder = Recorder()
    feed = Feed(recorder, make_hello(), path)
    assert feed.start()
    yield recorder, feed
    feed.close()


def test_a_reader_gets_hello_everything_and_then_changes(
    served: tuple[Recorder, Feed], path: Path
) -> None:
    recorder, _ = served
    recorder.add(semconv.PROMPT_TOKENS, 3, "peer")
    reader = Reader(path)

    assert reader.value("kvctl.prompt.tokens", 3)
    hello, full = reader.messages[:2]
    assert isinstance(hello, Hello)
    assert (hello.name, hello.role) == ("prefill-0", "prefill")
    assert isinstance(full, Delta)
    assert full.full

    recorder.add(semconv.PROMPT_TOKENS, 4, "peer")
    assert reader.value("kvctl.prompt.tokens", 7)


def test_items_reach_all_readers_and_old_ones_nobody(
    served: tuple[Recorder, Feed], path: Path
) -> None:
    recorder, _ = served
    recorder.put(Wait(0, "peer", "ok", "before anybody listened", 1, 2))
    readers = [Reader(path), Reader(path)]
    for reader in readers:
        reader.until(lambda messages: True if len(messages) >= 2 else None)
    recorder.put(Wait(0, "peer", "ok", "new", 1, 2))

    for reader in readers:
        items = reader.until(
            lambda messages: (
                [i for m in messages if isinstance(m, Delta) for i in items_of(m)] or None
            )
        )
        assert [(item.request, item.seq) for item in items] == [("new", 2)]


def test_only_the_owner_may_reach_the_socket(served: tuple[Recorder, Feed], path: Path) -> None:
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert [entry.name for entry in path.parent.iterdir()] == ["e.sock"]


def test_the_last_changes_are_sent_before_the_feed_ends(
    served: tuple[Recorder, Feed], path: Path
) -> None:
    recorder, feed = served
    reader = Reader(path)
    reader.until(lambda messages: True if messages else None)
    recorder.add(semconv.PROMPT_TOKENS, 1, "computed")
    feed.close()

    assert reader.value("kvctl.prompt.tokens", 1)
    assert not path.exists()


def test_a_stale_socket_is_replaced_and_a_served_one_is_not(path: Path) -> None:
    path.parent.mkdir(mode=0o700)
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(path))
    stale.close()
    first, second = (Feed(Recorder(), make_hello(), path) for _ in range(2))
    assert first.start()
    try:
        assert not second.start()
        assert Reader(path).until(lambda messages: messages or None)
    finally:
        first.close()


def test_a_folder_of_somebody_else_means_no_feed_but_a_running_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    monkeypatch.setenv("KVCTL_RUNTIME_DIR", str(tmp_path / "link"))
    feed = Feed(Recorder(), make_hello(), tmp_path / "link" / "e.sock")
    assert not feed.start()
    feed.close()


def test_a_slow_reader_is_disconnected_and_counted(
    served: tuple[Recorder, Feed], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed_module, "MAX_PENDING", 1 << 20)
    recorder, _ = served
    slow = Reader(path)
    slow.until(lambda messages: messages or None)  # and then it reads no more
    watcher = Reader(path)

    def dropped() -> bool:
        return any(
            series.metric == "kvctl.telemetry.dropped" and series.value
            for message in watcher.messages
            if isinstance(message, Delta)
            for series in message.series
        )

    ends = time.monotonic() + DEADLINE
    while not dropped():
        assert time.monotonic() < ends, "the slow reader was kept"
        for _ in range(500):
            recorder.put(Wait(0, "peer", "ok", "x" * 500, 1, 2))
        watcher.messages += watcher.unframer.feed(watcher.socket.recv(1 << 20))


def test_more_readers_than_allowed_are_turned_away(
    served: tuple[Recorder, Feed], path: Path
) -> None:
    readers = [Reader(path) for _ in range(feed_module.MAX_READERS)]
    for reader in readers:
        reader.until(lambda messages: messages or None)
    extra = Reader(path)
    assert extra.socket.recv(1) == b""


def test_a_reader_that_left_makes_room(served: tuple[Recorder, Feed], path: Path) -> None:
    for _ in range(3 * feed_module.MAX_READERS):
        reader = Reader(path)
        assert reader.until(lambda messages: messages or None)
        reader.socket.close()
