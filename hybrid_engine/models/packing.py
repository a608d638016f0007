"""Packing of canonical tensors into Megatron's parameters, and sharding by a parallel group.

Every rule has the same form: along one dim the whole parameter is a list of segments of canonical
tensors, and rank r of n holds the r-th of n equal parts of that list. Interleaved QKV, gate/up,
several projections in one, padded vocabulary, projections that are fused on disk and fewer KV heads
than ranks differ only in that list.

A canonical tensor is a name, or a part of a tensor in numpy's notation: `w[3, :, 1::2]` is every
second column of one expert. See `PartOfTensor`.

Sources: Megatron-LM `megatron/core/transformer/attention.py` (per query group: its query heads,
key, value), `megatron/core/transformer/mlp.py` (gated linear unit: gate rows, then up rows, per
rank), `megatron/core/transformer/moe/experts.py` (`_remove_glu_interleaving`: the same in blocks of
rows), `megatron/core/ssm/gated_delta_net.py` (each rank's part of each
projection), `megatron/core/tensor_parallel/layers.py` (even split along the partition dim).
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache

from hybrid_engine.records.layout import Place, Shard
from hybrid_engine.records.regions import Region, Shape, Shapes


class Over(StrEnum):
    """The group of training ranks that shards a parameter."""

    NONE = "none"
    TENSOR = "tensor"
    EXPERT_TENSOR = "expert tensor"


_PART = re.compile(r"(?P<name>[^\[]*)(?:\[(?P<dims>.+)\])?")
_DIM = re.compile(r":|(?P<index>\d+)(?:::(?P<step>\d+))?")


@dataclass(frozen=True, slots=True)
class PartOfTensor:
    """Part of a canonical tensor, taken by an index or by steps in some dims.

    Steps make no box of the tensor. So its shape is refined: a dim of size N that is taken in steps
    of n becomes two, [N / n, n], and a step is an index of the second.

    Attributes:
        name: canonical tensor.
        shape: its refined shape.
        indices: for each dim of that shape, the index that is taken; None: all.
    """

    name: str
    shape: Shape
    indices: tuple[int | None, ...]

    @property
    def kept(self) -> Shape:
        """Shape of the part: sizes of the dims that are taken whole."""
        dims = zip(self.shape, self.indices, strict=True)
        return tuple(size for size, index in dims if index is None)

    def spread(self, values: Sequence[int], others: Sequence[int]) -> tuple[int, ...]:
        """Return values of all dims: `values` where a dim is taken whole, else from `others`."""
        of_kept = iter(values)
        dims = zip(self.indices, others, strict=True)
        return tuple(next(of_kept) if index is None else other for index, other in dims)


def tensor_name(part: str) -> str:
    """Return the name of the canonical tensor of a part, or of a pattern of parts."""
    return part.partition("[")[0]


@lru_cache(4096)
def part_of_tensor(part: str, shape: Shape) -> PartOfTensor:
    """Return a part of a canonical tensor.

    Args:
        part: name, followed by a selection if not all of the tensor is taken. A selection is, for
            each dim, `:` (all), an index, or `first::step`.
        shape: shape of the tensor on disk.

    Raises:
        ValueError: the selection does not fit the shape.
    """
    match = _PART.fullmatch(part)
    if match is None:
        raise ValueError(f"{part} is not a name with a selection in brackets")
    if match["dims"] is None:
        return PartOfTensor(part, shape, (None,) * len(shape))
    dims = [_DIM.fullmatch(dim.strip()) for dim in match["dims"].split(",")]
    refined: list[int] = []
    indices: list[int | None] = []
    if len(dims) != len(shape):
        raise ValueError(f"{part} has {len(dims)} dims, the tensor {len(shape)}: {shape}")
    for dim, size in zip(dims, shape, strict=True):
        if dim is None:
            raise ValueError(f"{part} is not a name with `:`, an index or `first::step` in a dim")
        step = int(dim["step"] or 0)
        if dim["step"] is not None and step == 0:
            raise ValueError(f"{part} has a step of 0")
        index = None if dim["index"] is None else int(dim["index"])
        # A dim of 6 taken as 1::2 becomes [3, 2] with index 1 in the second: elements 1, 3 and 5.
        if step:
            if size % step:
                raise ValueError(f"{part}: a dim of {size} has no whole steps of {step}")
            refined.append(size // step)
            indices.append(None)
            size = step
        if index is not None and index >= size:
            raise ValueError(f"{part}: index {index} is out of range in a dim of {size}")
        refined.append(size)
        indices.append(index)
    return PartOfTensor(match["name"], tuple(refined), tuple(indices))


@dataclass(frozen=True, slots=True)
class Span:
    """Indices from `start` of canonical tensor `tensor`, along the packed dim.

    Projections that are fused on disk are spans of one canonical tensor.
    """

    tensor: str
    start: int = 0


@dataclass(frozen=True, slots=True)
class Segment:
    """`length` consecutive indices from `start` of canonical tensor `tensor`, along the packed dim.

    A tensor of None is padding.
    """

    tensor: str | None
    start: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing(ABC):
    """Rule of one parameter. Names are patterns with `{layer}` and `{expert}`, global from 0.

    Attributes:
        dim: canonical dim that is packed and sharded.
        over: group of ranks that shard the parameter.
        transposed: True if Megatron stores the canonical tensor with its two dims swapped.
        may_be_whole: True if some layer specs replicate the parameter. The local shape shows
            whether it is replicated.
    """

    dim: int = 0
    over: Over = Over.TENSOR
    transposed: bool = False
    may_be_whole: bool = False

    @abstractmethod
    def segments(self, num_parts: int, packed_size: int) -> Sequence[Segment]:
        """Return the segments of the whole parameter along `dim`.

        Args:
            num_parts: number of ranks that shard it.
            packed_size: length of the whole parameter along `dim`, with padding.
        """

    @abstractmethod
    def parts(self) -> Sequence[str]:
        """Return the distinct canonical tensors, or parts of these, that segments name."""

    def tensors(self) -> Sequence[str]:
        """Return the distinct names of the canonical tensors."""
        return list(dict.fromkeys(map(tensor_name, self.parts())))

    def num_units(self, packed_size: int) -> int:
        """Return the number of which the number of ranks that shard the parameter is a divisor."""
        return packed_size


@dataclass(frozen=True, slots=True)
class _OneTensor(Packing):
    name: str

    def segments(self, num_parts: int, packed_size: int) -> Sequence[Segment]:
        return [Segment(self.name, 0, packed_size)]

    def parts(self) -> Sequence[str]:
        return [self.name]


@dataclass(frozen=True, slots=True)
class Replicated(_OneTensor):
    """A tensor that every rank holds whole: norms, routers, biases of row-parallel layers."""

    over: Over = field(default=Over.NONE, kw_only=True)


@dataclass(frozen=True, slots=True)
class Split(_OneTensor):
    """A tensor sharded along `dim`: 0 for column-parallel layers, 1 for row-parallel weights."""

    dim: int = field(kw_only=True)


@dataclass(frozen=True, slots=True)
class Vocabulary(_OneTensor):
    """`size` rows, one per token, padded at the end to a multiple that Megatron chooses."""

    size: int

    def segments(self, num_parts: int, packed_size: int) -> Sequence[Segment]:
        rows = [Segment(self.name, 0, self.size)]
        if packed_size > self.size:
            rows.append(Segment(None, 0, packed_size - self.size))
        return rows


@dataclass(frozen=True, slots=True)
class InterleavedQKV(Packing):
    """Rows by query group: query heads, key head, value head. Weight or bias."""

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
        # 4 query heads per group, 2 groups, TP 4: the list q0-q3 k0 v0 q4-q7 k1 v1 has 12 heads,
        # and rank 1 has q3, k0, v0. A rank may hold keys whose queries are on its neighbour.
        return [
            Segment(span.tensor, span.start + group * rows, rows)
            for group in range(self.num_groups)
            for span, rows in rows_of_group
        ]

    def parts(self) -> Sequence[str]:
        return list(dict.fromkeys(span.tensor for span in (self.query, self.key, self.value)))


@dataclass(frozen=True, slots=True)
class GateUp(Packing):
    """Gate and up projection; each rank holds its gate rows followed by its up rows.

    Attributes:
        block: number of rows after which gate and up alternate on a rank (Megatron's
            `moe_mlp_glu_interleave_size`); None: all of the rank's rows.
    """

    gate: Span
    up: Span
    block: int | None = None

    def segments(self, num_parts: int, packed_size: int) -> Sequence[Segment]:
        # Rows of each projection on one rank.
        rows = packed_size // 2 // num_parts
        block = self.block or max(rows, 1)
        if rows % block:
            raise ValueError(
                f"{rows} rows of each projection on a rank are not whole blocks of {block}"
            )
        # Gate and up of 4 rows on 2 ranks: g0 g1 u0 u1 | g2 g3 u2 u3, so each rank multiplies its
        # gate rows with its up rows without communication.
        return [
            Segment(span.tensor, span.start + part * rows + first, block)
            for part in range(num_parts)
            for first in range(0, rows, block)
            for span in (self.gate, self.up)
        ]

    def parts(self) -> Sequence[str]:
        return list(dict.fromkeys((self.gate.tensor, self.up.tensor)))

    def num_units(self, packed_size: int) -> int:
        return packed_size // 2


@dataclass(frozen=True, slots=True)
class HeadRows:
    """Rows of heads in a canonical tensor, along the packed dim: the queries, say.

    Attributes:
        tensor: name of the tensor.
        num_heads: number of heads, or of groups of heads.
        length: rows of each.
        start: first row of the first.
        step: rows from one to the next; None: `length`.
    """

    tensor: str
    num_heads: int
    length: int
    start: int = 0
    step: int | None = None

    def share(self, part: int, num_parts: int) -> Iterator[Segment]:
        """Yield the rows of the part-th of `num_parts` equal shares of the heads.

        Raises ValueError if the shares have no equal numbers of heads.
        """
        num_heads, rest = divmod(self.num_heads, num_parts)
        if rest:
            raise ValueError(
                f"{num_parts} does not divide the {self.num_heads} heads of {self.tensor}"
            )
        step = self.length if self.step is None else self.step
        first = self.start + part * num_heads * step
        if step == self.length:
            yield Segment(self.tensor, first, num_heads * step)
        else:
            for head in range(num_heads):
                # Heads of 2 rows at a step of 4: rows 0, 1 and 4, 5. Rows between belong to another
                # section.
                yield Segment(self.tensor, first + head * step, self.length)


@dataclass(frozen=True, slots=True)
class PackedHeads(Packing):
    """Several projections in one parameter: a share of each in turn, then the next share.

    Attributes:
        sections: the projections.
        num_shares: number of shares of the whole parameter; None: a share for each rank.
    """

    sections: tuple[HeadRows, ...]
    num_shares: int | None = None

    def segments(self, num_parts: int, packed_size: int) -> Sequence[Segment]:
        num_shares = self.num_shares or num_parts
        return [
            segment
            for share in range(num_shares)
            for section in self.sections
            for segment in section.share(share, num_shares)
        ]

    def parts(self) -> Sequence[str]:
        return list(dict.fromkeys(section.tensor for section in self.sections))

    def num_units(self, packed_size: int) -> int:
        if self.num_shares is not None:
            return packed_size
        return math.gcd(*(section.num_heads for section in self.sections))


def held_regions(
    packing: Packing,
    indices: Mapping[str, int],
    shapes: Shapes,
    local_shape: Shape,
    place: Place,
    part: int,
    num_parts: int,
) -> list[Shard]:
    """Return the records of one rank's part of a parameter.

    Regions of a part of a tensor are in its refined shape.

    Args:
        packing: the rule.
        indices: values of `{layer}` and `{expert}` in its names.
        shapes: canonical name -> shape.
        local_shape: shape of a rank's part, the same on all `num_parts` ranks.
        place: place of the part, with strides in the order of the parameter's dims.
        part: number of the rank in its group, from 0.
        num_parts: number of ranks in the group that shards the parameter.

    Raises:
        ValueError: the ranks together do not hold exactly the canonical tensors of the rule.
    """
    # In the order of canonical dims. A transposed parameter has them in reverse order.
    order = -1 if packing.transposed else 1
    canonical_shape = local_shape[::order]
    strides = place.strides[::order]
    local_size = canonical_shape[packing.dim]
    names = {pattern: pattern.format(**indices) for pattern in packing.parts()}
    unknown = [name for name in map(tensor_name, names.values()) if name not in shapes]
    if unknown:
        raise ValueError(f"the checkpoint of this model has no tensor {', '.join(unknown)}")
    parts = {
        pattern: part_of_tensor(name, shapes[tensor_name(name)]) for pattern, name in names.items()
    }
    is_whole = packing.over is Over.NONE
    if packing.may_be_whole and not is_whole:
        is_whole = local_size == sum(part.kept[packing.dim] for part in parts.values())
    if is_whole:
        # Every rank holds the whole parameter.
        part = 0
        num_parts = 1
    packed_size = local_size * num_parts
    segments = packing.segments(num_parts, packed_size)
    total = sum(segment.length for segment in segments)
    if total != packed_size:
        raise ValueError(f"{packed_size} packed in Megatron, {total} by the model's configuration")
    _check_shapes(packing, segments, names, parts, canonical_shape, num_parts)
    # Walk along the whole parameter. `position` is the start of a segment in it, and this rank
    # holds the window [low, high). A segment that overlaps the window contributes one region.
    held = []
    position = 0
    low = part * local_size
    high = low + local_size
    # A vocabulary of 10 padded to 16 on 4 ranks: rank 2 has rows 8 and 9 and 2 rows of padding,
    # rank 3 has padding only and holds no region.
    for segment in segments:
        start = max(position, low)
        stop = min(position + segment.length, high)
        if segment.tensor is not None and start < stop:
            offsets = [0] * len(canonical_shape)
            # `start - position` is how far into the segment the window begins.
            offsets[packing.dim] = segment.start + start - position
            lengths = list(canonical_shape)
            lengths[packing.dim] = stop - start
            taken = parts[segment.tensor]
            region = Region(
                taken.name,
                # In dims that are taken by an index, the region has that index and length 1: column
                # 1::2 of expert 3 is [3, :, :, 1] of the refined shape.
                taken.spread(offsets, [index or 0 for index in taken.indices]),
                taken.spread(lengths, [1] * len(taken.shape)),
            )
            offset = place.offset + (start - low) * strides[packing.dim]
            # A dim of one index has no steps.
            all_strides = taken.spread(strides, [0] * len(taken.shape))
            held.append(Shard(region, Place(place.buffer, offset, all_strides)))
        position += segment.length
    return held


def _check_shapes(
    packing: Packing,
    segments: Sequence[Segment],
    names: Mapping[str, str],
    parts: Mapping[str, PartOfTensor],
    local_shape: Shape,
    num_parts: int,
) -> None:
    """Check that the segments hold each tensor exactly once.

    `local_shape` is in the order of canonical dims.

    Raises:
        ValueError: a tensor's segments do not have its shape.
    """
    lengths: Counter[str] = Counter()
    for segment in segments:
        if segment.tensor is not None:
            lengths[segment.tensor] += segment.length
    for pattern, length in lengths.items():
        name = names[pattern]
        shape = (*local_shape[: packing.dim], length, *local_shape[packing.dim + 1 :])
        if shape != parts[pattern].kept:
            raise ValueError(
                f"local shape {local_shape} on {num_parts} {packing.over} parallel rank(s) "
                f"holds {name} in shape {shape}, but its shape is {parts[pattern].kept}"
            )
