"""The software GPU as a test sees it: counts of calls, calls that fail, what is there, and what the checker reports."""

from __future__ import annotations

import ctypes
import functools
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

OUT_OF_MEMORY = 2
NOT_SUPPORTED = 801


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL("libcuda.so.1")
    library.software_gpu_counts.restype = ctypes.c_size_t
    return library


@dataclass(frozen=True)
class VirtualMemory:
    """What this process has: physical memory by handles, mappings, address ranges."""

    num_allocations: int
    num_mappings: int
    num_reservations: int


def virtual_memory() -> VirtualMemory:
    numbers = [ctypes.c_uint64() for _ in range(3)]
    _library().software_gpu_virtual_memory(*map(ctypes.byref, numbers))
    return VirtualMemory(*(number.value for number in numbers))


def counts() -> Counter[str]:
    """How often this process has called each function, and launched each kernel ("kernel": all of them)."""
    room = 0
    while True:
        text = ctypes.create_string_buffer(room)
        needed = _library().software_gpu_counts(text, ctypes.c_size_t(room))
        if needed <= room:
            break
        room = 2 * needed
    lines = (line.rpartition(" ") for line in text.value.decode().splitlines())
    return Counter({name: int(number) for name, _, number in lines})


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """What is called within the block, in a counter that is filled at its end."""
    before, within = counts(), Counter[str]()
    try:
        yield within
    finally:
        within.update(counts() - before)


@contextmanager
def failing(name: str, first: int = 1, num: int = 1, error: int = OUT_OF_MEMORY) -> Iterator[None]:
    """Let calls of `name` within the block fail: so many, from the one with this number on (1: the next one)."""
    _library().software_gpu_fail(name.encode(), ctypes.c_uint64(first), ctypes.c_uint64(num), error)
    try:
        yield
    finally:
        _library().software_gpu_fail(name.encode(), ctypes.c_uint64(1), ctypes.c_uint64(0), 0)


class Reports:
    """What the checker reports of all processes that share the file SOFTWARE_GPU_REPORTS."""

    def __init__(self) -> None:
        self._path = Path(os.environ["SOFTWARE_GPU_REPORTS"])
        self._read_nbytes = self._nbytes()

    def new(self) -> str:
        """Text since the last call."""
        with self._path.open("rb") if self._path.exists() else open(os.devnull, "rb") as file:
            file.seek(self._read_nbytes)
            text = file.read()
        self._read_nbytes += len(text)
        return text.decode(errors="replace")

    def require_none(self) -> None:
        """Fail the test if there is any since the last call."""
        if text := self.new():
            pytest.fail(f"the checker of the software GPU reports:\n{text}", pytrace=False)

    def _nbytes(self) -> int:
        return self._path.stat().st_size if self._path.exists() else 0
