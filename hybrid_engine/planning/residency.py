"""Which buckets' weights stay on the inference side while the devices train, so that they need not be sent again."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hybrid_engine.planning.plan import Bucket
from hybrid_engine.records.layout import Buffer, BufferId


@dataclass(frozen=True, eq=False)
class Residency:
    """What the weights of buckets take where they stay, and how much may.

    Attributes:
        nbytes: of the groups of each bucket on each rank: int array [buckets, ranks].
        limit: bytes on a rank; None: no limit.
    """

    nbytes: np.ndarray
    limit: int | None = None

    @classmethod
    def of(
        cls, buckets: Sequence[Bucket], buffers: Mapping[BufferId, Buffer], num_ranks: int, limit: int | None
    ) -> Residency:
        """Of the plan's buckets and the destination's buffers, of all ranks."""
        bucket_of = {group: bucket.index for bucket in buckets for group in bucket.groups}
        nbytes = np.zeros((len(buckets), num_ranks), dtype=np.int64)
        for buffer_id, buffer in buffers.items():
            nbytes[bucket_of[buffer.group], buffer_id.rank] += buffer.nbytes
        return cls(nbytes, limit)

    def kept(self, preferred: Iterable[int]) -> frozenset[int]:
        """The buckets that stay: in this order, each that still fits on every rank.

        On all ranks or on none: a bucket that is missing anywhere has to be sent in any case.
        """
        kept: list[int] = []
        taken = np.zeros(self.nbytes.shape[1], dtype=np.int64)
        for index in preferred:
            if self.limit is None or (taken + self.nbytes[index]).max(initial=0) <= self.limit:
                taken += self.nbytes[index]
                kept.append(index)
        return frozenset(kept)

    def nbytes_of(self, buckets: Collection[int], rank: int) -> int:
        """What these take on a rank."""
        return int(self.nbytes[sorted(buckets), rank].sum())


def frozen_everywhere(held: Sequence[Collection[str]], frozen: Sequence[Collection[str]]) -> frozenset[str]:
    """Tensors that no rank trains; by rank what it holds, and what of that it does not train."""
    trained = [set(own).difference(untrained) for own, untrained in zip(held, frozen, strict=True)]
    return frozenset().union(*held).difference(*trained)
