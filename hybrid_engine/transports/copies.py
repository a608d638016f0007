"""Thousands of small strided copies in few calls, with their errors.

    transfers --once--> runs (runs.py)
    runs on a GPU ----> a kernel or two, from tables of numbers (tile_kernel.py)
    other runs -------> a view of each, cut into its boxes only where the source descends; one call

Only numbers are kept. Views are created at every switch, so they keep no released memory alive, and
memory may return at another address.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import chain

import torch

from hybrid_engine.errors import TransportError
from hybrid_engine.planning.plan import Transfer
from hybrid_engine.ranks.torch_internals import copy_each
from hybrid_engine.records.layout import BufferId
from hybrid_engine.transports.runs import Flats, TiledCopies, origins_of, runs_of, tiled, views_of

FlatBuffers = Mapping[str, torch.Tensor]
"""Flat buffers of a rank, by name."""

FlatOf = Callable[[Transfer], torch.Tensor]
"""Returns the flat buffer that a transfer reads or writes."""


class CopyError(Exception):
    """A copy failed: `transfer`, for the reason `error`."""

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
        self._origins: object = None
        self._runs: list[Transfer] = []
        self._tiled: TiledCopies | None = None

    @torch.no_grad()
    def run(self, source_of: FlatOf, destination_of: FlatOf) -> None:
        """Copy everything, casting to the destination's dtype; on CUDA the copies are queued.

        Each function is called for one transfer of each buffer. Raises CopyError.
        """
        sources = _flats(self._sources, source_of)
        destinations = _flats(self._destinations, destination_of)
        origins = (origins_of(sources), origins_of(destinations))
        try:
            # Runs and tiles depend only on the transfers and these origins, not on addresses.
            if origins != self._origins:
                self._runs = list(runs_of(self.transfers, origins[0]))
                self._tiled = tiled(self._runs, *origins)
                self._origins = origins
            if self._tiled is None:
                _copy(self._runs, sources, destinations)
            else:
                self._tiled.run(sources, destinations)
        except Exception as error:
            # A failed batch does not name the transfer, so copy them one by one.
            for transfer in self.transfers:
                try:
                    _copy([transfer], sources, destinations)
                except Exception as single_error:
                    raise CopyError(transfer, single_error) from single_error
            # Alone each of them succeeds, so no transfer is at fault: the first stands for all.
            raise CopyError(self.transfers[0], error) from error


def _flats(first: dict[BufferId, Transfer], flat_of: FlatOf) -> Flats:
    flats = {}
    for buffer, transfer in first.items():
        try:
            flats[buffer] = flat_of(transfer)
        except Exception as error:
            raise CopyError(transfer, error) from error
    return flats


def _copy(runs: Iterable[Transfer], sources: Flats, destinations: Flats) -> None:
    views = [views_of(run, sources, destinations) for run in runs]
    if views:
        # (destinations, sources) of each run become one list of each side, for a single call.
        copy_each(*(list(chain.from_iterable(side)) for side in zip(*views, strict=True)))


def copy_straight(
    label: str,
    bucket: int,
    copies: BatchedCopies,
    source_of: FlatOf,
    destination: FlatBuffers,
    phase: str = "transfer",
    planned: Callable[[Transfer], Transfer] = lambda transfer: transfer,
) -> None:
    """Copy every transfer of `copies` from its flat source into its place in `destination`.

    Casts to the destination's dtype. On CUDA the copies are queued on the current stream. Raises
    TransportError that names the failed transfer, as `planned`.
    """
    try:
        copies.run(source_of, lambda transfer: destination[transfer.dst.buffer.name])
    except CopyError as failed:
        transfer = planned(failed.transfer)
        raise failure_at(label, bucket, phase, transfer, failed.error) from failed.error


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
