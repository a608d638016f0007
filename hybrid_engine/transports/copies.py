"""Thousands of small strided copies in few calls, with their errors and their time.

    transfers --once--> runs: equal boxes at equal distances, in one storage on either side
    run       --------> a view of the whole run, cut into its boxes only where the source descends
    all runs  --------> one call, on CUDA one per pair of dtypes, and one kernel per run with gaps

Only numbers are kept. Views are created at every switch, so they keep no released memory alive, and
memory may return at another address. Runs pay off for experts: Megatron's buffers hold the last
expert first, vLLM's the first.
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

FlatBuffers = Mapping[str, torch.Tensor]
"""Flat buffers of a rank, by name."""

FlatOf = Callable[[Transfer], torch.Tensor]
"""Returns the flat buffer that a transfer reads or writes."""

# Widest element that torch copies: 16 bytes, the most that a GPU thread moves at once.
_WIDE = torch.complex128
# A dtype that every kernel can move, by its bytes. The kernels do not support float8.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: _WIDE}


class CopyError(Exception):
    """A copy failed.

    Attributes:
        transfer: the transfer that failed.
        error: the reason.
    """

    def __init__(self, transfer: Transfer, error: Exception) -> None:
        super().__init__(str(error))
        self.transfer = transfer
        self.error = error


class BatchedCopies:
    """Copies of a fixed set of transfers, which are run again and again.

    Attributes:
        transfers: the transfers, in their original order. No two write the same element.
        by_source: the same by source buffer.
    """

    def __init__(self, transfers: Iterable[Transfer]) -> None:
        self.transfers = tuple(transfers)
        self.by_source: dict[BufferId, list[Transfer]] = {}
        for transfer in self.transfers:
            self.by_source.setdefault(transfer.src.buffer, []).append(transfer)
        # First transfer of each buffer: later entries replace earlier ones.
        self._sources = {buffer: group[0] for buffer, group in self.by_source.items()}
        self._destinations = {
            transfer.dst.buffer: transfer for transfer in reversed(self.transfers)
        }
        self._origins: dict[BufferId, _Origin] = {}
        self._runs: list[Run] = []

    @torch.no_grad()
    def run(self, source_of: FlatOf, destination_of: FlatOf) -> None:
        """Copy everything, casting to the destination's dtype; on CUDA the copies are queued.

        Each function is called for one transfer of each buffer. Raises CopyError.
        """
        sources = _flats(self._sources, source_of)
        destinations = _flats(self._destinations, destination_of)
        origins = _origins_of(sources)
        # Runs depend only on the transfers and these origins, not on addresses.
        if origins != self._origins:
            self._runs = list(runs_of(self.transfers, origins))
            self._origins = origins
        try:
            _copy(self._runs, sources, destinations)
        except Exception as error:
            self._raise_failed(sources, destinations, error)

    def _raise_failed(self, sources: _Flats, destinations: _Flats, error: Exception) -> None:
        """Raise CopyError for the first transfer that fails alone, or for the first of all."""
        # A failed batch does not name the transfer, so copy them one by one.
        for transfer in self.transfers:
            try:
                _copy([Run.of(transfer)], sources, destinations)
            except Exception as single_error:
                raise CopyError(transfer, single_error) from single_error
        raise CopyError(self.transfers[0], error) from error


_Flats = dict[BufferId, torch.Tensor]


class _Origin(NamedTuple):
    """Position of a flat buffer: `offset` elements from the start of the storage of this number."""

    storage: int
    offset: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Run:
    """Boxes of one shape at regular distances, ascending in the destination.

    The source may ascend or descend. All numbers are in elements.

    Attributes:
        source, destination: the flat buffers.
        src_start, dst_start: lowest offset of the run in each.
        lengths, src_strides, dst_strides: shape and strides of the whole run.
        is_cut: the source descends, which a view cannot; the boxes are copied one by one.
        is_dense: every copied view is one run of elements on both sides.
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
    def of(first: Transfer, count: int = 1, src_distance: int = 0, dst_distance: int = 0) -> Run:
        """Return the run of `count` transfers that begins with `first`."""
        lengths = first.lengths
        src_strides = first.src.strides
        dst_strides = first.dst.strides
        has_dense_boxes = src_strides == contiguous_strides(lengths) == dst_strides
        if count > 1:
            lengths = (count, *lengths)
            src_strides = (abs(src_distance), *src_strides)
            dst_strides = (dst_distance, *dst_strides)
        return Run(
            first.src.buffer,
            first.dst.buffer,
            # If the source descends, its lowest box is the last one.
            first.src.offset + min(0, src_distance * (count - 1)),
            first.dst.offset,
            lengths,
            src_strides,
            dst_strides,
            is_cut=src_distance < 0,
            is_dense=has_dense_boxes and (src_distance < 0 or count == 1),
        )


def _origins_of(flats: _Flats) -> dict[BufferId, _Origin]:
    # Storages are numbered, because staging memory has another address at every switch.
    numbers: dict[int, int] = {}
    origins = {}
    for buffer, flat in flats.items():
        offset = int(flat.storage_offset())
        start = flat.data_ptr() - offset * flat.element_size()
        number = numbers.setdefault(start, len(numbers))
        origins[buffer] = _Origin(number, offset, flat.dtype)
    return origins


def origins_at(buffers: Iterable[BufferId], dtype: torch.dtype) -> dict[BufferId, _Origin]:
    """Return origins of buffers in separate storages; the buffers need not exist."""
    return {buffer: _Origin(number, 0, dtype) for number, buffer in enumerate(buffers)}


def _flats(first: dict[BufferId, Transfer], flat_of: FlatOf) -> _Flats:
    flats = {}
    for buffer, transfer in first.items():
        try:
            flats[buffer] = flat_of(transfer)
        except Exception as error:
            raise CopyError(transfer, error) from error
    return flats


def runs_of(transfers: Iterable[Transfer], origins: Mapping[BufferId, _Origin]) -> Iterator[Run]:
    """Combine transfers into runs.

    Args:
        transfers: the transfers.
        origins: origins of the buffers that they read.
    """
    alike: dict[object, list[tuple[int, Transfer]]] = {}
    for transfer in transfers:
        src = transfer.src
        dst = transfer.dst
        origin = origins[src.buffer]
        # Buffers of one storage can share a view, so the source buffer is not part of the key.
        key = (
            origin.storage,
            origin.dtype,
            dst.buffer,
            transfer.lengths,
            src.strides,
            dst.strides,
        )
        alike.setdefault(key, []).append((origin.offset + src.offset, transfer))
    for group in alike.values():
        # Runs ascend in the destination.
        group.sort(key=lambda placed: placed[1].dst.offset)
        offsets = [(offset, transfer.dst.offset) for offset, transfer in group]
        for run in regular_runs(offsets, backwards=True):
            _, first = group[run.start]
            if len(run) == 1:
                yield Run.of(first)
            else:
                src_offset, dst_offset = offsets[run.start]
                next_src_offset, next_dst_offset = offsets[run.start + 1]
                yield Run.of(
                    first, len(run), next_src_offset - src_offset, next_dst_offset - dst_offset
                )


def _copy(runs: Iterable[Run], sources: _Flats, destinations: _Flats) -> None:
    batches: dict[object, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    # On CUDA the indices n - 1 to 0, by n.
    backwards: dict[int, torch.Tensor] = {}
    for run in runs:
        destination = destinations[run.destination]
        source = sources[run.source]
        dst_start = destination.storage_offset() + run.dst_start
        src_start = source.storage_offset() + run.src_start
        into = destination.as_strided(run.lengths, run.dst_strides, dst_start)
        out_of = source.as_strided(run.lengths, run.src_strides, src_start)
        if into.is_cuda and not run.is_dense:
            into, out_of = widened(into, out_of)
            # `index_copy_` copies a cut run in one kernel, where each of its boxes would take one.
            # With deterministic algorithms it would sort, and copy twice.
            is_one_kernel = out_of.is_cuda and not torch.are_deterministic_algorithms_enabled()
            if run.is_cut and into.dtype == out_of.dtype and is_one_kernel:
                count = len(into)
                if count not in backwards:
                    backwards[count] = torch.arange(count - 1, -1, -1, device=into.device)
                bits = _BITS[into.element_size()]
                into.view(bits).index_copy_(0, backwards[count], out_of.view(bits))
                continue
        # On CUDA one kernel copies a whole batch, if each of its tensors is dense and all tensors
        # of a side have the same dtype.
        key = (run.is_dense, into.dtype, out_of.dtype)
        into_views, out_of_views = batches.setdefault(key, ([], []))
        if run.is_cut:
            # torch has no negative strides.
            into_views.extend(into.unbind())
            out_of_views.extend(reversed(out_of.unbind()))
        else:
            into_views.append(into)
            out_of_views.append(out_of)
    for into_views, out_of_views in batches.values():
        copy_each(into_views, out_of_views)


def widened(into: torch.Tensor, out_of: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the same bytes as views of 16-byte elements, if both sides permit it.

    Sizes, strides and addresses must be multiples of 16 bytes; otherwise the views are returned
    unchanged. A GPU copies strided views element by element: eight of bfloat16 in the time of one.
    """
    if into.dtype != out_of.dtype:
        return into, out_of
    ratio = _WIDE.itemsize // into.element_size()
    for view in (into, out_of):
        if view.dim() == 0 or view.stride(-1) != 1 or view.data_ptr() % _WIDE.itemsize:
            return into, out_of
        numbers = (view.size(-1), *view.stride()[:-1], view.storage_offset())
        if any(number % ratio for number in numbers):
            return into, out_of
    return into.view(_WIDE), out_of.view(_WIDE)


def strided(flat: torch.Tensor, lengths: tuple[int, ...], place: Place) -> torch.Tensor:
    """Return the box of `lengths` at `place` of a flat buffer as a view, in elements."""
    return flat.as_strided(lengths, place.strides, flat.storage_offset() + place.offset)


def copy_straight(
    label: str,
    bucket: int,
    copies: BatchedCopies,
    source_of: FlatOf,
    destination: FlatBuffers,
) -> None:
    """Copy every transfer of `copies` from its flat source into its place in `destination`.

    Casts to the destination's dtype. On CUDA the copies are queued on the current stream. Raises
    TransportError naming the transfer that failed.
    """
    try:
        copies.run(source_of, lambda transfer: destination[transfer.dst.buffer.name])
    except CopyError as failed:
        raise failure_at(label, bucket, "transfer", failed.transfer, failed.error) from failed.error


def failure_at(
    label: str,
    bucket: int,
    phase: str,
    transfer: Transfer,
    error: BaseException,
    peer: int | None = None,
) -> TransportError:
    """Return the TransportError for an error at a transfer; `peer` is the rank that caused it."""
    if isinstance(error, KeyError):
        missing = error.args[0]
        problem = f"there is no buffer {getattr(missing, 'name', missing)!r}"
    elif isinstance(error, TransportError):
        problem = str(error)
    else:
        problem = f"{type(error).__name__}: {error}"
    of_peer = "" if peer is None else f", peer {peer}"
    return TransportError(
        f"{label} transport, bucket {bucket}, phase {phase}{of_peer}, "
        f"tensor {transfer.tensor}, rank {transfer.src_rank} {transfer.src.buffer.name!r} -> "
        f"rank {transfer.dst_rank} {transfer.dst.buffer.name!r}: {problem}",
        code="copy-failed",
    )


PHASES = ("read", "transfer", "write")


@dataclass
class PhaseClock:
    """Seconds by phase, summed up until `take`.

    Phases: read (locate the sources, pack them), transfer (bytes cross from rank to rank, and
    copies straight from source to destination), write (unpack into destinations). On CUDA a phase
    that only queues work ends before the work does; the next phase that waits includes its time.
    """

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Add the time of the `with` block to phase `name`."""
        return timed_span(self.seconds, name)

    def take(self) -> dict[str, float]:
        """Return the sums since the last call, and reset them."""
        seconds = self.seconds
        self.seconds = dict.fromkeys(seconds, 0.0)
        return seconds
