"""Megatron's side: ranks' coordinates, and where every parameter lies, from the parallel sizes.

Sources: megatron-core 0.16.1, `parallel_state.initialize_model_parallel` (rank orders), `models/gpt/gpt_model.py`
(what is on which chunk), `tensor_parallel/layers.py` (even splits).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from hybrid_engine.errors import ConfigError, Violation
from hybrid_engine.layouts.parameters import (
    Location,
    Parameter,
    cut_violations,
    head_violations,
    packed_size,
    parameters_of,
)
from hybrid_engine.layouts.stages import Chunk, PipelineSplit, chunks_of, split_violations
from hybrid_engine.models.packing import Over, Shape, Vocabulary, held_regions
from hybrid_engine.models.table import ModelTable
from hybrid_engine.records.holdings import PlacedBox, PlacedBoxes, SideBuilder, SideLayout
from hybrid_engine.records.layout import Layout
from hybrid_engine.records.owners import BoxOwners
from hybrid_engine.records.regions import contiguous_strides


@dataclass(frozen=True, slots=True)
class TrainCoordinates:
    """One rank's place in every group of megatron-core's."""

    tensor: int
    context: int
    data: int
    pipeline: int
    expert_tensor: int
    expert: int
    expert_data: int


@dataclass(frozen=True)
class TrainParallelism:
    """Parallel sizes of the training side, as Megatron-LM's arguments of similar names.

    Attributes:
        world_size: ranks.
        tensor, pipeline, virtual_pipeline, context, expert: sizes; virtual_pipeline None without.
        expert_tensor: ranks that cut each expert; None: `tensor`.
        num_layers_in_first_pipeline_stage, num_layers_in_last_pipeline_stage: the others share the rest evenly.
        account_for_embedding_in_pipeline_split, account_for_loss_in_pipeline_split: count as a layer.
        pipeline_layout: Megatron's notation of every stage (`pipeline_model_parallel_layout`).
        noop_layers: positions, from 0, of layers that hold nothing; they count for the pipeline split.
        make_vocab_size_divisible_by: the vocabulary is padded to a multiple of this times `tensor`.
        cuts_whole_projections: cut parameters that some layer specs give to every tensor parallel rank whole (the down
            projections of multi-latent attention): true for megatron-core's local spec, false for Transformer Engine's.
    """

    world_size: int
    tensor: int = 1
    pipeline: int = 1
    virtual_pipeline: int | None = None
    context: int = 1
    expert: int = 1
    expert_tensor: int | None = None
    num_layers_in_first_pipeline_stage: int | None = None
    num_layers_in_last_pipeline_stage: int | None = None
    account_for_embedding_in_pipeline_split: bool = False
    account_for_loss_in_pipeline_split: bool = False
    pipeline_layout: str | None = None
    noop_layers: tuple[int, ...] = ()
    make_vocab_size_divisible_by: int = 128
    cuts_whole_projections: bool = False

    @property
    def data(self) -> int:
        """Data parallel size of dense layers."""
        return self.world_size // (self.tensor * self.context * self.pipeline)

    @property
    def expert_cut(self) -> int:
        """Ranks that cut each expert."""
        return self.tensor if self.expert_tensor is None else self.expert_tensor

    @property
    def expert_data(self) -> int:
        """Data parallel size of experts."""
        return self.world_size // (self.expert_cut * self.expert * self.pipeline)

    @property
    def split(self) -> PipelineSplit:
        """How the layers are dealt out."""
        return PipelineSplit(
            self.pipeline,
            self.virtual_pipeline,
            self.num_layers_in_first_pipeline_stage,
            self.num_layers_in_last_pipeline_stage,
            self.account_for_embedding_in_pipeline_split,
            self.account_for_loss_in_pipeline_split,
            self.pipeline_layout,
        )

    def coordinates(self, rank: int) -> TrainCoordinates:
        """Dense groups count tensor, context, data, pipeline; experts' count expert tensor, expert, data, pipeline."""
        in_stage = rank % (self.world_size // self.pipeline)
        return TrainCoordinates(
            tensor=in_stage % self.tensor,
            context=in_stage // self.tensor % self.context,
            data=in_stage // (self.tensor * self.context),
            pipeline=rank // (self.world_size // self.pipeline),
            expert_tensor=in_stage % self.expert_cut,
            expert=in_stage // self.expert_cut % self.expert,
            expert_data=in_stage // (self.expert_cut * self.expert),
        )

    def chunks(self, table: ModelTable) -> list[Chunk]:
        """All model chunks, in the order in which layers run."""
        return chunks_of(self.split, table.dims.num_layers + len(self.noop_layers), table.dims.num_mtp_layers)

    def layer_numbers(self, chunk: Chunk) -> list[int]:
        """The checkpoint's numbers of a chunk's layers."""
        return [
            position - sum(noop < position for noop in self.noop_layers)
            for position in chunk.positions
            if position not in self.noop_layers
        ]

    def num_parts(self, over: Over) -> int:
        """How many ranks share a parameter that is cut over this group."""
        return {Over.NONE: 1, Over.TENSOR: self.tensor, Over.EXPERT_TENSOR: self.expert_cut}[over]

    def violations(self, table: ModelTable) -> list[Violation]:
        """Everything that makes these sizes impossible for a model; keys are the attributes' names."""
        found = _size_violations(self)
        if found:
            return found
        num_layers = table.dims.num_layers + len(self.noop_layers)
        return [
            *rank_violations(self, table),
            *head_violations(table, self.tensor, "tensor"),
            *expert_violations(self, table),
            *cut_violations_of(self, table),
            *noop_violations(self, table),
            *split_violations(self.split, num_layers, table.dims.num_mtp_layers),
        ]


def training_side(table: ModelTable, parallelism: TrainParallelism, dtype: str = "bfloat16") -> SideLayout:
    """Where Megatron keeps every tensor, on all ranks; each parameter is a buffer of its own.

    Raises ConfigError with every violation.
    """
    if violations := parallelism.violations(table):
        raise ConfigError(violations)
    return _TrainingSide(table, parallelism, dtype).build()


def training_layout(table: ModelTable, parallelism: TrainParallelism, rank: int, dtype: str = "bfloat16") -> Layout:
    """One rank's records; of several ranks, `training_side` once and its `layout_of`."""
    return training_side(table, parallelism, dtype).layout_of(rank)


class _TrainingSide:
    """Makes the side; ranks and pieces are made once for all parameters that have the same owners."""

    def __init__(self, table: ModelTable, parallelism: TrainParallelism, dtype: str) -> None:
        self._table = table
        self._sizes = parallelism
        self._chunks = parallelism.chunks(table)
        self._chunk_of_layer = {layer: chunk for chunk in self._chunks for layer in parallelism.layer_numbers(chunk)}
        self._side = SideBuilder(parallelism.world_size, table.shapes, dtype, table.dtypes, is_offered_all=False)
        self._ranks: dict[tuple[int, int | None, Over, int], np.ndarray] = {}
        self._pieces: dict[object, _Pieces] = {}
        ranks = np.arange(parallelism.world_size)
        self._dense = ranks.reshape(parallelism.pipeline, -1, parallelism.tensor)
        self._expert = ranks.reshape(parallelism.pipeline, -1, parallelism.expert, parallelism.expert_cut)

    def build(self) -> SideLayout:
        for parameter in parameters_of(self._table):
            for chunk in self._chunks_with(parameter):
                self._add(parameter, chunk)
        return self._side.build()

    def _chunks_with(self, parameter: Parameter) -> Iterator[Chunk]:
        tied = self._table.dims.tied_embeddings
        if parameter.location is Location.DECODER:
            yield self._chunk_of_layer[parameter.indices["layer"]]
            return
        for chunk in self._chunks:
            if {
                Location.EMBEDDING: chunk.has_embedding or chunk.has_mtp,
                Location.MTP: chunk.has_mtp,
                Location.FINAL_NORM: chunk.has_final_norm,
                Location.HEAD: chunk.has_head and not (tied and chunk.has_embedding),
            }[parameter.location]:
                yield chunk

    def _add(self, parameter: Parameter, chunk: Chunk) -> None:
        expert = parameter.indices.get("expert")
        if expert is not None:
            expert //= self._table.dims.num_experts // self._sizes.expert
        shapes = tuple(self._table.shapes[tensor] for tensor in parameter.tensors)
        key = parameter.rule, parameter.location, shapes, chunk.stage, chunk.virtual, expert
        if key not in self._pieces:
            self._pieces[key] = self._make_pieces(parameter, chunk, expert)
        made = self._pieces[key]
        for tensor, pieces in zip(parameter.tensors, made.by_tensor, strict=True):
            self._side.add(tensor, PlacedBoxes(pieces, parameter.indices, group=""))
        for ranks in made.ranks:
            self._side.add_elements(ranks, made.local_numel, of_expert=parameter.is_expert)

    def _make_pieces(self, parameter: Parameter, chunk: Chunk, expert: int | None) -> _Pieces:
        packing = parameter.packing
        is_whole = packing.may_be_whole and not self._sizes.cuts_whole_projections
        over = Over.NONE if is_whole else packing.over
        num_parts = self._sizes.num_parts(over)
        local_shape = self._local_shape(parameter, num_parts)
        strides = contiguous_strides(local_shape)
        by_tensor: dict[str, list[PlacedBox]] = {tensor: [] for tensor in parameter.tensors}
        ranks = [self._ranks_of(chunk.stage, expert, over, part) for part in range(num_parts)]
        for part in range(num_parts):
            for held in held_regions(packing, parameter.indices, self._table.shapes, local_shape, part, num_parts):
                by_tensor[held.region.tensor].append(
                    PlacedBox(
                        BoxOwners(held.region.offsets, held.region.lengths, ranks[part]),
                        buffer=f"chunk{chunk.virtual}.{parameter.name}",
                        numel=math.prod(local_shape),
                        start=held.start * strides[held.local_dim],
                        strides=strides[::-1] if packing.transposed else strides,
                    )
                )
        return _Pieces([tuple(pieces) for pieces in by_tensor.values()], ranks, math.prod(local_shape))

    def _local_shape(self, parameter: Parameter, num_parts: int) -> Shape:
        """Of one rank's parameter, as Megatron allocates it."""
        packing, shape = parameter.packing, self._table.shapes[parameter.tensors[0]]
        size = packed_size(packing, self._table.shapes, parameter.tensors)
        if isinstance(packing, Vocabulary):
            multiple = self._sizes.make_vocab_size_divisible_by * self._sizes.tensor
            size = -(-size // multiple) * multiple
        local = (*shape[: packing.dim], size // num_parts, *shape[packing.dim + 1 :])
        return local[::-1] if packing.transposed else local

    def _ranks_of(self, stage: int, expert: int | None, over: Over, part: int) -> np.ndarray:
        """Ranks that hold the same part of a parameter; one array for each set of them."""
        key = stage, expert, over, part
        if key not in self._ranks:
            in_stage = self._dense[stage] if expert is None else self._expert[stage, :, expert]
            self._ranks[key] = np.sort((in_stage if over is Over.NONE else in_stage[:, part]).ravel())
        return self._ranks[key]


@dataclass(frozen=True, slots=True)
class _Pieces:
    """Pieces of each tensor of a parameter, the ranks of each part, and the elements of one part."""

    by_tensor: list[tuple[PlacedBox, ...]]
    ranks: list[np.ndarray]
    local_numel: int


def _size_violations(sizes: TrainParallelism) -> list[Violation]:
    """Sizes that are no sizes; nothing else can be said then."""
    numbers = {
        name: getattr(sizes, name)
        for name in ("world_size", "tensor", "pipeline", "context", "expert", "make_vocab_size_divisible_by")
    }
    optional = ("virtual_pipeline", "expert_tensor", "num_layers_in_first_pipeline_stage")
    for name in (*optional, "num_layers_in_last_pipeline_stage"):
        if (value := getattr(sizes, name)) is not None:
            numbers[name] = value
    too_small = {name: value for name, value in numbers.items() if value < 1}
    return [Violation(name, f"{value} is not a valid size", "Use 1 or more") for name, value in too_small.items()]


def rank_violations(sizes: TrainParallelism, table: ModelTable) -> Iterator[Violation]:
    """Sizes whose product does not divide the number of ranks."""
    dense = {"TP": sizes.tensor, "PP": sizes.pipeline, "CP": sizes.context}
    if sizes.world_size % math.prod(dense.values()):
        yield Violation("tensor", _does_not_divide(dense, sizes.world_size), "Choose sizes whose product divides it")
    experts = {"ETP": sizes.expert_cut, "EP": sizes.expert, "PP": sizes.pipeline}
    if table.dims.num_experts and sizes.world_size % math.prod(experts.values()):
        yield Violation("expert", _does_not_divide(experts, sizes.world_size), "Choose sizes whose product divides it")


def _does_not_divide(sizes: Mapping[str, int], world_size: int) -> str:
    factors = " x ".join(f"{name} {size}" for name, size in sizes.items())
    return f"{factors} = {math.prod(sizes.values())} does not divide the world size {world_size}"


def expert_violations(sizes: TrainParallelism, table: ModelTable) -> Iterator[Violation]:
    """Experts that the ranks cannot share."""
    num_experts = table.dims.num_experts
    for key, size in (("expert", sizes.expert), ("expert_tensor", sizes.expert_tensor or 1)):
        if not num_experts and size > 1:
            yield Violation(key, f"{size}, but the model has no experts", "Use 1")
    if num_experts % sizes.expert:
        problem = f"{sizes.expert} does not divide the number of experts {num_experts}"
        yield Violation("expert", problem, f"Use a divisor of {num_experts}")


def noop_violations(sizes: TrainParallelism, table: ModelTable) -> Iterator[Violation]:
    """Layers that do nothing, at positions that are not there."""
    num_layers = table.dims.num_layers + len(sizes.noop_layers)
    if bad := [noop for noop in sizes.noop_layers if noop >= num_layers]:
        yield Violation("noop_layers", f"{bad} of {num_layers} positions, counted from 0", "Use smaller numbers")
    if len(set(sizes.noop_layers)) < len(sizes.noop_layers):
        yield Violation("noop_layers", f"{list(sizes.noop_layers)} names a position twice", "Name each once")


def cut_violations_of(sizes: TrainParallelism, table: ModelTable) -> Iterator[Violation]:
    """Parameters that do not divide evenly over the ranks that share them."""
    parts = {over: sizes.num_parts(over) for over in Over}
    keys = {Over.TENSOR: "tensor", Over.EXPERT_TENSOR: "tensor" if sizes.expert_tensor is None else "expert_tensor"}

    def is_even(parameter: Parameter) -> bool:
        """The vocabulary is padded; some projections are whole."""
        packing = parameter.packing
        return not isinstance(packing, Vocabulary) and (sizes.cuts_whole_projections or not packing.may_be_whole)

    yield from cut_violations(table, parts, keys, is_even)
