"""How one process tells another something: typed messages of bounded size, and one error for all that is none.

    encode(value) -> bytes                version, then msgpack
    decode(data, type) -> value           of exactly this type, or MessageError

No message names code to run, as a pickle does; what is not of the type, or longer than `LIMIT`, is refused before
anything is built of it. Types are msgspec's: `Record` for one with fields, and builtins.
"""

from __future__ import annotations

import hashlib
from functools import cache
from typing import Any

import msgspec

from hybrid_engine.errors import MessageError

VERSION = 1
"""The first byte. Ranks of one job run the same code; a server may not."""

LIMIT = 256 * 1024**2
"""Most bytes of a message. What a rank holds of DeepSeek-V3 is said in 3 MB."""


class Record(
    msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True, tag=False, kw_only=False, gc=False
):
    """Base of messages with fields: sent without their names, in order, none more and none less."""


def encode(value: object, limit: int = LIMIT) -> bytes:
    """Return the message. Raises MessageError for what has no message, or one of more than `limit` bytes."""
    try:
        data = bytes([VERSION]) + msgspec.msgpack.encode(value)
    # Other types, half a surrogate pair, more than 64 bits, a list within itself.
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise MessageError(f"this cannot be said: {error}") from None
    require_size(len(data), limit)
    return data


def decode(data: bytes | memoryview, kind: Any, limit: int = LIMIT) -> Any:
    """Return the value of a message of type `kind`, e.g. `list[str]`. Raises MessageError for anything else."""
    require_size(len(data), limit)
    if not len(data) or data[0] != VERSION:
        found = f"version {data[0]}" if len(data) else "no version"
        raise MessageError(f"a message of {found}, not of version {VERSION}: both sides must run the same release")
    try:
        return _decoder(kind).decode(memoryview(data)[1:])
    except (ValueError, RecursionError) as error:  # msgspec's errors are, and those of text that is no UTF-8
        raise MessageError(f"not a message of {kind}: {error}") from None


@cache
def _decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kind)


def require_size(nbytes: int, limit: int = LIMIT) -> None:
    """Raise MessageError for more bytes than that."""
    if nbytes > limit:
        raise MessageError(f"messages of {nbytes:,} bytes; the limit is {limit:,}")


def content_digest(message: bytes) -> bytes:
    """16 bytes: messages of one digest are taken for the same."""
    return hashlib.blake2b(message, digest_size=16).digest()
