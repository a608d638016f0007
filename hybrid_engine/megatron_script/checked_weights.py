"""`--resharding-verify`: compares inference weights with training's, bit by bit, when they are committed.

    checked.expect(training)       before the switch, one canonical tensor at a time: its parts are gathered from the
                                   ranks that hold them; each rank keeps a digest of what its own shards must be (of
                                   each replica, if training's replicas have diverged, which is logged)
    ... allocate, fill ...
    commit                         digests of what arrived are compared; `differing` names the tensors that differ

Checks that the switch moved the right bytes to the right places. That names and packing rules mean the right weights is
what `python -m hybrid_engine verify` checks for an architecture.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence

import torch

from hybrid_engine.errors import WeightError
from hybrid_engine.ports import InferenceWeights, TrainingWeights
from hybrid_engine.ranks.agreement import Agreement
from hybrid_engine.records.layout import Layout, Shard
from hybrid_engine.records.regions import Region
from hybrid_engine.transports.copies import strided

logger = logging.getLogger("hybrid_engine")

NUM_SAMPLED = 8
"""Canonical tensors that "sample" compares at every switch, others each time."""


Part = tuple[Region, torch.Tensor]


class CheckedWeights:
    """An `InferenceWeights` that checks what it commits and otherwise delegates to another one.

    Attributes:
        num_checked: shards of this rank compared since `expect`.
        differing: canonical tensors of which a shard of this rank differs from training's in any bit.
    """

    def __init__(self, weights: InferenceWeights, agreement: Agreement) -> None:
        self._weights = weights
        self._agreement = agreement
        self._shards: dict[str, list[Shard]] = {}  # by group
        layout = weights.layout()
        self._buffers = layout.buffers
        for shard in layout.shards:
            self._shards.setdefault(layout.buffers[shard.place.buffer].group, []).append(shard)
        self._expected: dict[Shard, set[str]] = {}
        self._filling: dict[str, torch.Tensor] = {}
        self._num_sampled = 0
        self.num_checked = 0
        self.differing: list[str] = []

    # -- the port -----------------------------------------------------------------------------------------------------

    def layout(self) -> Layout:
        """See `InferenceWeights`."""
        return self._weights.layout()

    def allocate(self, groups: Sequence[str]) -> Mapping[str, torch.Tensor]:
        """See `InferenceWeights`; `commit` reads the buffers."""
        buffers = self._weights.allocate(groups)
        self._filling |= buffers
        return buffers

    def commit(self, groups: Sequence[str]) -> None:
        """Compare what these groups were filled with, then commit it."""
        for group in groups:
            for shard in self._shards.get(group, ()):
                if shard in self._expected:
                    self._compare(shard)
            for name in {shard.place.buffer.name for shard in self._shards.get(group, ())}:
                self._filling.pop(name, None)
        self._weights.commit(groups)

    def finish_fill(self) -> None:
        """See `InferenceWeights`."""
        self._weights.finish_fill()

    def release(self) -> None:
        """See `InferenceWeights`."""
        self._filling.clear()
        self._weights.release()

    def resident_nbytes(self) -> int:
        """See `InferenceWeights`."""
        return self._weights.resident_nbytes()

    # -- the comparison -----------------------------------------------------------------------------------------------

    def expect(self, training: TrainingWeights, *, sample: bool) -> None:
        """Note what the next switch must deliver. Collective; training state must be on the device.

        Memory: one whole tensor at a time.

        Args:
            training: the source of the switch.
            sample: only NUM_SAMPLED tensors, the next ones at every call.
        """
        self.num_checked, self.differing, self._expected = 0, [], {}
        with self._agreement.phase("prepare"):
            training.prepare()
            held = training.layout()
            buffers = training.buffers()
        received: dict[str, list[Shard]] = {}  # by canonical tensor
        for shards in self._shards.values():
            for shard in shards:
                received.setdefault(shard.region.tensor, []).append(shard)
        of_tensor = held.shards_by_tensor()
        for name in self._chosen(sorted(set().union(*self._agreement.gather(list(received)))), sample=sample):
            own = [(one.region, _copy(_view(buffers, one))) for one in of_tensor.get(name, ())]
            versions = _versions([part for parts in self._agreement.gather(own, "verify") for part in parts])
            if len(versions) > 1:
                logger.warning("[Reshard] replicas of %s differ between ranks that train", name)
            for shard in received.get(name, ()):
                dtype = getattr(torch, self._buffers[shard.place.buffer].dtype)
                self._expected[shard] = {_digest(_assembled(shard.region, parts).to(dtype)) for parts in versions}

    def require_same(self) -> None:
        """Raise WeightError naming every tensor that differs, or was expected and not committed. Collective."""
        with self._agreement.phase("verify"):
            findings = [f"{name}: differs from Megatron's weights" for name in sorted(set(self.differing))]
            if missing := len(self._expected) - self.num_checked:
                findings.append(f"{missing} of {len(self._expected)} shards were never committed")
            if findings:
                raise WeightError(findings)

    def _chosen(self, names: Sequence[str], *, sample: bool) -> list[str]:
        """Return all names or, to sample, the next few of a round through all."""
        if not sample or len(names) <= NUM_SAMPLED:
            return list(names)
        first = self._num_sampled
        self._num_sampled += NUM_SAMPLED
        return [names[(first + index) % len(names)] for index in range(NUM_SAMPLED)]

    def _compare(self, shard: Shard) -> None:
        self.num_checked += 1
        if _digest(_view(self._filling, shard)) not in self._expected[shard]:
            self.differing.append(shard.region.tensor)


def _view(buffers: Mapping[str, torch.Tensor], shard: Shard) -> torch.Tensor:
    """Return a view of the shard's region in its buffer, with the region's shape."""
    return strided(buffers[shard.place.buffer.name].detach(), shard.region.lengths, shard.place)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy on the host with a storage of its own: a view would be pickled with its whole storage."""
    return tensor.to("cpu", copy=True, memory_format=torch.contiguous_format)


def _versions(parts: Sequence[Part]) -> list[list[Part]]:
    """Return the whole tensors that the parts make up: one if all replicas of each region are equal, else several."""
    replicas: dict[Region, list[Part]] = {}
    for region, tensor in parts:
        known = replicas.setdefault(region, [])
        if all(_digest(tensor) != _digest(other) for _, other in known):
            known.append((region, tensor))
    longest = max(len(known) for known in replicas.values())
    return [[known[min(index, len(known) - 1)] for known in replicas.values()] for index in range(longest)]


def _assembled(region: Region, parts: Sequence[Part]) -> torch.Tensor:
    """Return the values of `region`, put together from parts of its tensor."""
    values = torch.empty(region.lengths, dtype=parts[0][1].dtype)
    for part, tensor in parts:
        overlap = region.intersect(part)
        if overlap is not None:
            values[_within(overlap, region)] = tensor[_within(overlap, part)]
    return values


def _within(inner: Region, outer: Region) -> tuple[slice, ...]:
    return tuple(
        slice(low - base, low - base + length)
        for low, base, length in zip(inner.offsets, outer.offsets, inner.lengths, strict=True)
    )


def _digest(tensor: torch.Tensor) -> str:
    """Return a digest of the values, of a copy: numpy would keep a live storage from being resized."""
    content = _copy(tensor.detach()).view(-1).view(torch.uint8)
    return hashlib.blake2b(content.numpy().data, digest_size=16).hexdigest()
