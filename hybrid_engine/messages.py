"""Typed messages between processes, of bounded size, with a single error for anything invalid.

    encode(value) -> bytes                version byte, then msgpack
    decode(data, type) -> value           exactly of this type; otherwise MessageError

Unlike pickles, messages cannot name code to run. A message of another type, or longer than `LIMIT`,
is rejected before any object is built from it. Types are those of msgspec: `Record` for messages
with fields, and builtins.
"""

from __future__ import annotations

import hashlib
from functools import cache
from typing import Any

import msgspec

from hybrid_engine.errors import MessageError

VERSION = 2
"""First byte of every message. Ranks of one job run the same code, but a server may not."""

LIMIT = 256 * 1024**2
"""Maximum size of a message in bytes. One rank's records of DeepSeek-V3 take 3 MB."""


class Record(
    msgspec.Struct,
    array_like=True,
    frozen=True,
    forbid_unknown_fields=True,
    tag=False,
    kw_only=False,
    gc=False,
):
    """Base class of messages with fields.

    Sent as an array of exactly these fields, in order, without names.
    """


def encode(value: object, limit: int = LIMIT) -> bytes:
    """Encode `value`.

    Raises MessageError if it cannot be encoded, or takes more than `limit` bytes.
    """
    try:
        data = bytes([VERSION]) + msgspec.msgpack.encode(value)
    # Unsupported types, unpaired surrogates, integers of more than 64 bits, lists that contain
    # themselves.
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise MessageError(f"cannot encode message: {error}", code="not-encodable") from None
    require_size(len(data), limit)
    return data


def decode(data: bytes | memoryview, kind: Any, limit: int = LIMIT) -> Any:
    """Decode a message of type `kind`, e.g. `list[str]`. Raises MessageError for anything else."""
    require_size(len(data), limit)
    if not len(data) or data[0] != VERSION:
        version = f"version {data[0]}" if len(data) else "no version"
        raise MessageError(
            f"a message of {version}, not of version {VERSION}: "
            "both sides must run the same release",
            code="wrong-version",
        )
    try:
        return _decoder(kind).decode(memoryview(data)[1:])
    # msgspec's errors are ValueErrors, and so are those of text that is not UTF-8.
    except (ValueError, RecursionError) as error:
        raise MessageError(f"not a message of {kind}: {error}", code="malformed-message") from None


_decoder = cache(msgspec.msgpack.Decoder)


def require_size(nbytes: int, limit: int = LIMIT) -> None:
    """Raise MessageError if `nbytes` exceeds `limit`."""
    if nbytes > limit:
        raise MessageError(
            f"messages of {nbytes:,} bytes; the limit is {limit:,}", code="message-too-long"
        )


def content_digest(message: bytes) -> bytes:
    """Return a 16-byte digest; messages with equal digests are treated as equal."""
    return hashlib.blake2b(message, digest_size=16).digest()
