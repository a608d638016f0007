"""Megatron's side: where every parameter lies, from the parallel sizes.

Sources: megatron-core 0.16.1, `models/gpt/gpt_model.py` (what is on which chunk), `tensor_parallel/layers.py` (even
splits).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from hybrid_engine.errors import ConfigError
from hybrid_engine.layouts.parallelism import TrainParallelism
from hybrid_engine.layouts.parameters import Location, Parameter, StoredElements, packed_size, parameters_of, parts_of
from hybrid_engine.layouts.size_rules import violations
from hybrid_engine.layouts.stages import Chunk, chunks_of
from hybrid_engine.models.packing import Over, Shape, Vocabulary, held_regions
from hybrid_engine.models.table import ModelTable
from hybrid_engine.records.holdings import BoxOwners, PlacedBox, PlacedBoxes, SideBuilder, SideLayout
from hybrid_engine.records.regions import contiguous_strides


def training_side(table: ModelTable, parallelism: TrainParallelism, dtype: str = "bfloat16") -> SideLayout:
    """Where Megatron keeps every tensor, on all ranks; each parameter is a buffer of its own.

    Raises ConfigError with every violation.
    """
    if found := violations(parallelism, table):
        raise ConfigError(found)
    return _TrainingSide(table, parallelism, dtype).build()


class TrainingElements:
    """Counts what Megatron's ranks store, for many sizes of one model; lays nothing out."""

    def __init__(self, table: ModelTable) -> None:
        self._table = table
        self._counted: dict[object, list[tuple[Parameter, int]]] = {}

    def count(self, sizes: TrainParallelism) -> StoredElements:
        """Return what each rank of a stage stores, as `training_side` has it. The sizes must be possible."""
        side = _TrainingSide(self._table, sizes, "bfloat16")
        key = sizes.tensor, sizes.expert_cut, sizes.make_vocab_size_divisible_by, sizes.cuts_whole_projections
        if key not in self._counted:
            self._counted[key] = parts_of(self._table, side.local_numel)
        found = np.zeros((2, sizes.pipeline), dtype=np.int64)
        parts: Counter[tuple[str, ...]] = Counter()  # a tied head is one with the embedding
        for parameter, numel in self._counted[key]:
            copies = self._table.dims.num_experts // sizes.expert if parameter.is_expert else 1
            parts[parameter.tensors] += copies * numel
            for chunk in side.chunks_with(parameter):
                found[int(parameter.is_expert), chunk.stage] += copies * numel
        return StoredElements(found.sum(axis=0), found[1], max(parts.values()))


class _TrainingSide:
    """Makes the side; ranks and pieces are made once for all parameters that have the same owners."""

    def __init__(self, table: ModelTable, parallelism: TrainParallelism, dtype: str) -> None:
        self._table = table
        self._sizes = parallelism
        self._chunks = chunks_of(parallelism, table.dims.num_layers, table.dims.num_mtp_layers)
        self._chunk_with_attention = {layer: chunk for chunk in self._chunks for layer in chunk.attention}
        self._chunk_with_mlp = {layer: chunk for chunk in self._chunks for layer in chunk.mlp}
        self._side = SideBuilder(parallelism.world_size, table.shapes, dtype, table.dtypes, is_offered_all=False)
        self._ranks: dict[tuple[int, int | None, Over, int], np.ndarray] = {}
        self._pieces: dict[object, _Pieces] = {}

    def build(self) -> SideLayout:
        for parameter in parameters_of(self._table):
            for chunk in self.chunks_with(parameter):
                self._add(parameter, chunk)
        return self._side.build()

    def chunks_with(self, parameter: Parameter) -> Iterator[Chunk]:
        """Yield the chunks that have a parameter."""
        tied = self._table.dims.tied_embeddings
        if parameter.location is Location.DECODER:
            chunk_with = self._chunk_with_mlp if parameter.is_of_mlp else self._chunk_with_attention
            yield chunk_with[parameter.indices["layer"]]
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
        over = self._over(parameter)
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

    def _over(self, parameter: Parameter) -> Over:
        is_whole = parameter.packing.may_be_whole and not self._sizes.cuts_whole_projections
        return Over.NONE if is_whole else parameter.packing.over

    def local_numel(self, parameter: Parameter) -> int:
        """Elements of one rank's parameter."""
        return math.prod(self._local_shape(parameter, self._sizes.num_parts(self._over(parameter))))

    def _local_shape(self, parameter: Parameter, num_parts: int) -> Shape:
        """Return the shape of one rank's parameter, as Megatron allocates it."""
        packing, shape = parameter.packing, self._table.shapes[parameter.tensors[0]]
        size = packed_size(packing, self._table.shapes, parameter.tensors)
        if isinstance(packing, Vocabulary):
            size = self._sizes.padded_vocabulary(size)
        local = (*shape[: packing.dim], size // num_parts, *shape[packing.dim + 1 :])
        return local[::-1] if packing.transposed else local

    def _ranks_of(self, stage: int, expert: int | None, over: Over, part: int) -> np.ndarray:
        """Ranks that hold the same part of a parameter; one array for each set of them."""
        key = stage, expert, over, part
        if key not in self._ranks:
            in_stage = self._sizes.ranks[stage] if expert is None else self._sizes.expert_ranks[stage, :, expert]
            # The last axis is the one that cuts a parameter; along all others it is replicated.
            self._ranks[key] = np.sort((in_stage if over is Over.NONE else in_stage[..., part]).ravel())
        return self._ranks[key]


@dataclass(frozen=True, slots=True)
class _Pieces:
    """Pieces of each tensor of a parameter, the ranks of each part, and the elements of one part."""

    by_tensor: list[tuple[PlacedBox, ...]]
    ranks: list[np.ndarray]
    local_numel: int
