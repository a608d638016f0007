"""Bytes that are not a message of the expected type raise MessageError."""

from __future__ import annotations

import pytest

from hybrid_engine.errors import MessageError
from hybrid_engine.messages import VERSION, Record, decode, encode


class Pair(Record, frozen=True):
    number: int
    text: str


def test_messages_round_trip() -> None:
    for value, kind in (
        (Pair(1, "ü"), Pair),
        ({"a": [1, 2]}, dict[str, list[int]]),
        (None, str | None),
    ):
        assert decode(encode(value), kind) == value


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "no version"),
        (
            bytes([VERSION + 1]) + encode(Pair(1, "x"))[1:],
            f"version {VERSION + 1}, not of version {VERSION}",
        ),
        (encode(Pair(1, "x")) + b"\0", "trailing"),
        (encode([1, "x", 2]), "at most length 2"),
        (encode([1]), "at least length 2"),
        (encode(["x", 1]), "Expected `int`"),
        (bytes([VERSION]) + b"\xdd\xff\xff\xff\xff", "truncated"),  # an array of 2**32 - 1
        (bytes([VERSION]) + b"\xdb\xff\xff\xff\xff", "truncated"),
        (bytes([VERSION]) + b"\x92\x01\xa1\xff", "utf-8"),
    ],
)
def test_invalid_messages_are_refused(data: bytes, reason: str) -> None:
    with pytest.raises(MessageError, match=reason):
        decode(data, Pair)


def test_messages_beyond_the_limit_are_refused_on_both_sides() -> None:
    message = encode("x" * 100)
    for refused in (lambda: encode("x" * 100, 99), lambda: decode(message, str, 99)):
        with pytest.raises(MessageError, match=r"10\d bytes; the limit is 99"):
            refused()


def test_unencodable_values_are_refused() -> None:
    for value in ("\udc80", 2**70, object()):
        with pytest.raises(MessageError):
            encode(value)
