"""The messages of a bucket, derived at both ends from the order of the transfers.

    header | piece | piece | ... | padding      pieces in the bucket's order

A piece is one transfer's elements, row-major, in `plan.wire_dtype`, aligned to the element size.
The header has the bucket, the bytes of the message and, if the sender failed, the reason why its
contents are void. Nothing is pickled. The header also says how much follows: a delta (deltas.py) is
shorter than the contents.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from hybrid_engine.memory.host_pages import round_up
from hybrid_engine.planning.plan import Transfer, wire_dtype
from hybrid_engine.ranks.torch_internals import copy_each
from hybrid_engine.records.layout import Buffer, BufferId, Place
from hybrid_engine.records.regions import contiguous_strides

HEADER_NBYTES = 512
# Number of the bucket, bytes of the message, bytes that follow the header, digest of the contents.
# The failure follows, padded with zeros.
# 4 * 8 = 32 bytes, which leaves 480 for the failure.
_HEADER = struct.Struct("<qqqq")
ALIGNMENT = 64
"""Alignment of messages in memory, in bytes, and unit of their size."""


@dataclass(frozen=True, slots=True)
class Message:
    """Data that one rank sends another in one bucket.

    Attributes:
        peer: the other rank.
        transfers: copies into the message, or out of it if it is received, in the bucket's order.
        dtypes: dtype of each flat buffer as which `transfers` see the message.
        nbytes: bytes of header, pieces and padding; a multiple of `ALIGNMENT`.
    """

    peer: int
    transfers: tuple[Transfer, ...] = ()
    dtypes: Mapping[BufferId, torch.dtype] = field(default_factory=dict)
    nbytes: int = HEADER_NBYTES


@dataclass(frozen=True, slots=True, eq=False)
class StagedMessage:
    """A message and the memory from which it is sent, or into which it is received.

    Attributes:
        message: the message.
        memory: its bytes, uint8 [message.nbytes].
        sent_nbytes: bytes that follow the header; fewer than those of the contents are a delta.
        digest: digest of the contents, if a delta is sent.
        fault: why a received message is void or not the expected one; "": it is valid.
    """

    message: Message
    memory: torch.Tensor
    sent_nbytes: int
    digest: int = 0
    fault: str = ""

    @property
    def header(self) -> torch.Tensor:
        return self.memory[:HEADER_NBYTES]

    @property
    def contents(self) -> torch.Tensor:
        """Bytes after the header."""
        return self.memory[HEADER_NBYTES:]

    @property
    def sent(self) -> torch.Tensor:
        """Bytes that are exchanged."""
        return self.memory[: HEADER_NBYTES + self.sent_nbytes]


def stage(messages: Sequence[Message], memory: torch.Tensor) -> list[StagedMessage]:
    """Lay out messages in memory, which has as many bytes as they."""
    parts = memory.split([message.nbytes for message in messages])
    return [
        StagedMessage(message, part, message.nbytes - HEADER_NBYTES)
        for message, part in zip(messages, parts, strict=True)
    ]


def write_headers(messages: Sequence[StagedMessage], bucket: int, failure: str) -> None:
    """Write the headers, to a GPU in one copy, for which the host does not wait.

    A failure that does not fit is cut.
    """
    if messages:
        headers = bytearray()
        for staged in messages:
            header = _HEADER.pack(bucket, staged.message.nbytes, staged.sent_nbytes, staged.digest)
            # The cut may split a character; `read_headers` replaces it.
            headers += (header + failure.encode())[:HEADER_NBYTES].ljust(HEADER_NBYTES, b"\0")
        block = torch.frombuffer(headers, dtype=torch.uint8)
        if messages[0].memory.is_cuda:
            block = block.pin_memory().to(messages[0].memory.device, non_blocking=True)
        copy_each([staged.header for staged in messages], block.split(HEADER_NBYTES))


def read_headers(messages: Sequence[StagedMessage], bucket: int) -> list[StagedMessage]:
    """Return messages received for `bucket` as their headers describe them.

    Headers are read from a GPU in one copy.
    """
    if not messages:
        return []
    block = torch.stack([staged.header for staged in messages]).cpu().numpy()
    received = []
    for staged, header in zip(messages, map(bytes, block), strict=True):
        sent_bucket, nbytes, sent_nbytes, digest = _HEADER.unpack_from(header)
        failure = header[_HEADER.size :].rstrip(b"\0").decode(errors="replace")
        expected_nbytes = staged.message.nbytes
        fault = ""
        if failure:
            fault = f"the peer failed: {failure}"
        elif sent_bucket != bucket or nbytes != expected_nbytes:
            fault = (
                f"the peer sent {nbytes} bytes of bucket {sent_bucket}, "
                f"expected {expected_nbytes} of bucket {bucket}: "
                "the ranks' plans differ; compare their fingerprints"
            )
        received.append(replace(staged, sent_nbytes=sent_nbytes, digest=digest, fault=fault))
    return received


@dataclass(frozen=True)
class MessagePlanner:
    """Derives one rank's messages.

    Attributes:
        source_buffers, destination_buffers: see `TransportContext`; never copied: they are many.
        relay_buffers: further destinations.
    """

    rank: int
    source_buffers: Mapping[BufferId, Buffer]
    destination_buffers: Mapping[BufferId, Buffer]
    relay_buffers: Mapping[BufferId, Buffer]

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
        sent = [self._message(peer, outgoing[peer], is_sent=True) for peer in sorted(outgoing)]
        received = [self._message(peer, incoming[peer], is_sent=False) for peer in sorted(incoming)]
        return sent, received

    def _message(self, peer: int, transfers: Sequence[Transfer], *, is_sent: bool) -> Message:
        moved: list[Transfer] = []
        dtypes: dict[BufferId, torch.dtype] = {}
        end = HEADER_NBYTES
        for transfer in transfers:
            source = self.source_buffers[transfer.src.buffer]
            dst = transfer.dst.buffer
            destination = self.relay_buffers.get(dst) or self.destination_buffers.get(dst, source)
            dtype = getattr(torch, wire_dtype(source.dtype, destination.dtype))
            # torch views bytes as elements only at aligned addresses.
            start = round_up(end, dtype.itemsize)
            end = start + transfer.numel * dtype.itemsize
            # Places count from the header: 512 bytes are whole elements of any dtype.
            buffer = BufferId(peer, f"message in {dtype}")
            dtypes[buffer] = dtype
            strides = contiguous_strides(transfer.lengths)
            place = Place(buffer, start // dtype.itemsize, strides)
            moved.append(replace(transfer, dst=place) if is_sent else replace(transfer, src=place))
        return Message(peer, tuple(moved), dtypes, round_up(end, ALIGNMENT))
