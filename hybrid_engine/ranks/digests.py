"""Digests, for ranks to compare, and to tell whether bytes changed: of boxes of tensors, and of what has a text.

    on the host      xxh3 of the bytes, 64 bits, faster than a copy of them
    on a device      exact products of the bytes with fixed random numbers, 512 times smaller; of those, xxh3

Bytes that differ have the same digest with a probability of about 2**-64. It is no protection against an attacker.
"""

from __future__ import annotations

import ctypes
import hashlib
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
import xxhash

from hybrid_engine.ranks.torch_internals import int8_product

_LOWEST = -(2**62)
"""Less than any number that ranks compare, and than its negative."""

_PIECE_NUMEL = 1 << 24
"""Elements of a piece: a box that is cast, or that does not lie in one run, is copied piece by piece."""

_ROW = 1 << 14
"""Bytes that become eight 32-bit sums; no sum overflows below 2**17."""

_MOST_PENDING_NBYTES = 1 << 24
"""Memory of a device for what is to be hashed."""

_FEWEST_ROWS = 16  # cuBLAS multiplies more than so many


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


def box_digest(box: torch.Tensor, dtype: torch.dtype | None = None) -> int:
    """The digest of the bytes that `box`, any view, has in `dtype` (default: its own), in row-major order.

    Returns a signed 64-bit number. Boxes of one shape and dtype have the same digest wherever and however they lie, on
    devices of one kind. Waits for the device.
    """
    return box_digests([box], [dtype or box.dtype])[0]


@torch.no_grad()
def box_digests(boxes: Iterable[torch.Tensor], dtypes: Iterable[torch.dtype] | None = None) -> list[int]:
    """The digest of each box, as `box_digest` has it; `dtypes`: one for each box.

    One copy brings what is to be hashed from a device, and one more for every 16 MiB of that, which lie on the device
    twice: the host waits for the device as often, where a wait for each box takes longer than to read it.
    """
    boxes = list(boxes)
    dtypes = [box.dtype for box in boxes] if dtypes is None else dtypes
    digests = [xxhash.xxh3_64() for _ in boxes]
    on_devices: dict[torch.device, _Pending] = {}
    for digest, box, dtype in zip(digests, boxes, dtypes, strict=True):
        for flat in _flat_pieces(box, dtype):
            if flat.device.type == "cpu":
                _update(digest, flat)
            else:
                on_devices.setdefault(flat.device, _Pending()).add(digest, flat)
    for pending in on_devices.values():
        pending.hash()
    return [_number(digest) for digest in digests]


class _Pending:
    """What lies on one device and is to be hashed, in order."""

    def __init__(self) -> None:
        self._pairs: list[tuple[xxhash.xxh3_64, torch.Tensor]] = []
        self._nbytes = 0

    def add(self, digest: xxhash.xxh3_64, flat: torch.Tensor) -> None:
        if self._nbytes + flat.numel() > _MOST_PENDING_NBYTES:
            self.hash()
        self._pairs.append((digest, flat))
        self._nbytes += flat.numel()

    def hash(self) -> None:
        """Bring all from the device, and hash it."""
        if not self._pairs:
            return
        flats = [flat for _, flat in self._pairs]
        copied = (torch.cat(flats) if len(flats) > 1 else flats[0]).cpu()
        for (digest, _), flat in zip(self._pairs, copied.split([flat.numel() for flat in flats]), strict=True):
            _update(digest, flat)
        self._pairs, self._nbytes = [], 0


def _flat_pieces(box: torch.Tensor, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """What to hash of a box, [n] uint8, in order: its bytes; on a device a smaller form of these."""
    for piece in _pieces(box):
        run = piece.to(dtype).contiguous()
        flat = run.as_strided((run.numel(),), (1,)).view(torch.uint8)
        yield flat if flat.device.type == "cpu" else _shrunk(flat)


def _update(digest: xxhash.xxh3_64, flat: torch.Tensor) -> None:
    # not by numpy(): torch does not resize a storage any more that it has lent
    digest.update((ctypes.c_ubyte * flat.numel()).from_address(flat.data_ptr()))


def _number(digest: xxhash.xxh3_64) -> int:
    return int.from_bytes(digest.digest(), "big", signed=True)


def _pieces(box: torch.Tensor) -> Iterator[torch.Tensor]:
    """Views that together are the box, in order: as few as bound the memory of copies, by its shape alone."""
    if box.numel() <= _PIECE_NUMEL:
        yield box
    elif len(box) == 1:
        yield from _pieces(box[0])
    else:
        for part in box.split(max(1, _PIECE_NUMEL * len(box) // box.numel())):
            yield from _pieces(part)


def _shrunk(flat: torch.Tensor) -> torch.Tensor:
    """[n] uint8 as about n / 512 bytes, at the speed of the device's memory; few bytes as they are.

    Rows of the bytes as signed 8-bit numbers times a fixed random matrix, summed exactly in 32 bits. Two rows that
    differ give the same eight numbers with a probability of 255**-8 (multilinear hashing; Carter and Wegman, 1979).
    """
    rows = flat.numel() // _ROW
    if rows <= _FEWEST_ROWS:
        return flat
    whole, rest = flat[: rows * _ROW], flat[rows * _ROW :]
    if whole.data_ptr() % 16:  # as matrices must be aligned
        whole = whole.clone()
    sums = int8_product(whole.view(torch.int8).view(rows, _ROW), _factors(flat.device))
    return torch.cat([sums.view(-1).view(torch.uint8), rest])


def _factors(device: torch.device) -> torch.Tensor:
    """[_ROW, 8] int8, column by column; the same on all ranks and devices.

    Made in a thread of its own: a pool that the caller allocates from, as vLLM while it loads weights, is the caller's
    alone, and this stays for good.
    """
    with _one_at_a_time:
        if device not in _made_factors:
            with ThreadPoolExecutor(1) as thread:
                _made_factors[device] = thread.submit(_new_factors, device).result()
        return _made_factors[device]


_made_factors: dict[torch.device, torch.Tensor] = {}
_one_at_a_time = threading.Lock()


def _new_factors(device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(-127, 128, (8, _ROW), generator=generator, dtype=torch.int8, device="cpu").to(device).t()
