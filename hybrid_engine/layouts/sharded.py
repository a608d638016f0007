"""A sharded trainer's side (FSDP2): every parameter is split along one dim over as many ranks as shard it.

Which tensors of a checkpoint lie where in a parameter is given as `Packed`; a rank holds the part of them that is in
its part of the parameter. The live adaptor (backends/fsdp) makes its records by the same function.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from hybrid_engine.models.packing import Shape
from hybrid_engine.models.table import ModelTable
from hybrid_engine.records.holdings import PlacedBox, PlacedBoxes, SideBuilder, SideLayout
from hybrid_engine.records.owners import BoxOwners
from hybrid_engine.records.regions import StridedView, boxes_of_copy, contiguous_strides


@dataclass(frozen=True, slots=True)
class Packed:
    """A canonical tensor is this view of the whole, contiguous tensor called `parameter` (elements)."""

    parameter: str
    view: StridedView


@dataclass(frozen=True, slots=True)
class LocalBox:
    """A box of a tensor that a rank holds, and where its elements lie in a flat buffer of the rank.

    Attributes:
        offsets, lengths: of the box; some lengths are 0 where the rank holds nothing.
        start: of its first element in the buffer.
        strides: elements, one for each dim.
    """

    offsets: Shape
    lengths: Shape
    start: int
    strides: Shape


def held_boxes(packed: StridedView, parameter: Shape, part: LocalBox) -> Iterator[LocalBox]:
    """What a rank holds of a canonical tensor.

    Args:
        packed: the canonical tensor, as a view of the whole parameter.
        parameter: shape of the whole parameter.
        part: what the rank holds of it.

    Raises ValueError where a dim of the parameter holds several dims of the canonical tensor.
    """
    shape, unit = packed.shape, contiguous_strides(packed.shape)
    for box in boxes_of_copy(parameter, packed, StridedView(0, shape, unit)):
        # one box of the parameter, cut to what the rank has of it; dst says where its elements are in the canonical one
        first = tuple(map(max, box.offsets, part.offsets))
        last = tuple(map(min, _ends(box.offsets, box.lengths), _ends(part.offsets, part.lengths)))
        if any(low >= high for low, high in zip(first, last, strict=True)):
            continue
        position = box.dst_offset + _dot(first, box.offsets, box.dst_strides)
        offsets = tuple(position // step % size for step, size in zip(unit, shape, strict=True))
        lengths, strides = [1] * len(shape), [0] * len(shape)
        for dim, size in enumerate(high - low for low, high in zip(first, last, strict=True)):
            if size > 1:
                along = _dim_of(box.dst_strides[dim], unit, shape)
                if along is None or offsets[along] + size > shape[along]:
                    raise ValueError(f"dim {dim} of parameter shape {parameter} holds several of its dims")
                lengths[along], strides[along] = size, part.strides[dim]
        start = part.start + _dot(first, part.offsets, part.strides)
        yield LocalBox(offsets, tuple(lengths), start, tuple(strides))


def _ends(offsets: Shape, lengths: Shape) -> Shape:
    return tuple(low + size for low, size in zip(offsets, lengths, strict=True))


def _dot(index: Shape, base: Shape, strides: Shape) -> int:
    """How far `index` lies from `base`, in elements."""
    return sum((i - low) * stride for i, low, stride in zip(index, base, strides, strict=True))


def _dim_of(stride: int, unit: Shape, shape: Shape) -> int | None:
    """The dim along which a step of `stride` goes, if it is one step of a dim: dims of one element never are."""
    return next((dim for dim, step in enumerate(unit) if step == stride and shape[dim] > 1), None)


def sharded_side(
    table: ModelTable,
    packed: Mapping[str, Packed],
    shapes: Mapping[str, Shape],
    num_shards: int,
    replicas: int = 1,
    dtype: str = "float32",
    whole: Collection[str] = (),
) -> SideLayout:
    """Where FSDP2 keeps every tensor, on all ranks; each parameter is a buffer of its own, split along its first dim.

    Args:
        table: of the model.
        packed: canonical name -> where it lies.
        shapes: of the whole parameters.
        num_shards, replicas: consecutive ranks shard a parameter, and so many groups of them have a copy each (HSDP).
        dtype: of the parameters.
        whole: names of those that every rank has whole: a module's buffers.

    Source: torch.distributed.fsdp.fully_shard; torch.chunk gives every rank ceil(n / num_shards) rows while there are.
    """
    world_size = num_shards * replicas
    side = SideBuilder(world_size, table.shapes, dtype, table.dtypes, is_offered_all=False)
    ranks_of = [np.arange(shard, world_size, num_shards) for shard in range(num_shards)]
    everyone = np.arange(world_size)
    pieces: dict[object, tuple[PlacedBox, ...]] = {}
    for tensor, place in packed.items():
        shape, is_whole = shapes[place.parameter], place.parameter in whole
        key = place.view, shape, is_whole
        if key not in pieces:
            parts = [(_whole(shape), everyone)] if is_whole else _parts(shape, ranks_of)
            pieces[key] = tuple(
                PlacedBox(
                    BoxOwners(box.offsets, box.lengths, ranks),
                    "{name}",
                    math.prod(part.lengths),
                    box.start,
                    box.strides,
                )
                for part, ranks in parts
                for box in held_boxes(place.view, shape, part)
            )
        side.add(tensor, PlacedBoxes(pieces[key], {"name": place.parameter}, group=""))
    for name, shape in shapes.items():
        for part, ranks in [(_whole(shape), everyone)] if name in whole else _parts(shape, ranks_of):
            side.add_elements(ranks, math.prod(part.lengths), of_expert=".experts." in name)
    return side.build()


def _whole(shape: Shape) -> LocalBox:
    return LocalBox((0,) * len(shape), shape, 0, contiguous_strides(shape))


def _parts(shape: Shape, ranks_of: list[np.ndarray]) -> list[tuple[LocalBox, np.ndarray]]:
    """Each rank's rows; ranks without any are left out."""
    rows = -(-shape[0] // len(ranks_of))
    parts = []
    for shard, ranks in enumerate(ranks_of):
        first, last = min(shard * rows, shape[0]), min((shard + 1) * rows, shape[0])
        if first < last:
            lengths = (last - first, *shape[1:])
            offsets = (first, *(0 for _ in shape[1:]))
            parts.append((LocalBox(offsets, lengths, 0, contiguous_strides(lengths)), ranks))
    return parts
