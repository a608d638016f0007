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

import struct
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

import torch

from hybrid_engine.errors import WeightError
from hybrid_engine.planning.plan import Bucket, Costs
from hybrid_engine.ports import TrainingWeights
from hybrid_engine.ranks.digests import box_digests, text_digest
from hybrid_engine.ranks.job import Job
from hybrid_engine.records.holdings import TensorOwners, touching
from hybrid_engine.records.layout import Layout, Shard
from hybrid_engine.records.regions import Region
from hybrid_engine.records.sides import Side
from hybrid_engine.switch.replicas import ranks_text, region_text, replicas_differ, views_of
from hybrid_engine.transports.copies import FlatBuffers

NUM_SAMPLED = 8
"""Number of canonical tensors that "sample" compares per switch.

Consecutive switches compare different ones.
"""


_ROW = struct.Struct("<2q")
"""Row of a message of digests: key of a region, digest of its contents."""

OwnRegions = Mapping[str, Sequence[Shard]]
"""Canonical tensor -> regions of it on this rank, once for each place."""


class Verifier:
    """Verification of a job's switches; every rank has one.

    Args:
        source, destination: layouts of all ranks; consistent, because a plan was made of them.
        rank: this rank.
        mode: "full" compares every tensor, "sample" `NUM_SAMPLED` per switch in round-robin order.

    Attributes:
        dtypes: tensor -> its dtype in inference, in the plan's order.
        source, destination: this rank's regions on each side.
        compared: tensors that were compared when they were last sent.
    """

    def __init__(
        self, source: Side, destination: Side, rank: int, mode: Literal["sample", "full"]
    ) -> None:
        inference = destination.holdings
        self.dtypes = inference.dtypes
        self.source = self._regions_of(source.kind(rank), inference.owners)
        self.destination = self._regions_of(destination.kind(rank), source.holdings.owners)
        self.compared: set[str] = set()
        self._mode = mode
        self._next = 0

    def _regions_of(self, layout: Layout, others: Mapping[str, TensorOwners]) -> OwnRegions:
        """Return the regions of one rank's layout; `others`: boxes of the other side."""
        shards = layout.shards_by_tensor()
        return {
            name: [part for shard in shards.get(name, ()) for part in _parts(shard, others[name])]
            for name in self.dtypes
        }

    def begin(self, job: Job) -> Verification:
        """Start the verification of one fill, on all ranks. Collective with mode "sample"."""
        names = list(self.dtypes)
        if self._mode == "sample" and len(names) > NUM_SAMPLED:
            # A rank that was interrupted in an earlier switch may be behind the others.
            first = max(job.agreement.gather(self._next, int, "sample"))
            num_names = len(names)
            # Of 20 tensors, 16 to 19 and 0 to 3 follow 8 to 15; the next is 4.
            self._next = (first + NUM_SAMPLED) % num_names
            names = [names[(first + index) % num_names] for index in range(NUM_SAMPLED)]
        return Verification(self, job, frozenset(names))


def _parts(shard: Shard, others: TensorOwners) -> Iterator[Shard]:
    """Yield the regions that a shard consists of; `others`: boxes of the other side."""
    whole = shard.region
    (near,) = touching(others, [whole])
    boxes = [Region(whole.tensor, others[index].offsets, others[index].lengths) for index in near]
    # Several boxes may have the same part in common with the shard.
    for region in dict.fromkeys(map(whole.intersect, boxes)):
        assert region is not None, "`touching` returns only intersecting boxes"
        # `place.at` takes the offset within the box, not within the tensor.
        start = (low - base for low, base in zip(region.offsets, whole.offsets, strict=True))
        yield Shard(region, shard.place.at(start))


class Verification:
    """Verification of one fill on one rank.

    Attributes:
        tensors: canonical tensors to compare; only those that are sent are compared.
        costs: of digests and comparison. The engine's own proof counts as commit.
    """

    def __init__(self, verifier: Verifier, job: Job, tensors: frozenset[str]) -> None:
        self.tensors = tensors
        self._verifier = verifier
        self._job = job
        self._source: list[tuple[Shard, int]] = []
        self._destination: list[tuple[Shard, int]] = []
        self._sent: set[str] = set()
        self.costs = Costs()
        self._findings: list[str] = []

    def filled(self, bucket: Bucket, source: FlatBuffers, destination: FlatBuffers) -> None:
        """Compute digests of this rank's regions of a bucket's tensors, on both sides."""
        with self.costs.timed("verify"):
            verifier = self._verifier
            names = [name for name in bucket.tensors if name in self.tensors]
            verifier.compared.difference_update(bucket.tensors)
            self._sent.update(names)
            counts = self.costs.counts
            counts["tensors_verified"] += len(names)
            sources = [part for name in names for part in verifier.source[name]]
            destinations = [part for name in names for part in verifier.destination[name]]
            # A single call for both sides, because each call waits for the device.
            parts = sources + destinations
            boxes = views_of(source, sources) + views_of(destination, destinations)
            dtypes = [getattr(torch, verifier.dtypes[part.region.tensor]) for part in parts]
            digested = list(zip(parts, box_digests(boxes, dtypes), strict=True))
            counts["bytes_verified"] += sum(box.nbytes for box in boxes)
            self._source += digested[: len(sources)]
            self._destination += digested[len(sources) :]

    def skipped(self, buckets: Iterable[Bucket]) -> None:
        """Count skipped buckets' tensors as compared, if they were when they were last sent.

        Training's have not changed since, and the engine proves that it holds them (`unproven`).
        """
        names = {name for bucket in buckets for name in bucket.tensors}
        names &= self.tensors & self._verifier.compared
        self.costs.counts["tensors_verified"] += len(names)

    def unproven(self, finding: str) -> None:
        """Record a mismatch that the engine detected; `conclude` raises it."""
        self._findings.append(finding)

    def conclude(self) -> None:
        """Compare. Collective.

        Raises WeightError with every mismatch on this rank, RemoteError with those of other ranks.
        """
        with self.costs.timed("verify"):
            rows = [_ROW.pack(_key_of(part.region), digest) for part, digest in self._source]
            message = b"".join(rows)
            messages = self._job.agreement.gather(message, bytes, "verify", sys.maxsize)
            received = sum(map(len, messages)) - len(message)
            self.costs.counts["bytes_of_digests"] = received
            with self._job.agreement.phase("verify"):
                self._compare(messages)
                if self._findings:
                    raise WeightError(self._findings)
        self._verifier.compared |= self._sent

    def _compare(self, messages: Sequence[bytes]) -> None:
        """Compare this rank's regions with the rows of all ranks that train them."""
        parts = [part for part, _ in (*self._source, *self._destination)]
        keys = {part.region: _key_of(part.region) for part in parts}
        # Key -> digest on each rank that trains the region, once for each place.
        trained: dict[int, list[tuple[int, int]]] = {key: [] for key in keys.values()}
        for rank, message in enumerate(messages):
            for key, digest in _ROW.iter_unpack(message):
                if key in trained:
                    trained[key].append((rank, digest))
        # Of a tensor whose replicas differ, only the first region is reported.
        different: dict[str, str] = {}
        for region, key in keys.items():
            if len({digest for _, digest in trained[key]}) > 1:
                different.setdefault(
                    region.tensor, replicas_differ(region_text(region), trained[key])
                )
        self._findings += different.values()
        for part, digest in self._destination:
            replicas = trained[keys[part.region]]
            # A region is correct if it equals any replica: differing ones are reported above.
            if any(digest == digest_of_rank for _, digest_of_rank in replicas):
                continue
            where = f"{region_text(part.region)}: {part.place.buffer.name} of rank {self._job.rank}"
            trainers = ranks_text([rank for rank, _ in replicas])
            self._findings.append(f"{where} differs from the training weights of {trainers}")


def _key_of(region: Region) -> int:
    """Return the digest of a region's tensor and bounds."""
    return text_digest(region_text(region))


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
        self._dtypes: dict[Shard, torch.dtype] = {}
        for shard in source.shards:
            trained = source.buffers[shard.place.buffer].dtype
            dtype = served.get(shard.region.tensor, trained)
            if dtype != trained and _largest_of(dtype) < _largest_of(trained):
                self._dtypes[shard] = getattr(torch, dtype)

    def require(self, training: TrainingWeights) -> None:
        """Raise WeightError naming every tensor with a value that a cast makes infinite.

        Reads each part once; reads nothing if no tensor is cast to a smaller range.
        """
        if not self._dtypes:
            return
        boxes = views_of(training.buffers(), self._dtypes)
        dtypes = self._dtypes.values()
        extremes = [torch.stack(box.aminmax()) for box in boxes]
        fits = [
            extreme.to(dtype).isfinite().all()
            for extreme, dtype in zip(extremes, dtypes, strict=True)
        ]
        # A single synchronization with the device if everything fits.
        are_within = torch.stack(fits).tolist()
        findings = [
            self._finding(shard, box, dtype)
            for (shard, dtype), box, is_within in zip(
                self._dtypes.items(), boxes, are_within, strict=True
            )
            if not is_within
        ]
        if findings:
            raise WeightError(findings)

    def _finding(self, shard: Shard, values: torch.Tensor, dtype: torch.dtype) -> str:
        name = str(dtype).removeprefix("torch.")
        num_infinite = int(values.to(dtype).isinf().sum())
        largest = float(values.abs().max())
        return (
            f"{shard.region.tensor} on rank {self._rank}: {num_infinite} "
            f"of {values.numel()} elements are too large for {name}, in which they are sent: "
            f"up to {largest:g}, but {name} ends at {torch.finfo(dtype).max:g}. "
            "Use compression_dtype: bfloat16, or leave compress_reshard out"
        )


def _largest_of(dtype: str) -> float:
    return torch.finfo(getattr(torch, dtype)).max
