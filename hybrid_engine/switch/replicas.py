"""Comparison of training weights that several ranks hold; in every switch that sends weights.

    set-up     boxes of tensors that several ranks hold, grouped by these ranks
    digests    of all boxes below `MAX_NBYTES` on this rank, and of a row of each of `NUM_ROWS`
               larger ones, others in each switch; the device is awaited once
    require    one maximum over all ranks; only if a group differs, digests of its boxes by rank

Norms, biases, routers and buffers are below the limit. A difference that lasts in a larger tensor
is found by the switch that compares its row: at the latest after (number of larger boxes) /
`NUM_ROWS` switches if most rows differ, and after (rows of the largest box) times as many if one
does. `generate_config.verify` compares all of them.
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from itertools import chain

import numpy as np
import torch

from hybrid_engine.errors import WeightError
from hybrid_engine.ports import TrainingWeights
from hybrid_engine.ranks.digests import box_digests, text_digest
from hybrid_engine.ranks.job import Job
from hybrid_engine.records.layout import DTYPE_NBYTES, Shard
from hybrid_engine.records.regions import Offsets, Region, Shape
from hybrid_engine.records.sides import Side
from hybrid_engine.transports.copies import FlatBuffers
from hybrid_engine.transports.runs import view_of

MAX_NBYTES = 1 << 20
"""Exclusive limit of the bytes of a whole tensor that is compared in every switch."""

NUM_ROWS = 64
"""Maximum number of larger boxes of a group of ranks of which a switch compares a row."""

_Ranks = tuple[int, ...]
_PHASE = "comparison of replicas"


class Replicas:
    """Weights of one rank that other ranks hold, too."""

    def __init__(self, source: Side, rank: int) -> None:
        """Group the boxes of `rank`; `source`: training layouts of all ranks."""
        holdings = source.holdings
        shards = source.kind(rank).shards_by_tensor()
        # Most tensors share their owners with others.
        ranks_by_owners: dict[int, dict[tuple[Offsets, Shape], _Ranks]] = {}
        small: defaultdict[_Ranks, list[Shard]] = defaultdict(list)
        large: defaultdict[_Ranks, list[Shard]] = defaultdict(list)
        for name, owners in holdings.owners.items():
            nbytes = math.prod(holdings.shapes[name]) * DTYPE_NBYTES[holdings.dtypes[name]]
            if id(owners) not in ranks_by_owners:
                ranks_by_owners[id(owners)] = {
                    (box.offsets, box.lengths): tuple(sorted({*box.ranks.tolist()}))
                    for box in owners
                }
                for ranks in ranks_by_owners[id(owners)].values():
                    small[ranks]  # all ranks have all groups, in one order
            boxes = ranks_by_owners[id(owners)]
            for shard in shards.get(name, ()):
                ranks = boxes[shard.region.offsets, shard.region.lengths]
                (small if nbytes < MAX_NBYTES else large)[ranks].append(shard)
        self._groups = [(boxes, large[ranks]) for ranks, boxes in small.items() if len(ranks) > 1]
        self._turn = 0  # number of this switch

    def _boxes(self) -> list[list[Shard]]:
        """Return the boxes that this switch compares, by group."""
        boxes = []
        for small, large in self._groups:
            num_rows = min(NUM_ROWS, len(large))
            # Of 100 boxes the first switch compares row 0 of boxes 0 to 63; the second row 0 of 64
            # to 99 and row 1 of 0 to 27.
            numbers = range(self._turn * num_rows, (self._turn + 1) * num_rows)
            rows = [row_of(large[number % len(large)], number // len(large)) for number in numbers]
            boxes.append(small + rows)
        return boxes

    def digests(self, weights: TrainingWeights) -> list[list[int]]:
        """Return the digests of this rank's boxes in this switch, by group."""
        if not self._groups:
            return []
        groups = self._boxes()
        digests = iter(box_digests(views_of(weights.buffers(), chain(*groups))))
        return [[next(digests) for _ in group] for group in groups]

    def require_equal(self, digests: Sequence[Sequence[int]], job: Job) -> None:
        """Raise WeightError on all ranks if replicas differ, naming tensors and ranks. Collective.

        `digests`: of this rank. If they are equal, the next switch compares other rows.
        """
        if not self._groups:
            return
        values = [text_digest(*map(str, group)) if group else None for group in digests]
        if job.agreement.is_same(values, _PHASE):
            self._turn += 1
            return
        texts = [region_text(box.region) for box in chain(*self._boxes())]
        of_boxes = dict(zip(texts, chain(*digests), strict=True))
        by_rank = job.agreement.gather(of_boxes, dict[str, int], _PHASE, sys.maxsize)
        findings = []
        for text in dict.fromkeys(chain(*by_rank)):
            digest_of = {rank: of[text] for rank, of in enumerate(by_rank) if text in of}
            if len({*digest_of.values()}) > 1:
                findings.append(replicas_differ(text, digest_of.items()))
        with job.agreement.phase(_PHASE):
            if findings:
                raise WeightError(findings)
        # Ctrl-C had reached some ranks after they had counted a switch, and others before.
        self._turn = 0


def row_of(box: Shard, number: int) -> Shard:
    """Return a row of a box, along its last dim; numbers cycle through all rows."""
    # A box of one dim is a single row: the product of no sizes is 1.
    *sizes, length = box.region.lengths
    index = [*map(int, np.unravel_index(number % math.prod(sizes), sizes)), 0]
    offsets = tuple(map(sum, zip(box.region.offsets, index, strict=True)))
    region = Region(box.region.tensor, offsets, (*[1] * len(sizes), length))
    return Shard(region, box.place.at(index))


def views_of(buffers: FlatBuffers, boxes: Iterable[Shard]) -> list[torch.Tensor]:
    """Return views of boxes in their buffers."""
    return [view_of(buffers, box.region.lengths, box.place) for box in boxes]


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
