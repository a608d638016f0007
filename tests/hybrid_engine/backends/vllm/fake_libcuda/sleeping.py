"""The end of an engine and the beginning of the next, with vLLM's compiled allocator over a fake driver.

    python -m tests.hybrid_engine.backends.vllm.fake_libcuda.sleeping FOLDER

FOLDER has libcuda.so.1, empty libraries in place of those of a torch for CUDA, and cumem_allocator.abi3.so. Prints what
is found as JSON, by case; the engine of each case is built after that of the one before. In a process of its own: the
allocator keeps its state in C, and torch has other libraries here.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch

from hybrid_engine.backends.vllm import internals
from hybrid_engine.backends.vllm.weights.weight_memory import SleepMode, require_unused_allocator
from hybrid_engine.errors import StateError

MIB = 2**20
LIBRARIES = ("libtorch_cuda.so", "libc10_cuda.so", "libnvrtc.so.13")
"""That the allocator's file is linked with, and calls nothing of."""


class Driver:
    """The fake one, and vLLM's allocator as torch's memory pools call it."""

    def __init__(self, folder: Path) -> None:
        self.cuda = ctypes.CDLL(str(folder / "libcuda.so.1"), ctypes.RTLD_GLOBAL)
        self.cuda.fake_taken.restype = ctypes.c_size_t
        for name in LIBRARIES:
            ctypes.CDLL(str(folder / name), ctypes.RTLD_GLOBAL)
        path = folder / "cumem_allocator.abi3.so"
        self.module = _module("vllm.cumem_allocator", path)
        self.functions = ctypes.CDLL(str(path))
        self.functions.my_malloc.restype = ctypes.c_void_p
        self.functions.my_malloc.argtypes = [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
        self.functions.my_free.restype = None
        self.functions.my_free.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]

    def taken(self) -> int:
        """MiB of device memory."""
        return int(self.cuda.fake_taken()) // MIB

    def malloc(self, nbytes: int) -> int | None:
        """As a pool takes a segment."""
        found: int | None = self.functions.my_malloc(nbytes, 0, None)
        return found

    def free(self, address: int, nbytes: int) -> None:
        """As a pool gives it back."""
        self.functions.my_free(address, nbytes, 0, None)


class Engine:
    """Four segments of weights, a KV cache and what vLLM computes with besides, in vLLM's own allocator."""

    def __init__(self, driver: Driver) -> None:
        from vllm.device_allocator import cumem, sleep_mode_backend

        self.driver = driver
        self.allocator = cumem.CuMemAllocator.get_instance()
        driver.module.init_module(self.allocator.python_malloc_callback, self.allocator.python_free_callback)
        self.weights = [self._segment(32 * MIB, "weights") for _ in range(4)]
        self.others = [self._segment(64 * MIB, "kv_cache"), self._segment(2 * MIB, "runtime")]
        backend = sleep_mode_backend.CuMemBackend()
        self.worker = SimpleNamespace(sleep_mode_backend=backend)
        self.executor = SimpleNamespace(discard=backend.discard)

    def _segment(self, nbytes: int, tag: str) -> tuple[int, int]:
        self.allocator.current_tag = tag
        address = self.driver.malloc(nbytes)
        assert address is not None, "vLLM's allocator gave no memory"
        return address, nbytes

    def sleep(self, level: int) -> None:
        """As the `LLM`; level 0 takes no memory away."""
        if level:
            self.worker.sleep_mode_backend.suspend(level)

    def end(self, segments: list[tuple[int, int]]) -> None:
        """End of their memory pools."""
        for address, nbytes in segments:
            self.driver.free(address, nbytes)


def late_tensors(driver: Driver, memory: SleepMode, engine: Engine) -> dict[str, Any]:
    """Shut down asleep, while somebody refers to the weights until after the end."""
    memory.free({})
    memory.before_shutdown(engine)
    engine.end(engine.others)
    memory.after_shutdown()
    refused = _message_of(require_unused_allocator)
    engine.end(engine.weights)
    return {"refused": refused, "without": driver.malloc(2 * MIB)}


def one_after_the_other(driver: Driver, memory: SleepMode, engine: Engine) -> dict[str, Any]:
    """Shut down asleep, and nobody refers to the weights."""
    memory.free({})
    memory.before_shutdown(engine)
    engine.end(engine.weights + engine.others)
    memory.after_shutdown()
    return {}


def only_the_cache_asleep(driver: Driver, memory: SleepMode, engine: Engine) -> dict[str, Any]:
    """`release_weights: false`, shut down in training; vLLM ends the cache's pool first."""
    memory.free_kv_cache()
    asleep = driver.taken()
    memory.before_shutdown(engine)
    engine.end(engine.others[::-1] + engine.weights)
    memory.after_shutdown()
    return {"asleep": asleep}


def _message_of(call: Callable[[], None]) -> str:
    try:
        call()
    except StateError as error:
        return str(error)
    return ""


def _module(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[name] = module
    return module


class Always:
    """Gives one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __call__(self) -> Engine:
        return self._engine


class Runtime:
    """In place of vLLM's wrapper of CUDA's runtime, which copies what it keeps on the host."""

    def cudaMemcpy(self, dst: int, src: int, nbytes: int) -> None:
        ctypes.memmove(dst, src, nbytes)


def main(folder: str) -> None:
    driver = Driver(Path(folder))
    with (
        mock.patch("vllm.distributed.device_communicators.cuda_wrapper.CudaRTLibrary", Runtime),
        mock.patch.object(torch.cuda, "synchronize"),
        mock.patch.object(torch.accelerator, "synchronize"),
        mock.patch("vllm.device_allocator.get_mem_allocator_instance") as instance,
    ):
        from vllm.device_allocator import cumem

        instance.side_effect = cumem.CuMemAllocator.get_instance
        found = {}
        for case in (only_the_cache_asleep, late_tensors, one_after_the_other):
            require_unused_allocator()
            engine = Engine(driver)
            with (
                mock.patch.object(internals, "worker_of", return_value=engine.worker),
                mock.patch.object(internals, "core_of", return_value=SimpleNamespace(model_executor=engine.executor)),
            ):
                built = driver.taken()
                found[case.__name__] = {"built": built, **case(driver, SleepMode(Always(engine)), engine)}
            found[case.__name__]["left"] = driver.taken()
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
