"""Checks of weights in a switch: vLLM holds training's bits, and no cast makes a value infinite.

`generate_config.verify` compares digests during the switch:

    begin       before a fill: chooses the tensors, the same on all ranks
    filled      after a bucket's transfer: computes digests of its regions on both sides
    unproven    called by the engine in `commit` if it computes with other bytes than it received
    conclude    exchanges the digests of training; each rank compares the regions that it received

A region is correct if it has the bits of the ranks that train it, which must all be equal: replicas
with different bits train more than one model. `WeightError` on any rank fails the switch, and the
previous state is restored.

    training     | rank 0              | rank 1              |
    inference    | ranks 0, 1    | ranks 2, 3                |
    regions      | a             | b   | c                   |    with the same keys on all ranks

A region is the intersection of a box of training with a box of inference, so both sides digest it
in place. Neither the plan nor a transport is involved: the comparison checks both. Memory: 16 bytes
on each rank for every region of the verified tensors and every rank that trains it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from hybrid_engine.errors import WeightError
from hybrid_engine.planning.plan import Bucket
from hybrid_engine.ports import TrainingWeights
from hybrid_engine.ranks.digests import box_digests, text_digest
from hybrid_engine.ranks.job import Job
from hybrid_engine.records.holdings import TensorOwners, touching
from hybrid_engine.records.layout import Layout, Place, Shard
from hybrid_engine.records.regions import Region
from hybrid_engine.records.sides import Side
from hybrid_engine.switch.replicas import ranks_text, region_text, replicas_differ
from hybrid_engine.tracing import timed_span
from hybrid_engine.transports.copies import FlatBuffers
from hybrid_engine.transports.runs import view_of

NUM_SAMPLED = 8
"""Number of canonical tensors that "sample" compares per switch.

Consecutive switches compare different ones.
"""


class Verifier:
    """Verification of a job's switches; every rank has one.

    `mode`: "full" compares every tensor, "sample" `NUM_SAMPLED` per switch in round-robin order.
    """

    def __init__(self, regions: CommonRegions, job: Job, mode: Literal["sample", "full"]) -> None:
        self._regions = regions
        self._job = job
        self._mode = mode
        self._next = 0
        self._compared: set[str] = set()  # tensors that were compared when they were last sent

    def begin(self) -> Verification:
        """Start the verification of one fill, on all ranks. Collective with mode "sample"."""
        names = list(self._regions.dtypes)
        if self._mode == "sample" and len(names) > NUM_SAMPLED:
            # A rank that was interrupted in an earlier switch may be behind the others.
            first = max(self._job.agreement.gather(self._next, int, "sample"))
            num_names = len(names)
            # Of 20 tensors, 16 to 19 and 0 to 3 follow 8 to 15; the next is 4.
            self._next = (first + NUM_SAMPLED) % num_names
            names = [names[(first + index) % num_names] for index in range(NUM_SAMPLED)]
        return Verification(self._regions, self._job, frozenset(names), self._compared)


def _rows_of(digests: Sequence[tuple[PlacedRegion, int]]) -> torch.Tensor:
    """Return rows [N, 2] int64: key of the region, digest."""
    pairs = [(region.key, digest) for region, digest in digests]
    return torch.tensor(pairs, dtype=torch.int64).view(-1, 2)


class Verification:
    """Verification of one fill on one rank.

    Attributes:
        tensors: canonical tensors to compare; only those that are sent are compared.
        seconds: time for digests and comparison. The engine's own proof counts as commit.
    """

    def __init__(
        self,
        regions: CommonRegions,
        job: Job,
        tensors: frozenset[str],
        compared: set[str],
    ) -> None:
        self.tensors = tensors
        self._compared = compared
        self._regions = regions
        self._job = job
        self._source: list[tuple[PlacedRegion, int]] = []
        self._destination: list[tuple[PlacedRegion, int]] = []
        self._sent: set[str] = set()
        self._nbytes = 0
        self._num_tensors = 0
        self.seconds: dict[str, float] = {}
        self._findings: list[str] = []

    def filled(self, bucket: Bucket, source: FlatBuffers, destination: FlatBuffers) -> None:
        """Compute digests of this rank's regions of a bucket's tensors, on both sides."""
        with timed_span(self.seconds, "verify"):
            names = [name for name in bucket.tensors if name in self.tensors]
            self._compared.difference_update(bucket.tensors)
            self._sent.update(names)
            self._num_tensors += len(names)
            sources = list(self._boxes(names, self._regions.source, source))
            destinations = list(self._boxes(names, self._regions.destination, destination))
            # A single call for both sides, because each call waits for the device.
            placed = [*sources, *destinations]
            digests = box_digests([box for _, box, _ in placed], [dtype for *_, dtype in placed])
            self._nbytes += sum(box.nbytes for _, box, _ in placed)
            pairs = [(part, digest) for (part, *_), digest in zip(placed, digests, strict=True)]
            self._source += pairs[: len(sources)]
            self._destination += pairs[len(sources) :]

    def skipped(self, buckets: Iterable[Bucket]) -> None:
        """Count skipped buckets' tensors as compared, if they were when they were last sent.

        Training's have not changed since, and the engine proves that it holds them (`unproven`).
        """
        names = {name for bucket in buckets for name in bucket.tensors}
        self._num_tensors += len(names & self.tensors & self._compared)

    def unproven(self, finding: str) -> None:
        """Record a mismatch that the engine detected; `conclude` raises it."""
        self._findings.append(finding)

    def conclude(self) -> dict[str, int]:
        """Compare, and return the fields of `ReshardReport` about it. Collective.

        Raises WeightError with every mismatch on this rank, RemoteError with those of other ranks.
        """
        with timed_span(self.seconds, "verify"):
            rows = _rows_of(self._source).numpy().tobytes()
            messages = self._job.agreement.gather(rows, bytes, "verify", sys.maxsize)
            received = sum(map(len, messages)) - len(rows)
            # torch.frombuffer refuses an empty buffer.
            sources = [
                torch.tensor(np.frombuffer(message, np.int64)).view(-1, 2) for message in messages
            ]
            with self._job.agreement.phase("verify"):
                self._compare(sources)
                if self._findings:
                    raise WeightError(self._findings)
        self._compared |= self._sent
        return {
            "tensors_verified": self._num_tensors,
            "bytes_verified": self._nbytes,
            "bytes_of_digests": received,
        }

    def _boxes(
        self, names: Sequence[str], regions: OwnRegions, buffers: FlatBuffers
    ) -> Iterator[tuple[PlacedRegion, torch.Tensor, torch.dtype]]:
        """Yield this rank's regions of these tensors, their views, and the dtype to compare."""
        for name in names:
            dtype = getattr(torch, self._regions.dtypes[name])
            for part in regions[name]:
                yield part, view_of(buffers, part.region.lengths, part.place), dtype

    def _compare(self, sources: Sequence[torch.Tensor]) -> None:
        """Compare the received regions with `sources`, rows [N, 2] of each training rank."""
        rows = torch.cat(list(sources))
        ranks = torch.cat(
            [torch.full((len(of_rank),), rank) for rank, of_rank in enumerate(sources)]
        )
        order = rows[:, 0].argsort(stable=True)
        keys = rows[order, 0].contiguous()
        digests = rows[order, 1]
        ranks = ranks[order]
        self._compare_replicas(keys, digests, ranks)

        received = _rows_of(self._destination)
        received_keys = received[:, 0].contiguous()
        # With keys 3 3 7 7 7, those of 7 are from 2 to before 5.
        first = torch.searchsorted(keys, received_keys)
        end = torch.searchsorted(keys, received_keys, right=True)
        # A region is correct if it equals any replica: differing replicas are reported separately.
        is_right = torch.zeros(len(received), dtype=torch.bool)
        num_replicas = int((end - first).max()) if len(received) else 0
        # One replica of every region in a turn: a region has few, and a rank has many regions.
        for step in range(num_replicas):
            index = (first + step).clamp(max=len(keys) - 1)
            is_right |= (first + step < end) & (digests[index] == received[:, 1])
        for wrong in (~is_right).nonzero().flatten().tolist():
            part, _ = self._destination[wrong]
            senders = ranks[int(first[wrong]) : int(end[wrong])].tolist()
            region = region_text(part.region)
            where = f"{region}: {part.place.buffer.name} of rank {self._job.rank}"
            trained = f"the training weights of {ranks_text(senders)}"
            self._findings.append(f"{where} differs from {trained}")

    def _compare_replicas(
        self, keys: torch.Tensor, digests: torch.Tensor, ranks: torch.Tensor
    ) -> None:
        """Report regions of this rank whose replicas differ, only the first of each tensor.

        Args:
            keys: [N] keys of regions, sorted.
            digests: [N] digests.
            ranks: [N] ranks that train the regions.
        """
        # If replicas of a region are not all equal, two neighbours differ.
        differ = (keys[1:] == keys[:-1]) & (digests[1:] != digests[:-1])
        different = {*keys[1:][differ].tolist()}
        named: set[str] = set()
        for part, _ in (*self._source, *self._destination):
            region = part.region
            if part.key not in different or region.tensor in named:
                continue
            named.add(region.tensor)
            is_region = keys == part.key
            by_rank = zip(ranks[is_region].tolist(), digests[is_region].tolist(), strict=True)
            self._findings.append(replicas_differ(region_text(region), by_rank))


@dataclass(frozen=True, slots=True)
class PlacedRegion:
    """Region that this rank holds.

    Attributes:
        key: digest of its tensor and its bounds.
        region: the region.
        place: its place in a buffer.
    """

    key: int
    region: Region
    place: Place


OwnRegions = Mapping[str, Sequence[PlacedRegion]]
"""Canonical tensor -> this rank's regions of it, once for each place.

A region that lies in several places occurs several times.
"""


class CommonRegions:
    """This rank's regions of a job, with their places.

    Args:
        source, destination: layouts of all ranks; consistent, because a plan was made of them.
        rank: this rank.

    Attributes:
        dtypes: tensor -> its dtype in inference, in the plan's order.
        source, destination: this rank's regions on each side.
    """

    def __init__(self, source: Side, destination: Side, rank: int) -> None:
        inference = destination.holdings
        self.dtypes: Mapping[str, str] = {name: inference.dtypes[name] for name in inference.owners}
        self.source = self._regions_of(source.kind(rank), inference.owners)
        self.destination = self._regions_of(destination.kind(rank), source.holdings.owners)

    def _regions_of(self, layout: Layout, others: Mapping[str, TensorOwners]) -> OwnRegions:
        """Return the regions of one rank's layout; `others`: boxes of the other side."""
        shards = layout.shards_by_tensor()
        return {
            name: [part for shard in shards.get(name, ()) for part in _parts(shard, others[name])]
            for name in self.dtypes
        }


def _parts(shard: Shard, others: TensorOwners) -> Iterator[PlacedRegion]:
    """Yield the regions that a shard consists of; `others`: boxes of the other side."""
    whole = shard.region
    (near,) = touching(others, [whole])
    boxes = [Region(whole.tensor, others[index].offsets, others[index].lengths) for index in near]
    # Several boxes may have the same part in common with the shard.
    for region in dict.fromkeys(map(whole.intersect, boxes)):
        assert region is not None, "`touching` returns only intersecting boxes"
        # `place.at` takes the offset within the box, not within the tensor.
        start = (low - base for low, base in zip(region.offsets, whole.offsets, strict=True))
        yield PlacedRegion(text_digest(region_text(region)), region, shard.place.at(start))


class ValueRanges:
    """Parts of one rank's training weights that inference holds in a dtype of smaller range.

    Rounding is monotonic: all values of a part are finite in a dtype if the extremes are.

    Args:
        rank: this rank.
        source: this rank's training layout.
        served: tensor -> its dtype in inference.
    """

    def __init__(self, rank: int, source: Layout, served: Mapping[str, str]) -> None:
        self._rank = rank
        self._parts: list[tuple[Shard, torch.dtype]] = []
        for shard in source.shards:
            dtype = source.buffers[shard.place.buffer].dtype
            served_dtype = served.get(shard.region.tensor)
            if served_dtype is None:
                continue
            served_type, trained_type = (getattr(torch, name) for name in (served_dtype, dtype))
            if not (served_type.is_floating_point and trained_type.is_floating_point):
                continue
            # Also bfloat16: it ends at 3.39e38, float32 at 3.40e38.
            if torch.finfo(served_type).max < torch.finfo(trained_type).max:
                self._parts.append((shard, served_type))

    def require(self, training: TrainingWeights) -> None:
        """Raise WeightError naming every tensor with a value that a cast makes infinite.

        Reads each part once; reads nothing if no tensor is cast to a smaller range.
        """
        if not self._parts:
            return
        buffers = training.buffers()
        extremes = [torch.stack(self._view(buffers, shard).aminmax()) for shard, _ in self._parts]
        fits = [
            extreme.to(dtype).isfinite().all()
            for extreme, (_, dtype) in zip(extremes, self._parts, strict=True)
        ]
        # A single synchronization with the device if everything fits.
        are_within = torch.stack(fits).tolist()
        too_large = [part for part, fit in zip(self._parts, are_within, strict=True) if not fit]
        if too_large:
            raise WeightError([self._finding(buffers, *part) for part in too_large])

    def _finding(self, buffers: FlatBuffers, shard: Shard, dtype: torch.dtype) -> str:
        values = self._view(buffers, shard)
        name = str(dtype).removeprefix("torch.")
        num_infinite = int(values.to(dtype).isinf().sum())
        largest = float(values.abs().max())
        return (
            f"{shard.region.tensor} on rank {self._rank}: {num_infinite} "
            f"of {values.numel()} elements are too large for {name}, in which they are sent: "
            f"up to {largest:g}, but {name} ends at {torch.finfo(dtype).max:g}. "
            "Use compression_dtype: bfloat16, or leave compress_reshard out"
        )

    @staticmethod
    def _view(buffers: FlatBuffers, shard: Shard) -> torch.Tensor:
        return view_of(buffers, shard.region.lengths, shard.place)
