"""Moves training state off the device and back, under unchanged tensor objects.

    owner.offload_items() -> storages (views of one storage count once)    offload_items.py
    offload:  copy -> host arena | drop -> nothing;  then the storage's device memory is freed, on
              CUDA piece by piece while later copies, all of which were queued first, go on
    onload:   memory comes back under the same storage object: contents from the arena | zeros

    offload_parts(kind, parts)     parts of elastic storages go early, page by page; offload({kind})
                                   does the rest
    save_parts(kind, parts)        on CUDA their copies begin even earlier
    onload(..., read_only=True)    not expected to be written: the next offload of the kind compares
                                   digests and copies only changed storages
    onload(..., late={kind})       the kind's copies go on behind other work; whatever the owner
                                   guards waits for them before it uses the kind
    offload(..., late={kind})      the kind's copies begin, and its memory goes with a later offload

A storage in an elastic buffer releases its pages and keeps its address. Any other is resized to 0
bytes and back: every view stays valid but may be at a new address.

The arena of a kind takes the bytes of its copied storages. It is allocated at the first offload
(pinned on CUDA), grows where state appears, and is kept. Without a GPU only dropping saves memory.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NoReturn

import torch

from hybrid_engine.errors import HybridEngineError, OffloadError, StateError
from hybrid_engine.memory.arena import Arena, Copier
from hybrid_engine.memory.device_pages import Chunks
from hybrid_engine.memory.host_pages import HostMemory
from hybrid_engine.memory.offload_items import (
    KINDS,
    Kind,
    Offloadable,
    Part,
    Saved,
    SavedContents,
    Span,
    Spans,
    Storage,
    Survey,
    lay_out,
    names_of,
    pieces,
    storage_of,
    survey,
)
from hybrid_engine.memory.refusal import RefusedTensors
from hybrid_engine.ranks.torch_internals import storage_id, wrapped_tensors


class Offloader:
    """Offloads the state of an owner, kind by kind, and refuses the use of absent state.

    The inventory is listed again at every offload, because optimizers create state at their first
    step. A storage that several items view is moved once, with the first of KINDS that lists it. It
    is dropped only if items with action "drop" cover it and none has action "copy". An onload
    restores exactly the storages that left. Caches ("rebuild") are dropped, and not restored.

    Args:
        owner: lists the items; from now on its `guard` calls this object.
        device: only tensors of this device type are moved. Others are on the host already (Adam's
            CPU step counters on a GPU job). Default: cuda if available, else cpu.
    """

    def __init__(self, owner: Offloadable, device: torch.device | str | None = None) -> None:
        default_device = "cuda" if torch.cuda.is_available() else "cpu"
        self._device_type = torch.device(device or default_device).type
        self._owner = owner
        self._copier = Copier()
        is_on_gpu = self._device_type == "cuda"
        self._arenas = {kind: Arena(self._copier, pinned=is_on_gpu) for kind in KINDS}
        # Storages by kind, from their first part that leaves until all of the kind is back.
        self._departed: dict[Kind, list[Storage]] = {}
        # Kinds that left whole, until they are whole again; the value is the token of `departure`.
        self._offloaded: dict[Kind, object] = {}
        # Contents in the arena that still equal those on the device, by storage.
        self._unchanged: dict[Kind, Saved] = {}
        self._hidden_seconds = 0.0
        self._exposed_seconds = 0.0
        self._keeps_inventory = False
        self._is_quiet = False  # the device was waited for, and the owner rests since
        # Valid within a block of `owner_rests`.
        self._inventory: Survey | None = None
        self._refused = {kind: RefusedTensors(owner.guard, kind) for kind in KINDS}
        for refused in self._refused.values():
            weakref.finalize(self, refused.clear)
        # Elsewhere a copy is done when the call returns, so saving ahead would overlap nothing.
        self._saves_ahead = is_on_gpu
        owner.guard.add(self.require_present)

    @contextmanager
    def owner_rests(self) -> Iterator[None]:
        """List the inventory only once inside the block, for `resident_nbytes`.

        The owner must not create or drop tensors meanwhile. Offloads still list it again.

        After the block every use of the owner's tensors that are not on the device is refused, or
        waits for those that are late (refusal.py).
        """
        for refused in self._refused.values():
            refused.clear()
        self._keeps_inventory = True
        try:
            yield
        finally:
            self._keeps_inventory = False
            self._is_quiet = False
            self._inventory = None
            self._refuse()

    def require_present(self, kinds: Collection[str]) -> None:
        """Wait for state of these kinds on its way back; raise StateError if any is off."""
        self.wait(kinds)
        away = [kind for kind in KINDS if kind in kinds and kind in self._departed]
        if away:
            contexts = "train_context"
            if set(kinds) == {"param"}:
                contexts = "train_context or forward_context"
            raise StateError(
                f"training state is off the device, or leaving it ({', '.join(away)}): "
                f"make this call in {contexts}",
                code="state-is-offloaded",
            )

    def is_offloaded(self, kind: Kind) -> bool:
        """Return True after an offload of the whole kind, until an onload of all has begun."""
        # A kind without storages leaves as well.
        return kind in self._offloaded and not self._is_coming(kind)

    def departure(self, kind: Kind) -> object | None:
        """Return a token of the current departure of an offloaded kind; None if not offloaded.

        It stays the same object as long as no part of the kind was on the device, or on its way
        there: the contents are then unchanged as well.
        """
        return self._offloaded.get(kind)

    def offload(self, kinds: Iterable[Kind] = KINDS, *, late: Collection[Kind] = ()) -> int:
        """Move all state of these kinds off the device, and return the bytes that left it.

        Kinds that are off already stay so.

        Args:
            kinds: kinds to move.
            late: kinds of which what inference takes late (pool.py) is only copied, behind other
                work, and keeps its memory until an offload that does not name them here. It must
                not be used, and an onload before then leaves it where it is.

        Raises:
            OffloadError: a storage cannot be freed, before anything was moved; or moving failed,
                and everything that this call or `offload_parts` moved was put back.
        """
        requested = set(kinds)
        to_move = self._on_device(requested)
        moved = self._call_off(to_move)
        if late and not self._is_quiet:
            # It waits for all work of the device, and later it would wait for the copies.
            self._empty_cache()
        self._synchronize()
        inventory = self._survey()
        self._begin(to_move, inventory.storages)
        try:
            self._reserve_arenas(to_move)
            leaving = self._storages(to_move)
            staying = {
                storage: storage.late_ranges() if storage.kind in late else Spans()
                for storage in leaving
            }
            if self._saves_ahead:
                # Queue all copies first: they go on while memory is released.
                # First what must leave now, then what may stay: copies of a direction end in order.
                for storage, ranges in staying.items():
                    self._save(storage, ranges.missing(0, storage.nbytes))
                for storage, ranges in staying.items():
                    moved += self._save(storage, ranges)
            # Dropped storages last: their contents are lost, so nothing that can fail may follow.
            for storage in sorted(leaving, key=lambda storage: storage.action == "drop"):
                if staying[storage].nbytes:
                    leaves_now = staying[storage].missing(0, storage.nbytes)
                    moved += self._release_saved(storage, leaves_now)
                else:
                    moved += self._take_off(storage)
        except Exception as error:
            self._undo(to_move, error)
        # Late kinds have not left whole: what stays keeps its memory until a later offload.
        self._offloaded.update({kind: object() for kind in to_move.difference(late)})
        moved += inventory.forget_caches(requested)
        if not late:
            self._empty_cache()
        return moved

    def offload_parts(self, kind: Kind, parts: Iterable[Part]) -> int:
        """Move parts of elastic storages off the device ahead of `offload({kind})`.

        Releases every page wholly inside the union of the parts so far, and returns the bytes.
        Parts of storages that are not elastic, or not in the inventory, wait for `offload`. From
        the first part on the kind must not be written, and these parts must not be read.
        `onload({kind})` puts them back, also after an OffloadError.
        """
        if self.is_offloaded(kind):
            return 0
        leaving = self._leaving_ranges(kind, parts)
        try:
            for storage, ranges in leaving.items():
                self._save(storage, ranges)
            return sum(self._release_saved(*leaves) for leaves in leaving.items())
        except Exception as error:
            raise OffloadError(
                f"offload of parts of {kind} failed: {error}. "
                f"Nothing is lost; onload {kind} to restore it",
                code="offload-failed",
            ) from error

    def save_parts(self, kind: Kind, parts: Iterable[Part]) -> None:
        """Begin to copy parts that a later `offload_parts` will release; do not write them again.

        Works on CUDA, where copies are queued; does nothing elsewhere. Raises as `offload_parts`.
        """
        # Elsewhere a copy would block here, and gain nothing over `offload_parts`.
        if self._saves_ahead and not self.is_offloaded(kind):
            for storage, ranges in self._leaving_ranges(kind, parts).items():
                self._save(storage, ranges)

    def onload(
        self,
        kinds: Iterable[Kind] = KINDS,
        *,
        read_only: bool = False,
        late: Collection[Kind] = (),
    ) -> int:
        """Move the absent state of these kinds back to the device, and return its bytes.

        Present kinds are left alone.

        Args:
            kinds: kinds to move back.
            read_only: the contents are not expected to change until the next offload of the kind,
                which then copies only storages with another digest than now; not of late kinds.
            late: kinds whose memory is taken now and whose copies, on CUDA, go on behind other
                work. The guard waits for them (`require_present`), and so does an onload that does
                not name them here; an offload calls them off.

        Raises:
            OffloadError: restored storages stay on the device and the rest in the arena. The
                message names both, and a later call continues from there.
        """
        requested = set(kinds)
        absent = [kind for kind in KINDS if kind in requested and kind in self._departed]
        moved = 0
        if not read_only:
            for kind in requested:
                self._unchanged.pop(kind, None)
        begun: list[Kind] = []
        try:
            for kind in absent:
                # A new token: what was true of the contents while they were away is no longer.
                if kind in self._offloaded:
                    self._offloaded[kind] = object()
                moved += self._onload_kind(self._departed[kind])
                begun.append(kind)
        finally:
            # After a failure the kinds begun before it are completed too.
            for kind in begun:
                if not (kind in late and self._is_coming(kind)):
                    self._complete(kind, read_only=read_only)
        return moved

    def wait(self, kinds: Collection[str] = KINDS) -> None:
        """Wait for late copies of these kinds; those that no onload has begun stay away.

        Raises OffloadError if a copy failed. Nothing is lost, and the next call waits again.
        """
        for kind in KINDS:
            if kind in kinds and self._is_coming(kind):
                self._complete(kind, is_late=True)

    def take_seconds_behind(self) -> tuple[float, float]:
        """Return the seconds of late copies that were hidden and exposed since the last call.

        Exposed: the device had nothing else to do but what the guard held back.
        """
        seconds = self._hidden_seconds, self._exposed_seconds
        self._hidden_seconds = self._exposed_seconds = 0.0
        return seconds

    def chunks(self, kinds: Collection[Kind]) -> dict[Kind, list[Chunks | HostMemory]]:
        """Return the memories of elastic storages, by kind; only kinds that have state."""
        memories: dict[Kind, list[Chunks | HostMemory]] = {}
        for storage in (self._inventory or self._survey()).storages:
            if storage.kind in kinds:
                of_kind = memories.setdefault(storage.kind, [])
                if storage.buffer is not None:
                    of_kind.append(storage.buffer.memory)
        return memories

    def away_nbytes(self) -> dict[Kind, int]:
        """Return the bytes of device memory that an onload would allocate, by kind."""
        nbytes = dict.fromkeys(KINDS, 0)
        for storage in self._storages(KINDS):
            if not storage.is_coming:
                nbytes[storage.kind] += storage.released.nbytes
        return nbytes

    def resident_nbytes(self) -> dict[Kind, int]:
        """Return the bytes on the device by kind."""
        return (self._inventory or self._survey()).resident_nbytes()

    def held_nbytes(self) -> int:
        """Return the bytes on the device, without caches."""
        return sum(storage.resident_nbytes() for storage in self._survey().storages)

    def _refuse(self) -> None:
        """Refuse the use of tensors that are not on the device, unless the owner rests."""
        departed: dict[int, RefusedTensors] = {}
        for kind, storages in self._departed.items():
            refused = self._refused[kind]
            if not refused and not self._keeps_inventory:
                departed |= {storage_id(storage.storage): refused for storage in storages}
        if not departed:
            return
        with torch.DisableTorchFunctionSubclass():
            for tensor in {id(tensor): tensor for tensor in self._owner.guard.tensors()}.values():
                # Of a DTensor, the storage that was offloaded is the local tensor's.
                local = next(iter(wrapped_tensors(tensor).values()), tensor)
                of_kind = departed.get(storage_id(local.untyped_storage()))
                if of_kind is not None:
                    of_kind.add(tensor)

    def _survey(self) -> Survey:
        with torch.DisableTorchFunctionSubclass():
            inventory = survey(self._owner.offload_items(), self._device_type)
        if self._keeps_inventory:
            self._inventory = inventory
        return inventory

    def _synchronize(self) -> None:
        # Training may have used other streams; later releases wait only for the current stream.
        if self._device_type == "cuda" and not self._is_quiet:
            torch.cuda.synchronize()
            # Again, it would wait for copies that may be late.
            self._is_quiet = self._keeps_inventory

    def _empty_cache(self) -> None:
        # Return cached memory to the device, for the inference engine's own allocator.
        if self._device_type == "cuda":
            torch.cuda.empty_cache()

    def _storages(self, kinds: Collection[Kind]) -> list[Storage]:
        """Return the storages of these kinds that have begun to leave, in order of kind."""
        leaving = [kind for kind in KINDS if kind in kinds]
        return [storage for kind in leaving for storage in self._departed.get(kind, ())]

    def _on_device(self, kinds: Collection[Kind]) -> set[Kind]:
        """Return the kinds that are at least partly on the device, or on their way there."""
        return {
            kind
            for kind in kinds
            if kind not in self._offloaded or not all(s.is_away for s in self._departed[kind])
        }

    def _call_off(self, kinds: Collection[Kind]) -> int:
        """Cancel the onload of these kinds, and return the bytes that leave again."""
        nbytes = 0
        for storage in self._storages(kinds):
            if storage.is_coming:
                nbytes += storage.released.nbytes
            storage.call_off()
        return nbytes

    def _is_coming(self, kind: Kind) -> bool:
        """Return True while the kind, which left, is all there but for copies under way."""
        storages = self._departed.get(kind, ())
        return bool(storages) and all(
            storage.is_coming or not storage.has_begun_to_leave for storage in storages
        )

    def _begin(self, kinds: set[Kind], storages: Iterable[Storage]) -> None:
        """Record as leaving all storages of these kinds: those that have begun, and all others."""
        known = {storage.key for storage in self._storages(KINDS) if storage.has_begun_to_leave}
        fresh = [s for s in storages if s.kind in kinds and s.key not in known and s.nbytes > 0]
        reasons = [
            f"\n  {storage.owner} ({storage.kind}, {storage.nbytes} bytes): {reason}"
            for storage in fresh
            if (reason := storage.why_not_movable())
        ]
        if reasons:
            raise OffloadError(
                f"cannot be offloaded, nothing was moved:{''.join(reasons)}",
                code="cannot-offload",
            )
        departed: dict[Kind, list[Storage]] = {}
        for kind in kinds:
            before = self._departed.get(kind, [])
            new = [storage for storage in fresh if storage.kind == kind]
            begun = [storage for storage in before if storage.has_begun_to_leave]
            lay_out(before, self._unchanged.pop(kind, {}), new)
            departed[kind] = begun + new
        # All kinds in one step: a failure above leaves the record as it was.
        self._departed.update(departed)

    def _reserve_arenas(self, kinds: Iterable[Kind]) -> None:
        """Make room for the copied storages of these kinds in their arenas."""
        for kind in kinds:
            ends = [s.arena_stop for s in self._departed[kind] if s.action == "copy"]
            self._arenas[kind].reserve(max(ends, default=0))

    def _leaving_ranges(self, kind: Kind, parts: Iterable[Part]) -> Mapping[Storage, Spans]:
        """Record the kind as leaving, and return the byte ranges of parts that leave ahead."""
        self._call_off({kind})
        if kind not in self._departed:
            self._begin({kind}, self._survey().storages)
            self._reserve_arenas({kind})
        storages = {storage.key: storage for storage in self._departed[kind]}
        ranges: defaultdict[Storage, Spans] = defaultdict(Spans)
        for part in parts:
            _, key, buffer = storage_of("a part", part.flat)
            storage = storages.get(key)
            if storage is not None and buffer is not None and storage.action == "copy":
                itemsize = part.flat.element_size()
                offset = int(part.flat.storage_offset())
                stop = (offset + part.stop) * itemsize
                ranges[storage].add((offset + part.start) * itemsize, stop)
        return ranges

    def _take_off(self, storage: Storage) -> int:
        """Save the rest of the storage, then free it, an elastic one piece by piece; return it."""
        remaining = storage.nbytes - storage.released.nbytes
        self._save(storage, [(0, storage.nbytes)])
        if storage.buffer is not None:
            # Release each piece as its copy ends, while later copies go on.
            self._release_saved(storage, [save[:2] for save in storage.saves])
        storage.wait_saved(0, storage.nbytes)
        storage.done.add(0, storage.nbytes)
        storage.free()
        return remaining

    def _release_saved(self, storage: Storage, ranges: Iterable[Span]) -> int:
        """Wait until each range is saved, and release all granules that are done by then."""
        released = 0
        for start, stop in ranges:
            storage.wait_saved(start, stop)
            # A granule may be done only together with its neighbours, so take the joined range.
            released += storage.release_inside(*storage.done.add(start, stop))
        return released

    def _save(self, storage: Storage, ranges: Iterable[Span]) -> int:
        """Copy the unsaved part of these byte ranges to the arena; return the bytes copied."""
        if storage.action == "drop":
            return 0
        copied = 0
        unsaved = [gap for start, stop in ranges for gap in storage.saved.missing(start, stop)]
        for first, last in pieces(unsaved):
            slot = self._slot(storage)[first:last]
            copy = self._copier.copy(slot, storage.bytes_view()[first:last], "to host")
            # Before `saved`: a range that counts as saved must have a copy to wait for.
            storage.saves.append((first, last, copy))
            storage.saved.add(first, last)
            copied += last - first
        return copied

    def _onload_kind(self, storages: Sequence[Storage]) -> int:
        """Begin to bring back these storages, and return the bytes."""
        nbytes = 0
        for index, storage in enumerate(storages):
            if storage.is_coming:
                continue
            try:
                nbytes += self._put_back(storage)
            except Exception as error:
                for earlier in storages[:index]:
                    earlier.complete()
                raise OffloadError(
                    f"onload of {storage.owner} ({storage.kind}, {storage.nbytes} bytes) failed: "
                    f"{error}. On the device: {names_of(storages[:index])}. "
                    f"Still in host memory: {names_of(storages[index:])}. "
                    "Free device memory and onload again",
                    code="onload-failed",
                ) from error
        return nbytes

    def _put_back(self, storage: Storage) -> int:
        """Allocate the released memory and begin to copy contents back; return the bytes.

        `_complete` ends it.
        """
        storage.call_off()
        # Copies that `save_parts` began.
        storage.wait_saved(0, storage.nbytes)
        if not storage.released.nbytes:
            storage.forget_departure()
            return 0
        for start, stop in storage.take_back():
            if storage.action != "copy":
                continue
            memory = storage.bytes_view()[start:stop]
            slot = self._slot(storage)[start:stop]
            storage.arrivals.append(self._copier.copy(memory, slot, "to device"))
        # Only now have all of its copies begun.
        storage.is_coming = True
        return storage.released.nbytes

    def _complete(self, kind: Kind, *, read_only: bool = False, is_late: bool = False) -> None:
        """Wait for the copies of an onload; the kind is present when all its storages are back."""
        storages = self._departed[kind]
        # Read before `complete` resets it.
        saved = [storage for storage in storages if storage.saved.nbytes == storage.nbytes]
        arrivals = [copy for storage in storages for copy in storage.arrivals]
        reached = None
        try:
            if is_late and self._device_type == "cuda":
                # The device may still compute what was queued before: its work waits from here on.
                reached = torch.cuda.Event(enable_timing=True)
                reached.record(torch.cuda.current_stream(storages[0].device))
            copied = sum(storage.complete() for storage in storages if storage.is_coming)
            if is_late and arrivals:
                exposed = min(copied, arrivals[-1].seconds_after(reached))
                self._exposed_seconds += exposed
                self._hidden_seconds += copied - exposed
        except Exception as error:
            raise OffloadError(
                f"copies of {kind} to the device failed: {error}. Nothing is lost: they are in "
                "host memory, and the next use or onload waits for them again",
                code="onload-failed",
            ) from error
        if not any(storage.released.nbytes for storage in storages):
            if read_only:
                contents = {storage.identity: SavedContents.of(storage) for storage in saved}
                self._unchanged[kind] = contents
            self._offloaded.pop(kind, None)
            del self._departed[kind]
            self._refused[kind].clear()

    def _slot(self, storage: Storage) -> torch.Tensor:
        """Return the storage's part of the arena."""
        # Looked up at every use: the arena may move when it grows.
        return self._arenas[storage.kind].memory[storage.arena_offset : storage.arena_stop]

    def _undo(self, kinds: Collection[Kind], error: Exception) -> NoReturn:
        """Put back the state that a failed offload moved, then raise OffloadError."""
        zeroed = [
            storage
            for storage in self._storages(kinds)
            if storage.action == "drop" and storage.released.nbytes
        ]
        try:
            self.onload(kind for kind in KINDS if kind in kinds)
        except HybridEngineError as second:
            raise OffloadError(
                f"offload failed: {error}; and putting back failed: {second}", code="cannot-restore"
            ) from error
        lost = f" (dropped, hence zero: {names_of(zeroed)})" if zeroed else ""
        raise OffloadError(
            f"offload failed, everything was put back{lost}: {error}", code="offload-failed"
        ) from error
