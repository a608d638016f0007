"""The messages of a bucket: what one rank sends another, derived at both ends from the order of the transfers.

    body          header | piece | piece | ...      pieces follow one another in the bucket's order
    relay image   the first elements of a relay buffer, packed as they lie there (planning/relays.py)

A piece is one transfer's elements, row-major, in `plan.wire_dtype`, from a multiple of its element size on. The header
says which bucket this is, how many bytes it has, and, where the sender failed, why its contents are void. Nothing is
pickled. In a fill of deltas (deltas.py) the header goes first, and says what else is sent.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from hybrid_engine.planning.plan import Transfer, wire_dtype
from hybrid_engine.records.layout import Buffer, BufferId, Place
from hybrid_engine.records.regions import contiguous_strides

HEADER_NBYTES = 512
_HEADER = struct.Struct("<qqqqH")  # the fields of `Header`, the last as its length
ALIGNMENT = 64
"""Bytes; of each part of a message in memory."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One transfer's elements in a body: `nbytes` from byte `start`, row-major, in the dtype of the wire."""

    transfer: Transfer
    dtype: torch.dtype
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class RelayImage:
    """Data that one rank sends into one relay buffer of another: its first `numel` elements, as they lie there."""

    buffer: BufferId
    transfers: tuple[Transfer, ...]
    dtype: torch.dtype
    numel: int

    @property
    def nbytes(self) -> int:
        """Bytes on the wire."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Message:
    """Data that one rank sends another in one bucket.

    Attributes:
        peer: the other rank.
        pieces: in the body.
        nbytes: of the body: header, pieces and padding.
        images: each goes as a message of its own, after the body.
    """

    peer: int
    pieces: tuple[Piece, ...] = ()
    nbytes: int = HEADER_NBYTES
    images: tuple[RelayImage, ...] = ()

    def body_in(self, dtype: torch.dtype) -> BufferId:
        """The body as a flat buffer of this dtype."""
        return BufferId(self.peer, f"message in {dtype}")

    def packed(self) -> Iterator[Transfer]:
        """The transfers that fill it: they end in the message."""
        for piece in self.pieces:
            yield replace(piece.transfer, dst=self._place_of(piece))
        for image in self.images:
            yield from image.transfers

    def unpacked(self) -> Iterator[Transfer]:
        """The transfers that empty its body: they start there. Relay images lie where they belong already."""
        for piece in self.pieces:
            yield replace(piece.transfer, src=self._place_of(piece))

    def _place_of(self, piece: Piece) -> Place:
        strides = contiguous_strides(piece.transfer.lengths)
        return Place(self.body_in(piece.dtype), piece.start // piece.dtype.itemsize, strides)

    @property
    def total_nbytes(self) -> int:
        """Bytes of the body and all images."""
        return self.nbytes + sum(image.nbytes for image in self.images)

    @property
    def staged_nbytes(self) -> int:
        """Memory that holds the body and all images, aligned."""
        return sum(round_up(nbytes, ALIGNMENT) for nbytes in self._sizes)

    @property
    def _sizes(self) -> tuple[int, ...]:
        return self.nbytes, *(image.nbytes for image in self.images)

    def staged_in(self, memory: torch.Tensor) -> StagedMessage:
        """In one piece of memory, uint8 [staged_nbytes]; what is between its parts becomes zero."""
        parts, end = [], 0
        for nbytes in self._sizes:
            start, end = end, end + round_up(nbytes, ALIGNMENT)
            parts.append(memory[start : start + nbytes])
            memory[start + nbytes : end].zero_()
        return StagedMessage(self, parts[0], tuple(parts[1:]), memory[HEADER_NBYTES:])


@dataclass(frozen=True, slots=True)
class Header:
    """What a sender says of a message.

    Attributes:
        bucket: it belongs to.
        nbytes: of the message.
        delta_nbytes: of a delta that is sent instead of the contents; -1: there is none.
        digest: of the contents, where a delta is sent.
        failure: why nothing in it is valid; "": it is.
    """

    bucket: int
    nbytes: int
    delta_nbytes: int = -1
    digest: int = 0
    failure: str = ""


_NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")


@dataclass(frozen=True, slots=True, eq=False)
class StagedMessage:
    """A message and the byte tensors that it is sent from or comes into.

    Attributes:
        images: of its relay images.
        contents: all but the header; of use where it lies in one piece (`Message.staged_in`).
    """

    message: Message
    body: torch.Tensor
    images: tuple[torch.Tensor, ...] = ()
    contents: torch.Tensor = _NOTHING

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """In the order in which they go."""
        return self.body, *self.images

    @property
    def header(self) -> torch.Tensor:
        return self.body[:HEADER_NBYTES]

    def flats(self) -> dict[BufferId, torch.Tensor]:
        """The body in every dtype of its pieces, and the images: what `Message.packed` and `unpacked` speak of."""
        found = {
            image.buffer: flat.view(image.dtype) for image, flat in zip(self.message.images, self.images, strict=True)
        }
        for dtype in dict.fromkeys(piece.dtype for piece in self.message.pieces):
            whole = self.body.numel() // dtype.itemsize * dtype.itemsize
            found[self.message.body_in(dtype)] = self.body[:whole].view(dtype)
        return found

    def write_header(self, bucket: int, failure: str, delta_nbytes: int = -1, digest: int = 0) -> None:
        """Say which bucket this is and, where the contents are void, why; a long text is cut."""
        text = failure.encode()[: HEADER_NBYTES - _HEADER.size]
        fixed = _HEADER.pack(bucket, self.message.total_nbytes, delta_nbytes, digest, len(text))
        header = bytearray(fixed + text).ljust(HEADER_NBYTES, b"\0")
        self.header.copy_(torch.frombuffer(header, dtype=torch.uint8))

    def read_header(self) -> Header:
        """What the sender says of a message that has come."""
        header = self.header.cpu().numpy().tobytes()
        bucket, nbytes, delta_nbytes, digest, text_nbytes = _HEADER.unpack_from(header)
        text = header[_HEADER.size : _HEADER.size + text_nbytes].decode(errors="replace")
        return Header(bucket, nbytes, delta_nbytes, digest, text)

    def fault(self, bucket: int) -> str:
        """Describe what is wrong with a message of `bucket` that has come: "" if it is the one expected, and good."""
        header = self.read_header()
        if header.failure:
            return f"the peer failed: {header.failure}"
        if (header.bucket, header.nbytes) != (bucket, self.message.total_nbytes):
            return (
                f"the peer sent {header.nbytes} bytes of bucket {header.bucket}, expected {self.message.total_nbytes} "
                f"of bucket {bucket}: the ranks' plans differ; compare their fingerprints"
            )
        return ""


@dataclass(frozen=True)
class MessagePlanner:
    """Derives one rank's messages.

    Attributes:
        rank: global rank of this process.
        source_buffers: of all ranks.
        destination_buffers: of all ranks, as far as their dtype is another.
        relay_buffers: those that this rank has to do with.
    """

    rank: int
    source_buffers: Mapping[BufferId, Buffer]
    destination_buffers: Mapping[BufferId, Buffer]
    relay_buffers: Mapping[BufferId, Buffer]

    def messages(self, transfers: Sequence[Transfer]) -> tuple[list[Message], list[Message]]:
        """Messages that this rank sends and receives, by ascending peer; copies within the rank are no messages."""
        outgoing: dict[int, list[Transfer]] = {}
        incoming: dict[int, list[Transfer]] = {}
        for transfer in transfers:
            if transfer.src_rank == transfer.dst_rank:
                continue
            if transfer.src_rank == self.rank:
                outgoing.setdefault(transfer.dst_rank, []).append(transfer)
            elif transfer.dst_rank == self.rank:
                incoming.setdefault(transfer.src_rank, []).append(transfer)
        return self._by_peer(outgoing), self._by_peer(incoming)

    def source_dtype(self, transfer: Transfer) -> torch.dtype:
        """Dtype of the source buffer."""
        return _dtype(self.source_buffers[transfer.src.buffer].dtype)

    def _wire_dtype(self, transfer: Transfer) -> torch.dtype:
        source = self.source_buffers[transfer.src.buffer]
        return _dtype(wire_dtype(source.dtype, self.destination_buffers.get(transfer.dst.buffer, source).dtype))

    def _by_peer(self, transfers: Mapping[int, Sequence[Transfer]]) -> list[Message]:
        return [self._message(peer, transfers[peer]) for peer in sorted(transfers)]

    def _message(self, peer: int, transfers: Sequence[Transfer]) -> Message:
        pieces: list[Piece] = []
        end = HEADER_NBYTES
        relayed: dict[BufferId, list[Transfer]] = {}
        for transfer in transfers:
            if transfer.dst.buffer in self.relay_buffers:
                relayed.setdefault(transfer.dst.buffer, []).append(transfer)
                continue
            dtype = self._wire_dtype(transfer)
            start = round_up(end, dtype.itemsize)  # torch views bytes as elements only where these are aligned
            pieces.append(Piece(transfer, dtype, start, transfer.numel * dtype.itemsize))
            end = start + pieces[-1].nbytes
        images = (self._image(buffer, relayed[buffer]) for buffer in sorted(relayed))
        return Message(peer, tuple(pieces), end, tuple(images))

    def _image(self, buffer: BufferId, transfers: Sequence[Transfer]) -> RelayImage:
        dtype = _dtype(self.relay_buffers[buffer].dtype)
        return RelayImage(buffer, tuple(transfers), dtype, max(one.dst.extent(one.lengths).stop for one in transfers))


def _dtype(name: str) -> torch.dtype:
    """torch's, by the name that a `Buffer` has."""
    found: torch.dtype = getattr(torch, name)
    return found


def round_up(value: int, multiple: int) -> int:
    """The first multiple that is not smaller."""
    return -(-value // multiple) * multiple
