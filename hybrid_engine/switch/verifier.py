"""`generate_config.verify`: whether vLLM has the bits of training, found out inside the switch, by digests.

    begin          before a fill: which tensors, the same on all ranks
    filled         a bucket has crossed: digests of its regions on both sides (common_regions.py)
    unproven       the engine says, while it commits, that it computes with something else than it was given
    conclude       digests of training travel, each rank compares those of what it received

A region is right when it has the bits of the ranks that train it, which must be the same: replicas whose bits differ
train more than one model. `WeightError` on any rank fails the switch, so the state before is restored.

Memory: 16 bytes for every region of the verified tensors, of all ranks that train them.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import torch

from hybrid_engine.errors import WeightError
from hybrid_engine.planning.plan import Bucket
from hybrid_engine.ranks.digests import box_digest
from hybrid_engine.ranks.job import Job
from hybrid_engine.records.regions import Region
from hybrid_engine.switch.common_regions import CommonRegions, PlacedRegion
from hybrid_engine.tracing.recording import span
from hybrid_engine.transports.copies import strided

NUM_SAMPLED = 8
"""Canonical tensors that "sample" compares at every switch, others each time."""


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What a verification did on this rank.

    Attributes:
        num_tensors: canonical tensors that were compared.
        nbytes: of both sides, read for digests.
        digest_nbytes: received from other ranks.
        seconds: for digests and comparison; what the engine takes for its own proof counts as commit.
    """

    num_tensors: int
    nbytes: int
    digest_nbytes: int
    seconds: float


class Verifier:
    """Verifies the switches of a job; one on every rank.

    Args:
        regions: what is compared.
        job: of all ranks.
        mode: "full" compares every tensor, "sample" the next few of a round through all.
    """

    def __init__(self, regions: CommonRegions, job: Job, mode: Literal["sample", "full"]) -> None:
        self._regions, self._job, self._mode = regions, job, mode
        self._next = 0
        self._compared: set[str] = set()  # tensors, as they were sent last

    def begin(self) -> Verification:
        """The verification of one fill; called on all ranks, or none."""
        names = list(self._regions.dtypes)
        if self._mode == "sample" and len(names) > NUM_SAMPLED:
            first, self._next = self._next, (self._next + NUM_SAMPLED) % len(names)
            names = [names[(first + index) % len(names)] for index in range(NUM_SAMPLED)]
        return Verification(self._regions, self._job, frozenset(names), self._compared)


@dataclass
class _Digests:
    """Of one side on this rank: a digest for each region, in the same order."""

    regions: list[PlacedRegion] = field(default_factory=list)
    values: list[int] = field(default_factory=list)

    def rows(self) -> torch.Tensor:
        """[N, 2] int64: number of the region, digest."""
        pairs = [(region.number, value) for region, value in zip(self.regions, self.values, strict=True)]
        return torch.tensor(pairs, dtype=torch.int64).view(-1, 2)


class Verification:
    """Of one fill on one rank (port `FillObserver`).

    Attributes:
        tensors: canonical tensors that are compared, if they are sent.
    """

    def __init__(self, regions: CommonRegions, job: Job, tensors: frozenset[str], compared: set[str]) -> None:
        self.tensors, self._compared = tensors, compared
        self._regions, self._job = regions, job
        self._source, self._destination = _Digests(), _Digests()
        self._sent: set[str] = set()
        self._nbytes = self._num_tensors = 0
        self._seconds = 0.0
        self._findings: list[str] = []

    def filled(
        self, bucket: Bucket, source: Mapping[str, torch.Tensor], destination: Mapping[str, torch.Tensor]
    ) -> None:
        """Digest what this rank has of a bucket's tensors on either side."""
        with self._timed():
            names = [name for name in bucket.tensors if name in self.tensors]
            self._compared.difference_update(bucket.tensors)
            self._sent.update(names)
            self._num_tensors += len(names)
            self._digest(names, self._regions.source, source, self._source)
            self._digest(names, self._regions.destination, destination, self._destination)

    def skipped(self, buckets: Iterable[Bucket]) -> None:
        """Count what is not sent, if it was compared when it was: training has the digests of that, and vLLM holds it
        unchanged (`unproven`)."""
        names = {name for bucket in buckets for name in bucket.tensors}
        self._num_tensors += len(names & self.tensors & self._compared)

    def unproven(self, finding: str) -> None:
        """Note what the engine found to be wrong; `conclude` raises it."""
        self._findings.append(finding)

    def conclude(self) -> VerifyReport:
        """Compare. Collective. Raises WeightError with all that is wrong, RemoteError with that of other ranks."""
        with self._timed():
            rows = self._source.rows()
            sources: list[torch.Tensor] = self._job.agreement.gather(rows, "verify")
            received = sum(each.nbytes for each in sources) - rows.nbytes
            with self._job.agreement.phase("verify"):
                self._compare(sources)
                if self._findings:
                    raise WeightError(self._findings)
        self._compared |= self._sent
        return VerifyReport(self._num_tensors, self._nbytes, received, self._seconds)

    def _digest(
        self,
        names: Sequence[str],
        own: Mapping[str, Sequence[PlacedRegion]],
        buffers: Mapping[str, torch.Tensor],
        digests: _Digests,
    ) -> None:
        for name in names:
            dtype = getattr(torch, self._regions.dtypes[name])
            for part in own[name]:
                box = strided(buffers[part.place.buffer.name].detach(), part.lengths, part.place)
                digests.values.append(box_digest(box, dtype))
                digests.regions.append(part)
                self._nbytes += box.numel() * box.element_size()

    def _compare(self, sources: Sequence[torch.Tensor]) -> None:
        rows = torch.cat(list(sources))
        ranks = torch.cat([torch.full((len(each),), rank) for rank, each in enumerate(sources)])
        order = rows[:, 0].argsort(stable=True)
        numbers, digests, ranks = rows[order, 0].contiguous(), rows[order, 1], ranks[order]
        self._compare_replicas(numbers, digests, ranks)
        found = self._destination.rows()
        first = torch.searchsorted(numbers, found[:, 0].contiguous())
        end = torch.searchsorted(numbers, found[:, 0].contiguous(), right=True)
        is_right = torch.zeros(len(found), dtype=torch.bool)
        for step in range(int((end - first).max()) if len(found) else 0):  # one for each replica
            at = (first + step).clamp(max=len(numbers) - 1)
            is_right |= (first + step < end) & (digests[at] == found[:, 1])
        for index in (~is_right).nonzero().flatten().tolist():
            part = self._destination.regions[index]
            senders = ranks[int(first[index]) : int(end[index])].tolist()
            where = f"{_named(self._regions.region(part.number))}: {part.place.buffer.name} of rank {self._job.rank}"
            self._findings.append(f"{where} differs from the training weights of {_ranks(senders)}")

    def _compare_replicas(self, numbers: torch.Tensor, digests: torch.Tensor, ranks: torch.Tensor) -> None:
        """Find regions that ranks train with other bits; each tensor is named once, by the first of its regions."""
        differ = (numbers[1:] == numbers[:-1]) & (digests[1:] != digests[:-1])
        named: set[str] = set()
        for number in numbers[1:][differ].unique().tolist():
            region = self._regions.region(number)
            if region.tensor not in named:
                named.add(region.tensor)
                at = numbers == number
                of_digest = sorted(ranks[at & (digests == one)].tolist() for one in digests[at].unique())
                kinds = " and ".join(map(_ranks, of_digest))
                self._findings.append(f"{_named(region)}: {kinds} train it with different bits; replicas must be equal")

    @contextmanager
    def _timed(self) -> Iterator[None]:
        started = time.perf_counter()
        with span("verify"):
            yield
        self._seconds += time.perf_counter() - started


def _named(region: Region) -> str:
    """As an index into the tensor."""
    box = ", ".join(f"{low}:{high}" for low, high in zip(region.offsets, region.ends, strict=True))
    return f"{region.tensor}[{box}]"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
