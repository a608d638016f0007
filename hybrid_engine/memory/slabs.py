"""Host memory that is used again: flat tensors whose pages stay when a tensor dies and serve the next one.

A switch fills module after module into memory of the same few sizes, and drops it as soon as vLLM has packed it. Fresh
pages for each would cost several times what the copy costs; here the pages of one bucket serve all of them.

    pool.take(numel, dtype) -> tensor (contents undefined) --last reference gone--> slab is free --take--> …
                                                                                         └──trim──> system
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from bisect import insort

import torch

HUGE_PAGE = 2 * 1024**2
"""Bytes; slabs are multiples of it, and the system is asked to back them with such pages."""

SMALLEST = HUGE_PAGE // 2
"""Bytes; below, an ordinary tensor is given: the allocator keeps such memory anyway."""


class SlabPool:
    """Slabs of anonymous memory, each used by one tensor at a time.

    A slab is given to a tensor that needs at least half of it. Free slabs stay until `trim`, or until the pool goes.
    """

    def __init__(self) -> None:
        self.free_nbytes = 0
        self.used_nbytes = 0
        self._free: list[_Slab] = []  # in order of size

    @property
    def nbytes(self) -> int:
        """Bytes of all slabs, used and free."""
        return self.free_nbytes + self.used_nbytes

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat tensor on the CPU, contents undefined. Its memory comes back when the last tensor over it is gone."""
        needed = numel * dtype.itemsize
        if needed < SMALLEST:
            return torch.empty(numel, dtype=dtype)
        slab = self._fitting(needed)
        if slab is None:
            slab = _Slab(-(-needed // HUGE_PAGE) * HUGE_PAGE)
        self.used_nbytes += slab.nbytes
        pages = (ctypes.c_ubyte * slab.nbytes).from_buffer(slab.pages)
        # torch keeps `pages` as long as the tensor's storage lives
        weakref.finalize(pages, _give_back, weakref.ref(self), slab).atexit = False
        return torch.frombuffer(pages, dtype=dtype, count=numel)

    def trim(self) -> None:
        """Give free slabs back to the system."""
        self._free.clear()
        self.free_nbytes = 0

    def _fitting(self, needed: int) -> _Slab | None:
        """The smallest free slab that is large enough and not more than twice too large."""
        for index, slab in enumerate(self._free):
            if needed <= slab.nbytes <= max(2 * needed, HUGE_PAGE):
                self.free_nbytes -= slab.nbytes
                return self._free.pop(index)
        return None


class _Slab:
    """One anonymous mapping; unmapped when it is collected."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.pages.madvise(mmap.MADV_HUGEPAGE)

    def __lt__(self, other: _Slab) -> bool:
        return self.nbytes < other.nbytes


def _give_back(pool: weakref.ref[SlabPool], slab: _Slab) -> None:
    """The tensor over a slab is gone; so is the slab if the pool is."""
    owner = pool()
    if owner is not None:
        owner.used_nbytes -= slab.nbytes
        insort(owner._free, slab)
        owner.free_nbytes += slab.nbytes
