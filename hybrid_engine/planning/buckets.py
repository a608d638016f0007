"""Cutting a plan into buckets: tensors in the model's order, no destination group spread over two buckets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, eq=False)
class Need:
    """What one tensor takes at its destinations.

    Attributes:
        groups: the destination groups (`Buffer.group`) it is part of.
        ranks, nbytes: int arrays; destination bytes by rank.
    """

    groups: tuple[str, ...]
    ranks: np.ndarray
    nbytes: np.ndarray


@dataclass(frozen=True, slots=True)
class Outline:
    """A bucket without its transfers: its tensors, the groups it completes, the bytes of the rank that gets most."""

    tensors: tuple[str, ...]
    groups: tuple[str, ...]
    nbytes: int


def outline_buckets(needs: Mapping[str, Need], num_ranks: int, bucket_nbytes: int) -> list[Outline]:
    """Close a bucket as soon as some rank gets `bucket_nbytes` in it; `needs` is in the plan's order.

    The same on every rank: it depends on all destinations, not on what one rank touches.
    """
    outlines: list[Outline] = []
    tensors: list[str] = []
    filled = np.zeros(num_ranks, dtype=np.int64)

    def close() -> None:
        groups = dict.fromkeys(group for tensor in tensors for group in needs[tensor].groups)
        outlines.append(Outline(tuple(tensors), tuple(groups), int(filled.max())))
        tensors.clear()
        filled[:] = 0

    for cluster in _clusters(needs):
        tensors.extend(cluster)
        for tensor in cluster:
            np.add.at(filled, needs[tensor].ranks, needs[tensor].nbytes)
        if filled.max() >= bucket_nbytes:
            close()
    if tensors:
        close()
    return outlines


def _clusters(needs: Mapping[str, Need]) -> Sequence[Iterable[str]]:
    """Tensors that must stay in one bucket since they share groups, directly or through others; in order."""
    joined_to = list(range(len(needs)))  # an earlier tensor of the same cluster; the first points to itself
    first_of_group: dict[str, int] = {}

    def first(ordinal: int) -> int:
        while joined_to[ordinal] != ordinal:
            joined_to[ordinal] = joined_to[joined_to[ordinal]]
            ordinal = joined_to[ordinal]
        return ordinal

    for ordinal, need in enumerate(needs.values()):
        for group in need.groups:
            ends = first(ordinal), first(first_of_group.setdefault(group, ordinal))
            joined_to[max(ends)] = min(ends)
    clusters: dict[int, list[str]] = {}
    for ordinal, tensor in enumerate(needs):
        clusters.setdefault(first(ordinal), []).append(tensor)
    return list(clusters.values())
