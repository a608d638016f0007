"""Memory of weights on a CPU: vLLM's storages are resized, and what passes through loader layout is in huge pages."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Sequence

import torch

from hybrid_engine.backends.vllm.weights.tracing import WeightStorage
from hybrid_engine.backends.vllm.weights.weight_memory import Live, WeightMemory
from hybrid_engine.memory.host_pages import libc

_HUGE_PAGE = 2 * 1024**2


class CpuWeightMemory(WeightMemory):
    """On a CPU; see the port in weights/weight_memory.py."""

    def new(self, storages: Sequence[WeightStorage]) -> list[torch.Tensor]:
        tensors = super().new(storages)
        for tensor in tensors:
            _prefer_huge_pages(tensor.untyped_storage())
        return tensors

    def trim(self) -> None:
        _trim_heap()

    def free(self, live: Live) -> None:
        for tensor in live.values():
            tensor.untyped_storage().resize_(0)

    def restore(self, live: Live, storages: Sequence[WeightStorage], beside: Iterable[str] = ()) -> None:
        for storage in storages:
            memory = live[storage.name].untyped_storage() if storage.name in live else None
            if memory is not None and not memory.nbytes():
                memory.resize_(storage.nbytes)
                _prefer_huge_pages(memory)


def _trim_heap() -> None:
    """Return free heap pages to the system, where the C library can (glibc keeps freed blocks of up to 32 MiB).

    Takes milliseconds; without it, a released CPU model occupies about as much memory as before.
    """
    malloc_trim = getattr(libc(), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)


def _prefer_huge_pages(storage: torch.UntypedStorage) -> None:
    """Ask for 2 MiB pages behind memory that was allocated and not touched yet; without effect where there are none.

    The first write then costs little more than any other; with 4 KiB pages it takes several times as long.
    """
    start = -(-storage.data_ptr() // _HUGE_PAGE) * _HUGE_PAGE
    stop = (storage.data_ptr() + storage.nbytes()) // _HUGE_PAGE * _HUGE_PAGE
    if start < stop:
        libc().madvise(start, stop - start, mmap.MADV_HUGEPAGE)
