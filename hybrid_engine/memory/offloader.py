"""Moves training state off the device and back, under unchanged tensor objects.

    owner.offload_items() -> storages (views of one storage count once)                        memory/offload_items.py
    offload:  copy -> host arena | drop -> nothing;  then the storage's device memory is freed, on CUDA piece by piece
              while later copies, all of which were queued first, go on
    onload:   memory comes back under the same storage object: contents from the arena | zeros

    offload_parts(kind, parts)     parts of elastic storages go early, page by page; offload({kind}) does the rest
    save_parts(kind, parts)        on CUDA their copies begin even earlier
    begin_offload(kinds)           copies go on in the background; offload(kinds) waits for them and frees
    onload(..., read_only=True)    expected not to be written: the next offload of the kind copies what was all the same
    onload(..., wait=False)        copies go on in the background; wait() completes them
    onload(..., limit=nbytes)      only what fits; the next onload brings the rest

Memory is freed in one of two ways: a storage in an elastic buffer releases its pages and keeps its address; any other
storage is resized to 0 bytes and back, so that every view stays valid but may be at a new address.

Memory before and after, per kind, where T is the bytes of its storages and C those that are copied: before, T on the
device; after, 0 on the device and C in the arena, which is allocated at the first offload, is as large as needed
(pinned on CUDA), grows where state appears, and is kept for all later cycles. Without a GPU only dropping saves memory.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

import torch

from hybrid_engine.errors import HybridEngineError, OffloadError, StateError
from hybrid_engine.memory.arena import Arena, Copier
from hybrid_engine.memory.offload_items import (
    KINDS,
    Kind,
    Offloadable,
    OffloadReport,
    Part,
    Saved,
    Spans,
    Storage,
    Survey,
    checked,
    elastic_ranges,
    forget,
    lay_out,
    names_of,
    pieces,
    reuse_places,
    survey,
)


class Offloader:
    """Offloads the state of an owner, kind by kind, and guards it: what is not there cannot be used.

    The owner is asked for it at every offload, since optimizers create state at their first step. A storage that
    several items view is moved once, with the first kind that lists it in the order param, grad, optimizer; it is
    dropped only if items with action "drop" cover it and none has action "copy". An onload restores exactly what the
    offload before it took. Caches ("rebuild") are forgotten at every offload of their kind and not restored.

    Args:
        owner: lists the items; its `guard` asks this object from now on.
        device: only tensors of this device type are moved, the others are on the host already (Adam's CPU step
            counters on a GPU job); default: cuda where there is one, else cpu.
    """

    def __init__(self, owner: Offloadable, device: torch.device | str | None = None) -> None:
        self._device_type = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu")).type
        self._owner = owner
        self._arenas: dict[Kind, Arena] = {kind: Arena() for kind in KINDS}
        self._copier = Copier()
        self._departed: dict[Kind, list[Storage]] = {}  # from their first part on, until all of the kind is back
        self._offloaded: dict[Kind, object] = {}  # those that left whole, until they are whole again; see `departure`
        self._unchanged: dict[Kind, dict[int, Saved]] = {}  # by storage: what the arena has of it
        self._hidden_seconds = 0.0
        self._keeps_inventory = False
        self._inventory: Survey | None = None  # of the block of `owner_rests`
        self._saves_ahead = self._device_type == "cuda"  # elsewhere a copy is done when the call returns
        owner.guard.add(self.require_present)

    @contextmanager
    def owner_rests(self) -> Iterator[None]:
        """Within the block only this object makes and drops what the owner lists, so its sizes are asked for once.

        To list thousands of tensors takes longer than to look behind a few storages. What leaves is listed anew.
        """
        self._keeps_inventory = True
        try:
            yield
        finally:
            self._keeps_inventory, self._inventory = False, None

    def require_present(self, kinds: Collection[str]) -> None:
        """Raise StateError where anything of these kinds is off the device, leaving it, or not back yet."""
        if away := [kind for kind in KINDS if kind in kinds and kind in self._departed]:
            contexts = "train_context or forward_context" if set(kinds) == {"param"} else "train_context"
            raise StateError(
                f"training state is off the device, or moving ({', '.join(away)}): call this once it is back, in "
                f"{contexts}"
            )

    def is_offloaded(self, kind: Kind) -> bool:
        """Return True from a successful offload until an onload of all has begun; False while only parts are gone."""
        storages = self._departed[kind] if checked(kind) in self._offloaded else None
        return storages == [] or any(s.released.nbytes and not s.is_coming for s in storages or ())

    def departure(self, kind: Kind) -> object | None:
        """Return what is the same object for as long as nothing of an offloaded kind was on the device, or coming.

        So its contents are the same, too. None for a kind that is not offloaded.
        """
        return self._offloaded.get(checked(kind))

    def offload(self, kinds: Iterable[Kind] = KINDS) -> OffloadReport:
        """Move these kinds off the device, all that is there of them; kinds that are off already are left alone.

        Raises:
            OffloadError: a storage cannot be freed, before anything was moved; or moving failed, and everything that
                this call or `offload_parts` moved was put back.
        """
        requested = set(map(checked, kinds))
        to_move = self._on_device(requested)
        moved = OffloadReport(to_move)
        self._call_off(to_move, moved)
        self._synchronize()
        found = self._survey()
        self._begin(to_move, found.storages)
        try:
            self._reserve_arenas(to_move)
            leaving = self._storages(to_move)
            for storage in leaving if self._saves_ahead else ():  # the copies go on while memory is released
                moved.copied_nbytes[storage.kind] += self._save(storage, 0, storage.nbytes)
            # Dropped ones last: their contents are lost, so nothing that can fail may come after them.
            for storage in sorted(leaving, key=lambda storage: storage.action == "drop"):
                self._take_off(storage, moved)
        except Exception as error:
            self._undo(to_move, error)
        self._offloaded.update({kind: object() for kind in to_move})
        forget([item for item in found.caches if item.kind in requested], moved)
        found.caches[:] = [item for item in found.caches if item.kind not in requested]  # the last references to others
        if self._device_type == "cuda":
            torch.cuda.empty_cache()  # to the device, where the inference engine's own allocator finds it
        return moved.ended()

    def begin_offload(self, kinds: Iterable[Kind] = KINDS) -> None:
        """Begin to copy these kinds to the arena, in the background; `offload` waits for it and frees the device.

        Until then everything stays on the device, and must not be written. `onload` calls it off. Raises as `offload`.
        """
        begun = self._on_device(set(map(checked, kinds)))
        self._call_off(begun)
        self._synchronize()
        self._begin(begun, self._survey().storages)
        try:
            self._reserve_arenas(begun)
            for storage in self._storages(begun):
                if not (storage.action == "drop" or storage.in_arena or storage.saved.nbytes):
                    self._copier.begin_copy(storage.copies, self._slot(storage), storage.bytes_view(), "to host")
                    storage.in_arena = True
        except Exception as error:
            self.onload(begun)
            raise OffloadError(f"offload could not begin, nothing was moved: {error}") from error

    def offload_parts(self, kind: Kind, parts: Iterable[Part]) -> int:
        """Move parts of elastic storages off the device ahead of `offload({kind})`, which then does the rest.

        Every page that lies wholly inside the union of the parts so far is released; parts of storages that are not
        elastic, or not in the inventory, wait for `offload`. From the first part on the kind must not be written, and
        parts that were given must not be read. `onload({kind})` puts the parts back.

        Returns:
            The bytes released.

        Raises:
            OffloadError: the contents are then on the device or in the arena; `onload({kind})` restores everything.
        """
        if self.is_offloaded(kind):
            return 0
        given = self._leaving_ranges(kind, parts)
        try:
            self._save_all(given)
            return sum(self._release_saved(storage, *span) for storage, ranges in given for span in ranges)
        except Exception as error:
            raise OffloadError(
                f"offload of parts of {kind} failed: {error}. Nothing is lost; onload {kind} to restore it"
            ) from error

    def save_parts(self, kind: Kind, parts: Iterable[Part]) -> None:
        """Begin to copy parts that `offload_parts` will be given, and that are not written from here on.

        On CUDA, where copies are queued; elsewhere it does nothing. Raises as `offload_parts`.
        """
        if self._saves_ahead and not self.is_offloaded(kind):
            self._save_all(self._leaving_ranges(kind, parts))

    def onload(
        self, kinds: Iterable[Kind] = KINDS, *, read_only: bool = False, wait: bool = True, limit: int | None = None
    ) -> OffloadReport:
        """Move these kinds back to the device, what is off it of each; kinds that are there are left alone.

        Args:
            kinds: what to move back.
            read_only: the contents are not expected to change until the next offload of the kind, which then compares
                digests and copies only what changed. Takes them here, so not with `wait=False`.
            wait: False: the copies go on in the background, on CUDA on a side stream, on the CPU in a thread, and
                `wait` completes them; until then the kinds must not be touched.
            limit: most bytes of device memory to take. Of a kind that does not fit whole, storages that fit come, in
                order; the kind must not be written before an onload has brought the rest.

        Raises:
            OffloadError: what was restored stays on the device and the rest in the arena; the message names both, and a
                later call continues from there.
        """
        requested = dict.fromkeys(map(checked, kinds))
        moved = OffloadReport(kind for kind in requested if kind in self._departed)
        for kind in requested:
            if not read_only:
                self._unchanged.pop(kind, None)
            if kind in self._departed:
                if kind in self._offloaded:
                    self._offloaded[kind] = object()
                self._copier.finish("to host")  # what `save_parts` began
        begun: list[Kind] = []
        try:
            for kind in [kind for kind in requested if kind in self._departed]:
                self._onload_kind(self._departed[kind], moved, limit, background=not wait)
                begun.append(kind)
        finally:  # also what was begun before one that failed
            for kind in begun if wait else ():
                self._complete(kind, read_only=read_only)
        return moved.ended()

    def wait(self) -> None:
        """Complete what `onload(wait=False)` began, before it is used. Raises OffloadError; a later call goes on."""
        for kind in {storage.kind for storage in self._storages(KINDS) if storage.is_coming}:
            self._complete(kind)

    def take_hidden_seconds(self) -> float:
        """Return how long copies went on in the background, less the waits for them, since the last call."""
        seconds, self._hidden_seconds = self._hidden_seconds, 0.0
        return seconds

    def away_nbytes(self, kinds: Iterable[Kind] = KINDS) -> dict[Kind, int]:
        """Return the device memory that an onload would take, by kind."""
        away = {kind: [s for s in self._storages([kind]) if not s.is_coming] for kind in map(checked, kinds)}
        return {kind: sum(storage.released.nbytes for storage in storages) for kind, storages in away.items()}

    def resident_nbytes(self) -> dict[str, dict[str, int]]:
        """Return the bytes on the device by kind and owner; a storage counts once, under its first owner."""
        return (self._inventory or self._survey()).resident_nbytes()

    def host_nbytes(self) -> int:
        """Return the bytes of host memory that the arenas hold."""
        return sum(arena.memory.numel() for arena in self._arenas.values())

    def _survey(self) -> Survey:
        found = survey(self._owner.offload_items(), self._device_type)
        if self._keeps_inventory:
            self._inventory = found
        return found

    def _synchronize(self) -> None:
        if self._device_type == "cuda":  # training may have used other streams; later releases wait for the current one
            torch.cuda.synchronize()

    def _storages(self, kinds: Collection[Kind]) -> list[Storage]:
        """Storages of these kinds that have begun to leave, kind by kind."""
        return [storage for kind in KINDS if kind in kinds for storage in self._departed.get(kind, ())]

    def _on_device(self, kinds: Collection[Kind]) -> set[Kind]:
        """Return those of these kinds that are on the device, or on their way there, at least partly."""
        return {
            kind for kind in kinds if kind not in self._offloaded or not all(s.is_away for s in self._departed[kind])
        }

    def _call_off(self, kinds: Collection[Kind], moved: OffloadReport | None = None) -> None:
        """Bring nothing of these kinds any more."""
        coming = [storage for storage in self._storages(kinds) if storage.is_coming]
        if coming:
            self._copier.finish("to device")
        for storage in coming:
            storage.call_off()
            if moved is not None:
                moved.nbytes[storage.kind] += storage.released.nbytes

    def _begin(self, kinds: set[Kind], storages: Iterable[Storage]) -> None:
        """List what leaves with these kinds: what has begun to leave, and everything else of them."""
        known = {storage.key for storage in self._storages(KINDS) if storage.has_begun_to_leave}
        fresh = [s for s in storages if s.kind in kinds and s.key not in known and s.nbytes > 0]
        reasons = [
            f"{storage.owner} ({storage.kind}, {storage.nbytes} bytes): {reason}"
            for storage in fresh
            if (reason := storage.why_not_movable())
        ]
        if reasons:
            raise OffloadError("cannot be offloaded, nothing was moved:\n  " + "\n  ".join(reasons))
        listed: dict[Kind, list[Storage]] = {}
        for kind in kinds:
            before, new = self._departed.get(kind, []), [storage for storage in fresh if storage.kind == kind]
            begun = [storage for storage in before if storage.has_begun_to_leave]
            if begun or not reuse_places(new, self._unchanged.pop(kind, {})):
                lay_out(before, new)
            listed[kind] = begun + new
        self._departed.update(listed)  # at once: what fails before leaves everything as it was

    def _reserve_arenas(self, kinds: Iterable[Kind]) -> None:
        """Make room for everything of these kinds."""
        self._copier.finish("to host")  # memory that grows may move
        for kind in kinds:
            self._hidden_seconds += sum(storage.complete() for storage in self._departed[kind])
            ends = [storage.arena_stop for storage in self._departed[kind] if storage.action == "copy"]
            self._arenas[kind].reserve(max(ends, default=0), pinned=self._device_type == "cuda")

    def _leaving_ranges(self, kind: Kind, parts: Iterable[Part]) -> list[tuple[Storage, Spans]]:
        """Return the byte ranges of these parts by elastic storage; from here on the kind is leaving."""
        self._call_off({kind})
        if kind not in self._departed:
            self._begin({kind}, self._survey().storages)
            self._reserve_arenas({kind})
        return elastic_ranges(self._departed[kind], parts)

    def _save_all(self, given: Iterable[tuple[Storage, Spans]]) -> None:
        for storage, ranges in given:
            for start, stop in ranges:
                self._save(storage, start, stop)

    def _take_off(self, storage: Storage, moved: OffloadReport) -> None:
        """Save what is not saved yet, then free the storage; an elastic one piece by piece, as the copies end."""
        remaining = storage.nbytes - storage.released.nbytes
        moved.copied_nbytes[storage.kind] += self._save(storage, 0, storage.nbytes)
        for start, stop, _ in [] if storage.buffer is None else storage.saves.copy():
            self._release_saved(storage, start, stop)
        storage.wait_saved(0, storage.nbytes)
        storage.done.add(0, storage.nbytes)
        storage.free()
        storage.in_arena = storage.action == "copy"
        moved.nbytes[storage.kind] += remaining

    def _release_saved(self, storage: Storage, start: int, stop: int) -> int:
        """Once this byte range of an elastic storage is saved, release the granules that need not be kept any more."""
        storage.wait_saved(start, stop)
        return storage.release_inside(*storage.done.add(start, stop))

    def _save(self, storage: Storage, start: int, stop: int) -> int:
        """Copy of this byte range to the arena what must be kept and is not there yet; return the bytes copied."""
        if storage.action == "drop" or storage.in_arena:
            return 0
        copied = 0
        for first, last in pieces(storage.saved.missing(start, stop)):
            piece = slice(first, last)
            wait = self._copier.copy(self._slot(storage)[piece], storage.bytes_view()[piece], "to host")
            storage.saves.append((first, last, wait))  # first: what is saved must have somebody to wait for
            storage.saved.add(first, last)
            copied += last - first
        return copied

    def _onload_kind(
        self, storages: Sequence[Storage], moved: OffloadReport, limit: int | None, *, background: bool
    ) -> None:
        """Begin to bring back those of these storages that fit."""
        for index, storage in enumerate(storages):
            fits = limit is None or storage.released.nbytes <= limit - moved.total_nbytes
            if storage.is_coming or not fits:
                continue
            try:
                self._put_back(storage, moved, background=background)
            except Exception as error:
                self._copier.finish("to device")
                self._hidden_seconds += sum(earlier.complete() for earlier in storages[:index])
                raise OffloadError(
                    f"onload of {storage.owner} ({storage.kind}, {storage.nbytes} bytes) failed: {error}. "
                    f"On the device: {names_of(storages[:index])}. Still in host memory: {names_of(storages[index:])}. "
                    "Free device memory and onload again"
                ) from error

    def _put_back(self, storage: Storage, moved: OffloadReport, *, background: bool) -> None:
        """Take memory wherever it was released, and begin to copy contents back; `_complete` ends it."""
        storage.call_off()
        if not storage.released.nbytes:
            storage.forget_departure()
            return
        for start, stop in storage.take_back():
            if storage.action != "copy":
                continue
            pair = storage.bytes_view()[start:stop], self._slot(storage)[start:stop]
            if background:
                self._copier.begin_copy(storage.copies, *pair, "to device")
            else:
                self._copier.copy(*pair, "to device")
            moved.copied_nbytes[storage.kind] += stop - start
        moved.nbytes[storage.kind] += storage.released.nbytes
        storage.is_coming = True  # not before all of its copies have begun

    def _complete(self, kind: Kind, *, read_only: bool = False) -> None:
        """Wait for what is coming of a kind; it is no longer away when all is back."""
        storages = self._departed[kind]
        saved = [storage for storage in storages if storage.action == "copy"]
        is_saved = all(storage.in_arena for storage in saved)
        try:
            self._copier.finish("to device")
            self._hidden_seconds += sum(storage.complete() for storage in storages if storage.is_coming)
        except Exception as error:
            raise OffloadError(f"onload of {kind} failed: {error}. Nothing is lost; onload it again") from error
        if not any(storage.released.nbytes for storage in storages):
            if read_only and is_saved:
                self._unchanged[kind] = {storage.key: Saved.of(storage) for storage in saved}
            self._offloaded.pop(kind, None)
            del self._departed[kind]

    def _slot(self, storage: Storage) -> torch.Tensor:
        """Return the storage's part of the arena."""
        return self._arenas[storage.kind].memory[storage.arena_offset : storage.arena_stop]

    def _undo(self, kinds: Collection[Kind], error: Exception) -> NoReturn:
        """Put back what a failed offload moved, then raise; what cannot be put back stays offloaded and is named."""
        zeroed = [each for each in self._storages(kinds) if each.action == "drop" and each.released.nbytes]
        try:
            self.onload(kind for kind in KINDS if kind in kinds)
        except HybridEngineError as second:
            raise OffloadError(f"offload failed: {error}; and putting back failed: {second}") from error
        lost = f" (dropped, hence zero: {names_of(zeroed)})" if zeroed else ""
        raise OffloadError(f"offload failed, everything was put back{lost}: {error}") from error


MegatronOffloader = Offloader  # its name in programs of others: Megatron's was the first trainer
