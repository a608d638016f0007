"""How Megatron packs canonical tensors into one parameter, and how a parallel group shards it.

Every rule makes the same statement: along one dim the whole parameter is a list of segments of canonical tensors, and
rank r of n holds the r-th of n equal parts of that list. Interleaved QKV, gate/up, padded vocabulary, projections that
are fused on disk and fewer KV heads than ranks differ only in that list.

Sources: Megatron-LM `megatron/core/transformer/attention.py` (per query group: its query heads, key, value),
`megatron/core/transformer/mlp.py` (gated linear unit: gate rows, then up rows, per rank),
`megatron/core/transformer/moe/experts.py` (`_remove_glu_interleaving`: the same in blocks of rows),
`megatron/core/tensor_parallel/layers.py` (even split along the partition dim).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from hybrid_engine.records.regions import Region

Shape = tuple[int, ...]


class Over(StrEnum):
    """The group of training ranks that shards a parameter."""

    NONE = "none"
    TENSOR = "tensor"
    EXPERT_TENSOR = "expert tensor"


@dataclass(frozen=True, slots=True)
class Span:
    """Indices of canonical tensor `tensor` from `start` on, along the packed dim.

    Projections that are fused on disk are spans of one canonical tensor.
    """

    tensor: str
    start: int = 0


@dataclass(frozen=True, slots=True)
class Segment:
    """`length` consecutive indices of canonical `tensor` from `start` on, along the packed dim; None is padding."""

    tensor: str | None
    start: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing(ABC):
    """One parameter's rule. Names are patterns with `{layer}` and `{expert}` for 0-based global numbers.

    Attributes:
        dim: the canonical dim that is packed and sharded.
        over: the ranks that share the parameter.
        transposed: Megatron stores the canonical tensor with its two dims swapped.
        may_be_whole: some layer specs give every rank the whole parameter; its shape shows which.
    """

    dim: int = 0
    over: Over = Over.TENSOR
    transposed: bool = False
    may_be_whole: bool = False

    @abstractmethod
    def segments(self, num_parts: int, packed_size: int) -> Sequence[Segment]:
        """Return the whole parameter (of all `num_parts` ranks) along `dim`, `packed_size` long with its padding."""

    @abstractmethod
    def tensors(self) -> Sequence[str]:
        """Return the names of the canonical tensors, each once."""


@dataclass(frozen=True, slots=True)
class _OneTensor(Packing):
    name: str

    def segments(self, num_parts: int, packed_size: int) -> Sequence[Segment]:
        return [Segment(self.name, 0, packed_size)]

    def tensors(self) -> Sequence[str]:
        return [self.name]


@dataclass(frozen=True, slots=True)
class Replicated(_OneTensor):
    """Whole on every rank (norms, routers, biases of row-parallel layers)."""

    over: Over = field(default=Over.NONE, kw_only=True)


@dataclass(frozen=True, slots=True)
class Split(_OneTensor):
    """Sharded along `dim`: 0 for column-parallel weights and their biases, 1 for row-parallel weights."""

    dim: int = field(kw_only=True)


@dataclass(frozen=True, slots=True)
class Vocabulary(_OneTensor):
    """Rows by token, `size` of them, padded at the end to a multiple that Megatron chose."""

    size: int

    def segments(self, num_parts: int, packed_size: int) -> Sequence[Segment]:
        rows = [Segment(self.name, 0, self.size)]
        if packed_size > self.size:
            rows.append(Segment(None, 0, packed_size - self.size))
        return rows


@dataclass(frozen=True, slots=True)
class InterleavedQKV(Packing):
    """Per query group: the rows of its query heads, of its key head, of its value head. Weight or bias."""

    query: Span
    key: Span
    value: Span
    num_groups: int
    queries_per_group: int
    head_dim: int

    def segments(self, num_parts: int, packed_size: int) -> Sequence[Segment]:
        rows_of_group = [
            (self.query, self.queries_per_group * self.head_dim),
            (self.key, self.head_dim),
            (self.value, self.head_dim),
        ]
        return [
            Segment(span.tensor, span.start + group * rows, rows)
            for group in range(self.num_groups)
            for span, rows in rows_of_group
        ]

    def tensors(self) -> Sequence[str]:
        return list(dict.fromkeys(span.tensor for span in (self.query, self.key, self.value)))


@dataclass(frozen=True, slots=True)
class GateUp(Packing):
    """Each rank holds its rows of the gate projection followed by its rows of the up projection.

    Attributes:
        block: the two alternate in blocks of so many rows (Megatron's `moe_mlp_glu_interleave_size`); None: they do
            not, each rank's rows are one block.
    """

    gate: Span
    up: Span
    block: int | None = None

    def segments(self, num_parts: int, packed_size: int) -> Sequence[Segment]:
        rows = packed_size // 2 // num_parts  # of each projection on one rank
        block = self.block or max(rows, 1)
        if rows % block:
            raise ValueError(f"{rows} rows of each projection on a rank are not whole blocks of {block}")
        return [
            Segment(span.tensor, span.start + part * rows + first, block)
            for part in range(num_parts)
            for first in range(0, rows, block)
            for span in (self.gate, self.up)
        ]

    def tensors(self) -> Sequence[str]:
        return list(dict.fromkeys((self.gate.tensor, self.up.tensor)))


@dataclass(frozen=True, slots=True)
class Held:
    """Part of a rank's parameter: its indices from `start` on, along `local_dim`, hold `region`."""

    region: Region
    start: int
    local_dim: int


def held_regions(
    packing: Packing,
    indices: Mapping[str, int],
    shapes: Mapping[str, Shape],
    local_shape: Shape,
    part: int,
    num_parts: int,
) -> list[Held]:
    """Return what part `part` of `num_parts` of a parameter holds.

    Args:
        packing: the rule.
        indices: values of `{layer}` and `{expert}` in its names.
        shapes: canonical name -> shape.
        local_shape: of one rank's parameter, the same on all `num_parts` ranks.
        part: which of the ranks, from 0.
        num_parts: ranks of the group that shards the parameter.

    Raises:
        ValueError: with both numbers, unless the ranks together hold exactly the canonical tensors of the rule.
    """
    # Transposed parameters have two dims, of which the packed one is then the other one in Megatron's order.
    local_dim = len(local_shape) - 1 - packing.dim if packing.transposed else packing.dim
    local_size = local_shape[local_dim]
    names = {pattern: pattern.format(**indices) for pattern in packing.tensors()}
    if unknown := [name for name in names.values() if name not in shapes]:
        raise ValueError(f"the checkpoint of this model has no tensor {', '.join(unknown)}")
    if packing.over is Over.NONE or (
        packing.may_be_whole and local_size == sum(shapes[name][packing.dim] for name in names.values())
    ):
        part, num_parts = 0, 1  # every rank holds all of it
    segments = packing.segments(num_parts, local_size * num_parts)
    total = sum(segment.length for segment in segments)
    if total != local_size * num_parts:
        raise ValueError(f"{local_size * num_parts} packed in Megatron, {total} by the model's configuration")
    others = local_shape[::-1] if packing.transposed else local_shape
    _check_shapes(packing, segments, names, shapes, others, num_parts)
    # Walk along the whole parameter; `position` is where a segment begins in it, and this rank holds the window
    # [low, low + local_size). A segment that reaches into the window gives one region.
    held, position, low = [], 0, part * local_size
    for segment in segments:
        start, stop = max(position, low), min(position + segment.length, low + local_size)
        if segment.tensor is not None and start < stop:
            offsets = [0] * len(others)
            offsets[packing.dim] = segment.start + start - position
            lengths = (*others[: packing.dim], stop - start, *others[packing.dim + 1 :])
            held.append(Held(Region(names[segment.tensor], tuple(offsets), lengths), start - low, local_dim))
        position += segment.length
    return held


def _check_shapes(
    packing: Packing,
    segments: Sequence[Segment],
    names: Mapping[str, str],
    shapes: Mapping[str, Shape],
    local_shape: Shape,
    num_parts: int,
) -> None:
    """Raise ValueError unless the segments hold each tensor once and whole; `local_shape` is in canonical order."""
    found: Counter[str] = Counter()
    for segment in segments:
        if segment.tensor is not None:
            found[names[segment.tensor]] += segment.length
    for name, length in found.items():
        shape = (*local_shape[: packing.dim], length, *local_shape[packing.dim + 1 :])
        if shape != shapes[name]:
            raise ValueError(
                f"local shape {local_shape} on {num_parts} {packing.over} parallel rank(s) holds {name} in shape "
                f"{shape}, but its shape is {shapes[name]}"
            )
