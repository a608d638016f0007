"""What is no message of its type is one kind of error, whatever else it is."""

from __future__ import annotations

import pytest

from hybrid_engine.errors import MessageError
from hybrid_engine.messages import VERSION, Record, decode, encode


class Pair(Record, frozen=True):
    one: int
    other: str


def test_a_message_says_what_was_said() -> None:
    for value, kind in ((Pair(1, "ü"), Pair), ({"a": [1, 2]}, dict[str, list[int]]), (None, str | None)):
        assert decode(encode(value), kind) == value


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "no version"),
        (bytes([VERSION + 1]) + encode(Pair(1, "x"))[1:], f"version {VERSION + 1}, not of version {VERSION}"),
        (encode(Pair(1, "x")) + b"\0", "trailing"),
        (encode([1, "x", 2]), "at most length 2"),
        (encode([1]), "at least length 2"),
        (encode(["x", 1]), "Expected `int`"),
        (bytes([VERSION]) + b"\xdd\xff\xff\xff\xff", "truncated"),  # an array of 2**32 - 1
        (bytes([VERSION]) + b"\xdb\xff\xff\xff\xff", "truncated"),
        (bytes([VERSION]) + b"\x92\x01\xa1\xff", "utf-8"),
    ],
)
def test_what_is_no_message_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(MessageError, match=reason):
        decode(data, Pair)


def test_longer_messages_than_the_limit_are_neither_made_nor_read() -> None:
    message = encode("x" * 100)
    for refused in (lambda: encode("x" * 100, 99), lambda: decode(message, str, 99)):
        with pytest.raises(MessageError, match=r"10\d bytes; the limit is 99"):
            refused()


def test_what_cannot_be_said_is_refused() -> None:
    for value in ("\udc80", 2**70, object()):
        with pytest.raises(MessageError):
            encode(value)
