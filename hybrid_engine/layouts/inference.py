"""vLLM's side: the part of every tensor on each rank, from the parallel sizes.

Sources: vLLM 0.32.0, `distributed/utils.get_pp_indices`, `model_executor/layers/linear.py` (QKV,
gate/up), `vocab_parallel_embedding.py`, `fused_moe/expert_map_manager.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from hybrid_engine.errors import require_none
from hybrid_engine.layouts.parallelism import InferenceParallelism
from hybrid_engine.layouts.parameters import Location, Parameter, parameters_of
from hybrid_engine.layouts.size_rules import violations
from hybrid_engine.models.packing import GateUp, InterleavedQKV, Over, Split, Vocabulary
from hybrid_engine.models.table import ModelTable
from hybrid_engine.records.holdings import (
    BoxOwners,
    PlacedBox,
    PlacedBoxes,
    SideBuilder,
    SideLayout,
)
from hybrid_engine.records.regions import Shape, contiguous_strides

Span = tuple[int, int]
"""Interval [start, stop) along the packed dim."""


def stage_bounds(num_layers: int, stages: int) -> list[int]:
    """Return the first layer of each stage, and the end.

    The remainder of the division goes to the stages before the last, one layer each.
    """
    sizes = [num_layers // stages] * stages
    for extra in range(num_layers % stages):
        # 10 layers on 4 stages: 2, 3, 3, 2. The last stage has the head and never gets one more;
        # the first has the embedding and gets one only if all others but the last did.
        sizes[-2 - extra] += 1
    return [sum(sizes[:stage]) for stage in range(stages + 1)]


def expert_bounds(num_experts: int, blocks: int) -> list[int]:
    """Return the first expert of each block, and the end.

    The remainder of the division goes to the first blocks, one expert each.
    """
    size, remainder = divmod(num_experts, blocks)
    # 10 experts in 4 blocks: 3, 3, 2, 2, so bounds 0, 3, 6, 8, 10.
    return [block * size + min(block, remainder) for block in range(blocks + 1)]


def inference_side(
    table: ModelTable,
    parallelism: InferenceParallelism,
    dtype: str = "bfloat16",
) -> SideLayout:
    """Return vLLM's part of every tensor on all ranks, with a buffer for each box.

    Groups are Megatron's modules, which are about as large as vLLM's, and all experts of a layer.

    Raises:
        ConfigError: lists every violation of the sizes.
    """
    require_none(violations(parallelism, table))
    return _VllmSide(table, parallelism, dtype).build()


class _VllmSide:
    """Layout of vLLM's side. Arrays of ranks and pieces are shared by tensors with equal owners."""

    def __init__(self, table: ModelTable, parallelism: InferenceParallelism, dtype: str) -> None:
        self._table = table
        self._sizes = parallelism
        self._side = SideBuilder(
            parallelism.world_size,
            table.shapes,
            dtype,
            table.dtypes,
            is_offered_all=True,
        )
        self._layer_bounds = stage_bounds(table.dims.num_layers, parallelism.pipeline)
        self._expert_bounds = expert_bounds(table.dims.num_experts, parallelism.expert)
        self._groups: dict[str, str] = {}
        self._ranks: dict[tuple[int, int | None, tuple[int, ...]], np.ndarray] = {}
        self._pieces: dict[object, list[tuple[PlacedBox, ...]]] = {}

    def build(self) -> SideLayout:
        held: set[tuple[str, int]] = set()
        for parameter in parameters_of(self._table):
            for stage in self._stages_with(parameter):
                for tensor, pieces in self._pieces_of(parameter, stage).items():
                    if self._table.is_served(tensor) and (tensor, stage) not in held:
                        held.add((tensor, stage))
                        self._add(tensor, stage, pieces, parameter)
        return self._side.build()

    def _add(
        self,
        tensor: str,
        stage: int,
        pieces: tuple[PlacedBox, ...],
        parameter: Parameter,
    ) -> None:
        module, _, _ = parameter.name.rpartition(".")
        if parameter.is_expert:
            # vLLM holds all experts of a layer in one module.
            module, _, _ = module.partition(".experts.")
        # `setdefault` puts a tied head into the group of the embedding.
        group = self._groups.setdefault(tensor, module.format(**parameter.indices))
        self._side.add(tensor, PlacedBoxes(pieces, {"tensor": tensor}, group))
        if isinstance(parameter.packing, Vocabulary):
            # Padding counts as well, and the last ranks may have only padding and no piece.
            # 32,001 rows are padded to 32,064: 16,032 on each of two ranks.
            shape = self._table.shapes[tensor]
            rows = self._sizes.padded_vocabulary(shape[0]) // self._sizes.tensor
            numel = rows * math.prod(shape[1:])
            self._side.add_elements(self._ranks_of(stage, None), numel, of_expert=False)
            return
        for piece in pieces:
            self._side.add_elements(
                piece.owners.ranks,
                piece.numel,
                of_expert=parameter.is_expert,
            )

    def _stages_with(self, parameter: Parameter) -> Sequence[int]:
        """Return the pipeline stages that have a parameter."""
        num_stages = self._sizes.pipeline
        if parameter.location is Location.DECODER:
            layer = parameter.indices["layer"]
            ends = self._layer_bounds[1:]
            return [next(stage for stage, end in enumerate(ends) if layer < end)]
        if parameter.location is Location.MTP or self._table.serving.ends_on_every_stage:
            return range(num_stages)
        return [0 if parameter.location is Location.EMBEDDING else num_stages - 1]

    def _pieces_of(self, parameter: Parameter, stage: int) -> Mapping[str, tuple[PlacedBox, ...]]:
        """Return the pieces of each tensor on a stage."""
        expert = parameter.indices.get("expert")
        block = None
        if expert is not None and self._sizes.expert > 1:
            # The last block that starts at or before the expert.
            # Bounds [0, 3, 6, 8, 10]: expert 6 starts block 2, and expert 7 is in it too.
            block = int(np.searchsorted(self._expert_bounds, expert, side="right")) - 1
        shapes = tuple(self._table.shapes[tensor] for tensor in parameter.tensors)
        key = (parameter.rule, shapes, stage, block)
        if key not in self._pieces:
            self._pieces[key] = [
                self._make_pieces(parameter, tensor, stage, block) for tensor in parameter.tensors
            ]
        return dict(zip(parameter.tensors, self._pieces[key], strict=True))

    def _make_pieces(
        self,
        parameter: Parameter,
        tensor: str,
        stage: int,
        block: int | None,
    ) -> tuple[PlacedBox, ...]:
        shape = self._table.shapes[tensor]
        dim = parameter.packing.dim
        # With EP every expert is whole on one rank of an instance.
        if block is not None or self._is_whole(parameter):
            ranks = self._ranks_of(stage, block)
            return (_piece(shape, dim, (0, shape[dim]), ranks, 0),)
        pieces = []
        for number, ranks_by_span in enumerate(self._cuts(parameter, tensor, shape[dim])):
            for span, tp_ranks in ranks_by_span.items():
                ranks = self._ranks_of(stage, None, *tp_ranks)
                pieces.append(_piece(shape, dim, span, ranks, number))
        return tuple(pieces)

    def _is_whole(self, parameter: Parameter) -> bool:
        packing = parameter.packing
        if packing.over is Over.NONE or packing.may_be_whole or self._sizes.tensor == 1:
            return True
        if parameter.name.endswith(".eh_proj.weight"):  # a plain layer in vLLM's MTP models
            return True
        is_shared_expert = ".shared_experts." in parameter.name
        replicates = self._table.serving.whole_shared_experts
        return is_shared_expert and replicates and self._sizes.replicas_per_instance > 1

    def _cuts(
        self,
        parameter: Parameter,
        tensor: str,
        size: int,
    ) -> Iterator[Mapping[Span, list[int]]]:
        """Yield, for each part of a tensor that vLLM cuts separately, the ranks of each span.

        Ranks are tensor parallel ranks. `size` is the tensor's length along the packed dim.
        """
        packing = parameter.packing
        num_parts = self._sizes.tensor
        # Some models cut a fused gate and up projection without regard to its halves.
        is_plain = self._table.serving.cuts_fused_as_one and len(parameter.tensors) == 1
        if isinstance(packing, Split) or (isinstance(packing, GateUp) and is_plain):
            yield _even(0, size, num_parts)
        elif isinstance(packing, Vocabulary):
            rows = self._sizes.padded_vocabulary(size) // num_parts
            # The last ranks may have only padding, and no span.
            yield {
                (part * rows, min(part * rows + rows, size)): [part]
                for part in range(num_parts)
                if part * rows < size
            }
        elif isinstance(packing, GateUp):
            # A fused tensor [2 I, hidden] has gate rows [0, I) and up rows [I, 2 I), each cut over
            # all ranks: with I = 8 and TP 2, rank 1 has rows 4 to 7 and 12 to 15.
            is_fused = packing.gate.tensor == packing.up.tensor
            length = size // 2 if is_fused else size
            for span in (packing.gate, packing.up):
                if span.tensor.format(**parameter.indices) == tensor:
                    yield _even(span.start, length, num_parts)
        elif isinstance(packing, InterleavedQKV):
            num_groups = packing.num_groups
            head_dim = packing.head_dim
            if packing.query.tensor.format(**parameter.indices) == tensor:
                length = num_groups * packing.queries_per_group * head_dim
                yield _even(packing.query.start, length, num_parts)
            for span in (packing.key, packing.value):
                if span.tensor.format(**parameter.indices) == tensor:
                    yield _kv_heads(span.start, num_groups, head_dim, num_parts)
        else:
            kind = type(packing).__name__
            raise TypeError(f"{tensor}: vLLM's cut of a {kind} is not implemented")

    def _ranks_of(self, stage: int, block: int | None, *tp_ranks: int) -> np.ndarray:
        """Return the ranks of a stage with a block of experts or any of some tensor parallel ranks.

        Without both, all ranks of the stage. Equal arguments return the same array, because
        `SideBuilder` relies on identity.
        """
        key = (stage, block, tp_ranks)
        if key not in self._ranks:
            ranks = self._sizes.ranks[:, :, stage]
            if block is not None:
                # Blocks go to the ranks of an instance in order: replica, then tensor parallel
                # rank.
                # TP 2 and EP 4: block 3 is on replica 1 and tensor parallel rank 1 of every
                # instance.
                ranks = ranks[:, block // self._sizes.tensor, block % self._sizes.tensor]
            elif tp_ranks:
                ranks = ranks[:, :, tp_ranks]
            self._ranks[key] = np.sort(ranks.ravel())
        return self._ranks[key]


def _piece(shape: Shape, dim: int, span: Span, ranks: np.ndarray, number: int) -> PlacedBox:
    """Return the slice `span` of a tensor along `dim`, in a contiguous buffer."""
    start, stop = span
    offsets = tuple(start if axis == dim else 0 for axis in range(len(shape)))
    lengths = (*shape[:dim], stop - start, *shape[dim + 1 :])
    suffix = f"#{number}" if number else ""
    return PlacedBox(
        BoxOwners(offsets, lengths, ranks),
        buffer="{tensor}" + suffix,
        numel=math.prod(lengths),
        start=0,
        strides=contiguous_strides(lengths),
    )


def _even(start: int, length: int, num_parts: int) -> dict[Span, list[int]]:
    size = length // num_parts
    return {(start + part * size, start + (part + 1) * size): [part] for part in range(num_parts)}


def _kv_heads(start: int, heads: int, head_dim: int, num_parts: int) -> dict[Span, list[int]]:
    """Cut evenly, or with fewer heads than ranks, give each run of ranks the same head."""
    if heads >= num_parts:
        return _even(start, heads * head_dim, num_parts)
    # 2 heads on 4 ranks: ranks 0 and 1 have head 0, ranks 2 and 3 have head 1. The rules of sizes
    # make this divide evenly.
    copies = num_parts // heads
    spans = {}
    for head in range(heads):
        first = start + head * head_dim
        spans[first, first + head_dim] = list(range(head * copies, (head + 1) * copies))
    return spans
