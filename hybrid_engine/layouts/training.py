"""Megatron's side: the place of every parameter on each rank, from the parallel sizes.

Sources: megatron-core 0.16.1, `models/gpt/gpt_model.py` (contents of each chunk),
`tensor_parallel/layers.py` (even splits).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from hybrid_engine.errors import require_none
from hybrid_engine.layouts.parallelism import TrainParallelism
from hybrid_engine.layouts.parameters import Location, Parameter, packed_size, parameters_of
from hybrid_engine.layouts.size_rules import violations
from hybrid_engine.layouts.stages import Chunk, chunks_of
from hybrid_engine.models.packing import Over, Vocabulary, held_regions
from hybrid_engine.models.table import ModelTable
from hybrid_engine.records.holdings import (
    BoxOwners,
    PlacedBox,
    PlacedBoxes,
    SideBuilder,
    SideLayout,
)
from hybrid_engine.records.layout import BufferId, Place
from hybrid_engine.records.regions import Shape, contiguous_strides


def training_side(
    table: ModelTable,
    parallelism: TrainParallelism,
    dtype: str = "bfloat16",
) -> SideLayout:
    """Return Megatron's part of every tensor on all ranks, with a buffer for each parameter.

    Raises:
        ConfigError: lists every violation of the sizes.
    """
    require_none(violations(parallelism, table))
    return _TrainingSide(table, parallelism, dtype).build()


@dataclass(frozen=True, slots=True)
class _Pieces:
    """Pieces of one parameter.

    Attributes:
        by_tensor: pieces of each tensor.
        ranks: ranks that hold each part.
        local_numel: elements of one part.
    """

    by_tensor: list[tuple[PlacedBox, ...]]
    ranks: list[np.ndarray]
    local_numel: int


class _TrainingSide:
    """Layout of Megatron's side. Ranks and pieces are shared by parameters with equal owners."""

    def __init__(self, table: ModelTable, parallelism: TrainParallelism, dtype: str) -> None:
        self._table = table
        self._sizes = parallelism
        self._chunks = chunks_of(parallelism, table.dims.num_layers, table.dims.num_mtp_layers)
        self._chunk_with_attention: dict[int, Chunk] = {}
        self._chunk_with_mlp: dict[int, Chunk] = {}
        for chunk in self._chunks:
            self._chunk_with_attention.update(dict.fromkeys(chunk.attention, chunk))
            self._chunk_with_mlp.update(dict.fromkeys(chunk.mlp, chunk))
        self._side = SideBuilder(
            parallelism.world_size,
            table.refined_shapes,
            dtype,
            table.dtypes,
            is_offered_all=False,
        )
        self._ranks: dict[tuple[int, int | None, Over, int], np.ndarray] = {}
        self._pieces: dict[object, _Pieces] = {}

    def build(self) -> SideLayout:
        for parameter in parameters_of(self._table):
            for chunk in self._chunks_with(parameter):
                self._add(parameter, chunk)
        return self._side.build()

    def _chunks_with(self, parameter: Parameter) -> Iterator[Chunk]:
        """Yield the chunks that have a parameter."""
        if parameter.location is Location.DECODER:
            # `pre_mlp_layernorm` counts too: it stands before the MLP and is built with it.
            is_of_mlp = "mlp" in parameter.name.removeprefix(parameter.location)  # or of experts
            by_layer = self._chunk_with_mlp if is_of_mlp else self._chunk_with_attention
            yield by_layer[parameter.indices["layer"]]
            return
        is_tied = self._table.dims.tied_embeddings
        for chunk in self._chunks:
            # MTP layers need the embedding again. A tied head on the first chunk is the embedding.
            contents = {
                Location.EMBEDDING: chunk.has_embedding or chunk.has_mtp,
                Location.MTP: chunk.has_mtp,
                Location.FINAL_NORM: chunk.has_final_norm,
                Location.HEAD: chunk.has_head and not (is_tied and chunk.has_embedding),
            }
            if contents[parameter.location]:
                yield chunk

    def _add(self, parameter: Parameter, chunk: Chunk) -> None:
        expert = parameter.indices.get("expert")
        block = None  # expert parallel rank
        if expert is not None:
            # Each expert parallel rank has a block of consecutive experts.
            # Divides evenly: the rule of "expert" in size_rules.py.
            block = expert // (self._table.dims.num_experts // self._sizes.expert)
        parts = (parameter.shapes, parameter.selections)
        key = (parameter.rule, parameter.location, parts, chunk.stage, chunk.virtual, block)
        if key not in self._pieces:
            self._pieces[key] = self._make_pieces(parameter, chunk, block)
        pieces = self._pieces[key]
        for tensor, boxes in zip(parameter.tensors, pieces.by_tensor, strict=True):
            self._side.add(tensor, PlacedBoxes(boxes, parameter.indices, group=""))
        for ranks in pieces.ranks:
            self._side.add_elements(ranks, pieces.local_numel, of_expert=parameter.is_expert)

    def _make_pieces(self, parameter: Parameter, chunk: Chunk, block: int | None) -> _Pieces:
        over = self._over(parameter)
        num_parts = self._sizes.num_parts(over)
        local_shape = self._local_shape(parameter, num_parts)
        local_numel = math.prod(local_shape)
        buffer = f"chunk{chunk.virtual}.{parameter.name}"
        by_tensor: dict[str, list[PlacedBox]] = {tensor: [] for tensor in parameter.tensors}
        ranks_by_part = []
        for part in range(num_parts):
            ranks = self._ranks_of(chunk.stage, block, over, part)
            ranks_by_part.append(ranks)
            for shard in held_regions(
                parameter.packing,
                parameter.indices,
                self._table.shapes,
                local_shape,
                Place(BufferId(int(ranks[0]), buffer), 0, contiguous_strides(local_shape)),
                part,
                num_parts,
            ):
                region = shard.region
                place = shard.place
                owners = BoxOwners(region.offsets, region.lengths, ranks)
                box = PlacedBox(owners, buffer, local_numel, place.offset, place.strides)
                by_tensor[region.tensor].append(box)
        return _Pieces(list(map(tuple, by_tensor.values())), ranks_by_part, local_numel)

    def _over(self, parameter: Parameter) -> Over:
        is_whole = parameter.packing.may_be_whole and not self._sizes.cuts_whole_projections
        return Over.NONE if is_whole else parameter.packing.over

    def _local_shape(self, parameter: Parameter, num_parts: int) -> Shape:
        """Return the shape of one rank's part of a parameter, as Megatron allocates it."""
        packing = parameter.packing
        shape = parameter.shapes[0]
        size = packed_size(parameter)
        if isinstance(packing, Vocabulary):
            size = self._sizes.padded_vocabulary(size)
        local = (*shape[: packing.dim], size // num_parts, *shape[packing.dim + 1 :])
        return local[::-1] if packing.transposed else local

    def _ranks_of(self, stage: int, block: int | None, over: Over, part: int) -> np.ndarray:
        """Return the ranks that hold the same part of a parameter.

        Equal arguments return the same array, because `SideBuilder` relies on identity.
        """
        key = (stage, block, over, part)
        if key not in self._ranks:
            if block is None:
                ranks = self._sizes.ranks[stage]
            else:
                ranks = self._sizes.expert_ranks[stage, :, block]
            # The last axis cuts a parameter. Along all others it is replicated.
            # A parameter that is not cut is on all ranks of the stage, and `part` is 0.
            if over is not Over.NONE:
                ranks = ranks[..., part]
            self._ranks[key] = np.sort(ranks.ravel())
        return self._ranks[key]
