"""Digests of boxes of tensors and of texts, for comparison between ranks and for detecting changes.

    on the host      xxh3 of the bytes, 64 bits; faster than copying them
    on a device      exact products of the bytes with fixed random numbers, 512 times smaller,
                     and xxh3 of those

Different bytes have equal digests with a probability of about 2**-64. Digests give no protection
against an attacker.
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
"""Lower than any number that ranks compare, and than its negative."""

_PIECE_NUMEL = 1 << 24
"""Elements of a piece. A box that must be cast, or is not contiguous, is copied piece by piece."""

_ROW = 1 << 14
"""Bytes that become eight 32-bit sums. Below 2**17 no sum can overflow."""

_MAX_PENDING_NBYTES = 1 << 24
"""Bytes on a device that may wait for hashing."""

_MIN_ROWS = 16  # cuBLAS multiplies only matrices with more rows


def text_digest(*texts: str) -> int:
    """Return a 56-bit digest, so that `extremes_of` can hold it and its negative."""
    digest = hashlib.blake2b(repr(texts).encode(), digest_size=7)
    return int.from_bytes(digest.digest(), "big")


def extremes_of(values: Sequence[int | None]) -> torch.Tensor:
    """Return each value and its negative, int64 [N, 2], for comparison between ranks.

    After an elementwise maximum over all ranks, `are_same` returns the result. None takes no part.
    """
    pairs = [(_LOWEST, _LOWEST) if value is None else (value, -value) for value in values]
    return torch.tensor(pairs, dtype=torch.int64)


def are_same(extremes: torch.Tensor) -> bool:
    """Return True if all ranks that took part passed the same numbers; see `extremes_of`."""
    highest, negated_lowest = extremes.unbind(1)
    # _LOWEST on both sides: None on all ranks.
    return bool(((highest == -negated_lowest) | (highest == _LOWEST)).all())


def box_digest(box: torch.Tensor) -> int:
    """Return the digest of the bytes of `box`, in row-major order.

    The result is a signed 64-bit number. Boxes of one shape and dtype have equal digests for any
    strides, on devices of the same kind. `box` may be any view. Waits for the device.
    """
    return box_digests([box])[0]


@torch.no_grad()
def box_digests(
    boxes: Iterable[torch.Tensor],
    dtypes: Iterable[torch.dtype] | None = None,
) -> list[int]:
    """Return the `box_digest` of each box; `dtypes` has one dtype for each box.

    The data to hash leaves a device in one copy, plus one for every further 16 MiB. These bytes are
    on the device twice meanwhile. The host waits once per copy, because a wait for each box would
    take longer than reading it.
    """
    boxes = list(boxes)
    dtypes = [box.dtype for box in boxes] if dtypes is None else dtypes
    digests = [xxhash.xxh3_64() for _ in boxes]
    on_devices: dict[torch.device, _Pending] = {}
    for digest, box, dtype in zip(digests, boxes, dtypes, strict=True):
        for piece in _pieces(box):
            run = piece.to(dtype).contiguous()  # a view if nothing has to change
            flat = run.as_strided((run.numel(),), (1,)).view(torch.uint8)
            if flat.device.type == "cpu":
                _update(digest, flat)
            else:
                pending = on_devices.setdefault(flat.device, _Pending())
                pending.add(digest, _shrunk(flat))
    for pending in on_devices.values():
        pending.hash()
    return [int.from_bytes(digest.digest(), "big", signed=True) for digest in digests]


class _Pending:
    """Data on one device that is still to be hashed, in order."""

    def __init__(self) -> None:
        self._pairs: list[tuple[xxhash.xxh3_64, torch.Tensor]] = []
        self._nbytes = 0

    def add(self, digest: xxhash.xxh3_64, flat: torch.Tensor) -> None:
        if self._nbytes + flat.numel() > _MAX_PENDING_NBYTES:
            self.hash()
        self._pairs.append((digest, flat))
        self._nbytes += flat.numel()

    def hash(self) -> None:
        """Copy the data from the device and hash it."""
        if not self._pairs:
            return
        flats = [flat for _, flat in self._pairs]
        sizes = [flat.numel() for flat in flats]
        joined = (torch.cat(flats) if len(flats) > 1 else flats[0]).cpu()
        for (digest, _), part in zip(self._pairs, joined.split(sizes), strict=True):
            _update(digest, part)
        self._pairs = []
        self._nbytes = 0


def _update(digest: xxhash.xxh3_64, flat: torch.Tensor) -> None:
    # Not by numpy(): torch refuses to resize a storage that it has exported.
    array_type = ctypes.c_ubyte * flat.numel()
    digest.update(array_type.from_address(flat.data_ptr()))


def _pieces(box: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield views that together are the box, in order.

    They depend only on its shape, and are as few as the limit on the memory of copies permits.
    """
    if box.numel() <= _PIECE_NUMEL:
        yield box
    elif len(box) == 1:
        yield from _pieces(box[0])
    else:
        # [1000, 1000, 100] has 10**8 elements, and a piece 2**24: 167 rows of the first dim.
        for part in box.split(max(1, _PIECE_NUMEL * len(box) // box.numel())):
            yield from _pieces(part)


def _shrunk(flat: torch.Tensor) -> torch.Tensor:
    """Reduce [n] uint8 to about n / 512 bytes, at the speed of the device's memory.

    Rows of the bytes, as signed 8-bit numbers, are multiplied with a fixed random matrix and summed
    exactly in 32 bits. Two different rows give the same eight numbers with a probability of 255**-8
    (multilinear hashing; Carter and Wegman, 1979). Few bytes are returned unchanged.
    """
    rows = flat.numel() // _ROW
    if rows <= _MIN_ROWS:
        return flat
    end = rows * _ROW
    whole = flat[:end]
    rest = flat[end:]
    if whole.data_ptr() % 16:  # cuBLAS needs aligned matrices
        whole = whole.clone()
    matrix = whole.view(torch.int8).view(rows, _ROW)
    sums = int8_product(matrix, _factors(flat.device))
    return torch.cat([sums.view(-1).view(torch.uint8), rest])


def _factors(device: torch.device) -> torch.Tensor:
    """Return the random matrix, [_ROW, 8] int8 in column-major order, equal on all ranks.

    It is allocated in a separate thread. The calling thread may be using a temporary memory pool,
    as vLLM does while it loads weights, and the matrix outlives any pool.
    """
    with _factors_lock:
        if device not in _factors_by_device:
            with ThreadPoolExecutor(1) as thread:
                _factors_by_device[device] = thread.submit(_new_factors, device).result()
        return _factors_by_device[device]


_factors_by_device: dict[torch.device, torch.Tensor] = {}
_factors_lock = threading.Lock()


def _new_factors(device: torch.device) -> torch.Tensor:
    # On the host and from a fixed seed: generators of devices draw other numbers.
    generator = torch.Generator().manual_seed(0)
    shape = (8, _ROW)
    columns = torch.randint(-127, 128, shape, generator=generator, dtype=torch.int8, device="cpu")
    return columns.to(device).t()
