"""Thousands of small strided copies in few calls; their errors, and their time.

    transfers --once--> runs: equal boxes at equal distances, in one storage on either side
    run       --------> a view of the whole run, cut into its boxes only where the source goes backwards
    all of them ------> one call, on CUDA one for each pair of dtypes

What is kept are numbers: views are made at every switch, so that none keeps memory alive that was released, and memory
may come back elsewhere. Experts are why this pays: Megatron's buffers hold the last one first, vLLM the first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from hybrid_engine.errors import TransportError
from hybrid_engine.planning.coalescing import regular_runs
from hybrid_engine.planning.plan import Transfer
from hybrid_engine.ranks.torch_internals import copy_each
from hybrid_engine.records.layout import BufferId, Place
from hybrid_engine.records.regions import contiguous_strides
from hybrid_engine.tracing import timed_span

FlatOf = Callable[[Transfer], torch.Tensor]
"""The flat buffer that a transfer reads, or writes."""

_WIDE = torch.complex128
"""The widest elements that torch copies: 16 bytes, as many as a thread of a GPU moves at once."""


class CopyError(Exception):
    """A copy failed.

    Attributes:
        transfer: whose.
        error: why.
    """

    def __init__(self, transfer: Transfer, error: Exception) -> None:
        super().__init__(str(error))
        self.transfer, self.error = transfer, error


class BatchedCopies:
    """The copies of some transfers; made once, run again and again.

    Attributes:
        transfers: all of them, in the order given. No two write the same element.
    """

    def __init__(self, transfers: Iterable[Transfer]) -> None:
        self.transfers = tuple(transfers)
        self._sources = {transfer.src.buffer: transfer for transfer in reversed(self.transfers)}
        self._destinations = {transfer.dst.buffer: transfer for transfer in reversed(self.transfers)}
        self._origins: dict[BufferId, _Origin] = {}
        self._runs: list[_Run] = []

    @torch.no_grad()
    def run(self, source_of: FlatOf, destination_of: FlatOf) -> None:
        """Copy everything, casting to the destination's dtype; on CUDA the copies are queued.

        Both are called for one transfer of each buffer. Raises CopyError.
        """
        sources = _flats(self._sources, source_of)
        destinations = _flats(self._destinations, destination_of)
        origins = _origins_of(sources)
        if origins != self._origins:
            self._runs, self._origins = list(_runs(self.transfers, origins)), origins
        try:
            _copy(self._runs, sources, destinations)
        except Exception as error:
            self._raise_failed(sources, destinations, error)

    def _raise_failed(self, sources: _Flats, destinations: _Flats, error: Exception) -> None:
        """Raise CopyError for the first transfer that fails alone, or for the first of all if none does."""
        for transfer in self.transfers:
            try:
                _copy([_Run.of(transfer)], sources, destinations)
            except Exception as own:
                raise CopyError(transfer, own) from own
        raise CopyError(self.transfers[0], error) from error


_Flats = dict[BufferId, torch.Tensor]


class _Origin(NamedTuple):
    """Where a flat buffer lies: `offset` elements from the start of the storage of this number."""

    storage: int
    offset: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class _Run:
    """Boxes of one shape at regular distances: ascending in the destination, either way in the source. In elements.

    Attributes:
        source, destination: the flat buffers; `src_start`, `dst_start`: its lowest offset in each.
        lengths, src_strides, dst_strides: of the whole run.
        is_cut: it goes backwards, as no view does: its boxes are copied each by itself.
        is_dense: what is copied at a time is one run of elements on both sides.
    """

    source: BufferId
    destination: BufferId
    src_start: int
    dst_start: int
    lengths: tuple[int, ...]
    src_strides: tuple[int, ...]
    dst_strides: tuple[int, ...]
    is_cut: bool
    is_dense: bool

    @staticmethod
    def of(first: Transfer, count: int = 1, src_distance: int = 0, dst_distance: int = 0) -> _Run:
        """The run of `count` transfers that begins with `first`."""
        has_dense_boxes = first.src.strides == contiguous_strides(first.lengths) == first.dst.strides
        lengths, src_strides, dst_strides = first.lengths, first.src.strides, first.dst.strides
        if count > 1:
            lengths = (count, *lengths)
            src_strides, dst_strides = (abs(src_distance), *src_strides), (dst_distance, *dst_strides)
        return _Run(
            first.src.buffer,
            first.dst.buffer,
            first.src.offset + min(0, src_distance * (count - 1)),
            first.dst.offset,
            lengths,
            src_strides,
            dst_strides,
            is_cut=src_distance < 0,
            is_dense=has_dense_boxes and (src_distance < 0 or count == 1),
        )


def _origins_of(flats: _Flats) -> dict[BufferId, _Origin]:
    """Storages are numbered, not named by their addresses: staging memory comes anew at every switch."""
    numbers: dict[int, int] = {}
    found = {}
    for buffer, flat in flats.items():
        offset = int(flat.storage_offset())
        start = flat.data_ptr() - offset * flat.element_size()
        found[buffer] = _Origin(numbers.setdefault(start, len(numbers)), offset, flat.dtype)
    return found


def _flats(first: dict[BufferId, Transfer], flat_of: FlatOf) -> _Flats:
    found = {}
    for buffer, transfer in first.items():
        try:
            found[buffer] = flat_of(transfer)
        except Exception as error:
            raise CopyError(transfer, error) from error
    return found


def _runs(transfers: Iterable[Transfer], origins: dict[BufferId, _Origin]) -> Iterator[_Run]:
    alike: dict[object, list[tuple[int, Transfer]]] = {}
    for one in transfers:
        origin = origins[one.src.buffer]
        key = (origin.storage, origin.dtype, one.dst.buffer, one.lengths, one.src.strides, one.dst.strides)
        alike.setdefault(key, []).append((origin.offset + one.src.offset, one))
    for group in alike.values():
        group.sort(key=lambda placed: placed[1].dst.offset)
        offsets = [(offset, one.dst.offset) for offset, one in group]
        for run in regular_runs(offsets, backwards=True):
            first = group[run.start][1]
            if len(run) == 1:
                yield _Run.of(first)
            else:
                (src, dst), (next_src, next_dst) = offsets[run.start : run.start + 2]
                yield _Run.of(first, len(run), next_src - src, next_dst - dst)


def _copy(runs: Iterable[_Run], sources: _Flats, destinations: _Flats) -> None:
    batches: dict[object, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for run in runs:
        flat, source = destinations[run.destination], sources[run.source]
        into = flat.as_strided(run.lengths, run.dst_strides, flat.storage_offset() + run.dst_start)
        out_of = source.as_strided(run.lengths, run.src_strides, source.storage_offset() + run.src_start)
        if into.is_cuda and not run.is_dense:
            into, out_of = widened(into, out_of)
        # On CUDA one kernel copies a whole batch if each of its tensors is dense and all of a side have one dtype.
        batch = batches.setdefault((run.is_dense, into.dtype, out_of.dtype), ([], []))
        if run.is_cut:
            batch[0].extend(into.unbind())
            batch[1].extend(reversed(out_of.unbind()))
        else:
            batch[0].append(into)
            batch[1].append(out_of)
    for batch in batches.values():
        copy_each(*batch)


def widened(into: torch.Tensor, out_of: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same bytes in elements of 16 bytes, if sizes, strides and addresses of both sides are multiples of them.

    A GPU copies strided views element by element: eight of bfloat16 in the time of one.
    """
    ratio = _WIDE.itemsize // into.element_size()
    fits = into.dtype == out_of.dtype and all(
        view.dim() > 0
        and view.stride(-1) == 1
        and not any(number % ratio for number in (view.size(-1), *view.stride()[:-1], view.storage_offset()))
        and view.data_ptr() % _WIDE.itemsize == 0
        for view in (into, out_of)
    )
    return (into.view(_WIDE), out_of.view(_WIDE)) if fits else (into, out_of)


def strided(flat: torch.Tensor, lengths: tuple[int, ...], place: Place) -> torch.Tensor:
    """The box of `lengths` at `place` of a flat buffer, as a view; lengths and strides in elements."""
    return flat.as_strided(lengths, place.strides, flat.storage_offset() + place.offset)


def copy_straight(
    label: str,
    bucket: int,
    transfers: Iterable[Transfer] | BatchedCopies,
    source_of: FlatOf,
    destination: Mapping[str, torch.Tensor],
) -> None:
    """Copy every transfer from its flat source into its place in `destination`, casting to the destination's dtype.

    Raises TransportError naming the transfer that failed. Returns when the copies are done, on CUDA too.
    """
    copies = transfers if isinstance(transfers, BatchedCopies) else BatchedCopies(transfers)
    try:
        copies.run(source_of, lambda transfer: destination[transfer.dst.buffer.name])
    except CopyError as failed:
        raise failure_at(label, bucket, "transfer", failed.transfer, failed.error) from failed.error
    if copies.transfers:
        synchronize(destination[copies.transfers[-1].dst.buffer.name].device)


def synchronize(device: torch.device) -> None:
    """Wait until the copies queued on the device's current stream are done; nothing to do on the CPU."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def failure_at(
    label: str, bucket: int, phase: str, transfer: Transfer, error: BaseException, peer: int | None = None
) -> TransportError:
    """The TransportError for `error`, which happened at one transfer (with `peer`, where one is to blame)."""
    if isinstance(error, KeyError):
        missing = error.args[0]
        problem = f"there is no buffer {getattr(missing, 'name', missing)!r}"
    elif isinstance(error, TransportError):
        problem = str(error)
    else:
        problem = f"{type(error).__name__}: {error}"
    return TransportError(
        f"{label} transport, bucket {bucket}, phase {phase}{'' if peer is None else f', peer {peer}'}, "
        f"tensor {transfer.tensor}, rank {transfer.src_rank} {transfer.src.buffer.name!r} -> "
        f"rank {transfer.dst_rank} {transfer.dst.buffer.name!r}: {problem}"
    )


PHASES = ("read", "transfer", "write")


@dataclass
class PhaseClock:
    """Seconds by phase, summed up until `take`.

    read: find the sources, pack them; transfer: bytes cross from rank to rank, and copies that go straight from
    source to destination; write: unpack into destinations. On CUDA a phase that only queues work ends before the work
    does, and the next phase that waits has its time.
    """

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Add the time of the `with` block to phase `name`."""
        return timed_span(self.seconds, name)

    def take(self) -> dict[str, float]:
        """The sums since the last call, which start again at zero."""
        taken, self.seconds = self.seconds, dict.fromkeys(self.seconds, 0.0)
        return taken
