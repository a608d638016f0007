"""Host memory through which weights pass, bucket after bucket, in the same pages.

A switch fills modules in loader layout and drops them as soon as vLLM has packed them. Fresh pages for each would cost
several times what the copy costs; here the pages of one bucket serve the next.

    pool.lend([(numel, dtype), …]) -> tensors --last of them gone--> pages are free --lend--> …
                                          lent before a trim ─┐                └──trim──> system
                                                              └────────────────────────> system
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from collections.abc import Sequence

import torch

_ALIGNMENT = 64  # bytes, of every tensor


class StagingPool:
    """One run of pages, lent as a whole and taken back when the last tensor over it is gone.

    Memory: what was lent last, or more if more was lent before; what is lent while the pages are still out (somebody
    kept a tensor) is new memory, and the larger of the two is kept.
    """

    def __init__(self) -> None:
        self._free: _Pages | None = None
        self._num_trims = 0

    @property
    def free_nbytes(self) -> int:
        """Bytes that are kept and not lent."""
        return 0 if self._free is None else self._free.nbytes

    def lend(self, sizes: Sequence[tuple[int, torch.dtype]]) -> list[torch.Tensor]:
        """Flat tensors of these numbers of elements on the CPU, contents undefined, each with a storage of its own."""
        starts, end = [], 0
        for numel, dtype in sizes:
            starts.append(end)
            end += -(-numel * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        if not end:
            return [torch.empty(numel, dtype=dtype) for numel, dtype in sizes]
        pages, self._free = self._free, None
        if pages is None or pages.nbytes < end:
            del pages  # before the new ones, not beside them
            pages = _Pages(end)
        loan = (ctypes.c_ubyte * pages.nbytes).from_buffer(pages.memory)
        # torch keeps `loan` as long as a storage over it lives
        weakref.finalize(loan, _take_back, weakref.ref(self), pages, self._num_trims).atexit = False
        return [
            torch.frombuffer(loan, dtype=dtype, count=numel, offset=start) if numel else torch.empty(0, dtype=dtype)
            for start, (numel, dtype) in zip(starts, sizes, strict=True)
        ]

    def take_back(self, pages: _Pages, num_trims: int) -> None:
        """Keep pages, lent after so many trims, for the next loan; not after a trim, nor beside larger ones."""
        if self._num_trims == num_trims and self.free_nbytes < pages.nbytes:
            self._free = pages

    def trim(self) -> None:
        """Give the pages back to the system: those that are lent when the last tensor over them is gone."""
        self._num_trims += 1
        self._free = None


class _Pages:
    """An anonymous mapping, in huge pages where it is large enough; unmapped when it is collected."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self.memory = mmap.mmap(-1, self.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.memory.madvise(mmap.MADV_HUGEPAGE)


def _take_back(pool: weakref.ref[StagingPool], pages: _Pages, num_trims: int) -> None:
    """The last tensor over these pages is gone."""
    owner = pool()
    if owner is not None:
        owner.take_back(pages, num_trims)
