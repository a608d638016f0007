"""Whether a computed layout is the one that an engine really has."""

from __future__ import annotations

from hybrid_engine.records.layout import Layout
from hybrid_engine.records.regions import Region, subtract_all


def differences(computed: Layout, real: Layout) -> list[str]:
    """Tensors of which two layouts hold different elements, in whatever pieces, places and buffers; sorted."""
    ours, theirs = _regions(computed), _regions(real)
    return sorted(name for name in ours.keys() | theirs.keys() if not _same(ours.get(name, []), theirs.get(name, [])))


def _regions(layout: Layout) -> dict[str, list[Region]]:
    regions: dict[str, list[Region]] = {}
    for shard in layout.shards:
        regions.setdefault(shard.region.tensor, []).append(shard.region)
    return regions


def _same(one: list[Region], other: list[Region]) -> bool:
    return set(one) == set(other) or not (subtract_all(one, other) or subtract_all(other, one))
