"""Messages over a process group as deltas of the previous ones: the words that changed.

    sender     packs a message -> compares it with a copy of the previous one -> sends the delta, or
               the message if that is smaller
    receiver   applies the delta to its copy of the previous one -> unpacks the copy as any message

A word is two bytes of any content: an element in bfloat16, half of one in float32. Bits are
compared. A delta has

    number of changed words in each block of 256    int16 [blocks]
    their values                                    int16 [changed]
    their places in the block                       uint8 [changed]

so 3 bytes for each changed word, and 1/256 of the message. A fill is whole on all ranks unless all
of them ended the previous one. Both kinds update the copies. In a fill of deltas each sender
chooses for each message, and sends a digest with a delta: a copy that differs is an error.

A fill of deltas sends nothing ahead. Lengths are known only after the headers have arrived, so each
bucket takes two batches, both within `run` or `abandon`:

    compare with copies -> headers of all peers --> contents of all valid messages, whole or deltas
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch.nn.functional import pad

from hybrid_engine.errors import TransportError
from hybrid_engine.planning.plan import Costs, Transfer
from hybrid_engine.ranks.digests import box_digest
from hybrid_engine.transports.collective import CollectiveTransport, InFlight, Part
from hybrid_engine.transports.context import TransportContext
from hybrid_engine.transports.copies import FlatBuffers
from hybrid_engine.transports.messages import Message, StagedMessage, write_headers

_WORD = torch.int16
BLOCK = 256
"""Words of a block; a place in it fits a byte."""
_CHANGED_NBYTES = _WORD.itemsize + 1
# Blocks that are compared together: as many as a cache holds, and enough for a GPU. A position
# takes 8 bytes.
_PARTS = {"cpu": 1 << 12, "cuda": 1 << 16}


def encode(new: torch.Tensor, old: torch.Tensor) -> tuple[torch.Tensor | None, int]:
    """Return the delta that turns `old` into `new`, and the number of changed words.

    The delta is None if it would not be smaller than `new`, and empty without changes. Both tensors
    are uint8 [n], n even; `old` may be on the host. Memory: the delta, and parts of both tensors at
    a time.
    """
    part_numel = _PARTS[new.device.type] * BLOCK
    new_parts = new.view(_WORD).split(part_numel)
    old_parts = old.view(_WORD).split(part_numel)
    # Words are compared twice, which takes less time than new memory for the first result.
    counts = torch.cat(
        [
            _by_block(_differing(new_part, old_part))
            for new_part, old_part in zip(new_parts, old_parts, strict=True)
        ]
    )
    num_changed = int(counts.sum(dtype=torch.int64))
    if not num_changed:
        return new[:0], 0
    nbytes = counts.nbytes + num_changed * _CHANGED_NBYTES
    if nbytes >= new.numel():
        return None, num_changed
    delta = torch.empty(nbytes, dtype=torch.uint8, device=new.device)
    head, values, places = _split(delta, len(counts))
    head.copy_(counts)
    start = 0
    for new_part, old_part in zip(new_parts, old_parts, strict=True):
        positions = _positions(_differing(new_part, old_part))
        stop = start + len(positions)
        torch.index_select(new_part, 0, positions, out=values[start:stop])
        # A part begins with a block, so the low bits are the place in the block.
        places[start:stop].copy_(positions.bitwise_and_(BLOCK - 1))
        start = stop
    return delta, num_changed


def apply(delta: torch.Tensor, old: torch.Tensor) -> None:
    """Apply a delta to `old`, uint8 [n], in place.

    Raises TransportError, before any change, if the delta cannot belong to a message of this size.
    """
    if not delta.numel():
        return
    words = old.view(_WORD)
    num_blocks = -(-len(words) // BLOCK)
    refusal = TransportError(
        f"invalid delta: {delta.numel()} bytes for a message of {old.numel()} bytes",
        code="invalid-delta",
    )
    rest = delta.numel() - num_blocks * _WORD.itemsize
    if rest < 0 or rest % _CHANGED_NBYTES:
        raise refusal
    counts, values, places = _split(delta, num_blocks)
    ends = counts.cumsum(0, dtype=torch.int64)
    if int(ends[-1]) != len(values) or int(counts.min()) < 0:
        raise refusal
    start = 0
    part_blocks = _PARTS[old.device.type]
    for first in range(0, num_blocks, part_blocks):
        part = counts[first : first + part_blocks]
        stop = int(ends[first + len(part) - 1])
        block_starts = torch.arange(first, first + len(part), device=old.device).mul_(BLOCK)
        # Start of its block for every changed word, then its place added.
        positions = block_starts.repeat_interleave(part.to(torch.int64), output_size=stop - start)
        positions.add_(places[start:stop])
        words.scatter_(0, positions, values[start:stop])
        start = stop


def _split(delta: torch.Tensor, num_blocks: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return views of the counts by block, the values and the places."""
    head = num_blocks * _WORD.itemsize
    num_changed = (delta.numel() - head) // _CHANGED_NBYTES
    end = head + num_changed * _WORD.itemsize
    return delta[:head].view(_WORD), delta[head:end].view(_WORD), delta[end:]


def _by_block(mask: torch.Tensor) -> torch.Tensor:
    """Return the number of true elements in each block; the last block may be shorter."""
    rest = -len(mask) % BLOCK
    if rest:
        mask = pad(mask, (0, rest))
    return mask.view(-1, BLOCK).sum(1, dtype=_WORD)


# On the host numpy takes less than half of torch's time, for comparing and for positions.


def _differing(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    if new.device.type == "cpu":
        return torch.from_numpy(new.numpy() != old.numpy())
    return new != old.to(new.device, non_blocking=True)


def _positions(mask: torch.Tensor) -> torch.Tensor:
    if mask.device.type == "cpu":
        return torch.from_numpy(np.flatnonzero(mask.numpy()))
    return mask.nonzero().view(-1)


_Key = tuple[int, int]
"""Bucket and peer of a message."""


class Deltas:
    """Copies of a rank's previous messages, and a record of the copies that their receivers have.

    The copies are in host memory until `close`, as large as the messages of a complete fill.

    Attributes:
        is_whole: no message of this fill is a delta.
        counts: of the messages sent, see `Costs`.
    """

    def __init__(self) -> None:
        self.is_whole = True
        self.counts: Counter[str] = Counter()
        # Copies of messages that were sent, and of received ones.
        self._copies: dict[tuple[bool, _Key], torch.Tensor] = {}
        # Messages sent since the last whole fill began; their receivers have the same copy.
        self._delivered: set[_Key] = set()
        # Bytes of received deltas, by sender.
        self._came: dict[int, int] = {}

    def begin(self, *, whole: bool) -> None:
        """Begin a fill, with the same argument on all ranks. Never raises."""
        self.is_whole = whole
        self.counts.clear()
        self._came.clear()
        if whole:
            self._delivered.clear()

    def outgoing(
        self, bucket: int, peer: int, contents: torch.Tensor
    ) -> tuple[torch.Tensor | None, int]:
        """Return the delta of a message's contents, uint8 [n], and their digest.

        Returns None and 0 if the message must be sent whole. Updates the copy.
        """
        key = (bucket, peer)
        copy = self._copy(key, contents.numel(), is_sent=True)
        delta = None
        if key in self._delivered:
            delta, num_changed = encode(contents, copy)
            self.counts["words_compared"] += contents.numel() // _WORD.itemsize
            self.counts["words_changed"] += num_changed
        copy.copy_(contents)
        self._delivered.add(key)
        if delta is None:
            self.counts["messages_whole"] += 1
            return None, 0
        self.counts["messages_delta"] += 1
        return delta, box_digest(copy)

    def received(self, bucket: int, peer: int, nbytes: int) -> torch.Tensor:
        """Return the copy of a received message, uint8 [nbytes] on the host."""
        return self._copy((bucket, peer), nbytes, is_sent=False)

    def arrived(
        self,
        bucket: int,
        peer: int,
        contents: torch.Tensor,
        delta: torch.Tensor | None,
        digest: int,
    ) -> None:
        """Update the copy of a received message by its contents, or both by a delta.

        `contents` may lie in the copy. Raises TransportError if the copy differs from the sender's.
        """
        # `contents` exclude the header, the copy has room for it.
        copy = self._copies[False, (bucket, peer)][-contents.numel() :]
        is_copy = contents.data_ptr() == copy.data_ptr()
        if delta is not None:
            apply(delta.cpu(), copy)
            if box_digest(copy) != digest:
                raise TransportError(
                    f"bucket {bucket}, peer {peer}: after applying the delta, the copy of the last "
                    "message differs from the message that was packed. The next switch sends "
                    "everything",
                    code="delta-mismatch",
                )
            self._came[peer] = delta.numel()
            if not is_copy:
                contents.copy_(copy)
        elif not is_copy:
            copy.copy_(contents)

    def take_came(self) -> dict[int, int]:
        """Return the bytes of deltas received since the last call, by sender."""
        came = self._came
        self._came = {}
        return came

    @property
    def copies_nbytes(self) -> int:
        """Bytes of host memory of this rank's copies."""
        return sum(copy.numel() for copy in self._copies.values())

    def close(self) -> None:
        """Free the copies; the next fill must be whole."""
        self._copies.clear()
        self._delivered.clear()

    def _copy(self, message: _Key, nbytes: int, *, is_sent: bool) -> torch.Tensor:
        key = (is_sent, message)
        if key not in self._copies:
            self._copies[key] = torch.zeros(nbytes, dtype=torch.uint8, device="cpu")
        return self._copies[key]


class DeltaTransport(CollectiveTransport):
    """`CollectiveTransport` that sends messages as deltas where these are smaller.

    All ranks of a job use it, or none. `deltas`: copies of the previous messages, and counts.
    """

    def __init__(self, context: TransportContext) -> None:
        super().__init__(context)
        self.deltas = Deltas()
        # On the host, messages are received directly into the copies that deltas are applied to.
        self._receives_copies = self._device.type == "cpu"

    def start(
        self,
        bucket: int,
        transfers: Sequence[Transfer],
        source: FlatBuffers | None,
        reason: str = "",
    ) -> None:
        """Post the messages of a bucket, but nothing in a fill of deltas; see the base class."""
        if self.deltas.is_whole:
            super().start(bucket, transfers, source, reason)

    def take_costs(self) -> Costs:
        """See `context.Transport`."""
        costs = super().take_costs()
        costs.counts.update(self.deltas.counts)
        self.deltas.counts.clear()
        return costs

    def close(self) -> None:
        """Free staging memory and copies; idempotent."""
        super().close()
        self.deltas.close()

    def _write_headers(
        self, bucket: int, sent: Sequence[StagedMessage], reason: str
    ) -> tuple[Sequence[Part] | None, TransportError | None]:
        """Write the headers; see the base class.

        Returns the parts that follow the headers in a fill of deltas, and the failure to compute
        deltas, which makes the messages void.
        """
        deltas: Sequence[tuple[torch.Tensor | None, int]] = [(None, 0)] * len(sent)
        failure = None
        if not reason:
            try:
                deltas = [
                    self.deltas.outgoing(bucket, staged.message.peer, staged.contents)
                    for staged in sent
                ]
            except (RuntimeError, MemoryError) as error:
                # torch and numpy raise these when memory is short.
                failure = TransportError(
                    f"{self.name} transport, bucket {bucket}, phase read: {error}",
                    code="read-failed",
                )
                reason = str(failure)
        contents: list[Part] = []
        headers = []
        for staged, (delta, digest) in zip(sent, deltas, strict=True):
            delta_nbytes = -1 if delta is None else delta.numel()
            headers.append(staged.header_bytes(bucket, reason, delta_nbytes, digest))
            if not reason:
                contents.append((staged.message.peer, staged.contents if delta is None else delta))
        write_headers(sent, headers)
        return None if self.deltas.is_whole else contents, failure

    def _awaited(self, bucket: int, side: str, messages: Sequence[Message]) -> list[StagedMessage]:
        """Return incoming messages, each in one piece: on the host the copy, else staged."""
        # The copies are needed in either case: `_complete` writes them.
        parts = [
            self.deltas.received(bucket, message.peer, message.staged_nbytes)
            for message in messages
        ]
        if not self._receives_copies:
            parts = self._staged_parts(side, [message.staged_nbytes for message in messages])
        return [message.staged_in(memory) for message, memory in zip(messages, parts, strict=True)]

    def _finish(self, bucket: int, exchange: InFlight, deadline: float) -> InFlight:
        """Exchange the contents that the headers have announced, within the same deadline."""
        if exchange.contents is None:
            return exchange
        announced, failure = self._announced(exchange)
        self._wait(
            bucket,
            "transfer",
            self._post(bucket, "transfer", announced, exchange.contents, self._group),
            deadline,
        )
        return replace(exchange, failure=exchange.failure or failure)

    def _announced(self, exchange: InFlight) -> tuple[list[Part], TransportError | None]:
        """Return memory for the contents that the received headers announce, and a failure.

        The failure is a lack of memory. The contents must be received nevertheless, or the ranks
        would be out of step. Then, and if the message is not the copy, a delta is received into the
        memory of the message.
        """
        failure = None
        # A delta is always shorter than its message.
        rooms = [staged.contents for staged in exchange.incoming]
        if self._receives_copies:
            sizes = [max(header.delta_nbytes, 0) for header in exchange.headers]
            try:
                rooms = self._staged_parts("deltas", sizes)
            except TransportError as error:
                failure = error
        parts: list[Part] = []
        for staged, header, room in zip(exchange.incoming, exchange.headers, rooms, strict=True):
            peer = staged.message.peer
            memory = staged.contents
            if header.delta_nbytes >= 0:
                memory = room[: header.delta_nbytes]
                exchange.deltas[peer] = memory
            # The contents of a void message are not sent.
            if not header.failure:
                parts.append((peer, memory))
        return parts, failure

    def _complete(self, bucket: int, exchange: InFlight) -> None:
        """Turn received deltas into messages, and copy relay images into their relay buffers."""
        for staged, header in zip(exchange.incoming, exchange.headers, strict=True):
            peer = staged.message.peer
            delta = exchange.deltas.get(peer)
            self.deltas.arrived(bucket, peer, staged.contents, delta, header.digest)
            for image, flat in zip(staged.message.images, staged.images, strict=True):
                relay = self._relays.tensors[image.buffer.name]
                relay[: image.numel].view(torch.uint8).copy_(flat)
                if relay.is_cuda:
                    # Readers are other processes, notified by this host thread and not by the
                    # stream.
                    torch.cuda.current_stream(relay.device).synchronize()
