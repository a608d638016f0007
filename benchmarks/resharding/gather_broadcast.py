"""Gather and broadcast, written from the description of MindSpeed-RL's resharding, not its code.

    every parameter of a stage      a blocking all-gather over tensor parallel ranks; for an expert,
                                    over expert tensor and then expert parallel ranks
    every stage                     a broadcast of all gathered parameters, stage after stage
    every rank                      copies its inference shard from the whole model and drops the
                                    rest

So every rank receives the whole model. Deviations are to its advantage: copies are planned
beforehand from the engine's records and write vLLM's loader layout directly, without names, dicts
or `load_weights`, and a tied head is copied once.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from benchmarks.resharding.loading import IntoLoader
from benchmarks.resharding.measuring import Clock, gather
from hybrid_engine.records.layout import Layout, Shard
from hybrid_engine.records.regions import Region
from hybrid_engine.trainer.worker import ActorHybridWorker


@dataclass(frozen=True)
class PlacedRegion:
    """Region of a canonical tensor inside a parameter; offset and strides in elements."""

    region: Region
    offset: int
    strides: tuple[int, ...]


@dataclass(frozen=True)
class Parameter:
    """Parameter of a rank.

    Attributes:
        is_expert: True if gathered over expert groups.
        is_cut: True if gathered over (expert) tensor parallel ranks.
    """

    numel: int
    is_expert: bool
    is_cut: bool
    regions: tuple[PlacedRegion, ...]


@dataclass(frozen=True)
class RankState:
    """Parameters of a rank in order, and the global ranks of its groups."""

    parameters: tuple[Parameter, ...]
    tensor: tuple[int, ...]
    expert_tensor: tuple[int, ...]
    expert: tuple[int, ...]

    def owners(self, parameter: Parameter, states: Mapping[int, RankState], rank: int) -> list[int]:
        """Return the ranks of the gathered parts of a parameter of `rank`, in order."""
        if not parameter.is_expert:
            return list(self.tensor) if parameter.is_cut else [rank]
        return [
            owner
            for peer in self.expert
            for owner in (states[peer].expert_tensor if parameter.is_cut else (peer,))
        ]


@dataclass(frozen=True)
class Cut:
    """Copy from a gathered stage into a flat buffer; offsets and strides in elements."""

    lengths: tuple[int, ...]
    src_offset: int
    src_strides: tuple[int, ...]
    buffer: str
    dst_offset: int
    dst_strides: tuple[int, ...]


class GatherBroadcast(IntoLoader):
    """Writes training weights to vLLM's parameters by whole tensors and whole stages."""

    def __init__(self, worker: ActorHybridWorker) -> None:
        super().__init__(worker)
        self._weights = [tensor for _, tensor in worker.train.weights.model.named_weights()]
        dtypes = {tensor.dtype for tensor in self._weights}
        if len(dtypes) > 1:
            raise ValueError(f"weights must have the same dtype, not {', '.join(map(str, dtypes))}")
        self._dtype = dtypes.pop()
        self._tensor_group = parallel_state.get_tensor_model_parallel_group()
        self._expert_tensor_group = parallel_state.get_expert_tensor_parallel_group()
        self._expert_group = parallel_state.get_expert_model_parallel_group()
        self._stage_group = parallel_state.get_pipeline_model_parallel_group()
        self._stages = dist.get_process_group_ranks(self._stage_group)
        self._state = self._describe(worker)
        states = dict(enumerate(gather(self._state)))
        self._sizes = [_stage_numel(states, rank) for rank in self._stages]
        seen: set[tuple[Shard, Region]] = set()  # a tied head is in two stages, and copied once
        self._cuts = [list(_cuts(states, rank, self._target.layout, seen)) for rank in self._stages]

    def run(self, clock: Clock) -> None:
        flats = self._target.allocate(clock)
        with torch.no_grad():
            rank = dist.get_rank()
            with clock.phase("gather"):
                gathered = torch.empty(self._sizes[self._stages.index(rank)], dtype=self._dtype)
                self._gather_stage(gathered)
            for source, size, cuts in zip(self._stages, self._sizes, self._cuts, strict=True):
                with clock.phase("broadcast"):
                    stage = gathered if source == rank else torch.empty(size, dtype=self._dtype)
                    if len(self._stages) > 1:
                        dist.broadcast(stage, source, group=self._stage_group)
                with clock.phase("cut"):
                    for cut in cuts:
                        destination = flats[cut.buffer].as_strided(
                            cut.lengths, cut.dst_strides, cut.dst_offset
                        )
                        destination.copy_(
                            stage.as_strided(cut.lengths, cut.src_strides, cut.src_offset)
                        )
                del stage  # before the next stage is allocated
        self._target.commit(clock)

    def _describe(self, worker: ActorHybridWorker) -> RankState:
        by_address = _regions_by_parameter(worker)
        parameters = tuple(
            Parameter(
                tensor.numel(),
                ".experts." in name,
                bool(getattr(tensor, "tensor_model_parallel", False)),
                tuple(by_address.get(tensor.data_ptr(), ())),
            )
            for name, tensor in worker.train.weights.model.named_weights()
        )
        groups = (self._tensor_group, self._expert_tensor_group, self._expert_group)
        return RankState(
            parameters, *(tuple(dist.get_process_group_ranks(group)) for group in groups)
        )

    def _gather_stage(self, stage: torch.Tensor) -> None:
        start = 0
        for parameter, tensor in zip(self._state.parameters, self._weights, strict=True):
            whole = tensor.detach().reshape(-1)
            if parameter.is_cut:
                whole = _all_gather(
                    whole, self._expert_tensor_group if parameter.is_expert else self._tensor_group
                )
            if parameter.is_expert:
                whole = _all_gather(whole, self._expert_group)
            stage[start : start + whole.numel()] = whole
            start += whole.numel()


def _all_gather(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Gather the parts of all ranks of the group, concatenated in its order."""
    if group.size() == 1:
        return tensor
    whole = torch.empty(group.size() * tensor.numel(), dtype=tensor.dtype)
    dist.all_gather(list(whole.split(tensor.numel())), tensor, group=group)
    return whole


def _regions_by_parameter(worker: ActorHybridWorker) -> dict[int, list[PlacedRegion]]:
    """Map the address of each parameter of this rank to its regions, from the engine's records."""
    adaptor = worker.train.weights
    flats = adaptor.buffers()
    by_address: dict[int, list[PlacedRegion]] = {}
    starts = sorted(
        (tensor.data_ptr(), tensor.nbytes) for _, tensor in adaptor.model.named_weights()
    )
    for shard in adaptor.layout().shards:
        flat = flats[shard.place.buffer.name]
        address = flat.data_ptr() + shard.place.offset * flat.element_size()
        start = _parameter_start(starts, address)
        offset = (address - start) // flat.element_size()
        region = PlacedRegion(shard.region, offset, shard.place.strides)
        by_address.setdefault(start, []).append(region)
    return by_address


def _parameter_start(starts: list[tuple[int, int]], address: int) -> int:
    """Return the start address of the parameter that contains `address`."""
    start, nbytes = starts[bisect.bisect_right(starts, (address, float("inf"))) - 1]
    assert start <= address < start + nbytes
    return start


def _parts(states: Mapping[int, RankState], rank: int) -> Iterator[tuple[Parameter, int]]:
    """Yield the parts of the gathered stage of `rank` in order, with their offsets."""
    start = 0
    for index, parameter in enumerate(states[rank].parameters):
        for owner in states[rank].owners(parameter, states, rank):
            part = states[owner].parameters[index]
            yield part, start
            start += part.numel


def _stage_numel(states: Mapping[int, RankState], rank: int) -> int:
    return sum(part.numel for part, _ in _parts(states, rank))


def _cuts(
    states: Mapping[int, RankState], rank: int, layout: Layout, seen: set[tuple[Shard, Region]]
) -> Iterator[Cut]:
    """Yield copies from the gathered stage of `rank` into `layout`; skip regions in `seen`."""
    wanted = layout.shards_by_tensor()
    for part, start in _parts(states, rank):
        for source in part.regions:
            for shard in wanted.get(source.region.tensor, ()):
                common = source.region.intersect(shard.region)
                if common is None or (shard, common) in seen:
                    continue
                seen.add((shard, common))
                shift = sum(
                    (low - base) * stride
                    for low, base, stride in zip(
                        common.offsets, source.region.offsets, source.strides, strict=True
                    )
                )
                target = shard.place.at(
                    low - base
                    for low, base in zip(common.offsets, shard.region.offsets, strict=True)
                )
                yield Cut(
                    common.lengths,
                    start + source.offset + shift,
                    source.strides,
                    target.buffer.name,
                    target.offset,
                    target.strides,
                )
