"""Items to offload: those that an engine lists, and the storages behind them.

items (views, with owner, kind and action)  ->  survey()  ->  storages, each once
                                                         `->  caches, which are only dropped
"""

from __future__ import annotations

import time
import weakref
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Literal, Protocol

import torch

from hybrid_engine.errors import OffloadError
from hybrid_engine.memory.arena import BackgroundCopy
from hybrid_engine.memory.elastic import ElasticBuffer, exported_buffer_of
from hybrid_engine.ranks.digests import box_digest
from hybrid_engine.ranks.torch_internals import storage_id, wrapped_tensors

_start, _stop = itemgetter(0), itemgetter(1)


class Spans:
    """Byte ranges [start, stop), sorted, disjoint and joined where they touch."""

    def __init__(self) -> None:
        self._spans: list[tuple[int, int]] = []  # one list, changed in one step: an exception leaves no half of it

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(self._spans.copy())

    @property
    def nbytes(self) -> int:
        """Bytes in all ranges."""
        return sum(stop - start for start, stop in self._spans)

    def add(self, start: int, stop: int) -> tuple[int, int]:
        """Add a range; return the range of the set in which it now lies. An empty one changes nothing."""
        if start >= stop:
            return start, start
        low = bisect_left(self._spans, start, key=_stop)  # the first that ends at `start` or after it
        high = bisect_right(self._spans, stop, key=_start)  # the first that begins after `stop`
        if low < high:
            start, stop = min(start, self._spans[low][0]), max(stop, self._spans[high - 1][1])
        self._spans[low:high] = [(start, stop)]
        return start, stop

    def missing(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Return the parts of [start, stop) that are in no range, in order."""
        gaps: list[tuple[int, int]] = []
        first, end = bisect_right(self._spans, start, key=_stop), bisect_left(self._spans, stop, key=_start)
        for span_start, span_stop in self._spans[first:end]:
            if start < span_start:
                gaps.append((start, span_start))
            start = span_stop
        if start < stop:
            gaps.append((start, stop))
        return gaps

    def clear(self) -> None:
        """Remove all ranges."""
        self._spans.clear()


_PIECE_NBYTES = 256 * 2**20


def pieces(ranges: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Cut byte ranges into pieces, so that memory can come or go for one while another is copied.

    A piece takes 5 ms to a host, and its memory 0.5 ms to map (an H100 with PCIe 5).
    """
    for start, stop in ranges:
        for first in range(start, stop, _PIECE_NBYTES):
            yield first, min(first + _PIECE_NBYTES, stop)


Kind = Literal["param", "grad", "optimizer"]
Action = Literal["copy", "drop", "rebuild"]
KINDS: tuple[Kind, ...] = ("param", "grad", "optimizer")
ACTIONS: tuple[Action, ...] = ("copy", "drop", "rebuild")

_ALIGNMENT = 16  # bytes, of a storage's place in the arena; no element is larger


@dataclass(frozen=True, slots=True, eq=False)
class OffloadItem:
    """A tensor of the training state.

    Attributes:
        owner: who holds it, for reports and errors, e.g. "optimizer[0].exp_avg of decoder.layers.0.mlp.fc1.weight".
        kind: what it is offloaded with.
        tensor: any view; its whole storage is moved.
        action: "copy": the contents are restored; "drop": zeros are (gradients); "rebuild": nothing is, the owner
            recomputes it when it is missing (caches).
        forget: makes the owner of a "rebuild" item drop it; None for other items.
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


class Guards:
    """Whoever may take a trainer's state off the device; a call asks all of them, the last one added first.

    A call with the kinds of state that are about to be used raises StateError where one of them has moved these, or
    has another reason to refuse. Each guard is a bound method, held weakly: it refers to the model, and the hooks that
    call it would keep both alive.
    """

    def __init__(self) -> None:
        self._guards: list[weakref.WeakMethod[Callable[[Collection[str]], None]]] = []

    def add(self, guard: Callable[[Collection[str]], None]) -> None:
        """Ask `guard`, too, for as long as its object lives."""
        living = [each for each in self._guards if each() is not None]
        self._guards = [weakref.WeakMethod(guard), *living]

    def __call__(self, kinds: Iterable[str]) -> None:
        wanted = frozenset(kinds)
        for reference in self._guards:
            if (guard := reference()) is not None:
                guard(wanted)


class Offloadable(Protocol):
    """Owner of state that can leave the device: a trainer, or a model beside one."""

    guard: Guards

    def offload_items(self) -> Iterable[OffloadItem]:
        """Everything that can leave the device, as it is now."""


@dataclass(eq=False)
class Items:
    """State that no trainer owns, as a benchmark offloads it."""

    offload_items: Callable[[], Iterable[OffloadItem]]
    guard: Guards = field(default_factory=Guards)


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Elements [start, stop) of a contiguous 1-D tensor; raises ValueError for anything else."""

    flat: torch.Tensor
    start: int
    stop: int

    def __post_init__(self) -> None:
        if self.flat.dim() != 1 or not self.flat.is_contiguous():
            shape, strides = tuple(self.flat.shape), self.flat.stride()
            raise ValueError(f"a part needs a contiguous 1-D tensor, got shape {shape} with strides {strides}")
        if not 0 <= self.start <= self.stop <= self.flat.numel():
            raise ValueError(f"invalid part [{self.start}, {self.stop}) of a tensor of {self.flat.numel()} elements")


class OffloadReport:
    """Bytes that one call moved, summed up while it runs.

    Attributes:
        nbytes: device bytes freed or taken again, by kind.
        copied_nbytes: those of them that were copied, by kind.
        seconds: duration of the call.
    """

    def __init__(self, kinds: Iterable[Kind]) -> None:
        self.nbytes: dict[str, int] = dict.fromkeys(sorted(kinds, key=KINDS.index), 0)
        self.copied_nbytes, self.seconds, self._start = dict(self.nbytes), 0.0, time.perf_counter()

    @property
    def total_nbytes(self) -> int:
        """Bytes moved, summed over all kinds."""
        return sum(self.nbytes.values())

    def ended(self) -> OffloadReport:
        """Return it, with the time since it was created."""
        self.seconds = time.perf_counter() - self._start
        return self


@dataclass(eq=False)
class Storage:
    """One storage of the inventory, and where its contents are while it is offloaded.

    Attributes:
        key: identifies it: the address of its elastic buffer, or torch's handle.
        owner, kind, action: of the first item that lists it, see `survey`.
        buffer: the elastic buffer it lies in, if any.
        arena_offset: where its contents go in the arena, in bytes.
        in_arena: its contents are in the arena already, or on their way.
        saved: byte ranges whose contents are in the arena, or on their way.
        done: byte ranges that may be released: saved, or not to be kept.
        released: byte ranges whose contents are not on the device; noted before their memory goes, and until their
            contents are back.
        is_coming: it has memory again, and the copies of its contents are under way.
        copies: in the background, in either direction; whoever needs them done waits for them.
        saves: byte ranges on their way to the arena, in the order of their copies, and what waits for each.
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
    saved: Spans = field(default_factory=Spans)
    done: Spans = field(default_factory=Spans)
    released: Spans = field(default_factory=Spans)
    is_coming: bool = False
    copies: list[BackgroundCopy] = field(default_factory=list)
    saves: list[tuple[int, int, Callable[[], None]]] = field(default_factory=list)

    @property
    def is_away(self) -> bool:
        """Whether nothing of it is on the device, or on its way there; nor memory that was taken for it in vain."""
        return self.released.nbytes == self.nbytes and not (self.is_coming or self.copies or self.resident_nbytes())

    @property
    def has_begun_to_leave(self) -> bool:
        """Whether any of its contents are elsewhere, or may be."""
        return bool(self.copies or self.in_arena or self.saved.nbytes or self.done.nbytes or self.released.nbytes)

    @property
    def device(self) -> torch.device:
        return self.storage.device

    @property
    def arena_stop(self) -> int:
        return self.arena_offset + self.nbytes

    def bytes_view(self) -> torch.Tensor:
        """Return all of its bytes as a flat tensor."""
        return torch.empty(0, dtype=torch.uint8, device=self.device).set_(self.storage)

    def wait_saved(self, start: int, stop: int) -> None:
        """Wait until nothing of this byte range is on its way to the arena."""
        for index in reversed(range(len(self.saves))):
            first, last, wait = self.saves[index]
            if first < stop and start < last:
                wait()
                del self.saves[: index + 1]
                return

    def free(self) -> None:
        """Release all memory; contents are lost."""
        self.released.add(0, self.nbytes)
        if self.buffer is not None:
            self.buffer.release()
        else:
            self.storage.resize_(0)

    def release_inside(self, start: int, stop: int) -> int:
        """Release the granules that lie wholly in this byte range of an elastic storage; return their bytes."""
        assert self.buffer is not None, "parts are those of elastic storages"
        granule, before = self.buffer.granularity, self.released.nbytes
        first = -(-start // granule) * granule
        last = stop if stop == self.nbytes else stop // granule * granule
        for gap in self.released.missing(first, last):
            self.released.add(*gap)
            self.buffer.release(*gap)
        return self.released.nbytes - before

    def take_back(self) -> Iterator[tuple[int, int]]:
        """Take memory again where it was released; contents are undefined there, or zero if dropped.

        Yields byte ranges, each as soon as it has memory; whoever stops early has no more.
        """
        dropped = self.action == "drop"
        if self.buffer is None:
            self.storage.resize_(self.nbytes)
            if dropped:
                self.bytes_view().zero_()
            yield from self.released
            return
        for start, stop in self.released if dropped else pieces(self.released):
            if dropped:
                self.buffer.release(start, stop)  # discards what was written meanwhile
            self.buffer.restore(start, stop)
            if dropped and self.device.type != "cpu":  # on the CPU new pages are zero
                self.bytes_view()[start:stop].zero_()
            yield start, stop
        if dropped:
            for start, stop in [gap for span in self.done for gap in self.released.missing(*span)]:
                self.bytes_view()[start:stop].zero_()  # dropped bytes on pages that kept bytes share

    def call_off(self) -> None:
        """Begin no copy any more; what had memory again gives it back. Contents stay where they are.

        Where they are is noted before the first copy is given up, since an interrupt may come after it.
        """
        was_coming, self.is_coming = self.is_coming, False
        if self.copies and not self.released.nbytes:  # they go to the arena
            self.in_arena = False
        while self.copies:
            self.copies[-1].cancel()
            self.copies.pop()
        if not was_coming:
            return
        if self.buffer is None:
            self.storage.resize_(0)
            return
        for start, stop in self.released:
            self.buffer.release(start, stop)

    def complete(self) -> float:
        """Wait for its copies; what was coming is on the device again. Returns the seconds they took in the background.

        Raises what a copy raised: nothing is lost, and the next call makes it again.
        """
        seconds = 0.0
        while self.copies:
            seconds += self.copies[-1].wait()
            self.copies.pop()
        if self.is_coming:
            self.forget_departure()
        return seconds

    def forget_departure(self) -> None:
        """Note that everything is on the device again.

        An interrupt may come between any two lines. Until `released` is empty its contents count as elsewhere, and come
        from the arena once more; what is not released needs none of the rest.
        """
        self.is_coming = False  # first: what is coming gives its memory up when it is called off
        for spans in (self.released, self.saved, self.done):
            spans.clear()
        self.saves.clear()
        self.in_arena = False

    def resident_nbytes(self) -> int:
        """Return the bytes of device memory behind it now."""
        return self.storage.nbytes() if self.buffer is None else self.buffer.resident_nbytes()

    def why_not_movable(self) -> str | None:
        """Return why its memory cannot be freed and taken again under the same storage; None if it can."""
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

    def resident_nbytes(self) -> dict[str, dict[str, int]]:
        """Return the bytes of device memory by kind and owner."""
        resident: dict[str, dict[str, int]] = {kind: {} for kind in KINDS}
        sizes = [(storage.kind, storage.owner, storage.resident_nbytes()) for storage in self.storages]
        sizes += [(item.kind, item.owner, item.tensor.untyped_storage().nbytes()) for item in self.caches]
        for kind, owner, nbytes in sizes:
            resident[kind][owner] = resident[kind].get(owner, 0) + nbytes
        return resident


def survey(items: Iterable[OffloadItem], device_type: str) -> Survey:
    """Return the storages of these items on devices of this type.

    A storage that several items view gets the first kind and owner that list it, in order of KINDS. It is dropped only
    if items with action "drop" cover it and none has action "copy"; it is a cache only if all items say "rebuild".
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
    for key, found_storage in found.items():
        if key not in covered:
            found_storage.action = "copy"  # parts that no item covers must not be lost
    return Survey(list(found.values()), [item for key, item in caches.items() if key not in found])


def held_nbytes(items: Iterable[OffloadItem], device_type: str) -> int:
    """Return the bytes of memory behind these items on devices of this type, without caches."""
    return sum(storage.resident_nbytes() for storage in survey(items, device_type).storages)


def checked(kind: Kind) -> Kind:
    """Return a kind. Raises ValueError for anything else."""
    if kind not in KINDS:
        raise ValueError(f"kind {kind!r} is not one of {', '.join(KINDS)}")
    return kind


def elastic_ranges(storages: Iterable[Storage], parts: Iterable[Part]) -> list[tuple[Storage, Spans]]:
    """Return the byte ranges of these parts in those of the storages that are elastic."""
    elastic = {storage.key: storage for storage in storages if storage.buffer is not None}
    ranges: dict[int, Spans] = {}
    for part in parts:
        _, key, _ = storage_of("a part", part.flat)
        if key in elastic:
            size, offset = part.flat.element_size(), int(part.flat.storage_offset())
            ranges.setdefault(key, Spans()).add((offset + part.start) * size, (offset + part.stop) * size)
    return [(elastic[key], spans) for key, spans in ranges.items()]


def forget(caches: Iterable[OffloadItem], moved: OffloadReport) -> None:
    """Make the owners of these caches drop them."""
    for item in caches:
        if item.kind in moved.nbytes:
            moved.nbytes[item.kind] += item.tensor.untyped_storage().nbytes()
        if item.forget is not None:
            item.forget()


def lay_out(placed: Collection[Storage], new: Iterable[Storage]) -> None:
    """Assign every new copied storage its place in the arena: the one it had before, or one after all others."""
    known = {(each.key, each.nbytes): each.arena_offset for each in placed if each.action == "copy"}
    end = max((storage.arena_stop for storage in placed if storage.action == "copy"), default=0)
    for storage in (each for each in new if each.action == "copy"):
        offset = known.get((storage.key, storage.nbytes))
        storage.arena_offset = -(-end // _ALIGNMENT) * _ALIGNMENT if offset is None else offset
        end = max(end, storage.arena_stop)


@dataclass(frozen=True, slots=True)
class Saved:
    """Contents of a storage in the arena: where they are, how many bytes, and their digest."""

    offset: int
    nbytes: int
    digest: int

    @classmethod
    def of(cls, storage: Storage) -> Saved:
        """Describe a storage that is on the device and in the arena."""
        return cls(storage.arena_offset, storage.nbytes, box_digest(storage.bytes_view()))


def reuse_places(storages: Iterable[Storage], saved: Mapping[int, Saved]) -> bool:
    """Keep the places in the arena, if all of these storages have one; what is there as it is now counts as copied."""
    copied = [storage for storage in storages if storage.action == "copy"]
    # All or none: `lay_out` puts a storage without a place behind those of the last departure, which it does not know
    # here, so one that is new, or of another size, might be laid over a place that was kept.
    if not all(each.key in saved and saved[each.key].nbytes == each.nbytes for each in copied):
        return False
    for storage in copied:
        storage.arena_offset = saved[storage.key].offset
        storage.in_arena = Saved.of(storage) == saved[storage.key]
    return True


def names_of(storages: Iterable[Storage]) -> str:
    """Owners and sizes, for messages."""
    return ", ".join(f"{storage.owner} ({storage.nbytes} bytes)" for storage in storages) or "nothing"


def storage_of(owner: str, tensor: torch.Tensor) -> tuple[torch.UntypedStorage, int, ElasticBuffer | None]:
    """Return the tensor's storage, its key, and the elastic buffer it lies in, if any."""
    if wrapped_tensors(tensor):
        raise OffloadError(f"{owner}: a {type(tensor).__name__} only wraps other tensors; list those")
    storage, buffer = tensor.untyped_storage(), exported_buffer_of(tensor)
    return storage, (storage_id(storage) if buffer is None else buffer.address), buffer


def _covers(tensor: torch.Tensor, storage: torch.UntypedStorage) -> bool:
    """Return whether the tensor views every byte of the storage (False for one that repeats elements)."""
    return 0 not in tensor.stride() and tensor.numel() * tensor.element_size() >= storage.nbytes()
