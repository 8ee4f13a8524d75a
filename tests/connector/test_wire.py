import msgspec
import pytest

from kvctl_connector.wire import (
    Delta,
    Hello,
    ProtocolError,
    Series,
    Transfer,
    Unframer,
    Wait,
    encode_item,
    frame,
    items_of,
)

HELLO = Hello((1, 0), "i", 1, "e:0", "prefill-0", "prefill", 7, {"kvctl.role": "prefill"})
TRANSFER = Transfer(1, "peer", "recv", "ok", "r", 10, 20, 30, peer="p")


def test_messages_survive_any_cut_of_the_stream() -> None:
    delta = Delta(
        time=5,
        series=[Series("kvctl.transfer.count", {"tier": "peer"}, 2.0, [1, 1])],
        items=[encode_item(TRANSFER), encode_item(Wait(2, "peer", "ok", "r", 1, 2))],
    )
    stream = frame(HELLO) + frame(delta)
    for size in (1, 3, 17, len(stream)):
        unframer = Unframer()
        messages = [
            message
            for at in range(0, len(stream), size)
            for message in unframer.feed(stream[at : at + size])
        ]
        assert messages[0] == HELLO
        assert isinstance(messages[1], Delta)
        assert messages[1].series == delta.series
        assert items_of(messages[1]) == [TRANSFER, Wait(2, "peer", "ok", "r", 1, 2)]


def test_a_newer_minor_is_readable() -> None:
    class NewerHello(Hello, tag="hello"):
        mood: str = "new"

    newer = NewerHello((1, 9), "i", 1, "e:0", "n", "prefill", 7, mood="splendid")
    (message,) = Unframer().feed(frame(newer))
    assert isinstance(message, Hello)
    assert message.protocol == (1, 9)


def test_a_kind_of_message_that_a_newer_engine_has_added_is_skipped() -> None:
    body = msgspec.msgpack.encode({"type": "forecast", "rain": True})
    stream = len(body).to_bytes(4, "big") + body + frame(HELLO)
    assert list(Unframer().feed(stream)) == [HELLO]


def test_unknown_items_are_skipped() -> None:
    unknown = msgspec.Raw(msgspec.msgpack.encode({"type": "eclipse", "seq": 3}))
    delta = Delta(time=1, items=[unknown, encode_item(TRANSFER)])
    (message,) = Unframer().feed(frame(delta))
    assert isinstance(message, Delta)
    assert items_of(message) == [TRANSFER]


def test_another_major_is_an_error_that_says_so() -> None:
    with pytest.raises(ProtocolError, match=r"protocol 2\.0, this kvctl reads 1\.x"):
        list(Unframer().feed(frame(msgspec.structs.replace(HELLO, protocol=(2, 0)))))


@pytest.mark.parametrize("junk", [b"HTTP/1.1 200 OK\r\n", b"\0\0\0\4junk", b"\0\0\0\1\xc0"])
def test_what_is_no_feed_is_an_error(junk: bytes) -> None:
    with pytest.raises(ProtocolError):
        list(Unframer().feed(junk))
