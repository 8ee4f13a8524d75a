"""Reading feeds: one look, and a watch over several."""

from __future__ import annotations

import pytest
from fake_feed import (
    FakeFeed,
    counter,
    fake_feed,
    make_hello,
    make_transfer,
    make_wait,
)

from kvctl.errors import Exit, UnreachableError
from kvctl.sources.feed import Watch, read_snapshot, read_snapshots
from kvctl_connector import semconv

PATIENCE = 20.0
OK = {"tier": "peer", "direction": "recv", "outcome": "ok"}


def test_one_look_gives_the_sums_of_that_moment(tmp_path):
    with fake_feed(tmp_path / "feed.sock") as feed:
        feed.publish(counter(semconv.TRANSFER_COUNT, 7, **OK))
        found = read_snapshot(str(feed.path))
    assert (found.name, found.up, found.transfers_of("peer", "recv").ok) == ("prefill-0", True, 7)


@pytest.mark.parametrize("greeting", [b"", b"nonsense" * 4], ids=["silent", "garbage"])
def test_what_is_no_feed_is_explained(tmp_path, greeting):
    path = tmp_path / "feed.sock"
    with fake_feed(path, greeting=greeting), pytest.raises(UnreachableError) as caught:
        read_snapshot(str(path), timeout=0.1)
    assert caught.value.exit_code is Exit.UNREACHABLE
    assert str(path) in caught.value.message


def test_one_feed_that_hangs_does_not_hide_the_others(tmp_path):
    with (
        fake_feed(tmp_path / "a.sock", greeting=b"") as silent,
        fake_feed(tmp_path / "b.sock") as good,
    ):
        missing = str(tmp_path / "c.sock")
        found = read_snapshots([str(silent.path), str(good.path), missing], timeout=0.2)
    assert "said nothing for 0.2 s" in str(found[str(silent.path)])
    assert found[str(good.path)].name == "prefill-0"
    assert "no such socket" in str(found[missing])


def test_a_watch_collects_from_every_engine(tmp_path):
    with (
        fake_feed(tmp_path / "p.sock") as prefill,
        fake_feed(tmp_path / "d.sock", name="decode-0", role="decode") as decode,
        Watch([prefill.path, decode.path]) as watch,
    ):
        assert watch.wait_for(lambda: not watch.problems(), PATIENCE)
        decode.publish(
            counter(semconv.TRANSFER_COUNT, 1, **OK), items=[make_transfer(1), make_wait(2)]
        )
        prefill.publish(items=[make_transfer(1, direction="send")])
        assert watch.wait_for(lambda: len(watch.transfers()) == 2 and watch.waits(), PATIENCE)
        assert {(seen.engine, seen.transfer.direction) for seen in watch.transfers()} == {
            ("decode-0", "recv"),
            ("prefill-0", "send"),
        }
        assert [(seen.engine, seen.wait.tier) for seen in watch.waits()] == [("decode-0", "peer")]
        assert watch.snapshots()[str(decode.path)].transfers_of("peer", "recv").ok == 1
        assert watch.lost() == 0
    assert len(watch.transfers()) == 2  # what was collected stays


def test_a_watch_keeps_the_last_sums_of_an_engine_that_went_away(tmp_path):
    with fake_feed(tmp_path / "feed.sock") as feed, Watch([feed.path]) as watch:
        feed.greeted.wait(PATIENCE)
        feed.publish(counter(semconv.TRANSFER_COUNT, 4, **OK))
        feed.close()
        assert watch.wait_for(
            lambda: (found := watch.snapshots()) and not found[str(feed.path)].up, PATIENCE
        )
        assert watch.snapshots()[str(feed.path)].transfers_of("peer", "recv").ok == 4


def test_a_watch_finds_a_feed_that_appears_later(tmp_path):
    path = tmp_path / "feed.sock"
    with Watch([path]) as watch:
        assert watch.wait_for(lambda: "no such socket" in watch.problems()[str(path)], PATIENCE)
        feed = FakeFeed(path, make_hello())
        assert watch.wait_for(lambda: not watch.problems(), PATIENCE)
        feed.close()


def test_a_watch_is_bounded_and_says_what_it_missed(tmp_path):
    with fake_feed(tmp_path / "feed.sock") as feed, Watch([feed.path], limit=2) as watch:
        assert watch.wait_for(lambda: not watch.problems(), PATIENCE)
        feed.publish(items=[make_transfer(seq) for seq in (1, 2, 3)])
        feed.publish(items=[make_transfer(6)])  # 4 and 5 never came
        assert watch.wait_for(
            lambda: [s for s in watch.transfers() if s.transfer.seq == 6], PATIENCE
        )
        assert [seen.transfer.seq for seen in watch.transfers()] == [3, 6]
        assert watch.lost() == 4  # 1 and 2 were over the limit


def test_a_watch_strips_control_characters(tmp_path):
    with fake_feed(tmp_path / "feed.sock", name="a\x1bb") as feed, Watch([feed.path]) as watch:
        assert watch.wait_for(lambda: not watch.problems(), PATIENCE)
        feed.publish(items=[make_transfer(1, request="r\x1b[2J", peer="p\n")])
        assert watch.wait_for(watch.transfers, PATIENCE)
        (seen,) = watch.transfers()
    assert (seen.engine, seen.transfer.request, seen.transfer.peer) == (
        "a\ufffdb",
        "r\ufffd[2J",
        "p\ufffd",
    )
