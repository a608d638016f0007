"""Items to offload, as an engine lists them, and the storages behind them.

items (views, with owner, kind and action)  ->  survey()  ->  storages, without duplicates
                                                         `->  caches, which are only dropped
"""

from __future__ import annotations

import weakref
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, Literal, Protocol

import torch

from hybrid_engine.errors import OffloadError
from hybrid_engine.memory.arena import QueuedCopy
from hybrid_engine.memory.device_pages import Chunks
from hybrid_engine.memory.elastic import ElasticBuffer, exported_buffer_of
from hybrid_engine.memory.host_pages import round_up
from hybrid_engine.ranks.digests import box_digest
from hybrid_engine.ranks.torch_internals import storage_id, wrapped_tensors

Span = tuple[int, int]
"""A byte range [start, stop)."""

_start = itemgetter(0)
_stop = itemgetter(1)


class Spans:
    """Byte ranges [start, stop), sorted, disjoint and joined where they touch."""

    def __init__(self) -> None:
        self._spans: list[Span] = []

    def __iter__(self) -> Iterator[Span]:
        return iter(self._spans.copy())

    @property
    def nbytes(self) -> int:
        """Total bytes of the ranges."""
        return sum(stop - start for start, stop in self._spans)

    def add(self, start: int, stop: int) -> Span:
        """Add a range, and return the joined range; an empty one changes nothing."""
        if start >= stop:
            return start, start
        # First range that ends at `start` or later, and first range that begins after `stop`.
        # To 0-4, 6-8 and 10-12, a range 4-10 touches all three (low 0, high 3): 0-12 is left.
        low = bisect_left(self._spans, start, key=_stop)
        high = bisect_right(self._spans, stop, key=_start)
        if low < high:
            start = min(start, self._spans[low][0])
            stop = max(stop, self._spans[high - 1][1])
        # A single slice assignment: an interrupt cannot leave half of the change behind.
        self._spans[low:high] = [(start, stop)]
        return start, stop

    def missing(self, start: int, stop: int) -> list[Span]:
        """Return the parts of [start, stop) that are in no range, in order."""
        gaps: list[Span] = []
        # Ranges that end before `start` or begin after `stop` have no
        # share: 5-9 without 6-8 is 5-6, 8-9.
        first = bisect_right(self._spans, start, key=_stop)
        end = bisect_left(self._spans, stop, key=_start)
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


def pieces(ranges: Iterable[Span]) -> Iterator[Span]:
    """Cut byte ranges into pieces, so that memory of one piece is moved while another is copied.

    A piece takes 5 ms to a host, and its memory 0.5 ms to map (an H100 with PCIe 5).
    """
    for start, stop in ranges:
        for first in range(start, stop, _PIECE_NBYTES):
            yield first, min(first + _PIECE_NBYTES, stop)


Holder = torch.nn.Module | torch.optim.Optimizer
Kind = Literal["param", "grad", "optimizer"]
Action = Literal["copy", "drop", "rebuild"]
KINDS: tuple[Kind, ...] = ("param", "grad", "optimizer")
LATE_KINDS: frozenset[Kind] = frozenset({"optimizer"})
"""Kinds that forward and backward passes leave alone, so that their copies may go on behind them.

Whatever uses them calls the owner's guard first: an optimizer step, a checkpoint.
"""
ACTIONS: tuple[Action, ...] = ("copy", "drop", "rebuild")

# Bytes. Storages start at multiples of it in the arena. No element is larger.
_ALIGNMENT = 16


@dataclass(frozen=True, slots=True, eq=False)
class OffloadItem:
    """A tensor of the training state.

    Attributes:
        owner: holder of the tensor, for reports and errors, such as
            "optimizer[0].exp_avg of decoder.layers.0.mlp.fc1.weight".
        kind: kind of state with which it is offloaded.
        tensor: any view; its whole storage is moved.
        action: "copy": the contents are restored. "drop": zeros are restored (gradients).
            "rebuild": nothing is restored, because the owner recomputes it when it is missing
            (caches).
        forget: makes the owner of a "rebuild" item drop it; None for other items.

    Raises ValueError for an unknown kind or action, and if `forget` does not fit the action.
    """

    owner: str
    kind: Kind
    tensor: torch.Tensor
    action: Action = "copy"
    forget: Callable[[], object] | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS or self.action not in ACTIONS:
            raise ValueError(
                f"{self.owner}: kind {self.kind!r}, action {self.action!r}; "
                f"kinds are {', '.join(KINDS)}, actions {', '.join(ACTIONS)}"
            )
        # An owner that cannot forget a cache would keep its memory; state must never be forgotten.
        if (self.action == "rebuild") != (self.forget is not None):
            raise ValueError(
                f"{self.owner}: action {self.action!r} and forget={self.forget}; "
                "set `forget` for rebuild, and only for rebuild"
            )


class Guards:
    """Callbacks that refuse the use of state that is off the device; the newest is called first.

    Calling the object with kinds of state that are about to be used calls every guard, which raises
    StateError to refuse. Guards are bound methods, held weakly: the hooks that call them would
    otherwise keep the model alive.
    """

    def __init__(self) -> None:
        self._guards: list[weakref.WeakMethod[Callable[[Collection[str]], None]]] = []
        self._holders: list[weakref.ref[Holder]] = []

    def add(self, guard: Callable[[Collection[str]], None]) -> None:
        """Call `guard` as well, for as long as its object lives."""
        living = [reference for reference in self._guards if reference() is not None]
        self._guards = [weakref.WeakMethod(guard), *living]

    def reach(self, holders: Iterable[Holder]) -> None:
        """Note what holds tensors that users reach."""
        self._holders += map(weakref.ref, holders)

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield the modules' parameters, and what the optimizers step on and keep of them."""
        for holder in (reference() for reference in self._holders):
            if isinstance(holder, torch.nn.Module):
                yield from holder.parameters()
            elif holder is not None:
                for group in holder.param_groups:
                    yield from group["params"]
                for state in holder.state.values():
                    yield from (tensor for _, tensor in tensors_in("", state))

    def __call__(self, kinds: Iterable[str]) -> None:
        used_kinds = frozenset(kinds)
        for reference in self._guards:
            guard = reference()
            if guard is not None:
                guard(used_kinds)


def tensors_in(path: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (path, tensor) of every tensor in an optimizer's state, at any depth."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from tensors_in(f"{path}[{key!r}]", inner)
    elif isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            yield from tensors_in(f"{path}[{index}]", inner)


class Offloadable(Protocol):
    """Owner of state that can leave the device: a trainer, or a companion model."""

    guard: Guards

    def offload_items(self) -> Iterable[OffloadItem]:
        """Return every tensor that can leave the device at this moment."""


@dataclass(eq=False)
class Items:
    """State without a trainer, such as the state that a benchmark offloads."""

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
            raise ValueError(
                "a part needs a contiguous 1-D tensor, "
                f"got shape {tuple(self.flat.shape)} with strides {self.flat.stride()}"
            )
        numel = self.flat.numel()
        if not 0 <= self.start <= self.stop <= numel:
            raise ValueError(
                f"invalid part [{self.start}, {self.stop}) of a tensor of {numel} elements"
            )


@dataclass(eq=False)
class Storage:
    """A storage of the inventory, and the location of its contents while it is offloaded.

    Attributes:
        key: identity: the address of its elastic buffer, or torch's handle.
        owner, kind, action: of the first item that lists the storage, see `survey`.
        buffer: the elastic buffer that contains it, if any.
        arena_offset: start of its place in the arena, in bytes.
        saved: byte ranges whose contents are in the arena, or on their way there.
        done: byte ranges that may be released, because they are saved or need not be kept.
        released: byte ranges whose contents are not on the device. A range is added before its
            memory is freed, and removed after its contents are back.
        is_coming: it has memory again, and the copies of its contents are under way.
        arrivals: these copies.
        saves: byte ranges on their way to the arena, each with its copy, in order.
    """

    key: int
    owner: str
    kind: Kind
    action: Action
    storage: torch.UntypedStorage
    nbytes: int
    buffer: ElasticBuffer | None
    arena_offset: int = 0
    saved: Spans = field(default_factory=Spans)
    done: Spans = field(default_factory=Spans)
    released: Spans = field(default_factory=Spans)
    is_coming: bool = False
    arrivals: list[QueuedCopy] = field(default_factory=list)
    saves: list[tuple[int, int, QueuedCopy]] = field(default_factory=list)

    @property
    def is_away(self) -> bool:
        """True if it has no contents and no memory on the device, and none on their way there."""
        if self.released.nbytes != self.nbytes or self.is_coming or self.arrivals:
            return False
        # A failed onload may have left memory without contents.
        return not self.resident_nbytes()

    @property
    def has_begun_to_leave(self) -> bool:
        """True if any of its contents are, or may be, off the device."""
        return any(spans.nbytes for spans in (self.saved, self.done, self.released))

    @property
    def device(self) -> torch.device:
        return self.storage.device

    @property
    def identity(self) -> tuple[int, int]:
        """Key and bytes: a storage that has grown does not fit its old place in the arena."""
        return self.key, self.nbytes

    @property
    def arena_stop(self) -> int:
        return self.arena_offset + self.nbytes

    def bytes_view(self) -> torch.Tensor:
        """Return a flat uint8 tensor over the storage."""
        return torch.empty(0, dtype=torch.uint8, device=self.device).set_(self.storage)

    def wait_saved(self, start: int, stop: int) -> None:
        """Wait until no copy of this byte range to the arena is under way."""
        # Copies end in order, so waiting for the last overlapping copy completes all before it.
        for index in reversed(range(len(self.saves))):
            first, last, copy = self.saves[index]
            if first < stop and start < last:
                copy.wait()
                del self.saves[: index + 1]
                return

    def free(self) -> None:
        """Free all memory; contents are lost."""
        self.released.add(0, self.nbytes)
        if self.buffer is not None:
            self.buffer.release()
        else:
            self.storage.resize_(0)

    def late_ranges(self) -> Spans:
        """Return the byte ranges that are copied and that inference takes late, or never."""
        ranges = Spans()
        memory = self.buffer and self.buffer.memory
        if self.action == "copy" and isinstance(memory, Chunks):
            for start, stop in memory.late_ranges():
                ranges.add(start, min(stop, self.nbytes))
        return ranges

    def release_inside(self, start: int, stop: int) -> int:
        """Release granules wholly inside this byte range of an elastic storage; return bytes."""
        assert self.buffer is not None, "only elastic storages are released in part"
        before = self.released.nbytes
        for gap_start, gap_stop in self.released.missing(*self.buffer.inside(start, stop)):
            # Noted first: after an interrupt the contents come from the arena.
            self.released.add(gap_start, gap_stop)
            self.buffer.release(gap_start, gap_stop)
        return self.released.nbytes - before

    def take_back(self) -> Iterator[Span]:
        """Allocate the released memory again; it is zero if dropped, else undefined.

        Yields each byte range as soon as it has memory.
        """
        if self.buffer is None:
            self.storage.resize_(self.nbytes)
        for start, stop in pieces(self.released):
            if self.buffer is not None:
                if self.action == "drop":
                    # Discard anything written since the release.
                    self.buffer.release(start, stop)
                self.buffer.restore(start, stop)
            # On the CPU new pages are zero.
            if self.action == "drop" and (self.buffer is None or self.device.type != "cpu"):
                self.bytes_view()[start:stop].zero_()
            yield start, stop

    def call_off(self) -> None:
        """Free memory allocated for an onload, once no copy writes it."""
        was_coming = self.is_coming
        # Before the first wait, because an interrupt may follow it.
        self.is_coming = False
        self._await_arrivals()
        if not was_coming:
            return
        if self.buffer is None:
            self.storage.resize_(0)
            return
        for start, stop in self.released:
            self.buffer.release(start, stop)

    def complete(self) -> float:
        """Wait for the copies of an onload, and return their seconds; then the storage is back.

        Raises the error of a failed copy: nothing is lost, and the next call waits again.
        """
        seconds = self._await_arrivals()
        if self.is_coming:
            self.forget_departure()
        return seconds

    def _await_arrivals(self) -> float:
        seconds = 0.0
        while self.arrivals:
            seconds += self.arrivals[-1].wait()
            self.arrivals.pop()
        return seconds

    def forget_departure(self) -> None:
        """Record that everything is on the device again."""
        # An interrupt may come between any two lines: until `released` is empty the contents count
        # as absent, then the other fields do not matter.
        # First: `call_off` frees the memory of a storage that is coming.
        self.is_coming = False
        for spans in (self.released, self.saved, self.done):
            spans.clear()
        self.saves.clear()

    def resident_nbytes(self) -> int:
        """Return the bytes of device memory behind the storage now."""
        return self.storage.nbytes() if self.buffer is None else self.buffer.resident_nbytes()

    def why_not_movable(self) -> str | None:
        """Return why the storage cannot be freed and allocated again; None if it can."""
        if self.buffer is not None:
            return None
        if self.device.type == "cpu" and self.storage.is_shared():
            return (
                "it lies in torch shared memory, which cannot be resized; "
                "allocate it with allocate_elastic"
            )
        if not self.storage.resizable():
            return (
                "it does not own its memory (made by from_numpy, frombuffer or a mapping); "
                "clone it, or do not list it"
            )
        return None


@dataclass(frozen=True, slots=True)
class Survey:
    """An inventory without duplicates, in order of kind and then of the owner's list."""

    storages: list[Storage]
    caches: list[OffloadItem]

    def resident_nbytes(self) -> dict[Kind, int]:
        """Return the bytes of device memory by kind."""
        resident = dict.fromkeys(KINDS, 0)
        for storage in self.storages:
            resident[storage.kind] += storage.resident_nbytes()
        for item in self.caches:
            resident[item.kind] += item.tensor.untyped_storage().nbytes()
        return resident

    def forget_caches(self, kinds: Collection[Kind]) -> int:
        """Make the owners of these kinds' caches drop them, and return the bytes."""
        nbytes = 0
        for item in self.caches:
            if item.kind in kinds and item.forget is not None:
                nbytes += item.tensor.untyped_storage().nbytes()
                item.forget()
        # The items may be the last references to the caches.
        self.caches[:] = [item for item in self.caches if item.kind not in kinds]
        return nbytes


def survey(items: Iterable[OffloadItem], device_type: str) -> Survey:
    """Return the storages of these items on devices of this type, as `Offloader` describes.

    A storage has the first kind and owner that list it, in order of KINDS. It is a cache only if
    all its items have action "rebuild".
    """
    storages: dict[int, Storage] = {}
    covered: set[int] = set()
    caches: dict[int, OffloadItem] = {}
    for item in sorted(items, key=lambda item: KINDS.index(item.kind)):
        tensor = item.tensor
        if tensor.device.type != device_type:
            continue
        untyped, key, buffer = storage_of(item.owner, tensor)
        if item.action == "rebuild":
            caches.setdefault(key, item)
            continue
        nbytes = untyped.nbytes()
        if key not in storages:
            storages[key] = Storage(
                key, item.owner, item.kind, item.action, untyped, nbytes, buffer
            )
        if item.action == "copy":
            storages[key].action = "copy"
        # A stride of 0 repeats elements, so the count of elements proves nothing.
        if 0 not in tensor.stride() and tensor.numel() * tensor.element_size() >= nbytes:
            covered.add(key)
    for key, storage in storages.items():
        if key not in covered:
            # Parts that no item lists must not be lost.
            storage.action = "copy"
    only_caches = [item for key, item in caches.items() if key not in storages]
    return Survey(list(storages.values()), only_caches)


@dataclass(frozen=True, slots=True)
class SavedContents:
    """Contents of a storage in the arena: offset in bytes, and digest."""

    offset: int
    digest: int

    @classmethod
    def of(cls, storage: Storage) -> SavedContents:
        """Describe a storage that is on the device and in the arena."""
        return cls(storage.arena_offset, box_digest(storage.bytes_view()))


Saved = Mapping[tuple[int, int], SavedContents]
"""`Storage.identity` -> contents that were the same on the device and in the arena."""


def lay_out(placed: Iterable[Storage], saved: Saved, new: Collection[Storage]) -> None:
    """Assign every new copied storage its previous place in the arena, or one after all others.

    One that still has its saved contents counts as saved.
    """
    offsets = {of.identity: of.arena_offset for of in placed if of.action == "copy"}
    # Of saved storages that are gone the places are free again.
    kept = saved.keys() & {of.identity for of in new}
    offsets |= {identity: saved[identity].offset for identity in kept}
    end = max((offset + nbytes for (_, nbytes), offset in offsets.items()), default=0)
    for storage in new:
        if storage.action == "copy":
            after_others = round_up(end, _ALIGNMENT)
            storage.arena_offset = offsets.get(storage.identity, after_others)
            end = max(end, storage.arena_stop)
            contents = saved.get(storage.identity)
            if contents is not None and contents == SavedContents.of(storage):
                storage.saved.add(0, storage.nbytes)


def names_of(storages: Iterable[Storage]) -> str:
    """Return owners and sizes, for messages."""
    names = [f"{storage.owner} ({storage.nbytes} bytes)" for storage in storages]
    return ", ".join(names) or "nothing"


def storage_of(
    owner: str, tensor: torch.Tensor
) -> tuple[torch.UntypedStorage, int, ElasticBuffer | None]:
    """Return the tensor's storage, its key, and the elastic buffer that contains it, if any.

    Raises OffloadError for a wrapper of other tensors.
    """
    if wrapped_tensors(tensor):
        raise OffloadError(
            f"{owner}: a {type(tensor).__name__} only wraps other tensors; list those",
            code="wraps-tensors",
        )
    storage = tensor.untyped_storage()
    buffer = exported_buffer_of(tensor)
    key = storage_id(storage) if buffer is None else buffer.address
    return storage, key, buffer
