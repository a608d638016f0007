"""Gather and broadcast, as MindSpeed-RL's resharding is described: written here from the description, not its code.

    every parameter of a stage      all-gather over tensor parallel ranks, one blocking call each; an expert's over
                                    expert tensor and then expert parallel ranks
    every stage                     one broadcast of all that was gathered, stage after stage
    every rank                      cuts its inference shard out of the whole and drops the rest

So every rank receives the whole model. Where it departs from the description, it is to its advantage: what is cut from
where is known beforehand (from the engine's records) and goes straight into vLLM's loader layout, without names, dicts
or `load_weights`, and what comes twice (a tied head) is cut once.
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
class Held:
    """A region of a canonical tensor inside a parameter: element offset and strides from the parameter's start."""

    region: Region
    offset: int
    strides: tuple[int, ...]


@dataclass(frozen=True)
class Parameter:
    """One parameter of one rank.

    Attributes:
        is_expert: gathered over expert groups. is_cut: gathered over (expert) tensor parallel ranks at all.
    """

    numel: int
    is_expert: bool
    is_cut: bool
    held: tuple[Held, ...]


@dataclass(frozen=True)
class Place:
    """What one rank tells the others: its parameters in order, and global ranks of its groups."""

    parameters: tuple[Parameter, ...]
    tensor: tuple[int, ...]
    expert_tensor: tuple[int, ...]
    expert: tuple[int, ...]

    def owners(self, parameter: Parameter, places: Mapping[int, Place], rank: int) -> list[int]:
        """Ranks whose parts of this rank's parameter are gathered, in the order in which they lie."""
        if not parameter.is_expert:
            return list(self.tensor) if parameter.is_cut else [rank]
        return [
            owner
            for peer in self.expert
            for owner in (places[peer].expert_tensor if parameter.is_cut else (peer,))
        ]


@dataclass(frozen=True)
class Cut:
    """A copy from a gathered stage into a flat destination buffer; all in elements."""

    lengths: tuple[int, ...]
    src_offset: int
    src_strides: tuple[int, ...]
    buffer: str
    dst_offset: int
    dst_strides: tuple[int, ...]


class GatherBroadcast(IntoLoader):
    """Training weights to vLLM's parameters by whole tensors and whole stages."""

    def __init__(self, worker: ActorHybridWorker) -> None:
        super().__init__(worker)
        self._weights = [tensor for _, tensor in worker.train.weights.model.named_weights()]
        dtypes = {tensor.dtype for tensor in self._weights}
        if len(dtypes) > 1:
            raise ValueError(f"written for weights of one dtype, not {', '.join(map(str, dtypes))}")
        self._dtype = dtypes.pop()
        self._tensor_group = parallel_state.get_tensor_model_parallel_group()
        self._expert_tensor_group = parallel_state.get_expert_tensor_parallel_group()
        self._expert_group = parallel_state.get_expert_model_parallel_group()
        self._stage_group = parallel_state.get_pipeline_model_parallel_group()
        self._stages = dist.get_process_group_ranks(self._stage_group)
        self._place = self._describe(worker)
        places = dict(enumerate(gather(self._place)))
        self._sizes = [_stage_numel(places, rank) for rank in self._stages]
        seen: set[tuple[Shard, Region]] = set()
        self._cuts = [list(_cuts(places, rank, self._target.layout, seen)) for rank in self._stages]

    def run(self, clock: Clock) -> None:
        flats = self._target.allocate(clock)
        with torch.no_grad():
            own = dist.get_rank()
            with clock.phase("gather"):
                gathered = torch.empty(self._sizes[self._stages.index(own)], dtype=self._dtype)
                self._gather_stage(gathered)
            for source, size, cuts in zip(self._stages, self._sizes, self._cuts, strict=True):
                with clock.phase("broadcast"):
                    stage = gathered if source == own else torch.empty(size, dtype=self._dtype)
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
                del stage
        self._target.commit(clock)

    def _describe(self, worker: ActorHybridWorker) -> Place:
        held = _held_by_parameter(worker)
        parameters = [
            Parameter(
                tensor.numel(),
                ".experts." in name,
                bool(getattr(tensor, "tensor_model_parallel", False)),
                parts,
            )
            for (name, tensor), parts in zip(
                worker.train.weights.model.named_weights(), held, strict=True
            )
        ]
        groups = (self._tensor_group, self._expert_tensor_group, self._expert_group)
        return Place(
            tuple(parameters), *(tuple(dist.get_process_group_ranks(group)) for group in groups)
        )

    def _gather_stage(self, stage: torch.Tensor) -> None:
        start = 0
        for parameter, tensor in zip(self._place.parameters, self._weights, strict=True):
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
    """One after the other, in the order of the group."""
    if group.size() == 1:
        return tensor
    whole = torch.empty(group.size() * tensor.numel(), dtype=tensor.dtype)
    dist.all_gather(list(whole.split(tensor.numel())), tensor, group=group)
    return whole


def _held_by_parameter(worker: ActorHybridWorker) -> list[tuple[Held, ...]]:
    """What the records say of each of this rank's parameters, in their order."""
    adaptor = worker.train.weights
    flats = adaptor.buffers()
    by_address: dict[int, list[Held]] = {}
    starts = sorted(
        (tensor.data_ptr(), tensor.nbytes) for _, tensor in adaptor.model.named_weights()
    )
    starts_of = {flat: flats[flat].data_ptr() for flat in flats}
    for shard in adaptor.layout().shards:
        name, size = shard.place.buffer.name, flats[shard.place.buffer.name].element_size()
        address = starts_of[name] + shard.place.offset * size
        start = _home(starts, address)
        held = Held(shard.region, (address - start) // size, shard.place.strides)
        by_address.setdefault(start, []).append(held)
    return [
        tuple(by_address.get(tensor.data_ptr(), ())) for _, tensor in adaptor.model.named_weights()
    ]


def _home(starts: list[tuple[int, int]], address: int) -> int:
    """Start of the parameter that an address lies in."""
    start, nbytes = starts[bisect.bisect_right(starts, (address, float("inf"))) - 1]
    assert start <= address < start + nbytes
    return start


def _parts(places: Mapping[int, Place], rank: int) -> Iterator[tuple[Parameter, int]]:
    """What lies in the gathered stage of `rank`, in order: a parameter of one owner, and where it starts."""
    start = 0
    for index, parameter in enumerate(places[rank].parameters):
        for owner in places[rank].owners(parameter, places, rank):
            part = places[owner].parameters[index]
            yield part, start
            start += part.numel


def _stage_numel(places: Mapping[int, Place], rank: int) -> int:
    return sum(part.numel for part, _ in _parts(places, rank))


def _cuts(
    places: Mapping[int, Place], rank: int, layout: Layout, seen: set[tuple[Shard, Region]]
) -> Iterator[Cut]:
    """Copies from the gathered stage of `rank` into the buffers of `layout`; regions in `seen` are there already."""
    wanted = layout.shards_by_tensor()
    for part, start in _parts(places, rank):
        for held in part.held:
            for shard in wanted.get(held.region.tensor, ()):
                common = held.region.intersect(shard.region)
                if common is None or (shard, common) in seen:
                    continue
                seen.add((shard, common))
                inner = [
                    low - base
                    for low, base in zip(common.offsets, held.region.offsets, strict=True)
                ]
                shift = sum(step * stride for step, stride in zip(inner, held.strides, strict=True))
                target = shard.place.at(
                    low - base
                    for low, base in zip(common.offsets, shard.region.offsets, strict=True)
                )
                yield Cut(
                    common.lengths,
                    start + held.offset + shift,
                    held.strides,
                    target.buffer.name,
                    target.offset,
                    target.strides,
                )
