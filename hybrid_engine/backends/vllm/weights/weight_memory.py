"""The memory of inference weights on a device: of live ones, and of those that pass through loader layout.

Live tensors keep their identity and every view of them; what changes is whether there is memory behind them.
"""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from hybrid_engine.backends.vllm import internals
from hybrid_engine.backends.vllm.weights.sleeping_segments import SleepingSegments
from hybrid_engine.backends.vllm.weights.storages import WeightStorage
from hybrid_engine.errors import StateError

logger = logging.getLogger(__name__)

Live = Mapping[str, torch.Tensor]
"""What vLLM computes with, live parameters by storage; each is written whole in every fill."""


class WeightMemory:
    """Gives memory to weights and takes it back; here for a GPU without vLLM's sleep mode, where live ones stay.

    Attributes:
        frees_all_at_once: `free` takes the memory of all live weights, whichever it is told.
    """

    frees_all_at_once = False

    def new(self, storages: Sequence[WeightStorage], stay: Collection[str] = ()) -> list[torch.Tensor]:
        """Flat tensors [numel] for weights that pass through loader layout; contents undefined.

        `stay`: names of storages with which vLLM goes on to compute where they lie, so that they do not pass.
        """
        return [torch.empty(storage.numel, dtype=storage.dtype, device=storage.device) for storage in storages]

    def trim(self) -> None:
        """Keep no memory for weights that will pass through."""

    def free(self, live: Live) -> None:
        """Give the memory of these live weights back, where that is possible; contents are lost."""
        logger.warning("vLLM's sleep mode is off: its %d bytes of weights stay on the device", self.nbytes(live))

    def restore(self, live: Live, storages: Sequence[WeightStorage], beside: Iterable[str] = ()) -> None:
        """Take memory again for those of these storages that are live and have none; contents are undefined.

        `beside`: names of other tensors in `live`, for which it is taken too.
        """

    def complete(self) -> None:
        """Take memory for whatever else the model has, once all weights were asked for."""

    def free_kv_cache(self) -> None:
        """Give the KV cache's memory back where the weights' stays; where there is no sleep mode it stays too."""

    def is_given_back(self, live: Live) -> bool:
        """Whether nothing is taken that `free` would give back."""
        return not self.nbytes(live)

    def nbytes(self, live: Live) -> int:
        """Bytes taken now: those behind live weights, and those kept for weights that will pass through."""
        storages = (tensor.untyped_storage() for tensor in live.values())
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


class SleepMode(WeightMemory):
    """On a GPU: level 2 of vLLM's sleep mode gives all weights and the KV cache back at once; addresses stay.

    The first weights that are asked for wake vLLM up but for the segments of other weights, which come when these are
    asked for (sleeping_segments.py); the KV cache has a call of its own.
    """

    frees_all_at_once = True

    def __init__(self, llm: Callable[[], Any]) -> None:
        """`llm`: called for the `vllm.LLM`, which others keep."""
        self._llm = llm
        self._is_asleep = False
        self._is_partly_awake = False  # a wake-up ran out of memory half-way
        self._sleeping: SleepingSegments | None = None
        self.is_kv_cache_asleep = False

    def free(self, live: Live) -> None:
        if not self._is_asleep:
            self._llm().sleep(level=2)
            self._is_asleep = self.is_kv_cache_asleep = True
            self._sleeping = None
        elif self._is_partly_awake:
            # For vLLM the weights sleep still, and its worker would first read buffers that have no memory: only what
            # gives the memory back is called, which passes over what sleeps.
            internals.worker_of(self._llm()).sleep_mode_backend.suspend(level=2)
            self._is_partly_awake = False

    def restore(self, live: Live, storages: Sequence[WeightStorage], beside: Iterable[str] = ()) -> None:
        if self._is_asleep:
            self._wake_up(live)
        if self._sleeping is not None:
            names = (*(storage.name for storage in storages), *beside)
            self._sleeping.wake(live[name] for name in names if name in live)

    def complete(self) -> None:
        if self._sleeping is not None:
            self._sleeping.wake()
            self._sleeping = None

    def free_kv_cache(self) -> None:
        if not self.is_kv_cache_asleep:
            llm = self._llm()
            llm.sleep(level=0)  # pauses vLLM, and takes no memory
            # As vLLM's own release_kv_cache_memory, which refuses while the scheduler keeps ids of finished requests:
            # only a further step forgets them, and there is none.
            internals.core_of(llm).model_executor.discard(("kv_cache",))
            self.is_kv_cache_asleep = True

    def wake_kv_cache(self) -> None:
        """Take the KV cache's memory again, if it was given back. After a failure all of it is given back."""
        if self.is_kv_cache_asleep:
            llm = self._llm()
            try:
                llm.wake_up(tags=["kv_cache"])
            except BaseException:
                internals.worker_of(llm).sleep_mode_backend.discard(("kv_cache",))
                raise
            self.is_kv_cache_asleep = False

    def before_shutdown(self, llm: Any) -> None:
        """Give back what is awake where anything sleeps; vLLM's memory pools have not ended yet.

        vLLM's allocator unmaps once more what sleeps when its pool ends. The driver's error about that stays in the
        allocator, which from then on gives nothing back: what was awake would be taken as long as the process lives.
        """
        if self.is_kv_cache_asleep:  # it sleeps as soon as anything does, and wakes last
            internals.worker_of(llm).sleep_mode_backend.suspend(level=2)

    def after_shutdown(self) -> None:
        """Let others have memory from vLLM's allocator in this process; vLLM's memory has been freed."""
        if self.is_kv_cache_asleep:
            _take_error_away()

    def is_given_back(self, live: Live) -> bool:
        return self._is_asleep and not self._is_partly_awake

    def nbytes(self, live: Live) -> int:
        if self._is_asleep:
            return 0
        sleeping = self._sleeping
        if sleeping is None:
            return super().nbytes(live)
        return super().nbytes({name: tensor for name, tensor in live.items() if not sleeping.hold(tensor)})

    def _wake_up(self, live: Live) -> None:
        llm = self._llm()
        sleeping = SleepingSegments.of(llm, live.values())
        self._is_partly_awake = True
        with sleeping.overlooked():
            llm.wake_up(tags=["weights"])
        self._is_asleep = self._is_partly_awake = False
        self._sleeping = sleeping


def require_unused_allocator() -> None:
    """Make vLLM's allocator, of which a process has one, ready for an engine that is built now.

    Raises StateError when memory of an earlier engine is in use.
    """
    allocator = internals.CUMEM_ALLOCATOR.load().instance
    if allocator is None:
        return
    gc.collect()
    _take_error_away()
    if nbytes := allocator.get_current_usage():
        raise StateError(
            f"{nbytes} bytes of an earlier vLLM's weights or caches are in use in this process, and vLLM's sleep mode "
            "serves one engine at a time: call its shutdown(), and let go of its model and of tensors taken from it"
        )


def _take_error_away() -> None:
    """Clear the error that memory freed asleep leaves in vLLM's allocator, which gives none until a call raises it.

    This call always raises, for it cannot succeed. Memory that torch keeps of tensors that are gone is freed before.
    """
    torch.cuda.empty_cache()
    with contextlib.suppress(RuntimeError):
        internals.UNMAP.load()((0, 0, 0, 0))
