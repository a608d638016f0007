"""Fewer, larger transfers: boxes that lie at regular distances on both sides are one box with one dim more.

    rows of a head, head after head                 32 transfers of [64, 896]   ->  1 of [32, 64, 896]
    one matrix of every expert of a layer          128 transfers of [768, 2048] ->  1 of [128, 768, 2048]

What is moved stays the same. A coalesced transfer has the dims of the copy, no longer those of one canonical tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from hybrid_engine.planning.plan import Transfer
from hybrid_engine.records.layout import Place


def coalesce(transfers: Iterable[Transfer]) -> list[Transfer]:
    """Make the same copies in as few transfers as regular distances allow.

    Transfers are only joined when they go from one buffer to one other, so what a pair of ranks gets depends on the
    pair's own transfers alone. The result is in order of place.
    """
    by_buffers: dict[object, list[Transfer]] = {}
    for transfer in transfers:
        by_buffers.setdefault((transfer.src.buffer, transfer.dst.buffer), []).append(_flattened(transfer))
    coalesced = [one for same in by_buffers.values() for one in _coalesced(same)]
    return sorted(coalesced, key=by_place)


def by_place(transfer: Transfer) -> tuple[object, ...]:
    """Key that sorts transfers by where they go, then by where they come from."""
    return transfer.dst.buffer, transfer.dst.offset, transfer.src.buffer, transfer.src.offset


def _coalesced(transfers: list[Transfer]) -> list[Transfer]:
    """Join until nothing joins any more: heads, then experts of equal heads, and so on."""
    while len(transfers) > 1:
        by_shape: dict[object, list[Transfer]] = {}
        for one in transfers:
            by_shape.setdefault((one.lengths, one.src.strides, one.dst.strides), []).append(one)
        joined = [_flattened(_join(run)) for same in by_shape.values() for run in _runs(same)]
        if len(joined) == len(transfers):
            break
        transfers = joined
    return transfers


def _runs(transfers: list[Transfer]) -> Iterator[list[Transfer]]:
    """Cut transfers of one shape into runs whose distances, in source and destination, stay the same."""
    ordered = sorted(transfers, key=lambda one: (one.dst.offset, one.src.offset))
    for run in regular_runs([(one.src.offset, one.dst.offset) for one in ordered]):
        yield ordered[run.start : run.stop]


def regular_runs(offsets: Sequence[tuple[int, int]], *, backwards: bool = False) -> Iterator[range]:
    """Cut places (offset in the source, in the destination) into runs with the same distances from one to the next.

    `offsets` are in order of the destination. A run goes backwards through the source only if asked for: no strided
    view does.
    """
    distances = [(other[0] - one[0], other[1] - one[1]) for one, other in pairwise(offsets)]
    start = 0
    while start < len(offsets):
        stop = start + 1
        while (
            stop < len(offsets) and distances[stop - 1] == distances[start] and (distances[start][0] >= 0 or backwards)
        ):
            stop += 1
        # The last of a short run may be the first of a longer one: 0, then 10 11 12
        if stop - start == 2 and stop < len(distances) and distances[stop - 1] == distances[stop]:
            stop = start + 1
        yield range(start, stop)
        start = stop


def _join(run: Sequence[Transfer]) -> Transfer:
    """One transfer for a run: its first box, repeated along a new first dim."""
    first = run[0]
    if len(run) == 1:
        return first
    src, dst = run[1].src.offset - first.src.offset, run[1].dst.offset - first.dst.offset
    return replace(
        first,
        tensor=f"{first.tensor.partition(' … ')[0]} … {run[-1].tensor.rpartition(' … ')[2]}",
        lengths=(len(run), *first.lengths),
        src=Place(first.src.buffer, first.src.offset, (src, *first.src.strides)),
        dst=Place(first.dst.buffer, first.dst.offset, (dst, *first.dst.strides)),
        nbytes=sum(one.nbytes for one in run),
    )


def _flattened(transfer: Transfer) -> Transfer:
    """Without dims of length 1, and with neighbouring dims joined that are contiguous on both sides."""
    dims = list(zip(transfer.lengths, transfer.src.strides, transfer.dst.strides, strict=True))
    kept: list[tuple[int, int, int]] = []
    for length, src, dst in (dim for dim in dims if dim[0] != 1):
        # The dim before steps over exactly this whole dim, in source and destination: together they are one.
        if kept and kept[-1][1] == length * src and kept[-1][2] == length * dst:
            kept[-1] = kept[-1][0] * length, src, dst
        else:
            kept.append((length, src, dst))
    if len(kept) == len(dims):
        return transfer
    lengths, src_strides, dst_strides = zip(*kept, strict=True) if kept else ((), (), ())
    src_place = Place(transfer.src.buffer, transfer.src.offset, src_strides)
    dst_place = Place(transfer.dst.buffer, transfer.dst.offset, dst_strides)
    return Transfer(transfer.tensor, lengths, src_place, dst_place, transfer.nbytes, transfer.link)
