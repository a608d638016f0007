"""Coalescing: boxes at regular distances on both sides become one box with one more dim.

    rows of a head, head after head           32 transfers of [64, 896]   -> 1 of [32, 64, 896]
    one matrix of every expert of a layer    128 transfers of [768, 2048] -> 1 of [128, 768, 2048]

The bytes that move stay the same. The dims of a coalesced transfer describe the copy and no longer
one canonical tensor.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from hybrid_engine.planning.plan import Transfer
from hybrid_engine.records.layout import Place


def coalesce(transfers: Iterable[Transfer]) -> list[Transfer]:
    """Return the same copies in as few transfers as regular distances allow, sorted by place.

    Only transfers between the same two buffers are joined. The transfers of a pair of ranks
    therefore depend on that pair alone, and plans of single ranks agree with the plan of all.
    """
    coalesced = list(map(_flattened, transfers))
    while True:
        joined = join_regular(coalesced, lambda moved: (moved.src.buffer, moved.src.offset))
        if len(joined) == len(coalesced):
            return sorted(joined, key=by_place)
        # A joined transfer may join again: first the heads of an expert, then experts of equal
        # heads. A pass that does not end the loop leaves fewer transfers than before.
        coalesced = joined


def by_place(transfer: Transfer) -> tuple[object, ...]:
    """Return a key that sorts transfers by destination, then by source."""
    return transfer.dst.buffer, transfer.dst.offset, transfer.src.buffer, transfer.src.offset


def join_regular(
    transfers: Iterable[Transfer],
    source_of: Callable[[Transfer], tuple[object, int]],
    *,
    backwards: bool = False,
) -> list[Transfer]:
    """Join transfers of one shape where distances are constant in source and destination.

    Args:
        transfers: between any buffers; only those to one buffer are joined.
        source_of: returns the memory that a transfer reads, and the offset there; only those from
            one memory are joined.
        backwards: allow sources that descend. Strided views cannot.
    """
    alike: defaultdict[object, list[tuple[int, Transfer]]] = defaultdict(list)
    for transfer in transfers:
        memory, offset = source_of(transfer)
        src = transfer.src
        dst = transfer.dst
        key = (memory, dst.buffer, transfer.lengths, src.strides, dst.strides)
        alike[key].append((offset, transfer))
    joined = []
    for group in alike.values():
        # Destination places are disjoint, so their offsets put the boxes into one definite order.
        group.sort(key=lambda placed: (placed[1].dst.offset, placed[0]))
        offsets = [(offset, transfer.dst.offset) for offset, transfer in group]
        for run, distances in _regular_runs(offsets, backwards=backwards):
            boxes = [transfer for _, transfer in group[run.start : run.stop]]
            joined.append(_join(boxes, *distances))
    return joined


def _regular_runs(
    offsets: Sequence[tuple[int, int]],
    *,
    backwards: bool,
) -> Iterator[tuple[range, tuple[int, int]]]:
    """Cut places into runs; yield each with the distances from one place to the next.

    `offsets`: (source offset, destination offset) of each place, sorted by destination.
    """
    # Places (0, 0), (4, 8), (8, 16), (9, 20): distances (4, 8), (4, 8), (1, 4), so the first three
    # are a run and the last is one of its own.
    distances = [
        (after[0] - before[0], after[1] - before[1]) for before, after in pairwise(offsets)
    ]
    distances.append((0, 0))  # the last place may be a run of its own
    start = 0
    while start < len(offsets):
        stop = start + 1
        can_extend = distances[start][0] >= 0 or backwards
        while can_extend and stop < len(offsets) and distances[stop - 1] == distances[start]:
            stop += 1
        # The second place of a run of two may begin a longer run: in 0, 10, 11, 12 it is the 10.
        if stop - start == 2 and stop < len(distances) and distances[stop - 1] == distances[stop]:
            stop = start + 1
        yield range(start, stop), distances[start]
        start = stop


def _join(run: Sequence[Transfer], src_distance: int, dst_distance: int) -> Transfer:
    """Return one transfer for a run: its first box, alone or repeated along a new first dim."""
    first = run[0]
    if len(run) == 1:
        return first
    # A transfer that was joined before is already named "first … last".
    first_name = first.tensor.partition(" … ")[0]
    last_name = run[-1].tensor.rpartition(" … ")[2]
    joined = replace(
        first,
        tensor=f"{first_name} … {last_name}",
        lengths=(len(run), *first.lengths),
        src=Place(first.src.buffer, first.src.offset, (src_distance, *first.src.strides)),
        dst=Place(first.dst.buffer, first.dst.offset, (dst_distance, *first.dst.strides)),
        nbytes=sum(transfer.nbytes for transfer in run),
    )
    return _flattened(joined)


def _flattened(transfer: Transfer) -> Transfer:
    """Drop dims of length 1 and merge neighbouring dims that are contiguous on both sides."""
    dims = list(zip(transfer.lengths, transfer.src.strides, transfer.dst.strides, strict=True))
    kept: list[tuple[int, int, int]] = []
    for length, src, dst in dims:
        # The stride of such a dim is never stepped and may be any number. Left in, it would keep
        # equal copies apart in `join_regular`.
        if length == 1:
            continue
        # If one step of the previous dim spans this whole dim on both sides, the two are one dim.
        # [32, 64] with strides (64, 1) on both sides is [2048] with stride (1). If only one side is
        # contiguous, the two dims stay.
        if kept and kept[-1][1] == length * src and kept[-1][2] == length * dst:
            kept[-1] = (kept[-1][0] * length, src, dst)
        else:
            kept.append((length, src, dst))
    if len(kept) == len(dims):
        return transfer
    return replace(
        transfer,
        lengths=tuple(length for length, _, _ in kept),
        src=replace(transfer.src, strides=tuple(src for _, src, _ in kept)),
        dst=replace(transfer.dst, strides=tuple(dst for _, _, dst in kept)),
    )
