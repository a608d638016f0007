"""The messages of a bucket, derived at both ends from the order of the transfers.

    body          header | piece | piece | ...      pieces in the bucket's order
    relay image   the first elements of a relay buffer, as they lie there (planning/relays.py)

A piece is one transfer's elements, row-major, in `plan.wire_dtype`, aligned to the element size.
The header has the bucket, the bytes of the message and, if the sender failed, the reason why its
contents are void. Nothing is pickled. Where deltas (deltas.py) are sent, a message is exchanged in
one piece, and its header says how much follows: a delta is shorter than the contents.
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
_HEADER = struct.Struct("<qqqq")
ALIGNMENT = 64
"""Alignment of each part of a message in memory, in bytes."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements of a transfer in bytes [start, start + nbytes) of a body, row-major."""

    transfer: Transfer
    dtype: torch.dtype
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class RelayImage:
    """Data for a relay buffer of another rank: its first `numel` elements, as they lie there."""

    buffer: BufferId
    transfers: tuple[Transfer, ...]
    dtype: torch.dtype
    numel: int

    @property
    def nbytes(self) -> int:
        """Size on the wire, in bytes."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Message:
    """Data that one rank sends another in one bucket.

    Attributes:
        peer: the other rank.
        pieces: pieces of the body.
        nbytes: bytes of the body: header, pieces and padding.
        images: relay images; each is sent separately, after the body.
    """

    peer: int
    pieces: tuple[Piece, ...] = ()
    nbytes: int = HEADER_NBYTES
    images: tuple[RelayImage, ...] = ()

    def body_in(self, dtype: torch.dtype) -> BufferId:
        """Return the id of the body as a flat buffer of this dtype."""
        return BufferId(self.peer, f"message in {dtype}")

    @property
    def transfers(self) -> list[Transfer]:
        """The plan's transfers."""
        relayed = [transfer for image in self.images for transfer in image.transfers]
        return [*(piece.transfer for piece in self.pieces), *relayed]

    def pack_transfers(self) -> Iterator[Transfer]:
        """Yield the transfers whose destination is the message."""
        for piece in self.pieces:
            yield replace(piece.transfer, dst=self._place_of(piece))
        for image in self.images:
            yield from image.transfers

    def unpack_transfers(self) -> Iterator[Transfer]:
        """Yield the transfers whose source is the body."""
        # Relay images are received in place.
        for piece in self.pieces:
            yield replace(piece.transfer, src=self._place_of(piece))

    def _place_of(self, piece: Piece) -> Place:
        offset = piece.start // piece.dtype.itemsize
        strides = contiguous_strides(piece.transfer.lengths)
        return Place(self.body_in(piece.dtype), offset, strides)

    @property
    def total_nbytes(self) -> int:
        """Bytes of the body and all images."""
        return sum(self._sizes)

    @property
    def staged_nbytes(self) -> int:
        """Bytes of memory for the body and all images, aligned."""
        return sum(round_up(nbytes, ALIGNMENT) for nbytes in self._sizes)

    @property
    def _sizes(self) -> tuple[int, ...]:
        return self.nbytes, *(image.nbytes for image in self.images)

    def staged_in(self, memory: torch.Tensor, *, in_one_piece: bool) -> StagedMessage:
        """Lay the message out in `memory`, uint8 [staged_nbytes]; gaps become zero."""
        parts = []
        end = 0
        for nbytes in self._sizes:
            start = end
            end += round_up(nbytes, ALIGNMENT)
            parts.append(memory[start : start + nbytes])
            # Deltas compare the whole memory, gaps included.
            memory[start + nbytes : end].zero_()
        body, *images = parts
        return StagedMessage(self, body, tuple(images), memory if in_one_piece else None)


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
    """A message and the byte tensors from which it is sent, or into which it is received.

    Attributes:
        message: the message.
        body: memory of the body.
        images: memory of the relay images.
        memory: all of the message, or its header and a delta, which are exchanged in one piece;
            None: body and images are exchanged one after the other.
        digest: digest of the contents, if a delta is sent.
    """

    message: Message
    body: torch.Tensor
    images: tuple[torch.Tensor, ...] = ()
    memory: torch.Tensor | None = None
    digest: int = 0

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Everything that is exchanged, in that order."""
        return (self.body, *self.images) if self.memory is None else (self.memory,)

    @property
    def header(self) -> torch.Tensor:
        return self.body[:HEADER_NBYTES]

    @property
    def contents(self) -> torch.Tensor:
        """Bytes after the header of a message in one piece."""
        assert self.memory is not None
        return self.memory[HEADER_NBYTES:]

    def flats(self) -> dict[BufferId, torch.Tensor]:
        """Return the flat buffers of packed transfers: images, and the body in every dtype."""
        flats = {}
        for image, flat in zip(self.message.images, self.images, strict=True):
            flats[image.buffer] = flat.view(image.dtype)
        for dtype in dict.fromkeys(piece.dtype for piece in self.message.pieces):
            # torch views only whole elements.
            whole = self.body.numel() // dtype.itemsize * dtype.itemsize
            flats[self.message.body_in(dtype)] = self.body[:whole].view(dtype)
        return flats

    def header_bytes(self, bucket: int, failure: str) -> bytes:
        """Return the header for `write_headers`; a failure that does not fit is cut."""
        sent_nbytes = sum(tensor.numel() for tensor in self.tensors) - HEADER_NBYTES
        fixed = _HEADER.pack(bucket, self.message.total_nbytes, sent_nbytes, self.digest)
        # The cut may split a character; `read_headers` replaces it.
        return (fixed + failure.encode())[:HEADER_NBYTES].ljust(HEADER_NBYTES, b"\0")

    def fault(self, bucket: int, header: Header) -> str:
        """Return the fault of a message received for `bucket`; "" if it is expected and valid."""
        if header.failure:
            return f"the peer failed: {header.failure}"
        expected_nbytes = self.message.total_nbytes
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
        if messages[0].body.is_cuda:
            block = block.pin_memory().to(messages[0].body.device, non_blocking=True)
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
    """Derives one rank's messages; for buffers see `TransportContext`."""

    rank: int
    source_buffers: Mapping[BufferId, Buffer]
    destination_buffers: Mapping[BufferId, Buffer]
    relay_buffers: Mapping[BufferId, Buffer]

    def messages(self, transfers: Sequence[Transfer]) -> tuple[list[Message], list[Message]]:
        """Return the messages that this rank sends and receives, by ascending peer."""
        outgoing: dict[int, list[Transfer]] = {}
        incoming: dict[int, list[Transfer]] = {}
        for transfer in transfers:
            if transfer.src_rank == transfer.dst_rank:
                continue
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
        relayed: dict[BufferId, list[Transfer]] = {}
        for transfer in transfers:
            if transfer.dst.buffer in self.relay_buffers:
                # Packed in its place of the relay buffer, so it needs no unpacking.
                relayed.setdefault(transfer.dst.buffer, []).append(transfer)
                continue
            source = self.source_buffers[transfer.src.buffer]
            destination = self.destination_buffers.get(transfer.dst.buffer, source)
            dtype = getattr(torch, wire_dtype(source.dtype, destination.dtype))
            # torch views bytes as elements only at aligned addresses.
            start = round_up(end, dtype.itemsize)
            nbytes = transfer.numel * dtype.itemsize
            pieces.append(Piece(transfer, dtype, start, nbytes))
            end = start + nbytes
        images = []
        # Sorted, so that both ends derive the same order.
        for buffer in sorted(relayed):
            into_buffer = relayed[buffer]
            dtype = getattr(torch, self.relay_buffers[buffer].dtype)
            numel = max(transfer.dst.extent(transfer.lengths).stop for transfer in into_buffer)
            images.append(RelayImage(buffer, tuple(into_buffer), dtype, numel))
        return Message(peer, tuple(pieces), end, tuple(images))
