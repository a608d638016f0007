"""The messages of a bucket, derived at both ends from the order of the transfers.

    header | piece | piece | ... | padding      pieces in the bucket's order

A piece is one transfer's elements, row-major, in `plan.wire_dtype`, aligned to the element size.
The header has the bucket, the bytes of the message and, if the sender failed, the reason why its
contents are void. Nothing is pickled. The header also says how much follows: a delta (deltas.py) is
shorter than the contents.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from hybrid_engine.memory.host_pages import round_up
from hybrid_engine.planning.plan import Transfer, wire_dtype
from hybrid_engine.ranks.torch_internals import copy_each
from hybrid_engine.records.layout import Buffer, BufferId, Place
from hybrid_engine.records.regions import contiguous_strides

HEADER_NBYTES = 512
# The fields of `Header`. The failure follows, padded with zeros.
# 4 * 8 = 32 bytes, which leaves 480 for the failure.
_HEADER = struct.Struct("<qqqq")
ALIGNMENT = 64
"""Alignment of messages in memory, in bytes, and unit of their size."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements of a transfer in bytes [start, start + nbytes) of a message, row-major."""

    transfer: Transfer
    dtype: torch.dtype
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Message:
    """Data that one rank sends another in one bucket.

    Attributes:
        peer: the other rank.
        pieces: in the bucket's order.
        nbytes: bytes of header, pieces and padding; a multiple of `ALIGNMENT`.
    """

    peer: int
    pieces: tuple[Piece, ...] = ()
    nbytes: int = HEADER_NBYTES

    def flat_in(self, dtype: torch.dtype) -> BufferId:
        """Return the id of the message as a flat buffer of this dtype."""
        return BufferId(self.peer, f"message in {dtype}")

    def pack_transfers(self) -> Iterator[Transfer]:
        """Yield the transfers with the message as their destination."""
        for piece in self.pieces:
            yield replace(piece.transfer, dst=self._place_of(piece))

    def unpack_transfers(self) -> Iterator[Transfer]:
        """Yield the transfers with the message as their source."""
        for piece in self.pieces:
            yield replace(piece.transfer, src=self._place_of(piece))

    def _place_of(self, piece: Piece) -> Place:
        # Counted from the header, as `flats` views the whole message: 512 bytes
        # are whole elements of any dtype.
        offset = piece.start // piece.dtype.itemsize
        strides = contiguous_strides(piece.transfer.lengths)
        return Place(self.flat_in(piece.dtype), offset, strides)


@dataclass(frozen=True, slots=True)
class Header:
    """Header of a message.

    Attributes:
        bucket: number of the bucket.
        nbytes: bytes of the message.
        sent_nbytes: bytes that follow the header; fewer than those of the contents are a delta.
        digest: digest of the contents, if a delta is sent.
        failure: reason why the contents are void; "": they are valid.
    """

    bucket: int
    nbytes: int
    sent_nbytes: int
    digest: int
    failure: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class StagedMessage:
    """A message and the memory from which it is sent, or into which it is received.

    Attributes:
        message: the message.
        memory: its bytes, uint8 [message.nbytes], or its header and a delta.
        digest: digest of the contents, if a delta is sent.
    """

    message: Message
    memory: torch.Tensor
    digest: int = 0

    @property
    def header(self) -> torch.Tensor:
        return self.memory[:HEADER_NBYTES]

    @property
    def contents(self) -> torch.Tensor:
        """Bytes after the header."""
        return self.memory[HEADER_NBYTES:]

    def flats(self) -> dict[BufferId, torch.Tensor]:
        """Return the flat buffers of packed transfers: the message in every dtype."""
        dtypes = dict.fromkeys(piece.dtype for piece in self.message.pieces)
        return {self.message.flat_in(dtype): self.memory.view(dtype) for dtype in dtypes}

    def header_bytes(self, bucket: int, failure: str) -> bytes:
        """Return the header for `write_headers`; a failure that does not fit is cut."""
        fixed = _HEADER.pack(bucket, self.message.nbytes, self.contents.numel(), self.digest)
        # The cut may split a character; `read_headers` replaces it.
        return (fixed + failure.encode())[:HEADER_NBYTES].ljust(HEADER_NBYTES, b"\0")

    def fault(self, bucket: int, header: Header) -> str:
        """Return the fault of a message received for `bucket`; "" if it is expected and valid."""
        if header.failure:
            return f"the peer failed: {header.failure}"
        expected_nbytes = self.message.nbytes
        if header.bucket != bucket or header.nbytes != expected_nbytes:
            return (
                f"the peer sent {header.nbytes} bytes of bucket {header.bucket}, "
                f"expected {expected_nbytes} of bucket {bucket}: "
                "the ranks' plans differ; compare their fingerprints"
            )
        return ""


def write_headers(messages: Sequence[StagedMessage], headers: Iterable[bytes]) -> None:
    """Write headers (`header_bytes`), to a GPU in one copy, for which the host does not wait."""
    if messages:
        block = torch.frombuffer(bytearray(b"".join(headers)), dtype=torch.uint8)
        if messages[0].memory.is_cuda:
            block = block.pin_memory().to(messages[0].memory.device, non_blocking=True)
        copy_each([staged.header for staged in messages], block.split(HEADER_NBYTES))


def read_headers(messages: Sequence[StagedMessage]) -> list[Header]:
    """Return the headers of messages that were received, from a GPU in one copy."""
    if not messages:
        return []
    block = torch.stack([staged.header for staged in messages]).cpu().numpy()
    return [
        replace(
            Header(*_HEADER.unpack_from(header)),
            failure=header[_HEADER.size :].rstrip(b"\0").decode(errors="replace"),
        )
        for header in map(bytes, block)
    ]


@dataclass(frozen=True)
class MessagePlanner:
    """Derives one rank's messages.

    Attributes:
        source_buffers, destination_buffers: see `TransportContext`; relay buffers are destinations.
    """

    rank: int
    source_buffers: Mapping[BufferId, Buffer]
    destination_buffers: Mapping[BufferId, Buffer]

    def messages(self, transfers: Sequence[Transfer]) -> tuple[list[Message], list[Message]]:
        """Return the messages that this rank sends and receives, by ascending peer.

        `transfers`: between two ranks each.
        """
        outgoing: dict[int, list[Transfer]] = {}
        incoming: dict[int, list[Transfer]] = {}
        for transfer in transfers:
            # Transfers between two other ranks are skipped.
            if transfer.src_rank == self.rank:
                outgoing.setdefault(transfer.dst_rank, []).append(transfer)
            elif transfer.dst_rank == self.rank:
                incoming.setdefault(transfer.src_rank, []).append(transfer)
        # Sorted, so that any two ranks post their messages in a deterministic order.
        sent = [self._message(peer, outgoing[peer]) for peer in sorted(outgoing)]
        received = [self._message(peer, incoming[peer]) for peer in sorted(incoming)]
        return sent, received

    def _message(self, peer: int, transfers: Sequence[Transfer]) -> Message:
        pieces: list[Piece] = []
        end = HEADER_NBYTES
        for transfer in transfers:
            source = self.source_buffers[transfer.src.buffer]
            destination = self.destination_buffers.get(transfer.dst.buffer, source)
            dtype = getattr(torch, wire_dtype(source.dtype, destination.dtype))
            # torch views bytes as elements only at aligned addresses.
            start = round_up(end, dtype.itemsize)
            nbytes = transfer.numel * dtype.itemsize
            pieces.append(Piece(transfer, dtype, start, nbytes))
            end = start + nbytes
        return Message(peer, tuple(pieces), round_up(end, ALIGNMENT))
