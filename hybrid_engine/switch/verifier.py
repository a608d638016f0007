"""Checks of the weights in a switch: that vLLM has the bits of training, and that no cast makes a value infinite.

`generate_config.verify` compares by digests, inside the switch:

    begin          before a fill: which tensors, the same on all ranks
    filled         a bucket has crossed: digests of its regions on both sides
    unproven       the engine says, while it commits, that it computes with something else than it was given
    conclude       digests of training travel, each rank compares those of what it received

A region is right when it has the bits of the ranks that train it, which must be the same: replicas whose bits differ
train more than one model. `WeightError` on any rank fails the switch, so the state before is restored.

    training     | rank 0              | rank 1              |
    inference    | ranks 0, 1    | ranks 2, 3                |
    regions      | 0             | 1   | 2                   |      numbered alike on all ranks, over all tensors

Regions are what a box of training and a box of inference have in common. Each rank has every region of its own boxes
whole, so either side can digest it where it lies. Neither the plan nor a transport is asked, so both are checked,
relays and copies within a rank too.

Memory: 16 bytes for every region of the verified tensors, of all ranks that train them.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

import torch

from hybrid_engine.errors import WeightError
from hybrid_engine.planning.plan import Bucket
from hybrid_engine.ports import TrainingWeights
from hybrid_engine.ranks.digests import box_digests
from hybrid_engine.ranks.job import Job
from hybrid_engine.records.holdings import Box, TensorOwners, touching
from hybrid_engine.records.layout import Layout, Place, Shard
from hybrid_engine.records.regions import Region
from hybrid_engine.records.sides import Side
from hybrid_engine.tracing import timed_span
from hybrid_engine.transports.copies import strided

NUM_SAMPLED = 8
"""Canonical tensors that "sample" compares at every switch, others each time."""


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """Results of a verification on this rank.

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
        """The verification of one fill; called on all ranks, or none. Collective where it samples."""
        names = list(self._regions.dtypes)
        if self._mode == "sample" and len(names) > NUM_SAMPLED:
            # a rank that was interrupted in an earlier switch may not have come as far as the others
            first = max(self._job.agreement.gather(self._next, int, "sample"))
            self._next = (first + NUM_SAMPLED) % len(names)
            names = [names[(first + index) % len(names)] for index in range(NUM_SAMPLED)]
        return Verification(self._regions, self._job, frozenset(names), self._compared)


def _rows_of(digests: Sequence[tuple[PlacedRegion, int]]) -> torch.Tensor:
    """[N, 2] int64: number of the region, digest."""
    pairs = [(region.number, digest) for region, digest in digests]
    return torch.tensor(pairs, dtype=torch.int64).view(-1, 2)


def _rows_from(message: bytes) -> torch.Tensor:
    if not message:  # torch makes no tensor of no bytes
        return torch.empty(0, 2, dtype=torch.int64)
    return torch.frombuffer(bytearray(message), dtype=torch.int64).view(-1, 2)


class Verification:
    """Verification of one fill on one rank.

    Attributes:
        tensors: canonical tensors that are compared, if they are sent.
    """

    def __init__(self, regions: CommonRegions, job: Job, tensors: frozenset[str], compared: set[str]) -> None:
        self.tensors, self._compared = tensors, compared
        self._regions, self._job = regions, job
        self._source, self._destination = list[tuple[PlacedRegion, int]](), list[tuple[PlacedRegion, int]]()
        self._sent: set[str] = set()
        self._nbytes = self._num_tensors = 0
        self._seconds = {"verify": 0.0}
        self._findings: list[str] = []

    def filled(
        self, bucket: Bucket, source: Mapping[str, torch.Tensor], destination: Mapping[str, torch.Tensor]
    ) -> None:
        """Digest what this rank has of a bucket's tensors on either side."""
        with timed_span(self._seconds, "verify"):
            names = [name for name in bucket.tensors if name in self.tensors]
            self._compared.difference_update(bucket.tensors)
            self._sent.update(names)
            self._num_tensors += len(names)
            sources = list(self._boxes(names, self._regions.source, source))
            destinations = list(self._boxes(names, self._regions.destination, destination))
            both = [*sources, *destinations]  # together: each call waits for the device
            digests = box_digests((one.box for one in both), [one.dtype for one in both])
            self._nbytes += sum(one.box.numel() * one.box.element_size() for one in both)
            pairs = [(one.part, digest) for one, digest in zip(both, digests, strict=True)]
            self._source += pairs[: len(sources)]
            self._destination += pairs[len(sources) :]

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
        with timed_span(self._seconds, "verify"):
            rows = _rows_of(self._source)
            told = self._job.agreement.gather(rows.numpy().tobytes(), bytes, "verify", sys.maxsize)
            sources = [_rows_from(each) for each in told]
            received = sum(each.nbytes for each in sources) - rows.nbytes
            with self._job.agreement.phase("verify"):
                self._compare(sources)
                if self._findings:
                    raise WeightError(self._findings)
        self._compared |= self._sent
        return VerifyReport(self._num_tensors, self._nbytes, received, self._seconds["verify"])

    def _boxes(
        self, names: Sequence[str], own: OwnRegions, buffers: Mapping[str, torch.Tensor]
    ) -> Iterator[_PlacedBox]:
        """This rank's regions of some tensors, where they lie."""
        for name in names:
            dtype = getattr(torch, self._regions.dtypes[name])
            for part in own[name]:
                box = strided(buffers[part.place.buffer.name].detach(), part.lengths, part.place)
                yield _PlacedBox(part, box, dtype)

    def _compare(self, sources: Sequence[torch.Tensor]) -> None:
        rows = torch.cat(list(sources))
        ranks = torch.cat([torch.full((len(each),), rank) for rank, each in enumerate(sources)])
        order = rows[:, 0].argsort(stable=True)
        numbers, digests, ranks = rows[order, 0].contiguous(), rows[order, 1], ranks[order]
        self._compare_replicas(numbers, digests, ranks)
        found = _rows_of(self._destination)
        first = torch.searchsorted(numbers, found[:, 0].contiguous())
        end = torch.searchsorted(numbers, found[:, 0].contiguous(), right=True)
        is_right = torch.zeros(len(found), dtype=torch.bool)
        for step in range(int((end - first).max()) if len(found) else 0):  # one for each replica
            at = (first + step).clamp(max=len(numbers) - 1)
            is_right |= (first + step < end) & (digests[at] == found[:, 1])
        for index in (~is_right).nonzero().flatten().tolist():
            part, _ = self._destination[index]
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


def _named(region: Region) -> str:
    """Format as an index into the tensor."""
    box = ", ".join(f"{low}:{high}" for low, high in zip(region.offsets, region.ends, strict=True))
    return f"{region.tensor}[{box}]"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


@dataclass(frozen=True, slots=True)
class PlacedRegion:
    """A region that this rank has: its number, and where it lies."""

    number: int
    lengths: tuple[int, ...]
    place: Place


@dataclass(frozen=True, slots=True)
class _PlacedBox:
    """A region where it lies in a buffer, and the dtype in which both sides are compared."""

    part: PlacedRegion
    box: torch.Tensor
    dtype: torch.dtype


OwnRegions = Mapping[str, Sequence[PlacedRegion]]
"""Canonical tensor -> this rank's regions of it, each once for every place."""


@dataclass(frozen=True, slots=True)
class _Overlap:
    """Region that two boxes of a tensor have in common; it has no name, as tensors with the same owners share it."""

    region: Region
    source: Box
    destination: Box


class CommonRegions:
    """The regions of a job, and where this rank has them. The same numbers on all ranks, without a collective.

    Args:
        source, destination: what all ranks hold; sound, since a plan was made of them.
        rank: this one.

    Attributes:
        dtypes: tensor -> its dtype in inference, in the plan's order.
        source, destination: what this rank has.
    """

    def __init__(self, source: Side, destination: Side, rank: int) -> None:
        training, inference = source.placed.holdings, destination.placed.holdings
        known: dict[tuple[int, int], tuple[_Overlap, ...]] = {}  # by identity of the owners
        self._overlaps: dict[str, tuple[_Overlap, ...]] = {}
        for name, owners in inference.owners.items():
            key = id(training.owners[name]), id(owners)
            if key not in known:
                known[key] = tuple(_overlaps(training.owners[name], owners))
            self._overlaps[name] = known[key]
        self._names = tuple(self._overlaps)
        # Regions are numbered tensor by tensor: those of the k-th have the numbers from starts[k] to starts[k + 1]. The
        # last entry is the number of all regions and begins no tensor, so `zip` drops it.
        self._starts = tuple(accumulate(map(len, self._overlaps.values()), initial=0))
        self._first = dict(zip(self._names, self._starts, strict=False))
        self.dtypes: Mapping[str, str] = {name: inference.dtypes[name] for name in self._names}
        self.source = self._own(source.kind(rank), is_source=True)
        self.destination = self._own(destination.kind(rank), is_source=False)

    def region(self, number: int) -> Region:
        """The region of a number."""
        name = self._names[bisect_right(self._starts, number) - 1]
        region = self._overlaps[name][number - self._first[name]].region
        return Region(name, region.offsets, region.lengths)

    def _own(self, layout: Layout, *, is_source: bool) -> OwnRegions:
        shards = layout.shards_by_tensor()
        return {
            name: [part for shard in shards.get(name, ()) for part in self._parts(shard, is_source=is_source)]
            for name in self._names
        }

    def _parts(self, shard: Shard, *, is_source: bool) -> Iterator[PlacedRegion]:
        """The regions that a shard is made of."""
        whole = shard.region
        box = whole.offsets, whole.lengths
        # A shard is a whole box of its side (boxes are what shards have in common), so the overlaps that were cut out
        # of this very box lie in it; `place.at` takes the offset within the box, not within the tensor.
        for number, overlap in enumerate(self._overlaps[whole.tensor], self._first[whole.tensor]):
            if box == (overlap.source if is_source else overlap.destination):
                region = overlap.region
                start = (low - base for low, base in zip(region.offsets, whole.offsets, strict=True))
                yield PlacedRegion(number, region.lengths, shard.place.at(start))


def _overlaps(sources: TensorOwners, destinations: TensorOwners) -> Iterator[_Overlap]:
    for destination, near in zip(destinations, touching(sources, destinations), strict=True):
        for source in (sources[index] for index in near):
            region = source.region.intersect(destination.region)
            assert region is not None, "they touch"
            pair = (source.offsets, source.lengths), (destination.offsets, destination.lengths)
            yield _Overlap(region, *pair)


class ValueRanges:
    """The parts of one rank's training weights that inference holds in a dtype of a smaller range.

    Args:
        rank: of this process.
        source: what it holds for training.
        served: tensor -> its dtype in inference.

    float16 ends at 65504, and bfloat16 a little below float32. Rounding keeps the order of numbers, so that all of a
    part are finite in a dtype if the smallest and the largest are.
    """

    def __init__(self, rank: int, source: Layout, served: Mapping[str, str]) -> None:
        self._rank = rank
        self._parts: list[tuple[Shard, torch.dtype]] = []
        for shard in source.shards:
            one, other = source.buffers[shard.place.buffer].dtype, served.get(shard.region.tensor)
            if other is not None and _is_smaller(other, one) and 0 not in shard.region.lengths:
                self._parts.append((shard, getattr(torch, other)))

    def require(self, training: TrainingWeights) -> None:
        """Raise WeightError naming every tensor with a value that a cast makes infinite.

        Reads each part once; where nothing is cast to a smaller range, nothing.
        """
        if not self._parts:
            return
        buffers = training.buffers()
        ends = [torch.stack(self._view(buffers, shard).aminmax()) for shard, _ in self._parts]
        fits = [end.to(dtype).isfinite().all() for end, (_, dtype) in zip(ends, self._parts, strict=True)]
        if bool(torch.stack(fits).all()):
            return
        raise WeightError(
            [self._finding(buffers, *part) for part, fit in zip(self._parts, fits, strict=True) if not fit]
        )

    def _finding(self, buffers: Mapping[str, torch.Tensor], shard: Shard, dtype: torch.dtype) -> str:
        values = self._view(buffers, shard)
        name, most = str(dtype).removeprefix("torch."), torch.finfo(dtype).max
        return (
            f"{shard.region.tensor} on rank {self._rank}: {int(values.to(dtype).isinf().sum())} of {values.numel()} "
            f"elements are too large for {name}, in which they are sent: up to {float(values.abs().max()):g}, which "
            f"ends at {most:g}. Use compression_dtype: bfloat16, or leave compress_reshard out"
        )

    @staticmethod
    def _view(buffers: Mapping[str, torch.Tensor], shard: Shard) -> torch.Tensor:
        return strided(buffers[shard.place.buffer.name].detach(), shard.region.lengths, shard.place)


def _is_smaller(dtype: str, than: str) -> bool:
    """Whether the numbers of one dtype end before those of another."""
    one, other = getattr(torch, dtype), getattr(torch, than)
    return one.is_floating_point and other.is_floating_point and torch.finfo(one).max < torch.finfo(other).max
