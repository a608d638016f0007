"""vLLM's sleep mode over the driver of the software GPU.

The allocator is vLLM's. The extension that calls the driver comes in two forms: `compiled`, if
vLLM's wheel for CUDA is available, and `Ported`.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from hybrid_engine.backends.vllm.weights import weight_memory
from hybrid_engine.errors import DeviceMemoryError
from hybrid_engine.memory.cuda_driver import CudaDriver
from hybrid_engine.memory.host_pages import tensor_over
from tests.harness.compiled import load_compiled
from tests.harness.launch import REPO_ROOT
from tests.software_gpu.device import GRANULE, VirtualMemory, limit, mapped, virtual_memory

EXTENSION = "cumem_allocator.abi3.so"


@functools.cache
def compiled() -> SimpleNamespace:
    """Load vLLM's extension from the installed vLLM or from a wheel of `make offline-bundle`."""
    # The extension is linked with these libraries but calls none of their functions.
    for name in ("libtorch_cuda.so", "libc10_cuda.so", "libnvrtc.so.13"):
        load_compiled(name)
    folder = tempfile.TemporaryDirectory()
    path = Path(folder.name) / EXTENSION
    path.write_bytes(_extension())
    spec = importlib.util.spec_from_file_location("cumem_allocator", path)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    functions = ctypes.CDLL(str(path))
    functions.my_malloc.restype = ctypes.c_void_p
    functions.my_malloc.argtypes = [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
    functions.my_free.restype = None
    functions.my_free.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
    extension = SimpleNamespace(
        **vars(module), my_malloc=functions.my_malloc, my_free=functions.my_free
    )
    extension.folder = folder  # the file is loaded again to clear an error
    return extension


def _extension() -> bytes:
    spec = importlib.util.find_spec("vllm.cumem_allocator")
    if spec is not None and spec.origin is not None:
        return Path(spec.origin).read_bytes()
    for wheel in sorted(REPO_ROOT.glob("build/offline-wheels/vllm-*.whl")):
        return zipfile.ZipFile(wheel).read(f"vllm/{EXTENSION}")
    pytest.skip(f"{EXTENSION} is neither installed nor in a wheel of build/offline-wheels")


class Ported:
    """Port of the extension to Python; after an error, calls do nothing until it is read."""

    def __init__(self, api: ModuleType) -> None:
        self._api = api
        self._driver = CudaDriver(api, torch.device("cpu"))
        self._slots: dict[int, Any] = {}  # address -> slot with the handle of its memory
        self._error: DeviceMemoryError | None = None

    def init_module(
        self, malloc: Callable[[tuple[int, ...]], None], free: Callable[[int], tuple[int, ...]]
    ) -> None:
        self._on_malloc = malloc
        self._on_free = free

    def my_malloc(self, nbytes: int, device: int, stream: None) -> int | None:
        if self._error:
            return None
        address = self._driver.reserve(nbytes)
        self._slots[address] = ctypes.c_uint64()
        slot = ctypes.addressof(self._slots[address])
        self._on_malloc((device, nbytes, address, slot))
        self._create_and_map(nbytes, address, slot)
        if self._error:
            self._driver.unreserve(address, nbytes)
        return None if self._error else address

    def my_free(self, address: int, nbytes: int, device: int, stream: None) -> None:
        _, _, _, slot = self._on_free(address)
        self._unmap_and_release(nbytes, address, slot)
        self._driver.unreserve(address, nbytes)

    def python_create_and_map(self, device: int, nbytes: int, address: int, slot: int) -> None:
        self._create_and_map(nbytes, address, slot)
        self._raise()

    def python_unmap_and_release(self, device: int, nbytes: int, address: int, slot: int) -> None:
        self._unmap_and_release(nbytes, address, slot)
        self._raise()

    def forget_error(self) -> None:
        """Clear the error, like a write to the C variable."""
        self._error = None

    def _create_and_map(self, nbytes: int, address: int, slot: int) -> None:
        number = ctypes.c_uint64.from_address(slot)

        def create() -> None:
            number.value = int(self._driver.create(nbytes))

        self._call(create)
        self._call(lambda: self._driver.map(address, nbytes, self._handle(number)))

    def _unmap_and_release(self, nbytes: int, address: int, slot: int) -> None:
        # Like the C code: an earlier error skips the second call, but not the first.
        earlier_error = self._error
        self._error = None
        self._call(lambda: self._driver.unmap(address, nbytes))
        self._error = self._error or earlier_error
        self._call(lambda: self._driver.release(self._handle(ctypes.c_uint64.from_address(slot))))

    def _handle(self, number: ctypes.c_uint64) -> Any:
        return self._api.CUmemGenericAllocationHandle(number.value)

    def _call(self, call: Callable[[], object]) -> None:
        if not self._error:
            try:
                call()
            except DeviceMemoryError as error:
                self._error = error

    def _raise(self) -> None:
        error = self._error
        self._error = None
        if error:
            raise RuntimeError(f"CUDA Error: {error}")


class SleepingVllm:
    """vLLM's allocator in sleep mode, with a worker of one model.

    Segment "first" holds a weight and the model's buffer, "second" two weights, "third" one.
    """

    def __init__(self, patch: pytest.MonkeyPatch, api: ModuleType, extension: Any) -> None:
        from vllm.device_allocator import cumem

        self.driver = CudaDriver(api, torch.device("cpu"))
        self._extension = extension
        self.allocator = cumem.CuMemAllocator()
        patch.setattr(cumem.CuMemAllocator, "instance", self.allocator)
        patch.setattr(cumem, "cumem_available", True)
        patch.setattr("vllm.device_allocator.get_mem_allocator_instance", lambda: self.allocator)
        for name in ("init_module", "python_create_and_map", "python_unmap_and_release"):
            patch.setattr(cumem, name, getattr(extension, name))
        patch.setattr(cumem, "libcudart", SimpleNamespace(cudaMemcpy=ctypes.memmove))
        for name, result in {
            "empty_cache": None,
            "synchronize": None,
            "get_memory_info": (0, 0),
        }.items():
            patch.setattr(torch.accelerator, name, lambda *_, result=result: result)
        patch.setattr(torch.cuda, "synchronize", lambda device=None: None)
        patch.setattr(torch.cuda, "empty_cache", lambda: None)
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        # Segments have the size of a granule.
        patch.setattr(weight_memory, "_LEAST_NBYTES", GRANULE)
        if isinstance(extension, Ported):
            patch.setattr(weight_memory, "_clear_error", extension.forget_error)
        else:
            patch.setattr(cumem, "lib_name", extension.__file__)
        weight_memory.prepare_allocator()
        extension.init_module(
            self.allocator.python_malloc_callback, self.allocator.python_free_callback
        )

        self.segments: dict[str, int] = {}
        tags = {"workspace": "runtime", "kv": "kv_cache"}
        for name in ("first", "workspace", "second", "third", "kv"):
            self.add(name, tags.get(name, "weights"))
        self.requested = {"first": 128, "second": 128, "third": 64}
        self.allocator.allocator_and_pools["weights"] = [
            [SimpleNamespace(snapshot=self._snapshot), None]
        ]
        self.model = torch.nn.Module()
        self.model.register_buffer("rotary", self.over("first", 0).fill_(7))
        self.workspace = self.over("workspace", 0).fill_(5)
        weights = {"a": ("first", 64), "b": ("second", 0), "c": ("second", 64), "d": ("third", 0)}
        self.live = {name: self.over(segment, start) for name, (segment, start) in weights.items()}

        config = SimpleNamespace(model_config=SimpleNamespace(enable_nccl_comm_suspend=False))
        self.worker = SimpleNamespace(
            model_runner=SimpleNamespace(model=self.model), vllm_config=config
        )

    def malloc(self, tag: str = "weights") -> int | None:
        """Allocate one granule, like a segment of a pool in torch's allocator."""
        self.allocator.current_tag = tag
        return self._extension.my_malloc(GRANULE, 0, None)

    def add(self, name: str, tag: str) -> None:
        address = self.malloc(tag)
        assert address is not None, "vLLM's allocator gave no memory"
        self.segments[name] = address

    def trim(self, name: str) -> None:
        """Release a segment, like vLLM does with free segments."""
        pool = SimpleNamespace(
            snapshot=lambda: [{"address": self.segments[name], "allocated_size": 0}]
        )
        self.allocator._trim(pool)

    def end(self, *names: str) -> None:
        """End the pools of these segments, by default of all."""
        for name in names or list(self.segments):
            self._extension.my_free(self.segments.pop(name), GRANULE, 0, None)

    def over(self, segment: str, start: int) -> torch.Tensor:
        return tensor_over(self.segments[segment] + start, 64, torch.device("cpu"), None).view(
            torch.float32
        )

    def asleep(self) -> list[str]:
        """Return the unmapped segments, after comparing them with vLLM's records."""
        touchable = {address for address, _ in mapped()}
        unmapped = [name for name, address in self.segments.items() if address not in touchable]
        data = self.allocator.pointer_to_data
        assert unmapped == [
            name for name, address in self.segments.items() if data[address].is_asleep
        ]
        assert virtual_memory().nbytes == (len(self.segments) - len(unmapped)) * GRANULE
        return unmapped

    def leave(self) -> None:
        """Release all memory."""
        limit(None)
        self.allocator.wake_up()
        self.end()
        assert virtual_memory() == VirtualMemory()

    def _snapshot(self) -> list[dict[str, int]]:
        """Return the fields of a snapshot of torch's memory pools that vLLM uses."""
        used = self.requested.items()
        return [{"address": self.segments[name], "requested_size": nbytes} for name, nbytes in used]
