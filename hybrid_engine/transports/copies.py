"""Thousands of small strided copies in few calls, with their errors.

    transfers --once--> runs (runs.py)
    runs on a GPU ----> a kernel or two, from tables of numbers (tile_kernel.py)
    other runs -------> a view of each, cut into its boxes only where the source descends; one call

Only numbers are kept. Views are created at every switch, so they keep no released memory alive, and
memory may return at another address.
"""

from __future__ import annotations

from collections import defaultdict
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


class BatchedCopies:
    """Copies of a fixed set of transfers, which are run again and again.

    Attributes:
        transfers: the transfers, in their original order. No two write the same element.
        by_source: the same by source buffer.
    """

    def __init__(self, transfers: Iterable[Transfer]) -> None:
        self.transfers = tuple(transfers)
        self.by_source: defaultdict[BufferId, list[Transfer]] = defaultdict(list)
        self._by_destination: defaultdict[BufferId, list[Transfer]] = defaultdict(list)
        for transfer in self.transfers:
            self.by_source[transfer.src.buffer].append(transfer)
            self._by_destination[transfer.dst.buffer].append(transfer)
        self._origins: object = None
        self._runs: list[Transfer] = []
        self._tiled: TiledCopies | None = None

    @torch.no_grad()
    def run(self, source_of: FlatOf, destination_of: FlatOf, where: str) -> None:
        """Copy everything, casting to the destination's dtype; on CUDA the copies are queued.

        Each function is called for one transfer of each buffer. Raises TransportError, which names
        the failed transfer and `where` (`Transport.where`).
        """
        sources = _flats(self.by_source, source_of, where)
        destinations = _flats(self._by_destination, destination_of, where)
        origins = (origins_of(sources), origins_of(destinations))
        try:
            # Runs and tiles depend only on the transfers and these origins, not on addresses.
            if origins != self._origins:
                self._runs = runs_of(self.transfers, origins[0])
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
                    raise failure_at(where, transfer, single_error) from single_error
            # Alone each of them succeeds, so no transfer is at fault: the first stands for all.
            raise failure_at(where, self.transfers[0], error) from error


def _flats(by_buffer: Mapping[BufferId, list[Transfer]], flat_of: FlatOf, where: str) -> Flats:
    flats = {}
    for buffer, (transfer, *_) in by_buffer.items():
        try:
            flats[buffer] = flat_of(transfer)
        except Exception as error:
            raise failure_at(where, transfer, error) from error
    return flats


def _copy(runs: Iterable[Transfer], sources: Flats, destinations: Flats) -> None:
    views = [views_of(run, sources, destinations) for run in runs]
    if views:
        # (destinations, sources) of each run become one list of each side, for a single call.
        copy_each(*(list(chain.from_iterable(side)) for side in zip(*views, strict=True)))


def failure_at(where: str, transfer: Transfer, error: Exception) -> TransportError:
    """Return the TransportError for an error at a transfer."""
    if isinstance(error, KeyError):
        missing = error.args[0]
        problem = f"there is no buffer {getattr(missing, 'name', missing)!r}"
    elif isinstance(error, TransportError):
        problem = str(error)
    else:
        problem = f"{type(error).__name__}: {error}"
    return TransportError(
        f"{where}, tensor {transfer.tensor}, "
        f"rank {transfer.src_rank} {transfer.src.buffer.name!r} -> "
        f"rank {transfer.dst_rank} {transfer.dst.buffer.name!r}: {problem}",
        code="copy-failed",
    )
