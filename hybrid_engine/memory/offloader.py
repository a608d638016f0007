"""Taking training state off the device and putting it back, under unchanged tensor objects.

    inventory() -> items -> storages (views of one storage count once)
    offload:  copy -> host arena | drop -> nothing;  then the storage's device memory is freed
    onload:   memory comes back under the same storage object: contents from the arena | zeros

Memory is freed in one of two ways: a storage in an elastic buffer gives its pages back and keeps its address; any
other storage is resized to 0 bytes and back, so that every view stays valid but may find itself at a new address.

Memory before and after, per kind, with T the bytes of its storages, C those that are copied: before T on the device;
after, 0 on the device and C in the arena, which is allocated at the first offload, is exactly as large as needed
(pinned on CUDA), and stays for all later cycles. On a machine without a GPU "device" and host are the same memory:
offloading then saves only what is dropped, and is there because the mechanism is the same one.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from hybrid_engine.errors import HybridEngineError, OffloadError
from hybrid_engine.memory.elastic import ElasticBuffer, exported_buffer_of

Kind = Literal["param", "grad", "optimizer"]
Action = Literal["copy", "drop"]
KINDS: tuple[Kind, ...] = ("param", "grad", "optimizer")
ACTIONS: tuple[Action, ...] = ("copy", "drop")
_ALIGNMENT = 16  # bytes; no element is larger


@dataclass(frozen=True, slots=True, eq=False)
class OffloadItem:
    """A tensor of the training state.

    Attributes:
        owner: who holds it, for reports and errors, e.g. "optimizer[0].exp_avg of decoder.layers.0.mlp.fc1.weight".
        kind: what it is offloaded with.
        tensor: any view; its whole storage is moved.
        action: "copy": the contents come back; "drop": zeros come back (gradients).
    """

    owner: str
    kind: Kind
    tensor: torch.Tensor
    action: Action = "copy"

    def __post_init__(self) -> None:
        if self.kind not in KINDS or self.action not in ACTIONS:
            raise ValueError(
                f"{self.owner}: kind {self.kind!r}, action {self.action!r}; kinds are {', '.join(KINDS)}, "
                f"actions {', '.join(ACTIONS)}"
            )


@dataclass(frozen=True, slots=True)
class OffloadReport:
    """What one call moved: device bytes freed or taken again, by kind; the copied ones among them; seconds."""

    nbytes: Mapping[str, int]
    copied_nbytes: Mapping[str, int]
    seconds: float


@dataclass(eq=False)
class _Storage:
    """One storage of the inventory, and where its contents are while it is away."""

    key: int
    owner: str
    kind: Kind
    action: Action
    storage: torch.UntypedStorage
    nbytes: int
    buffer: ElasticBuffer | None
    arena_offset: int = 0

    @property
    def device(self) -> torch.device:
        return self.storage.device

    def bytes_view(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8, device=self.device).set_(self.storage)

    def free(self) -> None:
        """Give the device memory back; contents are lost."""
        if self.buffer is not None:
            self.buffer.release()
        else:
            self.storage.resize_(0)

    def take_back(self) -> None:
        """Have device memory again; contents are undefined, in an elastic buffer zero."""
        if self.buffer is not None:
            self.buffer.release()  # whatever was written meanwhile
        else:
            self.storage.resize_(self.nbytes)

    def resident_nbytes(self) -> int:
        return self.storage.nbytes() if self.buffer is None else self.buffer.resident_nbytes()

    def why_not_movable(self) -> str | None:
        """Why its memory cannot be freed and taken again under the same storage, if it cannot."""
        if self.buffer is not None:
            return None
        if self.device.type == "cpu" and self.storage.is_shared():
            return "it lies in torch shared memory, which cannot be resized; allocate it with allocate_elastic"
        if not self.storage.resizable():
            return "it does not own its memory (made by from_numpy, frombuffer or a mapping); clone it, or leave it out"
        return None


class _Arena:
    """Host memory for the copied contents of one kind; grows when the inventory does, never shrinks."""

    def __init__(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8)
        self._unpin: Callable[[], object] = lambda: None

    def reserve(self, nbytes: int, *, pinned: bool) -> None:
        """Have at least `nbytes`, page-locked if `pinned`. Contents are lost when it grows."""
        if self.memory.numel() >= nbytes:
            return
        self._unpin()
        self.memory = torch.empty(0, dtype=torch.uint8)  # before the new one, not beside it
        self.memory = torch.empty(nbytes, dtype=torch.uint8)
        if pinned:
            self._unpin = _pin(self.memory, self)

    def slot(self, storage: _Storage) -> torch.Tensor:
        """Where the storage's contents go."""
        return self.memory[storage.arena_offset : storage.arena_offset + storage.nbytes]


class MegatronOffloader:
    """Offloads what an inventory lists, kind by kind.

    The inventory is asked anew at every offload, since optimizers create state at their first step. A storage that
    several items view is moved once, with the first kind that names it in the order param, grad, optimizer; it is
    dropped only if items that cover it whole say so and nobody says copy. What an offload took off is exactly what
    the next onload puts back.
    """

    def __init__(
        self, inventory: Callable[[], Iterable[OffloadItem]], device: torch.device | str | None = None
    ) -> None:
        """`device`: only tensors of this device type are moved, the rest is there already (Adam's CPU step counters
        on a GPU job); default: cuda where there is one, else cpu."""
        default = "cuda" if torch.cuda.is_available() else "cpu"
        self._device_type = torch.device(device or default).type
        self._inventory = inventory
        self._arenas: dict[str, _Arena] = {kind: _Arena() for kind in KINDS}
        self._away: dict[str, list[_Storage]] = {}

    def is_offloaded(self, kind: Kind) -> bool:
        """True from a successful offload until a complete onload."""
        return _checked(kind) in self._away

    def offload(self, kinds: Iterable[Kind] = KINDS) -> OffloadReport:
        """Take these kinds off the device; kinds that are off already are left alone.

        Raises OffloadError: before anything moved when a storage cannot be freed; after everything that this call
        moved was put back when moving fails.
        """
        start = time.perf_counter()
        wanted = {kind for kind in map(_checked, kinds) if kind not in self._away}
        away = {storage.key for storages in self._away.values() for storage in storages}
        storages = [
            storage
            for storage in self._storages()
            if storage.kind in wanted and storage.key not in away and storage.nbytes > 0
        ]
        self._raise_unless_movable(storages)
        moved: dict[str, list[_Storage]] = {kind: [] for kind in KINDS if kind in wanted}
        try:
            self._reserve_arenas(storages)
            # What is dropped goes last: nothing that can fail comes after it.
            for storage in sorted(storages, key=lambda storage: storage.action == "drop"):
                self._take_off(storage)
                moved[storage.kind].append(storage)
        except Exception as error:
            self._undo(moved, error)
        self._away.update(moved)
        if self._device_type == "cuda":
            torch.cuda.empty_cache()  # to the device, where the inference engine's own allocator finds it
        return _report(moved, start)

    def onload(self, kinds: Iterable[Kind] = KINDS) -> OffloadReport:
        """Put these kinds back on the device; kinds that are there are left alone.

        Raises OffloadError when it fails (out of memory): what is back stays back, the rest stays in the arena, the
        message names both, and a later call goes on from there.
        """
        start = time.perf_counter()
        back: dict[str, list[_Storage]] = {}
        for kind in dict.fromkeys(map(_checked, kinds)):
            if kind in self._away:
                back[kind] = []
                self._onload_kind(kind, self._away[kind], back[kind])
                del self._away[kind]
        return _report(back, start)

    def resident_nbytes(self) -> dict[str, dict[str, int]]:
        """Bytes on the device now, by kind and owner; a storage counts once, under the first owner that lists it."""
        resident: dict[str, dict[str, int]] = {kind: {} for kind in KINDS}
        for storage in self._storages():
            by_owner = resident[storage.kind]
            by_owner[storage.owner] = by_owner.get(storage.owner, 0) + storage.resident_nbytes()
        return resident

    def host_nbytes(self) -> int:
        """Bytes of host memory that the arenas hold."""
        return sum(arena.memory.numel() for arena in self._arenas.values())

    def _storages(self) -> list[_Storage]:
        """The inventory's storages, each once, in order of kind and then of the inventory."""
        found: dict[int, _Storage] = {}
        covered: set[int] = set()
        for item in sorted(self._inventory(), key=lambda item: KINDS.index(item.kind)):
            if item.tensor.device.type != self._device_type:
                continue
            storage, key, buffer = _storage_of(item)
            if key not in found:
                found[key] = _Storage(key, item.owner, item.kind, item.action, storage, storage.nbytes(), buffer)
            if item.action == "copy":
                found[key].action = "copy"
            if _covers(item.tensor, storage):
                covered.add(key)
        for key, storage in found.items():
            if key not in covered:
                storage.action = "copy"  # parts that nobody listed must not be lost
        return list(found.values())

    def _raise_unless_movable(self, storages: Iterable[_Storage]) -> None:
        reasons = [
            f"{storage.owner} ({storage.kind}, {storage.nbytes} bytes): {reason}"
            for storage in storages
            if (reason := storage.why_not_movable())
        ]
        if reasons:
            raise OffloadError("cannot be offloaded, nothing was moved:\n  " + "\n  ".join(reasons))

    def _reserve_arenas(self, storages: Iterable[_Storage]) -> None:
        """Give every copied storage its slot in the arena of its kind."""
        ends = dict.fromkeys(KINDS, 0)
        for storage in storages:
            if storage.action == "copy":
                storage.arena_offset = -(-ends[storage.kind] // _ALIGNMENT) * _ALIGNMENT
                ends[storage.kind] = storage.arena_offset + storage.nbytes
        for kind, end in ends.items():
            if end:
                self._arenas[kind].reserve(end, pinned=self._device_type == "cuda")

    def _take_off(self, storage: _Storage) -> None:
        if storage.action == "copy":
            self._arenas[storage.kind].slot(storage).copy_(storage.bytes_view(), non_blocking=True)
            _synchronize(storage.device)
        storage.free()

    def _onload_kind(self, kind: Kind, away: list[_Storage], back: list[_Storage]) -> None:
        """Empties `away` as it goes, so that a failed onload can be continued."""
        try:
            while away:
                self._put_back(kind, away[0])
                back.append(away.pop(0))
        except Exception as error:
            raise OffloadError(
                f"onload of {away[0].owner} ({kind}, {away[0].nbytes} bytes) failed: {error}. "
                f"On the device: {_names(back)}. Still in host memory: {_names(away)}. "
                "Free device memory and onload again"
            ) from error
        finally:
            if back:
                _synchronize(back[-1].device)

    def _put_back(self, kind: Kind, storage: _Storage) -> None:
        storage.take_back()
        if storage.action == "copy":
            storage.bytes_view().copy_(self._arenas[kind].slot(storage), non_blocking=True)
        elif storage.buffer is None:
            storage.bytes_view().zero_()

    def _undo(self, moved: Mapping[str, list[_Storage]], error: Exception) -> None:
        """Put back what a failed offload took off, then raise; what cannot be put back stays offloaded and is named."""
        try:
            self._away.update({kind: list(storages) for kind, storages in moved.items()})
            self.onload(moved)
        except HybridEngineError as second:
            raise OffloadError(f"offload failed: {error}; and putting back failed: {second}") from error
        zeroed = [storage for storages in moved.values() for storage in storages if storage.action == "drop"]
        lost = f" (dropped, hence zero: {_names(zeroed)})" if zeroed else ""
        raise OffloadError(f"offload failed, everything was put back{lost}: {error}") from error


def _storage_of(item: OffloadItem) -> tuple[torch.UntypedStorage, int, ElasticBuffer | None]:
    """The item's storage, what identifies it, and the elastic buffer it lies in."""
    if is_traceable_wrapper_subclass(item.tensor):
        raise OffloadError(
            f"{item.owner} ({item.kind}): a {type(item.tensor).__name__} only wraps others; list what it wraps"
        )
    storage, buffer = item.tensor.untyped_storage(), exported_buffer_of(item.tensor)
    return storage, (storage._cdata if buffer is None else buffer.address), buffer


def _covers(tensor: torch.Tensor, storage: torch.UntypedStorage) -> bool:
    """Whether the tensor views every byte of the storage (a tensor that repeats elements counts as not)."""
    return 0 not in tensor.stride() and tensor.numel() * tensor.element_size() >= storage.nbytes()


def _checked(kind: Kind) -> Kind:
    if kind not in KINDS:
        raise ValueError(f"kind {kind!r} is not one of {', '.join(KINDS)}")
    return kind


def _report(moved: Mapping[str, list[_Storage]], start: float) -> OffloadReport:
    return OffloadReport(
        nbytes={kind: sum(storage.nbytes for storage in storages) for kind, storages in moved.items()},
        copied_nbytes={
            kind: sum(storage.nbytes for storage in storages if storage.action == "copy")
            for kind, storages in moved.items()
        },
        seconds=time.perf_counter() - start,
    )


def _names(storages: Iterable[_Storage]) -> str:
    return ", ".join(f"{storage.owner} ({storage.nbytes} bytes)" for storage in storages) or "nothing"


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _pin(memory: torch.Tensor, owner: object) -> Callable[[], object]:
    """Page-lock ordinary memory until the returned function is called, or `owner` is gone.

    Not `pin_memory=True`: that allocator rounds up to a power of two.
    """
    runtime, address = torch.cuda.cudart(), memory.data_ptr()
    code = int(runtime.cudaHostRegister(address, memory.numel(), 0))
    if code != 0:
        raise OffloadError(f"page-locking {memory.numel()} bytes of host memory failed with CUDA error {code}")
    unpin = weakref.finalize(owner, runtime.cudaHostUnregister, address)
    unpin.atexit = False
    return unpin
