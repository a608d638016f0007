"""Weights that sleep on when vLLM wakes up, until they are asked for.

vLLM's allocator maps memory segment by segment, a large parameter each, but its own wake-up maps all of a kind at
once. **Never run on a GPU yet**; tested with vLLM's allocator over a stand-in for the driver.

    segments = SleepingSegments.of(...)           those in which nothing lies but weights that will be written
    with segments.overlooked():                   vLLM's own wake-up passes over them, and does all the rest:
        llm.wake_up(tags=["weights"])             its bookkeeping, buffers and their contents
    segments.wake(tensors)                        for every group before it is filled
    segments.wake()                               what no group asked for

Addresses stay, so captured graphs do too. A segment says of itself whether it sleeps, so vLLM may be put to sleep
again at any point.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from hybrid_engine.backends.vllm import internals


class SleepingSegments:
    """Those of vLLM's allocator that are left asleep."""

    def __init__(self, segments: Iterable[Any]) -> None:
        """`segments`: vLLM's `AllocationData`, asleep."""
        self._segments = sorted(segments, key=_start)
        self._starts = [_start(segment) for segment in self._segments]

    @staticmethod
    def of(llm: Any, weights: Iterable[torch.Tensor]) -> SleepingSegments:
        """The segments in which nothing lies but these weights, which will be written whole.

        Where anything else does (a buffer, whose contents vLLM brings back when it wakes up, or a tensor that nobody
        knows), torch has given more of the segment than they take. None where vLLM's sleep mode works in another way.
        """
        worker = internals.worker_of(llm)
        if not internals.SLEEP_BACKEND.is_type_of(worker.sleep_mode_backend) or worker._sleep_saved_parameters:
            return SleepingSegments(())
        allocator = internals.MEM_ALLOCATOR.load()()
        pools = allocator.allocator_and_pools.get("weights", [])
        given = {segment["address"]: segment["requested_size"] for pool, _ in pools for segment in pool.snapshot()}
        asleep = SleepingSegments(data for data in allocator.pointer_to_data.values() if data.is_asleep)
        taken: Counter[int] = Counter()
        models = [model for model in (worker.model_runner.model, worker.get_draft_model()) if model is not None]
        buffers = {buffer.untyped_storage().data_ptr() for model in models for buffer in model.buffers()}
        storages = {storage.data_ptr(): storage for storage in (tensor.untyped_storage() for tensor in weights)}
        for address in storages.keys() - buffers:  # vLLM writes buffers as it wakes up, also those that are weights
            storage = storages[address]
            for segment in asleep._in(address, storage.nbytes()):
                taken[_start(segment)] += storage.nbytes()
        return SleepingSegments(one for one in asleep._segments if 0 < taken[_start(one)] == given.get(_start(one)))

    @contextlib.contextmanager
    def overlooked(self) -> Iterator[None]:
        """Within this context vLLM takes them for awake."""
        for segment in self._segments:
            segment.is_asleep = False
        try:
            yield
        finally:
            for segment in self._segments:
                segment.is_asleep = True

    def wake(self, tensors: Iterable[torch.Tensor] | None = None) -> None:
        """Have memory, contents undefined, wherever these tensors lie; default: everywhere.

        Raises RuntimeError, as vLLM's allocator does, for lack of memory; what woke stays awake.
        """
        touched = self._segments if tensors is None else [one for tensor in tensors for one in self._around(tensor)]
        for segment in touched:
            if segment.is_asleep:
                _map(segment)
                segment.is_asleep = False

    def hold(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor has no memory yet."""
        return any(segment.is_asleep for segment in self._around(tensor))

    def _around(self, tensor: torch.Tensor) -> list[Any]:
        """The segments in which a tensor's storage lies: one, in all that torch's allocator gives."""
        storage = tensor.untyped_storage()
        return self._in(storage.data_ptr(), storage.nbytes())

    def _in(self, address: int, nbytes: int) -> list[Any]:
        begin, end = bisect_right(self._starts, address) - 1, bisect_right(self._starts, address + max(nbytes, 1) - 1)
        return [one for one in self._segments[max(begin, 0) : end] if address < _start(one) + _nbytes(one)]


def _start(segment: Any) -> int:
    return int(segment.handle[2])


def _nbytes(segment: Any) -> int:
    return int(segment.handle[1])


def _map(segment: Any) -> None:
    """As vLLM does; torch's allocator may keep memory that nobody uses."""
    create_and_map = internals.CREATE_AND_MAP.load()
    try:
        create_and_map(segment.handle)
    except RuntimeError:
        torch.accelerator.empty_cache()
        create_and_map(segment.handle)
