"""Comparison of small training weights that several ranks hold; in every switch that sends weights.

    set-up     boxes of tensors below `MOST_NBYTES` that several ranks hold, grouped by these ranks
    digests    one digest of all boxes of a group on this rank; the device is awaited once
    require    one maximum over all ranks; only if a group differs, digests of its boxes by rank

Norms, biases, routers and buffers are below the limit; `generate_config.verify` compares others.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Iterable, Sequence
from itertools import chain

from hybrid_engine.errors import WeightError
from hybrid_engine.ports import TrainingWeights
from hybrid_engine.ranks.digests import box_digests, text_digest
from hybrid_engine.ranks.job import Job
from hybrid_engine.records.layout import DTYPE_NBYTES, Place
from hybrid_engine.records.regions import Region
from hybrid_engine.records.sides import Side
from hybrid_engine.transports.runs import view_of

MOST_NBYTES = 1 << 20
"""Exclusive limit of the bytes of a whole tensor that is compared."""

_PHASE = "comparison of replicas"


class Replicas:
    """Small weights of one rank that other ranks hold, too."""

    def __init__(self, source: Side, rank: int) -> None:
        """Group the boxes of `rank`; `source`: training layouts of all ranks."""
        holdings = source.placed.holdings
        shards = source.kind(rank).shards_by_tensor()
        # Most tensors share their owners with others.
        ranks_by_owners: dict[int, dict[tuple[tuple[int, ...], ...], tuple[int, ...]]] = {}
        groups: dict[tuple[int, ...], list[tuple[Region, Place]]] = {}
        for name, owners in holdings.owners.items():
            numel = math.prod(holdings.shapes[name])
            if not 0 < numel * DTYPE_NBYTES[holdings.dtypes[name]] < MOST_NBYTES:
                continue
            if id(owners) not in ranks_by_owners:
                ranks_by_owners[id(owners)] = {
                    (box.offsets, box.lengths): tuple(sorted({*box.ranks.tolist()}))
                    for box in owners
                }
            boxes = ranks_by_owners[id(owners)]
            for ranks in boxes.values():
                groups.setdefault(ranks, [])
            for shard in shards.get(name, ()):
                region = shard.region
                groups[boxes[region.offsets, region.lengths]].append((region, shard.place))
        self._groups = [boxes for ranks, boxes in groups.items() if len(ranks) > 1]

    def digests(self, weights: TrainingWeights) -> list[list[int]]:
        """Return the digests of this rank's boxes, by group."""
        if not self._groups:
            return []
        buffers = weights.buffers()
        boxes = [
            view_of(buffers, region.lengths, place)
            for group in self._groups
            for region, place in group
        ]
        digests = iter(box_digests(boxes))
        return [[next(digests) for _ in group] for group in self._groups]

    def require_equal(self, digests: Sequence[Sequence[int]], job: Job) -> None:
        """Raise WeightError on all ranks if replicas differ, naming tensors and ranks. Collective.

        `digests`: of this rank.
        """
        if not self._groups:
            return
        values = [text_digest(*map(str, group)) if group else None for group in digests]
        if job.agreement.is_same(values, _PHASE):
            return
        texts = [region_text(region) for group in self._groups for region, _ in group]
        digest_of = dict(zip(texts, chain.from_iterable(digests), strict=True))
        by_rank = job.agreement.gather(digest_of, dict[str, int], _PHASE, sys.maxsize)
        ranks_by_box: dict[str, dict[int, int]] = {}
        for rank, of_rank in enumerate(by_rank):
            for text, digest in of_rank.items():
                ranks_by_box.setdefault(text, {})[rank] = digest
        findings = [
            replicas_differ(text, by_rank.items())
            for text, by_rank in ranks_by_box.items()
            if len({*by_rank.values()}) > 1
        ]
        with job.agreement.phase(_PHASE):
            raise WeightError(findings)


def region_text(region: Region) -> str:
    """Format a region as an index into its tensor."""
    box = ", ".join(f"{low}:{high}" for low, high in zip(region.offsets, region.ends, strict=True))
    return f"{region.tensor}[{box}]"


def ranks_text(ranks: Collection[int]) -> str:
    """Format ranks, as in "ranks 0, 2"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def replicas_differ(region: str, digests: Iterable[tuple[int, int]]) -> str:
    """Describe a region with different bits on groups of ranks, given pairs of rank and digest."""
    ranks_by_digest: dict[int, list[int]] = {}
    for rank, digest in digests:
        ranks_by_digest.setdefault(digest, []).append(rank)
    listed = " and ".join(map(ranks_text, sorted(ranks_by_digest.values())))
    return f"{region}: {listed} train it with different bits; replicas must be equal"
