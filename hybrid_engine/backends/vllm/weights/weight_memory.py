"""The memory of inference weights on a device: of live ones, and of those that pass through loader layout.

Live tensors keep their identity and every view of them; what changes is whether there is memory behind them.

On a GPU vLLM's allocator maps memory segment by segment, a large parameter each, but its own wake-up maps all of a kind
at once. `SleepingSegments` lets weights sleep on until they are asked for.

    segments = SleepingSegments.of(...)           those in which nothing lies but weights that will be written
    with segments.overlooked():                   vLLM's own wake-up passes over them, and does all the rest:
        vllm.wake_up(["weights"])                 its bookkeeping, buffers and their contents
    segments.wake(tensors)                        for every group before it is filled
    segments.wake()                               what no group asked for

Addresses stay, so captured graphs do too. A segment says of itself whether it sleeps, so vLLM may be put to sleep
again at any point.
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


class SleepingLlm:
    """An engine of this process, as one who puts vLLM to sleep."""

    def __init__(self, llm: Callable[[], Any]) -> None:
        """`llm`: called for the `vllm.LLM`, which others keep."""
        self._llm = llm

    @property
    def worker(self) -> Any:
        """vLLM's, of this process."""
        return internals.worker_of(self._llm())

    def sleep(self, level: int) -> None:
        """As `vllm.LLM` has it; level 0 pauses vLLM, and takes no memory."""
        self._llm().sleep(level=level)

    def wake_up(self, tags: list[str]) -> None:
        """As `vllm.LLM` has it."""
        self._llm().wake_up(tags=tags)

    def discard(self, tags: tuple[str, ...]) -> None:
        """Give back the memory of these kinds, without their contents."""
        internals.core_of(self._llm()).model_executor.discard(tags)


class SleepingWorker:
    """The same of a server's worker; whoever calls it has paused the server.

    The engine core is not told: it would take the worker's memory for its own to give.
    """

    worker: Any

    def sleep(self, level: int) -> None:
        if not level:
            return
        try:
            self.worker.sleep(level=level)
        except AssertionError as error:
            # of the whole device's free memory, in which trainers and other servers take part
            if "Memory usage increased" not in str(error):
                raise

    def wake_up(self, tags: list[str]) -> None:
        self.worker.wake_up(tags)

    def discard(self, tags: tuple[str, ...]) -> None:
        self.worker.discard(tags)


class SleepMode(WeightMemory):
    """On a GPU: level 2 of vLLM's sleep mode gives all weights and the KV cache back at once; addresses stay.

    The first weights that are asked for wake vLLM up but for the segments of other weights, which come when these are
    asked for; the KV cache has a call of its own.
    """

    frees_all_at_once = True

    def __init__(self, vllm: SleepingLlm | SleepingWorker) -> None:
        self._vllm = vllm
        self._is_asleep = False
        self._is_partly_awake = False  # a wake-up ran out of memory half-way
        self._sleeping: SleepingSegments | None = None
        self._nbytes_awake = 0  # once nothing sleeps any more: counted once, for it is asked for in every bucket
        self._modules_without: set[str] = set()  # modules whose tensors lie elsewhere
        self.is_kv_cache_asleep = False

    def free(self, live: Live) -> None:
        if not self._is_asleep:
            modules = set(sys.modules)
            move_module_tensors_out(modules - self._modules_without)
            self._modules_without = modules
            self._is_asleep = self.is_kv_cache_asleep = self._is_partly_awake = True  # whatever comes of it
            self._sleeping = None
            with _leaving_garbage():
                self._vllm.sleep(level=2)
            self._is_partly_awake = False
        elif self._is_partly_awake:
            # For vLLM the weights sleep still, and its worker would first read buffers that have no memory: only what
            # gives the memory back is called, which passes over what sleeps.
            self._vllm.worker.sleep_mode_backend.suspend(level=2)
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
            self._vllm.sleep(level=0)
            # As vLLM's own release_kv_cache_memory, which refuses while the scheduler keeps ids of finished requests:
            # only a further step forgets them, and there is none.
            self._vllm.discard(("kv_cache",))
            self.is_kv_cache_asleep = True

    def wake_kv_cache(self) -> None:
        """Take the KV cache's memory again, if it was given back. After a failure all of it is given back."""
        if self.is_kv_cache_asleep:
            try:
                self._take(["kv_cache"])
            except BaseException:
                self._vllm.worker.sleep_mode_backend.discard(("kv_cache",))
                raise
            self.is_kv_cache_asleep = False

    def is_given_back(self, live: Live) -> bool:
        return self._is_asleep and not self._is_partly_awake

    def nbytes(self, live: Live) -> int:
        if self._is_asleep:
            return 0
        sleeping = self._sleeping
        if sleeping is None:
            return super().nbytes(live)
        return self._nbytes_awake - sleeping.nbytes

    def _wake_up(self, live: Live) -> None:
        sleeping = SleepingSegments.of(self._vllm.worker, live.values())
        self._is_partly_awake = True
        with sleeping.overlooked():
            self._take(["weights"])
        self._is_asleep = self._is_partly_awake = False
        self._nbytes_awake = super().nbytes(live)
        self._sleeping = sleeping

    def _take(self, tags: list[str]) -> None:
        """Wake these kinds up; where memory is short, once more with what garbage had."""
        try:
            with _leaving_garbage():
                self._vllm.wake_up(tags)
        except RuntimeError as error:
            if not _is_out_of_memory(error):
                raise
            self._vllm.wake_up(tags)


def _leaving_garbage() -> contextlib.AbstractContextManager[None]:
    """Within this context vLLM collects no garbage: that took 0.03 of 0.6 s, three times for each switch and back."""
    return internals.SLEEPS_COLLECTOR.replaced(lambda _: SimpleNamespace(collect=lambda: 0))


def after_workspaces(load_model: Callable[..., Any]) -> Callable[..., Any]:
    """vLLM's `Worker.load_model`, before which torch takes the workspaces of matrix products on the current stream.

    Loading computes products, at least for digests of the model's constants, and takes all memory from what sleeps: the
    next product on that stream, a trainer's, would write to memory that is not there. With tensor parallelism vLLM has
    made a stream of its own the current one by now.
    """

    @functools.wraps(load_model)
    def load(worker: Any, *arguments: Any, **named: Any) -> Any:
        make_workspaces(worker.device)
        return load_model(worker, *arguments, **named)

    return load


def move_module_tensors_out(names: Iterable[str]) -> None:
    """Give the tensors that these modules hold as globals other memory than that of vLLM's allocator.

    vLLM imports modules while it loads weights, when every new tensor of the device comes from the memory that it gives
    back in its sleep. compressed_tensors makes its table of FP4 values then: the first sleep would lose its contents,
    and it would keep the memory from the next engine of the process.
    """
    allocator = internals.CUMEM_ALLOCATOR.load().instance
    if allocator is None:
        return
    segments = {start: start + data.handle[1] for start, data in allocator.pointer_to_data.items()}
    for name in names:
        for value in list(getattr(sys.modules.get(name), "__dict__", {}).values()):
            if type(value) in (torch.Tensor, torch.nn.Parameter) and _is_within(value, segments):
                value.data = value.data.clone()


def _is_within(tensor: torch.Tensor, segments: Mapping[int, int]) -> bool:
    """Whether it lies in one of these segments, start -> end."""
    return any(start <= tensor.data_ptr() < end for start, end in segments.items())


def prepare_allocator() -> None:
    """Make vLLM's allocator, of which a process has one, ready for an engine that is built now.

    Raises StateError when memory of an earlier engine is in use.
    """
    allocator = internals.CUMEM_ALLOCATOR.load().get_instance()
    for _ in range(_MOST_COLLECTIONS):
        gc.collect()
        torch.cuda.empty_cache()
        if not allocator.get_current_usage():
            break
    _forget_error()
    if nbytes := allocator.get_current_usage():
        raise StateError(
            f"{nbytes} bytes of an earlier vLLM's weights or caches are in use in this process, and vLLM's sleep mode "
            "serves one engine at a time: call its shutdown(), and let go of its model and of tensors taken from it"
        )
    if not isinstance(allocator.python_free_callback, FreeCallback):
        allocator.python_free_callback = FreeCallback(allocator, allocator.python_free_callback)


_MOST_COLLECTIONS = 3
"""An object whose finalizer lets go of others takes more than one."""


class FreeCallback:
    """What vLLM's extension calls before it unmaps an allocation and releases its memory: there is some to release.

    An allocation that sleeps has none. The extension would release the number of what it released when the allocation
    went to sleep. The driver gives such numbers away again, so that may be anybody's memory in this process: on an H100
    it was a training buffer's. Nor has an allocation that was free when vLLM had loaded weights: vLLM releases these
    itself, and forgets them, while torch keeps them until the memory pool ends. vLLM's callback fails for them.
    """

    def __init__(self, allocator: Any, original: Callable[[int], Any]) -> None:
        """`original`: vLLM's own callback, which the extension may go on to call."""
        self._allocator = allocator
        self._original = original

    def __call__(self, address: int) -> Any:
        """Return what vLLM's callback returns: device, bytes, address, and where the number of the memory is.

        torch calls it while it goes through its blocks. Garbage that was collected meanwhile would free tensors, and so
        change these blocks.
        """
        collects = gc.isenabled()
        gc.disable()
        try:
            _forget_error()  # or the extension would unmap, and not release
            data = self._allocator.pointer_to_data.get(address)
            if data is None:
                return _with_some_memory((torch.cuda.current_device(), _LEAST_NBYTES, address, _new_number()))
            if data.is_asleep:
                _with_some_memory(data.handle)
            return self._original(address)
        finally:
            if collects:
                gc.enable()


def _with_some_memory(handle: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    """An allocation without memory, which gets a granule: the driver unmaps a range of which a part is mapped."""
    device, nbytes, address, number_address = handle
    try:
        internals.CREATE_AND_MAP.load()((device, min(nbytes, _LEAST_NBYTES), address, number_address))
    except RuntimeError:  # the device is full: release a number that nobody's memory has, and fail
        ctypes.c_uint64.from_address(number_address).value = 0
    return handle


def _new_number() -> int:
    """The address of a number, which the extension frees."""
    malloc = libc().malloc
    malloc.restype, malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    return int(malloc(ctypes.sizeof(ctypes.c_uint64)))


_LEAST_NBYTES = 2 * 2**20
"""The driver's granularity on all GPUs so far."""


def _is_out_of_memory(error: RuntimeError) -> bool:
    """Whether vLLM's allocator, or torch's, found no memory: the former has no type for it."""
    return "out of memory" in str(error).lower().replace("_", " ")


def _forget_error() -> None:
    """Clear the error that a failed call left in vLLM's allocator, which gives no memory and releases none after it."""
    extension = ctypes.CDLL(internals.CUMEM_LIBRARY.load())
    ctypes.c_int.in_dll(extension, "error_code").value = 0


class SleepingSegments:
    """Those of vLLM's allocator that are left asleep.

    Attributes:
        nbytes: of the weights in them that have no memory yet.
    """

    def __init__(self, segments: Iterable[Any], taken: Mapping[int, int] | None = None) -> None:
        """`segments`: vLLM's `AllocationData`, asleep. `taken`: bytes of weights in each, by its address."""
        self._segments = sorted(segments, key=_start)
        self._starts = [_start(segment) for segment in self._segments]
        self._taken = taken or {}
        self.nbytes = sum(self._taken.get(start, 0) for start in self._starts)

    @staticmethod
    def of(worker: Any, weights: Iterable[torch.Tensor]) -> SleepingSegments:
        """The segments in which nothing lies but these weights, which will be written whole.

        Where anything else does (a buffer, whose contents vLLM brings back when it wakes up, or a tensor that nobody
        knows), torch has given more of the segment than they take. None where vLLM's sleep mode works in another way.
        """
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
        left = [one for one in asleep._segments if 0 < taken[_start(one)] == given.get(_start(one))]
        return SleepingSegments(left, taken)

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
                self.nbytes -= self._taken.get(_start(segment), 0)

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
    """As vLLM does; garbage and torch's allocator may keep memory that nobody uses."""
    create_and_map = internals.CREATE_AND_MAP.load()
    try:
        create_and_map(segment.handle)
    except RuntimeError:
        gc.collect()
        torch.accelerator.empty_cache()
        create_and_map(segment.handle)
