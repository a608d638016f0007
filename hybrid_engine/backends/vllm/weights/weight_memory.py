"""The device memory of inference weights: live ones, and those that pass through loader layout.

Live tensors keep their identity and every view of them; only the memory behind them comes and goes.
On a GPU it does so in segments of vLLM's allocator, a large parameter each:

    weights = SleepingSegments.of(tensors)        segments with nothing but weights to be written
    weights.sleep()                               their memory is freed, or training's
    weights.wake(tensors)                         before each group is filled
    weights.wake()                                the segments that no group needed

The `is_asleep` flag is on each segment of vLLM's, so vLLM may be put to sleep at any point.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import sys
import weakref
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from hybrid_engine.backends.vllm import internals
from hybrid_engine.backends.vllm.private_names import Function, around
from hybrid_engine.backends.vllm.weights.cache_blocks import CacheBlocks
from hybrid_engine.backends.vllm.weights.tracing import WeightStorage
from hybrid_engine.errors import StateError
from hybrid_engine.memory.cuda_driver import driver_of
from hybrid_engine.memory.device_pages import Chunks
from hybrid_engine.memory.host_pages import libc
from hybrid_engine.memory.offload_items import Kind, Spans
from hybrid_engine.memory.pool import AddressRange, Memories, Pool, SharedSegment
from hybrid_engine.ranks.torch_internals import make_workspaces

logger = logging.getLogger(__name__)

Live = Mapping[str, torch.Tensor]
"""Storage -> live parameter that vLLM computes with; every fill writes each of them completely."""

Handle = tuple[int, int, int, int]
"""Device, bytes, address, and address of the driver's handle, of a segment of vLLM's allocator."""
OnMemory = Callable[[Handle], None]

_MAX_COLLECTIONS = 3
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

    def restore(self, tensors: Iterable[torch.Tensor]) -> None:
        """Allocate memory, uninitialised, for those of these live tensors that have none."""

    def share(self, live: Live, memories: Memories, leave: Callable[[], object]) -> bool:
        """See `ports.InferenceWeights.share_memory`."""
        return False

    def give_back(self) -> None:
        """See `ports.InferenceWeights.give_back`."""

    def close(self) -> None:
        """Drop all references to vLLM's tensors, which keep their contents."""

    def complete(self) -> None:
        """Allocate memory for the rest of the model, after the last call of `restore`."""

    def free_kv_cache(self) -> None:
        """Free the KV cache where the weights stay; without sleep mode the cache stays as well."""

    def is_given_back(self, live: Live) -> bool:
        """Return whether `free` has nothing to free."""
        return not self.nbytes(live)

    def nbytes(self, live: Live) -> int:
        """Return the bytes behind live weights and those kept for weights passing through."""
        return sum(_storages(live.values()).values())


def _storages(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Return address -> bytes of the storages of tensors, which may share one (a tied head)."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


def _do_nothing() -> None:
    pass


class SleepMode(WeightMemory):
    """Weights and KV cache in segments of vLLM's allocator, which have no memory while they sleep.

    Segments of the KV cache sleep, and those that hold nothing but weights, which a fill writes.
    All else stays; vLLM's own sleep would copy it to the host and back. Captured graphs stay valid;
    their memory sleeps too if `sleep_mode_offload_cudagraph` asks for that.

    Once memory is shared with training (memory/pool.py), sleeping and waking up only note whose
    contents it has. What training saves lies over the KV cache's last blocks, and leaves before a
    request gets one of them.

    Args:
        worker: returns vLLM's worker; this object keeps no reference to it.
        pause, resume: make vLLM pause before its memory goes, and resume.
        block_pool: returns the pool of the KV cache's blocks, if its scheduler is in this process.
    """

    frees_all_at_once = True

    def __init__(
        self,
        worker: Callable[[], Any],
        pause: Callable[[], object] = _do_nothing,
        resume: Callable[[], object] = _do_nothing,
        block_pool: Callable[[], Any] | None = None,
    ) -> None:
        self._worker = worker
        self._pause = pause
        self._resume = resume
        self._block_pool = block_pool
        self._blocks: CacheBlocks | None = None
        self._leave: Callable[[], Any] = _do_nothing
        self._weights = SleepingSegments(())
        self._caches = SleepingSegments(())
        self._pool: Pool | None = None
        self._is_asleep = False
        # Bytes of all weights, awake. Counted once, because `nbytes` is called for every bucket.
        self._nbytes_awake = 0
        self.is_kv_cache_asleep = False

    def free(self, live: Live) -> None:
        self.free_kv_cache()
        if not self._is_asleep:
            self._nbytes_awake = super().nbytes(live)
            self._weights = SleepingSegments.of(live.values())
            # Set before the calls: if one fails, an unknown part of the memory is gone.
            self._is_asleep = True
            if self._suspends_communicators:
                internals.SUSPEND_COMMUNICATORS()
        self._weights.sleep()

    def restore(self, tensors: Iterable[torch.Tensor]) -> None:
        if self._is_asleep:
            self._is_asleep = False
            if self._suspends_communicators:
                internals.RESUME_COMMUNICATORS()
        self._weights.wake(tensors)

    def complete(self) -> None:
        self._weights.wake()

    def free_kv_cache(self) -> None:
        allocator = internals.MEM_ALLOCATOR()
        segments = allocator.pointer_to_data.values()
        if not self.is_kv_cache_asleep:
            self._pause()
            self._caches = SleepingSegments(data for data in segments if data.tag == "kv_cache")
            self.is_kv_cache_asleep = True
        # Also the rest, if a call was interrupted or a wake-up failed after the cache had memory.
        self._caches.sleep()
        rest = [data for data in segments if not data.is_asleep and data.tag != "cudagraph"]
        if any(data.tag == "cudagraph" and not data.is_asleep for data in segments):
            # vLLM copies captured graphs' memory to the host, and takes the rest to be asleep.
            try:
                for data in rest:
                    data.is_asleep = True
                allocator.sleep(offload_tags=("cudagraph",))
            finally:
                for data in rest:
                    data.is_asleep = False

    def wake_kv_cache(self) -> None:
        """Allocate the KV cache again if it was freed. A failure frees all of it again."""
        if not self.is_kv_cache_asleep:
            return
        try:
            self._caches.wake()
        except BaseException:
            self._caches.sleep()
            raise
        allocator = internals.MEM_ALLOCATOR()
        if any(data.tag == "cudagraph" for data in allocator.pointer_to_data.values()):
            allocator.wake_up([])
        self._resume()
        self.is_kv_cache_asleep = False
        pending = self.pending()
        if self._blocks is not None:
            self._blocks.hold(pending, self._take_rest)
        elif pending.nbytes:
            self._take_rest()

    def pending(self) -> Spans:
        """Return the addresses of the KV cache, awake, that have contents of training."""
        return Spans() if self._pool is None else self._pool.pending()

    def _take_rest(self) -> None:
        """Take what training still has of the KV cache's memory."""
        assert self._pool is not None
        # If the switch is gone, nothing leaves, and the memory is refused.
        (self._leave() or _do_nothing)()
        self._pool.take_rest()

    def share(self, live: Live, memories: Memories, leave: Callable[[], object]) -> bool:
        driver = driver_of(torch.cuda.current_device())
        if driver is None:
            return False
        caches = {_start(data): data.handle[1] for data in self._caches.segments}
        weights = {_start(data): data.handle[1] for data in self._weights.segments}
        kinds: tuple[Kind, ...] = ("grad", "optimizer", "param")
        dropped, saved, lenders = (
            [memory for memory in memories.get(kind, ()) if isinstance(memory, Chunks)]
            for kind in kinds
        )
        if self._block_pool is not None and caches:
            blocks = CacheBlocks(self._worker().model_runner, self._block_pool())
            self._block_pool = None  # asked once: each `CacheBlocks` wraps a method of it
            self._blocks = blocks if blocks.address in caches and blocks.cover_all else None
        ranges = [AddressRange(start, nbytes, start) for start, nbytes in weights.items()]
        if self._blocks is not None:
            # What is dropped is for weights first, and then for the first blocks.
            left = max(_reserved(dropped) - sum(weights.values()), 0)
            # Chunks are taken whole, so a part of each layer's memory may be of no use for them.
            largest = max((nbytes for of in lenders for _, _, nbytes in of.resident()), default=0)
            last = _reserved(saved) + _reserved(lenders) + len(self._blocks.layers) * largest
            last = min(last, sum(caches.values()) - left)
            ranges += self._blocks.ranges(last, driver.granularity())
            del caches[self._blocks.address]
        ranges += [AddressRange(start, nbytes, start, True) for start, nbytes in caches.items()]
        self._pool = Pool(driver, [*dropped, *saved], lenders, ranges)
        # vLLM's objects may outlive the switch, and with it the trainer.
        self._leave = weakref.WeakMethod(leave)
        _shared.update(self._pool.segments)
        for data in (*self._weights.segments, *self._caches.segments):
            if _start(data) in _shared:
                # vLLM's extension releases this handle when it frees the segment.
                number = ctypes.c_uint64.from_address(data.handle[3])
                number.value = int(_shared[_start(data)].handle)
        return True

    def give_back(self) -> None:
        if self._pool is not None:
            for address in self._pool.segments:
                _shared.pop(address, None)
            self._pool.give_back()
            self._pool = None

    def is_given_back(self, live: Live) -> bool:
        return self._is_asleep and all(segment.is_asleep for segment in self._weights.segments)

    def nbytes(self, live: Live) -> int:
        if self._is_asleep:
            return 0
        return (self._nbytes_awake or super().nbytes(live)) - self._weights.nbytes

    @property
    def _suspends_communicators(self) -> bool:
        config = self._worker().vllm_config.model_config
        return bool(getattr(config, "enable_nccl_comm_suspend", False))


def _reserved(memories: Iterable[Chunks]) -> int:
    return sum(memory.reserved_nbytes for memory in memories)


@around
def without_what_stays(load_model: Function, worker: Any, *arguments: Any, **named: Any) -> Any:
    """Call `Worker.load_model`: state that outlives the engine is outside vLLM's memory pool.

    torch allocates its matrix-product workspaces, for the stream that vLLM has selected, before
    loading; in the pool they would keep its memory from the next engine. Tensors of modules that
    vLLM imports move out afterwards, also if loading fails.
    """
    make_workspaces(worker.device)
    modules = set(sys.modules)
    try:
        return load_model(worker, *arguments, **named)
    finally:
        move_module_tensors_out(set(sys.modules) - modules)


def move_module_tensors_out(names: Iterable[str]) -> None:
    """Move tensors that are globals of these modules out of the memory of vLLM's allocator.

    While vLLM loads weights every new device tensor comes from that memory, also those of modules
    it imports, such as the table of FP4 values of compressed_tensors.
    """
    allocator = internals.CUMEM_ALLOCATOR.instance
    if allocator is None:
        return
    segments = [
        (start, start + data.handle[1]) for start, data in allocator.pointer_to_data.items()
    ]
    for name in names:
        variables = getattr(sys.modules.get(name), "__dict__", {})
        for value in list(variables.values()):
            # Exact types: a subclass may refuse to have its data replaced.
            if type(value) in (torch.Tensor, torch.nn.Parameter) and any(
                start <= value.data_ptr() < end for start, end in segments
            ):
                value.data = value.data.clone()


def prepare_allocator() -> None:
    """Prepare vLLM's allocator, of which a process has one, for a new engine.

    Raises StateError if memory of an earlier engine is in use.
    """
    allocator = internals.CUMEM_ALLOCATOR.get_instance()
    for _ in range(_MAX_COLLECTIONS):
        gc.collect()
        torch.cuda.empty_cache()
        nbytes = allocator.get_current_usage()
        if not nbytes:
            break
    _clear_error()
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
    would release its old handle again, which the driver may have reused for any memory of the
    process. Nor has one that was free when vLLM had loaded weights: vLLM releases and forgets it,
    and its callback fails for it, while torch keeps it until the memory pool ends.
    """

    def __init__(self, allocator: Any, original: Callable[[int], Any]) -> None:
        """`original`: vLLM's callback, which the extension may still call."""
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
                malloc = libc().malloc
                malloc.restype = ctypes.c_void_p
                malloc.argtypes = [ctypes.c_size_t]
                # The address of memory for a driver handle; the extension frees it.
                handle = int(malloc(ctypes.sizeof(ctypes.c_uint64)))
                return _with_some_memory((device, _LEAST_NBYTES, address, handle))
            shared = _shared.pop(address, None)
            if shared is not None:
                shared.forget()
            elif data.is_asleep:
                _with_some_memory(data.handle)
            return self._original(address)
        finally:
            if collects:
                gc.enable()


def _with_some_memory(handle: Handle) -> Handle:
    """Map a granule of an allocation without memory; return `handle`.

    The driver also unmaps a range that is mapped in part.
    """
    device, nbytes, address, number_address = handle
    create_and_map = internals.CREATE_AND_MAP.load()
    try:
        create_and_map((device, min(nbytes, _LEAST_NBYTES), address, number_address))
    except RuntimeError:
        # The device is full. Releasing 0, which is no memory's handle, fails and does no harm.
        ctypes.c_uint64.from_address(number_address).value = 0
    return handle


def _clear_error() -> None:
    """Clear the error of a failed call, which blocks vLLM's allocator."""
    extension = ctypes.CDLL(internals.CUMEM_LIBRARY)
    ctypes.c_int.in_dll(extension, "error_code").value = 0


# Segments that share memory with training, by address.
_shared: dict[int, SharedSegment] = {}


@contextlib.contextmanager
def shared_segments() -> Iterator[None]:
    """Make vLLM's allocator, in this context, note what it would do to memory that is shared."""
    allocator = internals.CUMEM_ALLOCATOR.get_instance()

    def wake(create_and_map: OnMemory, handle: Handle) -> None:
        shared = _shared.get(handle[2])
        if shared is None:
            create_and_map(handle)
        else:
            shared.wake()

    def sleep(unmap_and_release: OnMemory, handle: Handle) -> None:
        shared = _shared.get(handle[2])
        if shared is not None and handle[2] in allocator.pointer_to_data:
            shared.sleep()
            return
        # vLLM frees a segment that it has forgotten.
        if shared is not None:
            _shared.pop(handle[2]).forget()
        unmap_and_release(handle)

    with (
        internals.CREATE_AND_MAP.replaced(around(wake)),
        internals.UNMAP_AND_RELEASE.replaced(around(sleep)),
    ):
        yield


class SleepingSegments:
    """Segments of vLLM's allocator that may sleep.

    Attributes:
        segments: vLLM's `AllocationData`, in order of addresses.
    """

    def __init__(self, segments: Iterable[Any], taken: Mapping[int, int] | None = None) -> None:
        """`taken`: address of a segment -> bytes of weights in it."""
        self.segments = sorted(segments, key=_start)
        self._starts = [_start(segment) for segment in self.segments]
        self._taken = taken or {}

    @staticmethod
    def of(weights: Iterable[torch.Tensor]) -> SleepingSegments:
        """Return the segments that hold nothing but these weights, which get new values.

        A segment of which torch has allocated more holds something else: a buffer, an adapter.
        """
        allocator = internals.MEM_ALLOCATOR()
        requested = {
            segment["address"]: segment["requested_size"]
            for pool, _ in allocator.allocator_and_pools.get("weights", [])
            for segment in pool.snapshot()
        }
        every = SleepingSegments(allocator.pointer_to_data.values())
        taken: Counter[int] = Counter()
        for address, nbytes in _storages(weights).items():
            for segment in every._in(address, nbytes):
                taken[_start(segment)] += nbytes
        filled = [
            segment
            for segment in every.segments
            if 0 < taken[_start(segment)] == requested.get(_start(segment))
        ]
        return SleepingSegments(filled, taken)

    @property
    def nbytes(self) -> int:
        """Bytes of weights in the segments that sleep."""
        return sum(self._taken.get(_start(data), 0) for data in self.segments if data.is_asleep)

    def wake(self, tensors: Iterable[torch.Tensor] | None = None) -> None:
        """Allocate memory, uninitialised, behind these tensors; by default, behind all segments.

        Raises RuntimeError if memory is short, as vLLM's allocator does; segments that woke up
        before stay awake.
        """
        segments = self.segments
        if tensors is not None:
            storages = _storages(tensors).items()
            segments = [data for address, nbytes in storages for data in self._in(address, nbytes)]
        create_and_map = internals.CREATE_AND_MAP.load()
        for segment in segments:
            if segment.is_asleep:
                try:
                    create_and_map(segment.handle)
                except RuntimeError:
                    # Memory is short: free what this process does not use.
                    gc.collect()
                    torch.accelerator.empty_cache()
                    create_and_map(segment.handle)
                segment.is_asleep = False

    def sleep(self) -> None:
        """Free the memory of the segments that are awake."""
        awake = [segment for segment in self.segments if not segment.is_asleep]
        if awake:
            # Kernels may still use the memory, and the next to use it has other addresses.
            torch.cuda.synchronize()
        unmap_and_release = internals.UNMAP_AND_RELEASE.load()
        for segment in awake:
            # First, as in vLLM: whatever fails, the contents are lost.
            segment.is_asleep = True
            unmap_and_release(segment.handle)

    def _in(self, address: int, nbytes: int) -> list[Any]:
        """Return the segments that overlap `nbytes` bytes at `address`; at least one byte."""
        first = bisect_right(self._starts, address) - 1
        end = bisect_right(self._starts, address + max(nbytes, 1) - 1)
        # `first` begins at or before `address`, and may end before it.
        candidates = self.segments[max(first, 0) : end]
        return [data for data in candidates if address < _start(data) + int(data.handle[1])]


def _start(segment: Any) -> int:
    return int(segment.handle[2])
