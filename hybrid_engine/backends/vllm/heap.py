"""Give memory that was freed back to the operating system."""

from __future__ import annotations

import ctypes
import ctypes.util


def trim() -> None:
    """Make the C library return its free pages, where it can (glibc keeps freed blocks of up to 32 MiB otherwise).

    Takes milliseconds; without it a released CPU model keeps about as much memory as it had.
    """
    library = ctypes.util.find_library("c")
    malloc_trim = getattr(ctypes.CDLL(library), "malloc_trim", None) if library else None
    if malloc_trim is not None:
        malloc_trim(0)
