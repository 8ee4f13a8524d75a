"""The feed's messages: what an engine says on its local socket, and how it is framed.

On connecting a reader gets a `Hello`, then a `Delta` with every series (``full`` is true), then
a `Delta` whenever something changed. Series carry cumulative values, so a message may be missed
or repeated without harm; items (single transfers) carry sequence numbers, so a reader sees how
many it missed. Readers ignore messages, fields, series and items that they do not know; another
major version is an error.

Frame: four bytes, big-endian, length of the body; the body is MessagePack.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Union

import msgspec

PROTOCOL_MAJOR = 1
PROTOCOL_MINOR = 0
MAX_FRAME = 16 * 1024 * 1024  # bytes; a longer one means that the stream is not ours
_LENGTH = struct.Struct(">I")


class ProtocolError(Exception):
    """The bytes on the socket are not a feed that this version can read."""


class Hello(msgspec.Struct, tag="hello"):
    """The first message: who is speaking.

    Attributes:
        protocol: (major, minor).
        incarnation: random id of this engine process's life; a restart gets a new one.
        started: Unix time in ns at which the cumulative sums began at zero.
        instance: engine id and data-parallel rank, the value of ``semconv.INSTANCE``.
        name: the name that the topology gives the instance, or the engine id.
        role: ``prefill``, ``decode`` or ``both``.
        pid: of the engine-core process.
        resource: further resource attributes (``semconv.RESOURCE_*``).
    """

    protocol: tuple[int, int]
    incarnation: str
    started: int
    instance: str
    name: str
    role: str
    pid: int
    resource: dict[str, str] = {}


class Series(msgspec.Struct, omit_defaults=True):
    """One metric with one attribute set, cumulative since `Hello.started`.

    Attributes:
        metric: a name of ``semconv``.
        value: of a counter or gauge; the sum of a histogram.
        buckets: counts per bucket of a histogram, one more than its bounds; not cumulative.
    """

    metric: str
    attributes: dict[str, str]
    value: float
    buckets: list[int] | None = None


class Transfer(msgspec.Struct, tag="transfer", omit_defaults=True):
    """One transfer that ended. Times are Unix ns; `phase` and `reason` only on a failure."""

    seq: int
    tier: str
    direction: str
    outcome: str
    request: str
    start: int
    end: int
    bytes: int
    peer: str = ""
    phase: str = ""
    reason: str = ""


class Wait(msgspec.Struct, tag="wait", omit_defaults=True):
    """One request's wait for KV that ended: from allocation to completed load, Unix ns."""

    seq: int
    tier: str
    outcome: str
    request: str
    start: int
    end: int


class Choice(msgspec.Struct, tag="choice", omit_defaults=True):
    """One request that was offered KV: by whom how much, what was taken, and why.

    Attributes:
        tier: that was taken: of ``semconv.CHOICES``.
        why: of ``semconv.WHYS``.
        offers: tokens by tier; a tier that did not know yet has 0.
    """

    seq: int
    request: str
    tier: str
    why: str
    offers: dict[str, int]


Item = Union[Transfer, Wait, Choice]  # noqa: UP007 - msgspec on Python 3.10 wants a real Union


class Delta(msgspec.Struct, tag="delta", omit_defaults=True):
    """What changed since the last message. `items` are encoded `Item`s, see `items_of`."""

    time: int
    series: list[Series] = []
    items: list[msgspec.Raw] = []
    full: bool = False


Message = Union[Hello, Delta]  # noqa: UP007

_encoder = msgspec.msgpack.Encoder()
_message_decoder = msgspec.msgpack.Decoder(Message)
_item_decoder = msgspec.msgpack.Decoder(Item)


def encode_item(item: Item) -> msgspec.Raw:
    """An item, packed once for all readers."""
    return msgspec.Raw(_encoder.encode(item))


def frame(message: Message) -> bytes:
    """A message with its length in front."""
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


def items_of(delta: Delta) -> list[Item]:
    """The items of a delta that this version knows, in order."""
    known: list[Item] = []
    for raw in delta.items:
        try:
            known.append(_item_decoder.decode(raw))
        except msgspec.ValidationError:
            continue  # a kind of item that a newer engine has added
    return known


class Unframer:
    """Turns received bytes into messages.

    Raises:
        ProtocolError: from `feed`, when the stream is not a feed of a readable version.
    """

    def __init__(self) -> None:
        self._pending = bytearray()

    def feed(self, data: bytes) -> Iterator[Message]:
        """Takes what was received and yields each message that is complete."""
        self._pending += data
        while len(self._pending) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._pending)
            if length > MAX_FRAME:
                raise ProtocolError(f"a frame of {length} bytes: this is not a kvctl feed")
            end = _LENGTH.size + length
            if len(self._pending) < end:
                return
            body = bytes(self._pending[_LENGTH.size : end])
            del self._pending[:end]
            if (message := self._decode(body)) is not None:
                yield message

    @staticmethod
    def _decode(body: bytes) -> Message | None:
        try:
            message = _message_decoder.decode(body)
        except msgspec.MsgspecError as error:
            _refuse_other_major(body)
            if _is_newer_kind(body):
                return None
            raise ProtocolError(f"not a message of the kvctl feed: {error}") from error
        if isinstance(message, Hello):
            _refuse_other_major(body)
        return message


class _Spoken(msgspec.Struct):
    """The one field of `Hello` that every major version keeps, so that each can tell another."""

    protocol: tuple[int, int]


class _Tagged(msgspec.Struct):
    """What every message of this major version has: the kind that it is of."""

    type: str


_spoken_decoder = msgspec.msgpack.Decoder(_Spoken)
_tagged_decoder = msgspec.msgpack.Decoder(_Tagged)


def _is_newer_kind(body: bytes) -> bool:
    """Whether it is a whole message, of a kind that a newer engine has added."""
    try:
        return _tagged_decoder.decode(body).type not in ("hello", "delta")
    except msgspec.MsgspecError:
        return False


def _refuse_other_major(body: bytes) -> None:
    try:
        major, minor = _spoken_decoder.decode(body).protocol
    except msgspec.MsgspecError:
        return  # no greeting at all
    if major != PROTOCOL_MAJOR:
        raise ProtocolError(
            f"the engine speaks feed protocol {major}.{minor}, this kvctl reads "
            f"{PROTOCOL_MAJOR}.x: use the kvctl that started the engine"
        )
