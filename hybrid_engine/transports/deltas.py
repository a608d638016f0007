"""Codec of messages to servers: what changed in a message since the last one.

    sender     packs a message -> compares its contents with a copy of the last ones -> sends a
               delta in their place, unless they are as short
    receiver   applies the delta to its copy of the last contents -> unpacks the copy

Contents are words of two bytes: an element in bfloat16, half of one in float32. Bits are compared.
A delta has

    number of changed words in each block of 256    int16 [blocks]
    their values                                    int16 [changed]
    their places in the block                       uint8 [changed]

so 3 bytes for each changed word, and 1/256 of the message; one without changes is empty. A fill is
whole on all ranks unless all of them ended the previous one. Each delta comes with a digest: a copy
that differs is an error.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

import numpy as np
import torch

from hybrid_engine.errors import TransportError
from hybrid_engine.planning.plan import Costs
from hybrid_engine.ranks.digests import box_digest
from hybrid_engine.transports.messages import StagedMessage

BLOCK = 256
"""Words of a block; a place in it fits a byte."""
_WORD_NBYTES = 2
_CHANGED_NBYTES = _WORD_NBYTES + 1
_BLOCKS_PER_PART = 1 << 12
"""Blocks that are compared together: as many as a cache holds. A position takes 8 bytes."""


def encode(new: np.ndarray, old: np.ndarray) -> tuple[np.ndarray, int]:
    """Return the delta that turns `old` into `new`, and the number of changed words.

    All are uint8 [n], n even; `new` itself is returned if the delta would not be smaller. Memory:
    twice the delta, and parts of both arrays at a time.
    """
    new_words = new.view(np.int16)
    old_words = old.view(np.int16)
    counts: list[np.ndarray] = []
    values: list[np.ndarray] = []
    places: list[np.ndarray] = []
    nbytes = num_changed = 0
    for start in range(0, len(new_words), _BLOCKS_PER_PART * BLOCK):
        part = new_words[start : start + _BLOCKS_PER_PART * BLOCK]
        positions = np.flatnonzero(part != old_words[start : start + len(part)])
        num_blocks = -(-len(part) // BLOCK)
        nbytes += num_blocks * _WORD_NBYTES + len(positions) * _CHANGED_NBYTES
        num_changed += len(positions)
        # A delta takes 3 bytes of a changed word and 2 of a block of 512, so it pays off below 66 %
        # of changed words. From there on words are only counted.
        if nbytes < len(new):
            # Positions ascend, so those of a block lie between the numbers of its edges.
            edges = np.searchsorted(positions, np.arange(num_blocks + 1) * BLOCK)
            counts.append(np.diff(edges).astype(np.int16))
            values.append(part[positions])
            places.append((positions & (BLOCK - 1)).astype(np.uint8))
    if not num_changed:
        return new[:0], 0
    if nbytes >= len(new):
        return new, num_changed
    parts = [part.view(np.uint8) for part in (*counts, *values, *places)]
    return np.concatenate(parts), num_changed


def apply(delta: np.ndarray, old: np.ndarray) -> None:
    """Apply a delta to `old`, uint8 [n], in place.

    Raises TransportError, before any change, if the delta cannot belong to a message of this size.
    """
    if not len(delta):
        return
    words = old.view(np.int16)
    num_blocks = -(-len(words) // BLOCK)
    head = num_blocks * _WORD_NBYTES
    num_changed, rest = divmod(len(delta) - head, _CHANGED_NBYTES)
    is_valid = num_changed >= 0 and not rest
    if is_valid:
        places_start = head + num_changed * _WORD_NBYTES
        counts = delta[:head].view(np.int16)
        values = delta[head:places_start].view(np.int16)
        places = delta[places_start:]
        # The last block may be short.
        last = int(places[num_changed - int(counts[-1]) :].max(initial=0))
        is_beyond = (num_blocks - 1) * BLOCK + last >= len(words)
        is_valid = counts.min() >= 0 and counts.sum() == num_changed and not is_beyond
    if not is_valid:
        raise TransportError(
            f"invalid delta: {len(delta)} bytes for a message of {len(old)} bytes",
            code="invalid-delta",
        )
    start = 0
    for first in range(0, num_blocks, _BLOCKS_PER_PART):
        part = counts[first : first + _BLOCKS_PER_PART]
        stop = start + int(part.sum())
        block_starts = np.arange(first, first + len(part)) * BLOCK
        words[block_starts.repeat(part) + places[start:stop]] = values[start:stop]
        start = stop


class Deltas:
    """Copies of the previous messages that a rank has sent and received.

    The copies are in host memory until `close`, as large as the messages of a complete fill.
    """

    def __init__(self) -> None:
        # By bucket and peer. Receivers of the messages sent have the same copy.
        self._sent: dict[tuple[int, int], torch.Tensor] = {}
        self._received: dict[tuple[int, int], torch.Tensor] = {}

    def begin(self, *, whole: bool) -> None:
        """Begin a fill, with the same argument on all ranks. Never raises."""
        if whole:
            self._sent.clear()

    def encode(self, bucket: int, staged: StagedMessage, costs: Costs) -> StagedMessage:
        """Return the message to send: with a delta in place of the contents, if it is smaller."""
        contents = staged.contents
        key = (bucket, staged.message.peer)
        body = contents.numpy()
        if key in self._sent:
            body, num_changed = encode(body, self._sent[key].numpy())
            costs.counts["words_compared"] += contents.numel() // _WORD_NBYTES
            costs.counts["words_changed"] += num_changed
        # Noted before it is sent: if the fill fails, the next one is whole and starts from nothing.
        copy = self._sent.setdefault(key, torch.empty_like(contents)).copy_(contents)
        if len(body) == contents.numel():
            costs.counts["messages_whole"] += 1
            return staged
        costs.counts["messages_delta"] += 1
        contents[: len(body)] = torch.from_numpy(body)
        return replace(staged, sent_nbytes=len(body), digest=box_digest(copy))

    def decode(self, bucket: int, staged: StagedMessage) -> None:
        """Replace a received delta by the contents of the message.

        Raises TransportError if the copy of the last contents differs from the sender's.
        """
        contents = staged.contents
        key = (bucket, staged.message.peer)
        copy = self._received.setdefault(key, torch.empty_like(contents))
        if staged.sent_nbytes == contents.numel():
            copy.copy_(contents)
            return
        apply(contents[: staged.sent_nbytes].numpy(), copy.numpy())
        if box_digest(copy) != staged.digest:
            raise TransportError(
                f"bucket {bucket}, peer {staged.message.peer}: after applying the delta, the copy "
                "of the last message differs from the message that was packed. The next switch "
                "sends everything",
                code="delta-mismatch",
            )
        contents.copy_(copy)

    @property
    def copies_nbytes(self) -> int:
        """Bytes of host memory of this rank's copies."""
        return sum(copy.numel() for copy in chain(self._sent.values(), self._received.values()))

    def close(self) -> None:
        """Free the copies; the next fill must be whole."""
        self._sent.clear()
        self._received.clear()
