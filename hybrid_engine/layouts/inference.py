"""vLLM's side: what each rank holds, from the parallel sizes.

Sources: vLLM 0.32.0, `distributed/utils.get_pp_indices`, `model_executor/layers/linear.py` (QKV, gate/up),
`vocab_parallel_embedding.py`, `fused_moe/expert_map_manager.py`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from hybrid_engine.errors import ConfigError
from hybrid_engine.layouts.parallelism import InferenceParallelism
from hybrid_engine.layouts.parameters import Location, Parameter, StoredElements, parameters_of, parts_of
from hybrid_engine.layouts.size_rules import violations
from hybrid_engine.models.packing import GateUp, InterleavedQKV, Over, Shape, Split, Vocabulary
from hybrid_engine.models.table import ModelTable
from hybrid_engine.records.holdings import BoxOwners, PlacedBox, PlacedBoxes, SideBuilder, SideLayout
from hybrid_engine.records.regions import contiguous_strides


def stage_bounds(num_layers: int, stages: int) -> list[int]:
    """Where each stage's layers begin, and the end. What does not divide goes to the stages before the last."""
    sizes = [num_layers // stages] * stages
    for extra in range(num_layers % stages):
        sizes[-2 - extra] += 1
    return [sum(sizes[:stage]) for stage in range(stages + 1)]


def expert_bounds(num_experts: int, blocks: int) -> list[int]:
    """Where each block of experts begins, and the end. What does not divide goes to the first blocks."""
    return [block * (num_experts // blocks) + min(block, num_experts % blocks) for block in range(blocks + 1)]


def inference_side(table: ModelTable, parallelism: InferenceParallelism, dtype: str = "bfloat16") -> SideLayout:
    """Return vLLM's part of every tensor, on all ranks; each box is its own buffer.

    Groups are Megatron's modules, which are about as large as vLLM's, and all experts of a layer.

    Raises ConfigError with every violation.
    """
    if found := violations(parallelism, table):
        raise ConfigError(found)
    return _InferenceSide(table, parallelism, dtype).build()


class InferenceElements:
    """Counts what vLLM's ranks store, for many sizes of one model; lays nothing out."""

    def __init__(self, table: ModelTable) -> None:
        self._table = table
        self._counted: dict[object, list[tuple[Parameter, int]]] = {}

    def count(self, sizes: InferenceParallelism) -> StoredElements:
        """Return what the rank with most stores, by pipeline stage. The sizes must be possible."""
        side = _InferenceSide(self._table, sizes, "bfloat16")
        key = sizes.tensor, sizes.expert > 1, sizes.replicas_per_instance > 1
        if key not in self._counted:
            self._counted[key] = parts_of(self._table, side.local_numel)
        found = np.zeros((2, sizes.pipeline), dtype=np.int64)
        ends = set()
        parts: Counter[tuple[str, ...]] = Counter()  # a tied head is one with the embedding
        for parameter, numel in self._counted[key]:
            copies = -(-self._table.dims.num_experts // sizes.expert) if parameter.is_expert else 1
            parts[parameter.tensors] += copies * numel
            for stage in side.stages_with(parameter):
                if parameter.indices or (parameter.tensors, stage) not in ends:  # a tied head is the embedding
                    ends.add((parameter.tensors, stage))
                    found[int(parameter.is_expert), stage] += copies * numel
        return StoredElements(found.sum(axis=0), found[1], max(parts.values()))


class _InferenceSide:
    """Makes the side; ranks and pieces are made once for all tensors that have the same owners."""

    def __init__(self, table: ModelTable, parallelism: InferenceParallelism, dtype: str) -> None:
        self._table = table
        self._sizes = parallelism
        self._side = SideBuilder(parallelism.world_size, table.shapes, dtype, table.dtypes, is_offered_all=True)
        self._layer_bounds = stage_bounds(table.dims.num_layers, parallelism.pipeline)
        self._expert_bounds = expert_bounds(table.dims.num_experts, parallelism.expert)
        self._groups: dict[str, str] = {}
        self._ranks: dict[tuple[int, int | None, int | None], np.ndarray] = {}
        self._pieces: dict[object, list[tuple[PlacedBox, ...]]] = {}

    def build(self) -> SideLayout:
        held: set[tuple[str, int]] = set()
        for parameter in parameters_of(self._table):
            for stage in self.stages_with(parameter):
                for tensor, pieces in self._pieces_of(parameter, stage).items():
                    if self._table.is_served(tensor) and (tensor, stage) not in held:
                        held.add((tensor, stage))
                        self._add(tensor, stage, pieces, parameter)
        return self._side.build()

    def _add(self, tensor: str, stage: int, pieces: tuple[PlacedBox, ...], parameter: Parameter) -> None:
        module, _, _ = parameter.name.rpartition(".")
        if parameter.is_expert:  # vLLM has all of a layer's in one module
            module, _, _ = module.partition(".experts.")
        group = self._groups.setdefault(tensor, module.format(**parameter.indices))  # a tied head is in the embedding's
        self._side.add(tensor, PlacedBoxes(pieces, {"tensor": tensor}, group))
        if isinstance(parameter.packing, Vocabulary):  # padding counts, and the last ranks may have nothing else
            shape = self._table.shapes[tensor]
            rows = self._sizes.padded_vocabulary(shape[0]) // self._sizes.tensor
            self._side.add_elements(self._ranks_of(stage, None, None), rows * math.prod(shape[1:]), of_expert=False)
            return
        for piece in pieces:
            self._side.add_elements(piece.owners.ranks, piece.numel, of_expert=parameter.is_expert)

    def stages_with(self, parameter: Parameter) -> Sequence[int]:
        """Return the pipeline stages that have a parameter."""
        num_stages = self._sizes.pipeline
        if parameter.location is Location.DECODER:
            layer = parameter.indices["layer"]
            return [next(stage for stage in range(num_stages) if layer < self._layer_bounds[stage + 1])]
        if parameter.location is Location.MTP or self._table.serving.ends_on_every_stage:
            return range(num_stages)
        return [0 if parameter.location is Location.EMBEDDING else num_stages - 1]

    def local_numel(self, parameter: Parameter) -> int:
        """Elements of a parameter that one rank stores; experts are whole on some ranks, or cut on all."""
        total = 0
        for tensor in filter(self._table.is_served, parameter.tensors):
            shape, dim = self._table.shapes[tensor], parameter.packing.dim
            rows = [shape[dim]]
            if isinstance(parameter.packing, Vocabulary):
                rows = [self._sizes.padded_vocabulary(shape[dim]) // self._sizes.tensor]
            elif not self._is_whole(parameter) and not (parameter.is_expert and self._sizes.expert > 1):
                spans = (next(iter(span)) for span in self._spans(parameter, tensor, shape[dim]))
                rows = [stop - start for start, stop in spans]
            total += sum(rows) * math.prod(shape) // shape[dim]
        return total

    def _pieces_of(self, parameter: Parameter, stage: int) -> Mapping[str, tuple[PlacedBox, ...]]:
        """Tensor -> its pieces on a stage."""
        expert, block = parameter.indices.get("expert"), None
        if expert is not None and self._sizes.expert > 1:
            block = int(np.searchsorted(self._expert_bounds, expert, side="right")) - 1
        shapes = tuple(self._table.shapes[tensor] for tensor in parameter.tensors)
        key = parameter.rule, shapes, stage, block
        if key not in self._pieces:
            self._pieces[key] = [self._make_pieces(parameter, tensor, stage, block) for tensor in parameter.tensors]
        return dict(zip(parameter.tensors, self._pieces[key], strict=True))

    def _make_pieces(self, parameter: Parameter, tensor: str, stage: int, block: int | None) -> tuple[PlacedBox, ...]:
        shape = self._table.shapes[tensor]
        dim = parameter.packing.dim
        pieces = []
        if block is not None or self._is_whole(parameter):
            return (self._piece(shape, dim, (0, shape[dim]), self._ranks_of(stage, block, None), 0),)
        for number, span in enumerate(self._spans(parameter, tensor, shape[dim])):
            for bounds, parts in span.items():
                ranks = np.sort(np.concatenate([self._ranks_of(stage, block, part) for part in parts]))
                pieces.append(self._piece(shape, dim, bounds, ranks, number))
        return tuple(pieces)

    def _is_whole(self, parameter: Parameter) -> bool:
        packing = parameter.packing
        if packing.over is Over.NONE or packing.may_be_whole or self._sizes.tensor == 1:
            return True
        is_shared_expert = ".shared_experts." in parameter.name
        return is_shared_expert and self._table.serving.whole_shared_experts and self._sizes.replicas_per_instance > 1

    def _spans(self, parameter: Parameter, tensor: str, size: int) -> Iterator[Mapping[tuple[int, int], list[int]]]:
        """For each part of a tensor that vLLM cuts by itself: [start, stop) -> the tensor parallel ranks with it."""
        packing, parts = parameter.packing, self._sizes.tensor
        fused = self._table.serving.cuts_fused_as_one and len(parameter.tensors) == 1
        if isinstance(packing, Split) or (isinstance(packing, GateUp) and fused):
            yield _even(0, size, parts)
        elif isinstance(packing, Vocabulary):
            yield _vocabulary(size, self._sizes.padded_vocabulary(size) // parts, parts)
        elif isinstance(packing, GateUp):
            is_fused = packing.gate.tensor == packing.up.tensor
            for span in (packing.gate, packing.up):
                if span.tensor.format(**parameter.indices) == tensor:
                    yield _even(span.start, size // 2 if is_fused else size, parts)
        elif isinstance(packing, InterleavedQKV):
            spans = (packing.query, packing.key, packing.value)
            for number, span in enumerate(spans):
                if span.tensor.format(**parameter.indices) != tensor:
                    continue
                if number == 0:
                    yield _even(span.start, packing.num_groups * packing.queries_per_group * packing.head_dim, parts)
                else:
                    yield _kv_heads(span.start, packing.num_groups, packing.head_dim, parts)
        else:
            raise TypeError(f"{tensor}: how vLLM cuts a {type(packing).__name__} is not known here")

    def _piece(self, shape: Shape, dim: int, bounds: tuple[int, int], ranks: np.ndarray, number: int) -> PlacedBox:
        offsets = tuple(bounds[0] if axis == dim else 0 for axis in range(len(shape)))
        lengths = tuple(bounds[1] - bounds[0] if axis == dim else size for axis, size in enumerate(shape))
        suffix = f"#{number}" if number else ""
        return PlacedBox(
            BoxOwners(offsets, lengths, ranks), "{tensor}" + suffix, math.prod(lengths), 0, contiguous_strides(lengths)
        )

    def _ranks_of(self, stage: int, block: int | None, part: int | None) -> np.ndarray:
        """Ranks of a stage, those with a block of experts, those of a tensor parallel rank; one array for each set."""
        key = stage, block, part
        if key not in self._ranks:
            in_stage = self._sizes.ranks[:, :, stage]
            if block is not None:
                in_stage = in_stage[:, block // self._sizes.tensor, block % self._sizes.tensor]
            elif part is not None:
                in_stage = in_stage[:, :, part]
            self._ranks[key] = np.sort(in_stage.ravel())
        return self._ranks[key]


def _even(start: int, length: int, parts: int) -> dict[tuple[int, int], list[int]]:
    size = length // parts
    return {(start + part * size, start + (part + 1) * size): [part] for part in range(parts)}


def _vocabulary(size: int, rows: int, parts: int) -> dict[tuple[int, int], list[int]]:
    """`rows` each; the last ranks may have padding alone."""
    bounds = ((part * rows, min((part + 1) * rows, size), part) for part in range(parts))
    return {(start, stop): [part] for start, stop, part in bounds if start < stop}


def _kv_heads(start: int, heads: int, head_dim: int, parts: int) -> dict[tuple[int, int], list[int]]:
    """Cut evenly, or with fewer heads than ranks one head for each run of ranks."""
    if heads >= parts:
        return _even(start, heads * head_dim, parts)
    copies = parts // heads
    return {
        (start + head * head_dim, start + (head + 1) * head_dim): list(range(head * copies, (head + 1) * copies))
        for head in range(heads)
    }
