"""What must be received whatever the plan: elements that a rank, or a host, needs and does not hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from hybrid_engine.planning.routes import Hosts
from hybrid_engine.records.owners import BoxOwners, groups_of_columns, presence_of
from hybrid_engine.records.regions import subtract_all, union


def missing_by_rank(
    sources: Sequence[BoxOwners],
    destinations: Sequence[BoxOwners],
    num_ranks: int,
    ranks: np.ndarray | None = None,
) -> Iterator[tuple[np.ndarray, int]]:
    """What each rank must receive: |needed minus held|, each element once.

    Args:
        sources, destinations: the owners of one tensor.
        num_ranks: of the world. ranks: those to look at; default: all.

    Yields (ranks, elements); every rank that needs anything is in one of them.
    """
    ranks = np.arange(num_ranks) if ranks is None else ranks
    needs = [presence_of(box, num_ranks)[ranks] for box in destinations]
    concerned = np.flatnonzero(np.any(needs, axis=0)) if needs else np.zeros(0, dtype=np.int64)
    ranks, needs = ranks[concerned], [need[concerned] for need in needs]
    holds = [presence_of(box, num_ranks)[ranks] for box in sources]
    # Ranks that need the same boxes and hold the same boxes have equal columns, and the box algebra is done once.
    for members in groups_of_columns([*needs, *holds], len(ranks)):
        first = members[0]
        needed = union(box.region for box, need in zip(destinations, needs, strict=True) if need[first])
        held = [box.region for box, hold in zip(sources, holds, strict=True) if hold[first]]
        yield ranks[members], sum(region.numel for region in subtract_all(needed, held))


def missing_by_host(sources: Sequence[BoxOwners], destinations: Sequence[BoxOwners], hosts: Hosts) -> np.ndarray:
    """Elements that must come to each host over the network; int array by host."""
    numel = np.zeros(hosts.count, dtype=np.int64)

    def by_host(owners: Sequence[BoxOwners]) -> list[BoxOwners]:
        return [BoxOwners(each.offsets, each.lengths, hosts.numbers[each.ranks]) for each in owners]

    for numbers, count in missing_by_rank(by_host(sources), by_host(destinations), hosts.count):
        numel[numbers] += count
    return numel
