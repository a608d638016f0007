"""What there is to offload: items that an engine lists, and the storages behind them.

items (views, with owner, kind and action)  ->  survey()  ->  storages, each once
                                                         `->  caches, which are only forgotten
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from hybrid_engine.errors import OffloadError
from hybrid_engine.memory.elastic import ElasticBuffer, exported_buffer_of
from hybrid_engine.memory.spans import Spans

Kind = Literal["param", "grad", "optimizer"]
Action = Literal["copy", "drop", "rebuild"]
KINDS: tuple[Kind, ...] = ("param", "grad", "optimizer")
ACTIONS: tuple[Action, ...] = ("copy", "drop", "rebuild")


@dataclass(frozen=True, slots=True, eq=False)
class OffloadItem:
    """A tensor of the training state.

    Attributes:
        owner: who holds it, for reports and errors, e.g. "optimizer[0].exp_avg of decoder.layers.0.mlp.fc1.weight".
        kind: what it is offloaded with.
        tensor: any view; its whole storage is moved.
        action: "copy": the contents come back; "drop": zeros come back (gradients); "rebuild": nothing comes back,
            its owner computes it anew when it is missing (caches).
        forget: makes the owner of a "rebuild" item let go of it; others have none.
    """

    owner: str
    kind: Kind
    tensor: torch.Tensor
    action: Action = "copy"
    forget: Callable[[], object] | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS or self.action not in ACTIONS:
            raise ValueError(
                f"{self.owner}: kind {self.kind!r}, action {self.action!r}; kinds are {', '.join(KINDS)}, "
                f"actions {', '.join(ACTIONS)}"
            )
        if (self.action == "rebuild") != (self.forget is not None):
            raise ValueError(f"{self.owner}: action {self.action!r} and forget={self.forget}; rebuild needs forget")


@dataclass(frozen=True, slots=True, eq=False)
class Reached:
    """A tensor that model or optimizer refers to, whether the inventory lists it or not.

    Attributes:
        owner: the path that leads to it.
        tensor: any view.
        stays: why it is left on the device; None where nobody has said so.
    """

    owner: str
    tensor: torch.Tensor
    stays: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Elements [start, stop) of a contiguous 1-D tensor; ValueError for anything else."""

    flat: torch.Tensor
    start: int
    stop: int

    def __post_init__(self) -> None:
        if self.flat.dim() != 1 or not self.flat.is_contiguous():
            raise ValueError(f"a part of a tensor of shape {tuple(self.flat.shape)}, strides {self.flat.stride()}")
        if not 0 <= self.start <= self.stop <= self.flat.numel():
            raise ValueError(f"part [{self.start}, {self.stop}) of a tensor of {self.flat.numel()} elements")


@dataclass(frozen=True, slots=True)
class OffloadReport:
    """What one call moved: device bytes freed or taken again, by kind; the copied ones among them; seconds."""

    nbytes: Mapping[str, int]
    copied_nbytes: Mapping[str, int]
    seconds: float


class Moved:
    """What a running call has moved so far, by kind."""

    def __init__(self, kinds: Iterable[Kind]) -> None:
        self.nbytes: dict[str, int] = dict.fromkeys(sorted(kinds, key=KINDS.index), 0)
        self.copied = dict(self.nbytes)
        self._start = time.perf_counter()

    def report(self) -> OffloadReport:
        """All of it, and the time since this object was made."""
        return OffloadReport(self.nbytes, self.copied, time.perf_counter() - self._start)


@dataclass(eq=False)
class Storage:
    """One storage of the inventory, and where its contents are while it is away.

    Attributes:
        key: what identifies it: the address of its elastic buffer, or torch's handle.
        arena_offset: where in the arena its contents go, in bytes.
        in_arena: its contents are in the arena already.
        done: byte ranges that may be released: saved, or not to be kept.
        released: byte ranges that have no memory.
    """

    key: int
    owner: str
    kind: Kind
    action: Action
    storage: torch.UntypedStorage
    nbytes: int
    buffer: ElasticBuffer | None
    arena_offset: int = 0
    in_arena: bool = False
    done: Spans = field(default_factory=Spans)
    released: Spans = field(default_factory=Spans)

    @property
    def device(self) -> torch.device:
        return self.storage.device

    def bytes_view(self) -> torch.Tensor:
        """All of its bytes."""
        return torch.empty(0, dtype=torch.uint8, device=self.device).set_(self.storage)

    def free(self) -> None:
        """Give all memory back; contents are lost."""
        if self.buffer is not None:
            self.buffer.release()
        else:
            self.storage.resize_(0)
        self.released.add(0, self.nbytes)

    def release_inside(self, start: int, stop: int) -> int:
        """Give back the granules that lie wholly in this byte range of an elastic storage; returns the bytes."""
        granule, before = self.buffer.granularity, self.released.nbytes
        first = -(-start // granule) * granule
        last = stop if stop == self.nbytes else stop // granule * granule
        for gap in self.released.missing(first, last):
            self.buffer.release(*gap)
            self.released.add(*gap)
        return self.released.nbytes - before

    def take_back(self) -> None:
        """Have memory again where it was given back; contents are undefined there, or zero if dropped."""
        dropped = self.action == "drop"
        if self.buffer is None:
            self.storage.resize_(self.nbytes)
            if dropped:
                self.bytes_view().zero_()
            return
        for start, stop in self.released:
            if dropped:
                self.buffer.release(start, stop)  # whatever was written meanwhile
            self.buffer.restore(start, stop)
            if dropped and self.device.type != "cpu":  # where pages come back as they are
                self.bytes_view()[start:stop].zero_()
        if dropped:
            for start, stop in [gap for span in self.done for gap in self.released.missing(*span)]:
                self.bytes_view()[start:stop].zero_()  # what was given up with a page that others kept

    def forget_departure(self) -> None:
        """Everything is on the device again."""
        self.done.clear()
        self.released.clear()

    def resident_nbytes(self) -> int:
        """Bytes of device memory behind it now."""
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


@dataclass(frozen=True, slots=True)
class Survey:
    """An inventory, each storage once, in order of kind and then of the inventory."""

    storages: list[Storage]
    caches: list[OffloadItem]

    def keys(self) -> set[int]:
        """What identifies all that is listed."""
        return {s.key for s in self.storages} | {storage_of(item.owner, item.tensor)[1] for item in self.caches}

    def resident_nbytes(self) -> dict[str, dict[str, int]]:
        """Bytes of device memory by kind and owner."""
        resident: dict[str, dict[str, int]] = {kind: {} for kind in KINDS}
        sizes = [(storage.kind, storage.owner, storage.resident_nbytes()) for storage in self.storages]
        sizes += [(item.kind, item.owner, item.tensor.untyped_storage().nbytes()) for item in self.caches]
        for kind, owner, nbytes in sizes:
            resident[kind][owner] = resident[kind].get(owner, 0) + nbytes
        return resident


def survey(items: Iterable[OffloadItem], device_type: str) -> Survey:
    """The storages of these items on devices of this type.

    A storage that several items view has the first kind and owner that name it, in order of KINDS; it is dropped only
    if items that cover it whole say so and nobody says copy, and it is a cache only if nobody says otherwise.
    """
    found: dict[int, Storage] = {}
    covered: set[int] = set()
    caches: dict[int, OffloadItem] = {}
    for item in sorted(items, key=lambda item: KINDS.index(item.kind)):
        if item.tensor.device.type != device_type:
            continue
        storage, key, buffer = storage_of(item.owner, item.tensor)
        if item.action == "rebuild":
            caches.setdefault(key, item)
            continue
        if key not in found:
            found[key] = Storage(key, item.owner, item.kind, item.action, storage, storage.nbytes(), buffer)
        if item.action == "copy":
            found[key].action = "copy"
        if _covers(item.tensor, storage):
            covered.add(key)
    for key, storage in found.items():
        if key not in covered:
            storage.action = "copy"  # parts that nobody listed must not be lost
    return Survey(list(found.values()), [item for key, item in caches.items() if key not in found])


def storage_of(owner: str, tensor: torch.Tensor) -> tuple[torch.UntypedStorage, int, ElasticBuffer | None]:
    """The tensor's storage, what identifies it, and the elastic buffer it lies in."""
    if is_traceable_wrapper_subclass(tensor):
        raise OffloadError(f"{owner}: a {type(tensor).__name__} only wraps others; list what it wraps")
    storage, buffer = tensor.untyped_storage(), exported_buffer_of(tensor)
    return storage, (storage._cdata if buffer is None else buffer.address), buffer


def _covers(tensor: torch.Tensor, storage: torch.UntypedStorage) -> bool:
    """Whether the tensor views every byte of the storage (a tensor that repeats elements counts as not)."""
    return 0 not in tensor.stride() and tensor.numel() * tensor.element_size() >= storage.nbytes()
