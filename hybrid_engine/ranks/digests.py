"""Digests, for ranks to compare: of boxes of tensors, computed where the bytes lie, and of what has a text.

A box is taken in pieces, each piece as 32-bit words w; with fixed random odd 64-bit numbers r and m, mod 2**64:

    piece  = sum over i of r[i] * w[i]            digest = (... (piece[0] * m + piece[1]) * m + ...)

One word that differs always shows: an odd number times what differs is not 0. Several that differ are missed with a
probability of at most 2**-32 (multilinear hashing; Dietzfelbinger, 1996). It is no protection against an attacker.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator, Sequence

import torch

_LOWEST = -(2**62)
"""Less than any number that ranks compare, and than its negative."""

_PIECE_NUMEL = 1 << 18
"""Elements of a piece: on the device two copies of it, in 64 bits, beside the numbers r."""

_FOLD = -7046029254386353131  # 2**64 divided by the golden ratio, odd
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
"""Bytes per element -> as what elements are read, where their number does not make whole 32-bit words."""


def text_digest(*texts: str) -> int:
    """A number of 56 bits, so that `extremes_of` can hold it and its negative."""
    return int.from_bytes(hashlib.blake2b(repr(texts).encode(), digest_size=7).digest(), "big")


def extremes_of(values: Sequence[int | None]) -> torch.Tensor:
    """Numbers to compare, int64 [N, 2]: once each element is the largest of all ranks', `are_same` tells. None takes no
    part."""
    given = [(_LOWEST, _LOWEST) if value is None else (value, -value) for value in values]
    return torch.tensor(given, dtype=torch.int64)


def are_same(extremes: torch.Tensor) -> bool:
    """Whether all ranks that took part gave the same numbers."""
    highest, negated_lowest = extremes.unbind(1)
    return bool(((highest == -negated_lowest) | (highest == _LOWEST)).all())


@torch.no_grad()
def box_digest(box: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The digest of the bytes that `box`, any view, has in `dtype`, in row-major order: an int64 scalar on its device.

    Boxes of one shape have the same pieces, so equal digests are equal bytes wherever and however the boxes lie.
    """
    digest = torch.zeros((), dtype=torch.int64, device=box.device)
    for piece in _pieces(box):
        words = _words(piece.to(dtype).contiguous())
        digest = digest * _FOLD + (words * _factors(words.device)[: words.numel()]).sum()
    return digest


def _pieces(box: torch.Tensor) -> Iterator[torch.Tensor]:
    """Views that together are the box, in order."""
    if box.numel() <= _PIECE_NUMEL:
        yield box
    elif len(box) == 1:
        yield from _pieces(box[0])
    else:
        for part in box.split(max(1, _PIECE_NUMEL * len(box) // box.numel())):
            yield from _pieces(part)


def _words(piece: torch.Tensor) -> torch.Tensor:
    flat = piece.view(-1)
    if flat.numel() * flat.element_size() % 4:
        return flat.view(_WORDS[flat.element_size()]).to(torch.int64)
    if flat.storage_offset() * flat.element_size() % 4:  # a view of words must begin at a whole one
        flat = flat.clone()
    return flat.view(torch.int32).to(torch.int64)


@functools.cache
def _factors(device: torch.device) -> torch.Tensor:
    """The numbers r; the same on all ranks and devices."""
    generator = torch.Generator().manual_seed(0)
    most_words = 4 * _PIECE_NUMEL  # of complex numbers, 16 bytes each
    random = torch.randint(-(2**63), 2**63 - 1, (most_words,), generator=generator, dtype=torch.int64)
    return (random | 1).to(device)
