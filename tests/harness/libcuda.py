"""CUDA's driver on a machine without a GPU: libcuda.c, compiled here, and the real `cuda.bindings.driver` over it.

The library is loaded under the driver's own name, so whatever asks for libcuda.so.1 afterwards gets this one, vLLM's
compiled allocator too. The state is the process's: one `LibCuda` at a time.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from unittest import SkipTest

GARBAGE = 0xA5
GRANULE = 65536


def load_compiled(name: str, source: Path = Path("/dev/null")) -> None:
    """Compile a C file, by default an empty one, and load it as the library of this name."""
    if (compiler := shutil.which("cc")) is None:
        raise SkipTest(f"there is no C compiler (cc) for {source}")
    with tempfile.TemporaryDirectory() as folder:
        options = ["-shared", "-fPIC", "-O1", "-pthread", "-Wall", "-Wextra", "-Werror", f"-Wl,-soname,{name}"]
        command = [compiler, *options, "-o", f"{folder}/{name}", "-x", "c", str(source), "-ldl"]
        subprocess.run(command, check=True, timeout=60)
        ctypes.CDLL(f"{folder}/{name}", ctypes.RTLD_GLOBAL)


@functools.cache
def _loaded() -> tuple[ctypes.CDLL, ModuleType]:
    """The library and the bindings; raises SkipTest with what is missing."""
    if find_spec("cuda") is None or find_spec("cuda.bindings") is None:
        raise SkipTest("cuda-bindings is missing: requirements-cpu.txt has it")
    load_compiled("libcuda.so.1", Path(__file__).with_suffix(".c"))
    library = ctypes.CDLL("libcuda.so.1")
    assert hasattr(library, "test_taken"), "the driver of a GPU was loaded in this process before"
    library.test_taken.restype = library.test_mapped.restype = ctypes.c_size_t
    from cuda.bindings import driver

    return library, driver


class LibCuda:
    """The driver in this process.

    Attributes:
        api: `cuda.bindings.driver`, initialized.
    """

    def __init__(self, granule: int = GRANULE, missing: str = "") -> None:
        """`missing`: an attribute of the device (name without its prefix), which has all others."""
        self._library, self.api = _loaded()
        gc.collect()  # what tests before left in cycles has memory
        attribute = getattr(self.api.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{missing}") if missing else 0
        ctypes.c_size_t.in_dll(self._library, "test_granule").value = granule
        ctypes.c_int.in_dll(self._library, "test_missing_attribute").value = attribute
        self.limit(None)
        (code,) = self.api.cuInit(0)
        assert code == self.api.CUresult.CUDA_SUCCESS

    def limit(self, total_nbytes: int | None) -> None:
        """Let the device have so much memory; None: no end."""
        size = ctypes.c_size_t.in_dll(self._library, "test_total_nbytes")
        size.value = ctypes.c_size_t(-1).value if total_nbytes is None else total_nbytes

    @contextmanager
    def failing(self, call: str) -> Iterator[None]:
        """Let a call fail with CUDA_ERROR_NOT_SUPPORTED."""
        name = (ctypes.c_char * 64).in_dll(self._library, "test_failing_call")
        ctypes.c_int.in_dll(self._library, "test_failing_code").value = self.api.CUresult.CUDA_ERROR_NOT_SUPPORTED
        name.value = call.encode()
        try:
            yield
        finally:
            name.value = b""

    def mapped(self) -> list[tuple[int, int]]:
        """(address, bytes) of everything that is mapped and may be touched, in order."""
        found = ((ctypes.c_uint64 * 2) * self._library.test_mapped(None, 0))()
        self._library.test_mapped(found, len(found))
        return sorted((address, nbytes) for address, nbytes in found)

    def taken_nbytes(self) -> int:
        """Bytes of physical memory that a handle or a mapping of this process keeps."""
        return int(self._library.test_taken())

    def leaks(self) -> dict[str, int]:
        """How many handles, mappings and ranges are left."""
        counts = [ctypes.c_size_t() for _ in range(3)]
        self._library.test_counts(*map(ctypes.byref, counts))
        return dict(zip(("handles", "mappings", "ranges"), (count.value for count in counts), strict=True))
