"""What a CPU job tells the system about the C library's memory."""

from __future__ import annotations

import ctypes
import ctypes.util
import functools

import torch

_HUGE_PAGE = 2 * 1024**2
_MADV_HUGEPAGE = 14  # <linux/mman.h>


def trim() -> None:
    """Make the C library return its free pages, where it can (glibc keeps freed blocks of up to 32 MiB otherwise).

    Takes milliseconds; without it a released CPU model keeps about as much memory as it had.
    """
    malloc_trim = getattr(_libc(), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)


def prefer_huge_pages(storage: torch.UntypedStorage) -> None:
    """Ask for pages of 2 MiB behind memory that was allocated and not touched yet; where there are none, nothing.

    A first write then costs little more than any other; with pages of 4 KiB it takes several times as long.
    """
    start = -(-storage.data_ptr() // _HUGE_PAGE) * _HUGE_PAGE
    stop = (storage.data_ptr() + storage.nbytes()) // _HUGE_PAGE * _HUGE_PAGE
    if start < stop:
        _libc().madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), _MADV_HUGEPAGE)


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(ctypes.util.find_library("c"))
