"""Access of tests to the software GPU: counts, injected failures, memory, and reports."""

from __future__ import annotations

import ctypes
import functools
import gc
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from importlib.metadata import PackageNotFoundError
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from unittest import SkipTest

import pytest

from tests.software_gpu.build import build_driver

OUT_OF_MEMORY = 2
NOT_SUPPORTED = 801
GARBAGE = 0xA5
"""Value of every byte of new memory, except in large pieces."""
GRANULE = 65536
"""Granularity of the driver that `load_driver` loads."""


@functools.cache
def library() -> ctypes.CDLL:
    """Return libcuda, for calls that torch does not make."""
    library = ctypes.CDLL("libcuda.so.1")
    assert hasattr(library, "software_gpu_counts"), (
        "this process had loaded the driver of a GPU before"
    )
    library.software_gpu_counts.restype = library.software_gpu_mapped.restype = ctypes.c_size_t
    for function in (library.software_gpu_timeline_compute, library.software_gpu_timeline_scale):
        function.argtypes = [ctypes.c_double]
    return library


@functools.cache
def _bindings_over_driver() -> ModuleType:
    """Return `cuda.bindings.driver` with the software driver, or raise SkipTest."""
    if find_spec("cuda") is None or find_spec("cuda.bindings") is None:
        raise SkipTest("cuda-bindings is missing: requirements-cpu.txt has it")
    if shutil.which("g++") is None or shutil.which("gcc") is None:
        raise SkipTest("the software driver requires a C++ compiler (gcc and g++)")
    try:
        path = build_driver()
    except PackageNotFoundError as error:
        raise SkipTest(
            f"{error.name} is missing, which has cuda.h: requirements-cpu.txt has it"
        ) from None
    os.environ["SOFTWARE_GPU_PAGE_NBYTES"] = str(GRANULE)
    ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
    from cuda.bindings import driver

    return driver


def load_driver() -> ModuleType:
    """Load the driver alone, with a torch without CUDA, and return `cuda.bindings.driver` for it,
    initialized.

    The library has the driver's name, so that later loads of libcuda.so.1 get this one, also by
    vLLM's compiled allocator. The driver's state belongs to the process; a limit set by an earlier
    test is removed.
    """
    api = _bindings_over_driver()
    gc.collect()  # Reference cycles of earlier tests may hold memory.
    limit(None)
    (code,) = api.cuInit(0)
    assert code == api.CUresult.CUDA_SUCCESS
    return api


@dataclass(frozen=True)
class VirtualMemory:
    """Numbers of physical allocations, mappings and address ranges, and bytes of the memory."""

    num_allocations: int = 0
    num_mappings: int = 0
    num_reservations: int = 0
    nbytes: int = 0


def virtual_memory() -> VirtualMemory:
    numbers = [ctypes.c_uint64() for _ in range(4)]
    library().software_gpu_virtual_memory(*map(ctypes.byref, numbers))
    return VirtualMemory(*(number.value for number in numbers))


def mapped() -> list[tuple[int, int]]:
    """Return (address, bytes) of all mapped and accessible memory of this process, in order."""
    ranges = ((ctypes.c_uint64 * 2) * library().software_gpu_mapped(None, ctypes.c_size_t(0)))()
    library().software_gpu_mapped(ranges, ctypes.c_size_t(len(ranges)))
    return [(address, nbytes) for address, nbytes in ranges]


def limit(total_nbytes: int | None) -> None:
    """Limit this process's physical memory on the first device; None: no limit."""
    free_nbytes = -1 if total_nbytes is None else max(total_nbytes - virtual_memory().nbytes, 0)
    library().software_gpu_leave(0, ctypes.c_int64(free_nbytes))


@contextmanager
def without_attribute(name: str) -> Iterator[None]:
    """Remove the devices' attribute CU_DEVICE_ATTRIBUTE_`name` for the block."""
    from cuda.bindings import driver

    attribute = int(getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}"))
    library().software_gpu_set_attribute(attribute, 0)
    try:
        yield
    finally:
        library().software_gpu_set_attribute(attribute, 1)


def counts() -> Counter[str]:
    """Return the numbers of calls by function, and of launches by kernel; "kernel" is their sum."""
    size = 0
    while True:
        text = ctypes.create_string_buffer(size)
        needed = library().software_gpu_counts(text, ctypes.c_size_t(size))
        if needed <= size:
            break
        size = 2 * needed
    lines = (line.rpartition(" ") for line in text.value.decode().splitlines())
    return Counter({name: int(number) for name, _, number in lines})


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count the calls in the block; the counter is filled at its end."""
    before = counts()
    calls = Counter[str]()
    try:
        yield calls
    finally:
        calls.update(counts() - before)


@dataclass
class Timeline:
    """Seconds that a block would take on hardware of given speed, without computations; see
    timeline.cpp.

    Attributes:
        seconds: time of the host, including waits.
        memory, to_host, from_host, link: busy times of the device's memory, of copies to and from
            the host, and of copies between devices.
    """

    seconds: float = 0.0
    memory: float = 0.0
    to_host: float = 0.0
    from_host: float = 0.0
    link: float = 0.0

    def __str__(self) -> str:
        names = [field.name for field in fields(self)][1:]
        in_use = ", ".join(
            f"{name.replace('_', ' ')} {getattr(self, name) * 1e3:.3f}" for name in names
        )
        return f"{self.seconds * 1e3:.3f} ms by the timeline, of which in use: {in_use}"


@contextmanager
def timed() -> Iterator[Timeline]:
    """Measure the timeline of the block; it is filled at the end."""
    before = _clocks()
    timeline = Timeline()
    try:
        yield timeline
    finally:
        seconds = (now - then for now, then in zip(_clocks(), before, strict=True))
        for field, value in zip(fields(Timeline), seconds, strict=True):
            setattr(timeline, field.name, value)


def _clocks() -> list[float]:
    clocks = (ctypes.c_double * len(fields(Timeline)))()
    library().software_gpu_timeline(clocks)
    return list(clocks)


@contextmanager
def failing(name: str, first: int = 1, num: int = 1, error: int = OUT_OF_MEMORY) -> Iterator[None]:
    """Make `num` calls of `name` in the block fail, from number `first` on (1 is the next call)."""
    library().software_gpu_fail(name.encode(), ctypes.c_uint64(first), ctypes.c_uint64(num), error)
    try:
        yield
    finally:
        library().software_gpu_fail(name.encode(), ctypes.c_uint64(1), ctypes.c_uint64(0), 0)


class Reports:
    """Reports of the checker from all processes that share the file SOFTWARE_GPU_REPORTS."""

    def __init__(self) -> None:
        self._path = Path(os.environ["SOFTWARE_GPU_REPORTS"])
        self._read_nbytes = self._nbytes()

    def new(self) -> str:
        """Return the reports since the last call."""
        with self._path.open("rb") if self._path.exists() else open(os.devnull, "rb") as file:
            file.seek(self._read_nbytes)
            text = file.read()
        self._read_nbytes += len(text)
        return text.decode(errors="replace")

    def require_none(self) -> None:
        """Fail the test if there are reports since the last call."""
        if text := self.new():
            pytest.fail(f"the checker of the software GPU reports:\n{text}", pytrace=False)

    def _nbytes(self) -> int:
        return self._path.stat().st_size if self._path.exists() else 0
