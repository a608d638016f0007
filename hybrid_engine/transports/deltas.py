"""Deltas of messages: positions and values of what changed since the message before, and the copies that takes.

    sender     packs a message -> compares it with a copy of the last one -> its delta, or all of it if that is less
    receiver   writes the delta into its own copy of the last one -> unpacks that as it unpacks any message

A word is two bytes, whatever they belong to: an element in bfloat16, half of one in float32. Bits are compared. A delta
has

    how many words of each block of 256 changed     int16 [blocks]
    their values                                    int16 [changed]
    their places in the block                       uint8 [changed]

so 3 bytes for each of them, and 1/256 of the message. A fill is whole, or one of deltas, for all ranks alike: it is
whole unless all of them ended the last one. Both make copies. In a fill of deltas each sender chooses for each message.
The digest of what was packed goes with a delta, so a copy that differs from the sender's is an error.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch.nn.functional import pad

from hybrid_engine.errors import TransportError
from hybrid_engine.ranks.digests import box_digest

_WORD = torch.int16
BLOCK = 256
"""Words; a place in one is a byte."""
_CHANGED_NBYTES = _WORD.itemsize + 1
_PARTS = {"cpu": 1 << 12, "cuda": 1 << 16}
"""Blocks that are looked at together: what a cache holds, and enough for a GPU. A position takes 8 bytes."""


def encode(new: torch.Tensor, old: torch.Tensor) -> tuple[torch.Tensor | None, int]:
    """The delta that makes `new` of `old`, None where it would take as many bytes; and how many words changed.

    Both are uint8 [n], n even; `old` may be on the host. Memory: the delta, and parts of both at a time.
    """
    part_numel = _PARTS[new.device.type] * BLOCK
    pairs = list(zip(new.view(_WORD).split(part_numel), old.view(_WORD).split(part_numel), strict=True))
    # compared twice, which takes less than new memory for what was found the first time
    counts = torch.cat([_by_block(_differing(*pair)) for pair in pairs])
    changed = int(counts.sum(dtype=torch.int64))
    if not changed:
        return new[:0], 0
    if (nbytes := counts.nbytes + changed * _CHANGED_NBYTES) >= new.numel():
        return None, changed
    delta = torch.empty(nbytes, dtype=torch.uint8, device=new.device)
    head, values, places = _split(delta, len(counts))
    head.copy_(counts)
    end = 0
    for part, old_part in pairs:
        positions = _positions(_differing(part, old_part))
        begin, end = end, end + len(positions)
        torch.index_select(part, 0, positions, out=values[begin:end])
        places[begin:end].copy_(positions.bitwise_and_(BLOCK - 1))
    return delta, changed


def apply(delta: torch.Tensor, old: torch.Tensor) -> None:
    """Make of `old`, uint8 [n], in place, what `delta` was made from. Raises TransportError where it is none for it."""
    if not delta.numel():
        return
    words = old.view(_WORD)
    num_blocks = -(-len(words) // BLOCK)
    refusal = TransportError(f"{delta.numel()} bytes are no delta of a message of {old.numel()}")
    rest = delta.numel() - num_blocks * _WORD.itemsize
    if rest < 0 or rest % _CHANGED_NBYTES:
        raise refusal
    counts, values, places = _split(delta, num_blocks)
    ends = counts.cumsum(0, dtype=torch.int64)
    if int(ends[-1]) != len(values) or int(counts.min()) < 0:
        raise refusal
    end, together = 0, _PARTS[old.device.type]
    for first in range(0, num_blocks, together):
        part = counts[first : first + together]
        begin, end = end, int(ends[first + len(part) - 1])
        starts = torch.arange(first, first + len(part), device=old.device).mul_(BLOCK)
        positions = starts.repeat_interleave(part.to(torch.int64), output_size=end - begin).add_(places[begin:end])
        words.scatter_(0, positions, values[begin:end])


def _split(delta: torch.Tensor, num_blocks: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Numbers by block, values, places."""
    head = num_blocks * _WORD.itemsize
    end = head + (delta.numel() - head) // _CHANGED_NBYTES * _WORD.itemsize
    return delta[:head].view(_WORD), delta[head:end].view(_WORD), delta[end:]


def _by_block(mask: torch.Tensor) -> torch.Tensor:
    if rest := -len(mask) % BLOCK:
        mask = pad(mask, (0, rest))
    return mask.view(-1, BLOCK).sum(1, dtype=_WORD)


def _differing(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    # on the host numpy takes less than half of torch's time, for this and for positions
    if new.device.type == "cpu":
        return torch.from_numpy(new.numpy() != old.numpy())
    return new != old.to(new.device, non_blocking=True)


def _positions(mask: torch.Tensor) -> torch.Tensor:
    return mask.nonzero().view(-1) if mask.device.type != "cpu" else torch.from_numpy(np.flatnonzero(mask.numpy()))


@dataclass(slots=True)
class DeltaCount:
    """Of the messages that a rank sent in a fill; all 0 where none can be a delta.

    Attributes:
        num_deltas, num_whole: messages that went as deltas, and whole.
        num_words, num_changed: words that were compared, and that had changed.
        copies_nbytes: host memory of this rank's copies.
    """

    num_deltas: int = 0
    num_whole: int = 0
    num_words: int = 0
    num_changed: int = 0
    copies_nbytes: int = 0

    @property
    def density(self) -> float | None:
        """Share of the words that changed; None where none were compared."""
        return self.num_changed / self.num_words if self.num_words else None


class Deltas:
    """One rank's copies of the messages that it sent and received last, and which of them their receivers have.

    The copies are in host memory, as many bytes as the messages of a fill that leaves nothing out, until `close`.

    Attributes:
        is_whole: no message of this fill is a delta.
    """

    def __init__(self) -> None:
        self.is_whole = True
        self._count = DeltaCount()
        self._sent: dict[tuple[int, int], torch.Tensor] = {}  # by bucket and peer
        self._received: dict[tuple[int, int], torch.Tensor] = {}
        self._delivered: set[tuple[int, int]] = set()  # those sent since all went whole
        self._came: dict[int, int] = {}  # bytes of deltas by sender

    def begin(self, *, whole: bool) -> None:
        """Begin a fill; the same on all ranks. Raises nothing."""
        self.is_whole, self._count = whole, DeltaCount()
        self._came.clear()
        if whole:
            self._delivered.clear()

    def outgoing(self, bucket: int, peer: int, contents: torch.Tensor) -> tuple[torch.Tensor | None, int]:
        """The delta of a message's contents, uint8 [n], and their digest; None and 0 where they go whole."""
        copy, delta = self._copy(self._sent, (bucket, peer), contents.numel()), None
        if (bucket, peer) in self._delivered:
            delta, changed = encode(contents, copy)
            self._count.num_words += contents.numel() // _WORD.itemsize
            self._count.num_changed += changed
        copy.copy_(contents)
        self._delivered.add((bucket, peer))
        self._count.num_deltas += delta is not None
        self._count.num_whole += delta is None
        return delta, 0 if delta is None else box_digest(copy)

    def received(self, bucket: int, peer: int, nbytes: int) -> torch.Tensor:
        """The copy of a message, uint8 [nbytes] on the host."""
        return self._copy(self._received, (bucket, peer), nbytes)

    def arrived(self, bucket: int, peer: int, contents: torch.Tensor, delta: torch.Tensor | None, digest: int) -> None:
        """Write a delta into the copy and that into `contents`, or `contents` into the copy, unless it is its end.

        Raises TransportError where the copy is not the sender's.
        """
        copy = self._received[bucket, peer][-contents.numel() :]
        is_copy = contents.data_ptr() == copy.data_ptr()
        if delta is not None:
            apply(delta.cpu(), copy)
            if box_digest(copy) != digest:
                raise TransportError(
                    f"bucket {bucket}, peer {peer}: with what changed, the copy of the last message is not the message "
                    "that was packed. The next switch sends everything"
                )
            self._came[peer] = delta.numel()
            if not is_copy:
                contents.copy_(copy)
        elif not is_copy:
            copy.copy_(contents)

    def take_came(self) -> dict[int, int]:
        """Bytes of the deltas that came, by sender, since the last call."""
        came, self._came = self._came, {}
        return came

    def counted(self) -> DeltaCount:
        """Count the messages sent since `begin`, and the copies."""
        copies = (*self._sent.values(), *self._received.values())
        return replace(self._count, copies_nbytes=sum(copy.numel() for copy in copies))

    def close(self) -> None:
        """Free the copies; the next fill must be whole."""
        for held in (self._sent, self._received, self._delivered):
            held.clear()

    def _copy(self, copies: dict[tuple[int, int], torch.Tensor], key: tuple[int, int], nbytes: int) -> torch.Tensor:
        if key not in copies:
            copies[key] = torch.zeros(nbytes, dtype=torch.uint8, device="cpu")
        return copies[key]
