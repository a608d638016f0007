"""How Megatron packs canonical tensors into one parameter, and how a parallel group cuts it.

Every rule is the same statement: along one dim the whole parameter is a list of segments of canonical tensors, and
rank r of n holds the r-th of n equal parts of that list. Interleaved QKV, gate/up, padded vocabulary, projections that
are fused on disk and fewer KV heads than ranks differ in nothing but the list.

Sources: Megatron-LM `megatron/core/transformer/attention.py` (per query group: its query heads, key, value),
`megatron/core/transformer/mlp.py` (gated linear unit: gate rows, then up rows, per rank),
`megatron/core/tensor_parallel/layers.py` (even split along the partition dim).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from hybrid_engine.records.regions import Region

Shape = tuple[int, ...]


class Over(StrEnum):
    """Which group of training ranks cuts a parameter."""

    NONE = "none"
    TENSOR = "tensor"
    EXPERT_TENSOR = "expert tensor"


@dataclass(frozen=True, slots=True)
class Span:
    """Indices of canonical tensor `tensor` from `start` on, along the packed dim. More than one tensor may be on disk
    as one: its parts are spans of it."""

    tensor: str
    start: int = 0


@dataclass(frozen=True, slots=True)
class Segment:
    """`length` consecutive indices of canonical `tensor` from `start` on, along the packed dim. None is padding."""

    tensor: str | None
    start: int
    length: int


class Packing(Protocol):
    """One parameter's rule. Names are patterns with `{layer}` and `{expert}` for 0-based global numbers.

    Attributes:
        dim: the canonical dim that is packed and cut.
        over: the ranks that share the parameter.
        transposed: Megatron stores the two dims of the canonical tensor the other way round.
        may_be_whole: some layer specs give every rank the whole parameter; the shape tells.
    """

    @property
    def dim(self) -> int: ...
    @property
    def over(self) -> Over: ...
    @property
    def transposed(self) -> bool: ...
    @property
    def may_be_whole(self) -> bool: ...

    def segments(self, num_parts: int, packed_size: int) -> Sequence[Segment]:
        """The whole parameter (all `num_parts` ranks) along `dim`; `packed_size` is its length, padding included."""
        ...

    def tensors(self) -> Sequence[str]:
        """Names of the canonical tensors, each once."""
        ...


@dataclass(frozen=True, slots=True)
class Replicated:
    """Every rank holds all of it (norms, routers, biases of row-parallel layers)."""

    name: str
    dim: int = 0
    over: Over = Over.NONE
    transposed: bool = False
    may_be_whole: bool = False

    def segments(self, num_parts: int, packed_size: int) -> Sequence[Segment]:
        return [Segment(self.name, 0, packed_size)]

    def tensors(self) -> Sequence[str]:
        return [self.name]


@dataclass(frozen=True, slots=True)
class Split:
    """Cut along `dim`: 0 for column-parallel weights and their biases, 1 for row-parallel weights."""

    name: str
    dim: int
    over: Over = Over.TENSOR
    transposed: bool = False
    may_be_whole: bool = False

    def segments(self, num_parts: int, packed_size: int) -> Sequence[Segment]:
        return [Segment(self.name, 0, packed_size)]

    def tensors(self) -> Sequence[str]:
        return [self.name]


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Rows by token, `size` of them, padded at the end to a multiple Megatron chose."""

    name: str
    size: int
    dim: int = 0
    over: Over = Over.TENSOR
    transposed: bool = False
    may_be_whole: bool = False

    def segments(self, num_parts: int, packed_size: int) -> Sequence[Segment]:
        rows = [Segment(self.name, 0, self.size)]
        if packed_size > self.size:
            rows.append(Segment(None, 0, packed_size - self.size))
        return rows

    def tensors(self) -> Sequence[str]:
        return [self.name]


@dataclass(frozen=True, slots=True)
class InterleavedQKV:
    """Per query group: the rows of its query heads, of its key head, of its value head. Weight or bias."""

    query: Span
    key: Span
    value: Span
    num_groups: int
    queries_per_group: int
    head_dim: int
    dim: int = 0
    over: Over = Over.TENSOR
    transposed: bool = False
    may_be_whole: bool = False

    def segments(self, num_parts: int, packed_size: int) -> Sequence[Segment]:
        parts = ((self.query, self.queries_per_group * self.head_dim), (self.key, self.head_dim))
        parts += ((self.value, self.head_dim),)
        return [
            Segment(span.tensor, span.start + group * rows, rows)
            for group in range(self.num_groups)
            for span, rows in parts
        ]

    def tensors(self) -> Sequence[str]:
        return list(dict.fromkeys(span.tensor for span in (self.query, self.key, self.value)))


@dataclass(frozen=True, slots=True)
class GateUp:
    """Each rank holds its rows of the gate projection followed by its rows of the up projection."""

    gate: Span
    up: Span
    dim: int = 0
    over: Over = Over.TENSOR
    transposed: bool = False
    may_be_whole: bool = False

    def segments(self, num_parts: int, packed_size: int) -> Sequence[Segment]:
        rows = packed_size // 2 // num_parts
        return [
            Segment(span.tensor, span.start + part * rows, rows)
            for part in range(num_parts)
            for span in (self.gate, self.up)
        ]

    def tensors(self) -> Sequence[str]:
        return list(dict.fromkeys((self.gate.tensor, self.up.tensor)))


@dataclass(frozen=True, slots=True)
class Held:
    """Part of a rank's parameter: local indices from `start` on, along `local_dim`, hold `region`."""

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
    """What part `part` of `num_parts` of a parameter holds.

    Args:
        packing: the rule.
        indices: values of `{layer}` and `{expert}` in its names.
        shapes: canonical name -> shape.
        local_shape: of one rank's parameter, the same on all `num_parts` ranks.

    Raises ValueError, with both numbers, unless the ranks together hold exactly the canonical tensors of the rule.
    """
    local_dim = len(local_shape) - 1 - packing.dim if packing.transposed else packing.dim
    local_size = local_shape[local_dim]
    names = {pattern: pattern.format(**indices) for pattern in packing.tensors()}
    if unknown := [name for name in names.values() if name not in shapes]:
        raise ValueError(f"the checkpoint of this model has no tensor {', '.join(unknown)}")
    if packing.over is Over.NONE or (
        packing.may_be_whole and local_size == sum(shapes[name][packing.dim] for name in names.values())
    ):
        part, num_parts = 0, 1
    segments = packing.segments(num_parts, local_size * num_parts)
    total = sum(segment.length for segment in segments)
    if total != local_size * num_parts:
        raise ValueError(f"{local_size * num_parts} packed in Megatron, {total} by the model's configuration")
    others = local_shape[::-1] if packing.transposed else local_shape
    _check_shapes(packing, segments, names, shapes, others, num_parts)
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
