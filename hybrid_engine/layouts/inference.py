"""vLLM's side: ranks' positions, and what each holds, from the parallel sizes.

Positions count tensor ranks first, then pipeline stages, then replicas; `rank_order` says which rank is at each. With
expert parallelism, EP / TP consecutive replicas are one vLLM instance that shares the experts, whole ones each.

Sources: vLLM 0.32.0, `distributed/parallel_state.py` (order of ranks), `distributed/utils.get_pp_indices`,
`model_executor/layers/linear.py` (QKV, gate/up), `vocab_parallel_embedding.py`, `fused_moe/expert_map_manager.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hybrid_engine.errors import ConfigError, Violation
from hybrid_engine.layouts.parameters import Location, Parameter, cut_violations, head_violations, parameters_of
from hybrid_engine.models.packing import GateUp, InterleavedQKV, Over, Shape, Span, Split, Vocabulary
from hybrid_engine.models.table import ModelTable
from hybrid_engine.records.holdings import PlacedBox, PlacedBoxes, SideBuilder, SideLayout
from hybrid_engine.records.layout import Layout
from hybrid_engine.records.owners import BoxOwners
from hybrid_engine.records.regions import contiguous_strides

VOCAB_MULTIPLE = 64
"""vLLM pads the vocabulary to a multiple of this and cuts the padded one."""


@dataclass(frozen=True, slots=True)
class InferPosition:
    """One rank's place in vLLM; `expert` is the number of its block of experts, 0 where all ranks have all."""

    tensor: int
    pipeline: int
    replica: int
    expert: int


@dataclass(frozen=True)
class InferenceParallelism:
    """Parallel sizes of the inference side.

    Attributes:
        world_size: ranks.
        tensor, pipeline: sizes of one replica.
        expert: 1 cuts every expert over the tensor ranks; a multiple of `tensor` shares whole experts.
        rank_order: the global rank at each position; None: rank r at position r.
    """

    world_size: int
    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    rank_order: tuple[int, ...] | None = None

    @property
    def data(self) -> int:
        """Replicas."""
        return self.world_size // (self.tensor * self.pipeline)

    @property
    def replicas_per_instance(self) -> int:
        """Consecutive replicas that share the experts."""
        return self.expert // self.tensor if self.expert > 1 else 1

    @property
    def order(self) -> np.ndarray:
        """Global rank by position."""
        return np.arange(self.world_size) if self.rank_order is None else np.array(self.rank_order, dtype=np.int64)

    def position(self, rank: int) -> InferPosition:
        """Where a global rank is."""
        number = int(np.flatnonzero(self.order == rank)[0])
        tensor, replica = number % self.tensor, number // (self.tensor * self.pipeline)
        block = replica % self.replicas_per_instance * self.tensor + tensor if self.expert > 1 else 0
        return InferPosition(tensor, number // self.tensor % self.pipeline, replica, block)

    def violations(self, table: ModelTable) -> list[Violation]:
        """Everything that makes these sizes impossible for a model; keys are the attributes' names."""
        sizes = {name: getattr(self, name) for name in ("world_size", "tensor", "pipeline", "expert")}
        if found := [
            Violation(key, f"{size} is not a valid size", "Use 1 or more") for key, size in sizes.items() if size < 1
        ]:
            return found
        return [
            *rank_violations(self),
            *head_violations(table, self.tensor, "tensor"),
            *count_violations(self, table),
            *cut_violations_of(self, table),
        ]


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
    """What vLLM holds of every tensor, on all ranks; each box is a buffer of its own, grouped as Megatron's parameters.

    Raises ConfigError with every violation.
    """
    if violations := parallelism.violations(table):
        raise ConfigError(violations)
    return _InferenceSide(table, parallelism, dtype).build()


def inference_layout(
    table: ModelTable, parallelism: InferenceParallelism, rank: int, dtype: str = "bfloat16"
) -> Layout:
    """One rank's records; of several ranks, `inference_side` once and its `layout_of`."""
    return inference_side(table, parallelism, dtype).layout_of(rank)


class _InferenceSide:
    """Makes the side; ranks and pieces are made once for all tensors that have the same owners."""

    def __init__(self, table: ModelTable, parallelism: InferenceParallelism, dtype: str) -> None:
        self._table = table
        self._sizes = parallelism
        self._side = SideBuilder(parallelism.world_size, table.shapes, dtype, table.dtypes, is_offered_all=True)
        self._layer_bounds = stage_bounds(table.dims.num_layers, parallelism.pipeline)
        self._expert_bounds = expert_bounds(table.dims.num_experts, parallelism.expert)
        grid = (-1, parallelism.replicas_per_instance, parallelism.pipeline, parallelism.tensor)
        self._positions = parallelism.order.reshape(grid)
        self._groups: dict[str, str] = {}
        self._ranks: dict[tuple[int, int | None, int | None], np.ndarray] = {}
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

    def _add(self, tensor: str, stage: int, pieces: tuple[PlacedBox, ...], parameter: Parameter) -> None:
        module = parameter.name.format(**{**parameter.indices, "expert": ""}).rpartition(".")[0]
        group = self._groups.setdefault(tensor, module)  # a tied head is in the embedding's
        self._side.add(tensor, PlacedBoxes(pieces, {"tensor": tensor}, group))
        if isinstance(parameter.packing, Vocabulary):  # padding counts, and the last ranks may have nothing else
            shape = self._table.shapes[tensor]
            rows = padded_vocabulary(shape[0]) // self._sizes.tensor
            self._side.add_elements(self._ranks_of(stage, None, None), rows * math.prod(shape[1:]), of_expert=False)
            return
        for piece in pieces:
            self._side.add_elements(piece.owners.ranks, piece.numel, of_expert=parameter.is_expert)

    def _stages_with(self, parameter: Parameter) -> Sequence[int]:
        num_stages = self._sizes.pipeline
        if parameter.location is Location.DECODER:
            layer = parameter.indices["layer"]
            return [next(stage for stage in range(num_stages) if layer < self._layer_bounds[stage + 1])]
        if parameter.location is Location.MTP or self._table.serving.ends_on_every_stage:
            return range(num_stages)
        return [0 if parameter.location is Location.EMBEDDING else num_stages - 1]

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
            yield _vocabulary(size, parts)
        elif isinstance(packing, GateUp):
            for start, length in _lengths(packing, (packing.gate, packing.up), parameter, tensor, size):
                yield _even(start, length, parts)
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
            in_stage = self._positions[:, :, stage]
            if block is not None:
                in_stage = in_stage[:, block // self._sizes.tensor, block % self._sizes.tensor]
            elif part is not None:
                in_stage = in_stage[:, :, part]
            self._ranks[key] = np.sort(in_stage.ravel())
        return self._ranks[key]


def _even(start: int, length: int, parts: int) -> dict[tuple[int, int], list[int]]:
    size = length // parts
    return {(start + part * size, start + (part + 1) * size): [part] for part in range(parts)}


def _vocabulary(size: int, parts: int) -> dict[tuple[int, int], list[int]]:
    """The last ranks may have padding alone."""
    rows = padded_vocabulary(size) // parts
    bounds = ((part * rows, min((part + 1) * rows, size), part) for part in range(parts))
    return {(start, stop): [part] for start, stop, part in bounds if start < stop}


def padded_vocabulary(size: int) -> int:
    """Rows of vLLM's embedding over all tensor parallel ranks."""
    return -(-size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


def _kv_heads(start: int, heads: int, head_dim: int, parts: int) -> dict[tuple[int, int], list[int]]:
    """Cut evenly, or with fewer heads than ranks one head for each run of ranks."""
    if heads >= parts:
        return _even(start, heads * head_dim, parts)
    copies = parts // heads
    return {
        (start + head * head_dim, start + (head + 1) * head_dim): list(range(head * copies, (head + 1) * copies))
        for head in range(heads)
    }


def _lengths(
    packing: GateUp, spans: Sequence[Span], parameter: Parameter, tensor: str, size: int
) -> Iterator[tuple[int, int]]:
    """(start, length) of the projections that are in `tensor`, which may be both on disk."""
    length = size // 2 if packing.gate.tensor == packing.up.tensor else size
    for span in spans:
        if span.tensor.format(**parameter.indices) == tensor:
            yield span.start, length


def rank_violations(sizes: InferenceParallelism) -> Iterator[Violation]:
    """Sizes that do not make whole replicas and instances of the ranks."""
    tp, pp = sizes.tensor, sizes.pipeline
    if sizes.world_size % (tp * pp):
        yield Violation(
            "tensor",
            f"TP {tp} x PP {pp} = {tp * pp} does not divide the world size {sizes.world_size}",
            "Choose sizes whose product divides it",
        )
    if sizes.expert > 1 and sizes.expert % tp:
        yield Violation("expert", f"{sizes.expert} is no multiple of TP {tp}", "Use 1 or a multiple")
    elif sizes.world_size % (sizes.expert * pp):
        yield Violation(
            "expert",
            f"EP {sizes.expert} x PP {pp} = {sizes.expert * pp} does not divide the world size {sizes.world_size}",
            "Choose sizes whose product divides it",
        )
    if sizes.rank_order is not None and sorted(sizes.rank_order) != list(range(sizes.world_size)):
        yield Violation("rank_order", f"not each of {sizes.world_size} ranks once", "Leave it out")


def count_violations(sizes: InferenceParallelism, table: ModelTable) -> Iterator[Violation]:
    """More stages than layers, more ranks that share experts than experts."""
    dims = table.dims
    if sizes.pipeline > dims.num_layers:
        yield Violation("pipeline", f"{sizes.pipeline} stages for {dims.num_layers} layers", "Use fewer stages")
    if sizes.expert > max(dims.num_experts, 1):
        problem = f"{sizes.expert}, but the model has {dims.num_experts or 'no'} experts"
        yield Violation("expert", problem, f"Use {'fewer' if dims.num_experts else '1'}")


def cut_violations_of(sizes: InferenceParallelism, table: ModelTable) -> Iterator[Violation]:
    """What vLLM cuts and tensor parallel ranks cannot share evenly."""
    dims = table.dims
    if padded_vocabulary(dims.vocab_size) % sizes.tensor:
        rows = padded_vocabulary(dims.vocab_size)
        problem = f"{sizes.tensor} does not divide the {rows} rows of the padded vocabulary"
        yield Violation("tensor", problem, f"Use a divisor of {rows}")
    parts = {Over.NONE: 1, Over.TENSOR: sizes.tensor, Over.EXPERT_TENSOR: sizes.tensor if sizes.expert == 1 else 1}

    def is_even(parameter: Parameter) -> bool:
        """The vocabulary is padded, heads are counted one by one, some projections are whole, some not there."""
        packing = parameter.packing
        is_cut = isinstance(packing, Split | GateUp) and not packing.may_be_whole
        return is_cut and table.is_served(parameter.tensors[0])

    yield from cut_violations(table, parts, {Over.TENSOR: "tensor", Over.EXPERT_TENSOR: "tensor"}, is_even)
