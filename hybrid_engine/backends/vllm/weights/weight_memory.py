"""The device memory of inference weights: live ones, and those that pass through loader layout.

Live tensors keep their identity and every view of them; only the memory behind them comes and goes.

On a GPU vLLM's allocator maps memory segment by segment, a large parameter each, but its wake-up
maps all segments of a kind at once. `SleepingSegments` lets weights sleep until they are filled.

    segments = SleepingSegments.of(...)           segments with nothing but weights to be written
    with segments.overlooked():                   vLLM's wake-up skips them and does the rest:
        vllm.wake_up(["weights"])                 its bookkeeping, buffers and their contents
    segments.wake(tensors)                        before each group is filled
    segments.wake()                               the segments that no group needed

Addresses stay the same, so captured graphs stay valid. The `is_asleep` flag is on each segment of
vLLM's, so vLLM may be put to sleep again at any point.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import logging
import sys
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from hybrid_engine.backends.vllm import internals
from hybrid_engine.backends.vllm.weights.tracing import WeightStorage
from hybrid_engine.errors import StateError
from hybrid_engine.memory.host_pages import libc
from hybrid_engine.ranks.torch_internals import make_workspaces

logger = logging.getLogger(__name__)

Live = Mapping[str, torch.Tensor]
"""Storage -> live parameter that vLLM computes with; every fill writes each of them completely."""

_MOST_COLLECTIONS = 3
"""Garbage collections before giving up: an object whose finalizer frees others needs several."""

_LEAST_NBYTES = 2 * 2**20
"""The driver's allocation granularity, in bytes; the same on all GPUs so far."""


class WeightMemory:
    """Memory of weights on a GPU without vLLM's sleep mode, and base class of others.

    Live weights stay in place.

    Attributes:
        frees_all_at_once: `free` takes the memory of all live weights, whatever its argument.
    """

    frees_all_at_once = False

    def new(
        self, storages: Sequence[WeightStorage], stay: Collection[str] = ()
    ) -> list[torch.Tensor]:
        """Return flat tensors [numel] for weights that pass through loader layout, uninitialised.

        `stay`: names of storages whose memory vLLM goes on to compute with.
        """
        return [
            torch.empty(storage.numel, dtype=storage.dtype, device=storage.device)
            for storage in storages
        ]

    def trim(self) -> None:
        """Free the memory kept for weights that will pass through loader layout."""

    def free(self, live: Live) -> None:
        """Free the memory of these live weights where possible; their contents are lost."""
        logger.warning(
            "vLLM's sleep mode is off: its %d bytes of weights stay on the device",
            self.nbytes(live),
        )

    def restore(
        self, live: Live, storages: Sequence[WeightStorage], others: Iterable[str] = ()
    ) -> None:
        """Allocate memory, uninitialised, for those of these storages that are live and have none.

        `others`: names of further tensors in `live` that get memory as well.
        """

    def complete(self) -> None:
        """Allocate memory for the rest of the model, after the last call of `restore`."""

    def free_kv_cache(self) -> None:
        """Free the KV cache where the weights stay; without sleep mode the cache stays as well."""

    def is_given_back(self, live: Live) -> bool:
        """Return whether `free` has nothing to free."""
        return not self.nbytes(live)

    def nbytes(self, live: Live) -> int:
        """Return the bytes behind live weights and those kept for weights passing through."""
        storages = (tensor.untyped_storage() for tensor in live.values())
        # Live tensors may share a storage (a tied head).
        by_address = {storage.data_ptr(): storage.nbytes() for storage in storages}
        return sum(by_address.values())


class SleepingLlm:
    """Sleep-mode calls on an engine of this process."""

    def __init__(self, llm: Callable[[], Any]) -> None:
        """
        Args:
            llm: returns the `vllm.LLM`; this object keeps no reference to it.
        """
        self._llm = llm

    @property
    def worker(self) -> Any:
        """vLLM's worker of this process."""
        return internals.worker_of(self._llm())

    def sleep(self, level: int) -> None:
        """Call `vllm.LLM.sleep`; level 0 pauses vLLM and frees no memory."""
        self._llm().sleep(level=level)

    def wake_up(self, tags: list[str]) -> None:
        """Call `vllm.LLM.wake_up`."""
        self._llm().wake_up(tags=tags)

    def discard(self, tags: tuple[str, ...]) -> None:
        """Free the memory of these kinds and lose their contents."""
        core = internals.core_of(self._llm())
        core.model_executor.discard(tags)


class SleepingWorker:
    """Sleep-mode calls on a server's worker; its caller has paused the server.

    The engine core is not involved: it would manage the worker's memory as its own.
    """

    worker: Any

    def sleep(self, level: int) -> None:
        if not level:
            return
        try:
            self.worker.sleep(level=level)
        except AssertionError as error:
            # vLLM compares free memory of the whole device, which trainers and other servers share.
            if "Memory usage increased" not in str(error):
                raise

    def wake_up(self, tags: list[str]) -> None:
        self.worker.wake_up(tags)

    def discard(self, tags: tuple[str, ...]) -> None:
        self.worker.discard(tags)


class SleepMode(WeightMemory):
    """Weights in vLLM's sleep mode (level 2), which frees all weights and the KV cache at once.

    Addresses stay the same. The first `restore` wakes vLLM up, except for segments of other
    weights, which wake when these are restored. The KV cache wakes by a separate call.
    """

    frees_all_at_once = True

    def __init__(self, vllm: SleepingLlm | SleepingWorker) -> None:
        self._vllm = vllm
        self._is_asleep = False
        self._is_partly_awake = False  # a wake-up ran out of memory half-way
        self._sleeping: SleepingSegments | None = None
        # Bytes of all weights, awake. Counted once, because `nbytes` is called for every bucket.
        self._nbytes_awake = 0
        self._modules_without: set[str] = set()  # modules without tensors in vLLM's memory
        self.is_kv_cache_asleep = False

    def free(self, live: Live) -> None:
        if not self._is_asleep:
            modules = set(sys.modules)
            move_module_tensors_out(modules - self._modules_without)
            self._modules_without = modules
            # Set before the call: if it fails, an unknown part of the memory is gone.
            self._is_asleep = True
            self.is_kv_cache_asleep = True
            self._is_partly_awake = True
            self._sleeping = None
            with _without_collections():
                self._vllm.sleep(level=2)
            self._is_partly_awake = False
        elif self._is_partly_awake:
            # To vLLM the weights are still asleep, and its worker's `sleep` would first read
            # buffers that have no memory. `suspend` only frees memory and skips sleeping segments.
            self._vllm.worker.sleep_mode_backend.suspend(level=2)
            self._is_partly_awake = False

    def restore(
        self, live: Live, storages: Sequence[WeightStorage], others: Iterable[str] = ()
    ) -> None:
        if self._is_asleep:
            self._wake_up(live)
        if self._sleeping is not None:
            names = (*(storage.name for storage in storages), *others)
            self._sleeping.wake(live[name] for name in names if name in live)

    def complete(self) -> None:
        if self._sleeping is not None:
            self._sleeping.wake()
            self._sleeping = None

    def free_kv_cache(self) -> None:
        if not self.is_kv_cache_asleep:
            self._vllm.sleep(level=0)
            # vLLM's own release_kv_cache_memory does this, but refuses while the scheduler keeps
            # ids of finished requests. Only another step forgets them, and none follows.
            self._vllm.discard(("kv_cache",))
            self.is_kv_cache_asleep = True

    def wake_kv_cache(self) -> None:
        """Allocate the KV cache again if it was freed. A failure frees all of it again."""
        if self.is_kv_cache_asleep:
            try:
                self._allocate(["kv_cache"])
            except BaseException:
                # A part of the cache may have been allocated.
                self._vllm.worker.sleep_mode_backend.discard(("kv_cache",))
                raise
            self.is_kv_cache_asleep = False

    def is_given_back(self, live: Live) -> bool:
        return self._is_asleep and not self._is_partly_awake

    def nbytes(self, live: Live) -> int:
        if self._is_asleep:
            return 0
        if self._sleeping is None:
            return super().nbytes(live)
        return self._nbytes_awake - self._sleeping.nbytes

    def _wake_up(self, live: Live) -> None:
        # Before vLLM wakes up, which clears the flags of its segments.
        sleeping = SleepingSegments.of(self._vllm.worker, live.values())
        self._is_partly_awake = True
        with sleeping.overlooked():
            self._allocate(["weights"])
        self._is_asleep = False
        self._is_partly_awake = False
        self._nbytes_awake = super().nbytes(live)
        self._sleeping = sleeping

    def _allocate(self, tags: list[str]) -> None:
        """Wake these kinds up; if memory is short, collect garbage and try once more."""
        try:
            with _without_collections():
                self._vllm.wake_up(tags)
        except RuntimeError as error:
            if not _is_out_of_memory(error):
                raise
            self._vllm.wake_up(tags)


def _without_collections() -> contextlib.AbstractContextManager[None]:
    """Stop vLLM from collecting garbage in this context.

    A collection took 0.03 of 0.6 s, three times per switch and back.
    """
    return internals.SLEEPS_COLLECTOR.replaced(lambda _: SimpleNamespace(collect=lambda: 0))


def without_what_stays(load_model: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `Worker.load_model`: state that outlives the engine is outside the pool that sleeps.

    Loading computes products, at least for digests of the model's constants, and takes all memory
    from the pool that sleeps. torch allocates its matrix-product workspaces before it: a workspace
    from that pool would have no memory when the next product on its stream, a trainer's, writes to
    it. The workspaces are those of the current stream: with tensor parallelism vLLM has created
    and selected a stream by now.

    Tensors of modules that vLLM imports move out afterwards, also if loading fails: an engine that
    ends before its first sleep would leave them to the process's next engine.
    """

    @functools.wraps(load_model)
    def load(worker: Any, *arguments: Any, **named: Any) -> Any:
        make_workspaces(worker.device)
        modules = set(sys.modules)
        try:
            return load_model(worker, *arguments, **named)
        finally:
            move_module_tensors_out(set(sys.modules) - modules)

    return load


def move_module_tensors_out(names: Iterable[str]) -> None:
    """Move tensors that are globals of these modules out of the memory of vLLM's allocator.

    vLLM imports modules while it loads weights, when every new device tensor comes from the memory
    that sleep mode frees. compressed_tensors makes its table of FP4 values then: the first sleep
    would lose its contents, and the table would keep the memory from the process's next engine.
    """
    allocator = internals.CUMEM_ALLOCATOR.load().instance
    if allocator is None:
        return
    segments = {start: start + data.handle[1] for start, data in allocator.pointer_to_data.items()}
    for name in names:
        variables = getattr(sys.modules.get(name), "__dict__", {})
        for value in list(variables.values()):
            # Exact types: a subclass may refuse to have its data replaced.
            if type(value) in (torch.Tensor, torch.nn.Parameter) and _is_within(value, segments):
                value.data = value.data.clone()


def _is_within(tensor: torch.Tensor, segments: Mapping[int, int]) -> bool:
    """Return whether a tensor begins in one of these segments, start -> end."""
    return any(start <= tensor.data_ptr() < end for start, end in segments.items())


def prepare_allocator() -> None:
    """Prepare vLLM's allocator, of which a process has one, for a new engine.

    Raises StateError if memory of an earlier engine is in use.
    """
    allocator = internals.CUMEM_ALLOCATOR.load().get_instance()
    for _ in range(_MOST_COLLECTIONS):
        gc.collect()
        torch.cuda.empty_cache()
        if not allocator.get_current_usage():
            break
    _clear_error()
    nbytes = allocator.get_current_usage()
    if nbytes:
        raise StateError(
            f"{nbytes} bytes of an earlier vLLM's weights or caches are in use in this process, "
            "and vLLM's sleep mode serves one engine at a time: call its shutdown(), and delete "
            "references to its model and to tensors taken from it",
            code="earlier-engine-in-use",
        )
    if not isinstance(allocator.python_free_callback, FreeCallback):
        allocator.python_free_callback = FreeCallback(allocator, allocator.python_free_callback)


class FreeCallback:
    """A callback of vLLM's extension before it unmaps an allocation and releases its memory.

    It makes sure that there is memory to release. An allocation that sleeps has none: the extension
    would release the handle it had released when the allocation went to sleep. The driver reuses
    handles, so this may be any other memory of the process; on an H100 it was a training buffer's.
    An allocation that was free when vLLM had loaded weights has no memory either: vLLM releases and
    forgets these, while torch keeps them until the memory pool ends. vLLM's callback fails for
    them.
    """

    def __init__(self, allocator: Any, original: Callable[[int], Any]) -> None:
        """
        Args:
            allocator: vLLM's.
            original: vLLM's callback, which the extension may still call.
        """
        self._allocator = allocator
        self._original = original

    def __call__(self, address: int) -> Any:
        """Return device, bytes, address and the address of the handle, as vLLM's callback does.

        torch calls this while it iterates over its blocks. A garbage collection in here would free
        tensors and so change these blocks.
        """
        collects = gc.isenabled()
        gc.disable()
        try:
            _clear_error()  # after an error the extension would unmap, but not release
            data = self._allocator.pointer_to_data.get(address)
            if data is None:
                device = torch.cuda.current_device()
                return _with_some_memory((device, _LEAST_NBYTES, address, _new_handle()))
            if data.is_asleep:
                _with_some_memory(data.handle)
            return self._original(address)
        finally:
            if collects:
                gc.enable()


def _with_some_memory(handle: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    """Map a granule of an allocation without memory; return `handle`.

    A granule is enough, because the driver unmaps a range that is mapped in part.
    """
    device, nbytes, address, number_address = handle
    create_and_map = internals.CREATE_AND_MAP.load()
    try:
        create_and_map((device, min(nbytes, _LEAST_NBYTES), address, number_address))
    except RuntimeError:
        # The device is full. Releasing 0, which is no memory's handle, fails and does no harm.
        ctypes.c_uint64.from_address(number_address).value = 0
    return handle


def _new_handle() -> int:
    """Return the address of memory for a driver handle; the extension frees it."""
    malloc = libc().malloc
    malloc.restype = ctypes.c_void_p
    malloc.argtypes = [ctypes.c_size_t]
    return int(malloc(ctypes.sizeof(ctypes.c_uint64)))


def _is_out_of_memory(error: RuntimeError) -> bool:
    """Return whether vLLM's allocator or torch's ran out of memory; vLLM's has no error type."""
    return "out of memory" in str(error).lower().replace("_", " ")


def _clear_error() -> None:
    """Clear the error of a failed call, which blocks vLLM's allocator."""
    extension = ctypes.CDLL(internals.CUMEM_LIBRARY.load())
    ctypes.c_int.in_dll(extension, "error_code").value = 0


class SleepingSegments:
    """Segments of vLLM's allocator that stay asleep when vLLM wakes up.

    Attributes:
        nbytes: bytes of weights in them that have no memory yet.
    """

    def __init__(self, segments: Iterable[Any], taken: Mapping[int, int] | None = None) -> None:
        """
        Args:
            segments: vLLM's `AllocationData`, asleep.
            taken: address of a segment -> bytes of weights in it.
        """
        self._segments = sorted(segments, key=_start)
        self._starts = [_start(segment) for segment in self._segments]
        self._taken = taken or {}
        self.nbytes = sum(self._taken.get(start, 0) for start in self._starts)

    @staticmethod
    def of(worker: Any, weights: Iterable[torch.Tensor]) -> SleepingSegments:
        """Return the sleeping segments that hold nothing but these weights, which get new values.

        If torch has allocated more of a segment than the weights occupy, it holds something else:
        a buffer, whose contents vLLM restores when it wakes up, or an unknown tensor. Returns no
        segments if vLLM's sleep mode works in another way than expected.
        """
        if not internals.SLEEP_BACKEND.is_type_of(worker.sleep_mode_backend):
            return SleepingSegments(())
        if worker._sleep_saved_parameters:
            return SleepingSegments(())
        allocator = internals.MEM_ALLOCATOR.load()()
        pools = allocator.allocator_and_pools.get("weights", [])
        requested = {
            segment["address"]: segment["requested_size"]
            for pool, _ in pools
            for segment in pool.snapshot()
        }
        allocations = allocator.pointer_to_data.values()
        asleep = SleepingSegments(data for data in allocations if data.is_asleep)

        models = (worker.model_runner.model, worker.get_draft_model())
        buffers = {
            buffer.untyped_storage().data_ptr()
            for model in models
            if model is not None
            for buffer in model.buffers()
        }
        storages = {}
        for tensor in weights:
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage
        taken: Counter[int] = Counter()
        # vLLM writes buffers as it wakes up, including those that are weights.
        for address in storages.keys() - buffers:
            nbytes = storages[address].nbytes()
            for segment in asleep._in(address, nbytes):
                taken[_start(segment)] += nbytes
        filled = [
            segment
            for segment in asleep._segments
            if 0 < taken[_start(segment)] == requested.get(_start(segment))
        ]
        return SleepingSegments(filled, taken)

    @contextlib.contextmanager
    def overlooked(self) -> Iterator[None]:
        """Make vLLM treat these segments as awake in this context."""
        for segment in self._segments:
            segment.is_asleep = False
        try:
            yield
        finally:
            for segment in self._segments:
                segment.is_asleep = True

    def wake(self, tensors: Iterable[torch.Tensor] | None = None) -> None:
        """Allocate memory, uninitialised, behind these tensors; by default, behind all segments.

        Raises RuntimeError if memory is short, as vLLM's allocator does; segments that woke up
        before stay awake.
        """
        if tensors is None:
            segments = self._segments
        else:
            segments = []
            for tensor in tensors:
                storage = tensor.untyped_storage()
                segments += self._in(storage.data_ptr(), storage.nbytes())
        for segment in segments:
            if segment.is_asleep:
                _map(segment)
                segment.is_asleep = False
                self.nbytes -= self._taken.get(_start(segment), 0)

    def _in(self, address: int, nbytes: int) -> list[Any]:
        """Return the segments that overlap `nbytes` bytes at `address`; at least one byte."""
        first = bisect_right(self._starts, address) - 1
        end = bisect_right(self._starts, address + max(nbytes, 1) - 1)
        # `first` begins at or before `address`, and may end before it.
        candidates = self._segments[max(first, 0) : end]
        return [data for data in candidates if address < _start(data) + int(data.handle[1])]


def _start(segment: Any) -> int:
    return int(segment.handle[2])


def _map(segment: Any) -> None:
    """Map a segment as vLLM does; if memory is short, first free unused memory of this process."""
    create_and_map = internals.CREATE_AND_MAP.load()
    try:
        create_and_map(segment.handle)
    except RuntimeError:
        gc.collect()
        torch.accelerator.empty_cache()
        create_and_map(segment.handle)
