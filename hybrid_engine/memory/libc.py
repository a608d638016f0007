"""The C library of this process, for system calls that Python does not offer in the form needed."""

from __future__ import annotations

import ctypes
import functools
import os
from typing import NoReturn


@functools.cache
def libc() -> ctypes.CDLL:
    """Return the C library; its calls set the error number that `raise_errno` reads."""
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
    library.mremap.restype = ctypes.c_void_p
    library.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int]
    library.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    library.prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]
    library.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    return library


def raise_errno(what: str) -> NoReturn:
    """Raise the OSError of the last call, which was `what`."""
    code = ctypes.get_errno()
    raise OSError(code, f"{what}: {os.strerror(code)}")
