"""Which part of a rank's training buffers nobody reads any more after each step of a fill, a bucket for example."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from hybrid_engine.records.layout import Extent, Shard

Releases = Mapping[str, tuple[Extent, ...]]
"""Buffer name -> intervals, in elements; in order, none touching another."""


def release_schedule(shards: Iterable[Shard], steps: Sequence[Collection[str]]) -> tuple[Releases, ...]:
    """For every step what can go once all ranks are through with it and those before it.

    Args:
        shards: the training records of one rank.
        steps: the canonical tensors of each, the same on all ranks.

    An interval that records of several steps share goes with the last of them; what holds a tensor of no step (nobody
    reads it) is not among them.
    """
    number_of = {tensor: number for number, tensors in enumerate(steps) for tensor in tensors}
    never = len(steps)
    spans: dict[str, list[tuple[int, int, int]]] = {}
    for shard in shards:
        extent, number = shard.place.extent(shard.region.lengths), number_of.get(shard.region.tensor, never)
        spans.setdefault(shard.place.buffer.name, []).append((extent.start, extent.stop, number))
    found: list[dict[str, list[Extent]]] = [{} for _ in range(never + 1)]
    for name, own in spans.items():
        for start, stop, number in _disjoint(own):
            extents = found[number].setdefault(name, [])
            if extents and extents[-1].stop == start:
                start = extents.pop().start
            extents.append(Extent(start, stop))
    return tuple({name: tuple(extents) for name, extents in one.items()} for one in found[:never])


def _disjoint(spans: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Spans (start, stop, step) in order; those that overlap are one, with the last step of them."""
    joined: list[tuple[int, int, int]] = []
    for start, stop, number in sorted(spans):
        if joined and start < joined[-1][1]:
            first, last, other = joined.pop()
            joined.append((first, max(stop, last), max(number, other)))
        else:
            joined.append((start, stop, number))
    return joined
