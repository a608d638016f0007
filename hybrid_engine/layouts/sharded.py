"""A sharded trainer's side (FSDP2): every parameter is split along one dim over as many ranks as shard it.

Which tensors of a checkpoint lie where in a parameter is given as `Packed`; a rank holds the part of them that is in
its part of the parameter. The live adaptor (backends/fsdp) makes its records by the same function.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from hybrid_engine.layouts.parallelism import ShardedParallelism
from hybrid_engine.models.packing import Shape
from hybrid_engine.models.table import ModelTable
from hybrid_engine.records.holdings import BoxOwners, PlacedBox, PlacedBoxes, SideBuilder, SideLayout
from hybrid_engine.records.regions import StridedView, boxes_of_copy, contiguous_strides


@dataclass(frozen=True, slots=True)
class Packed:
    """A canonical tensor is this view of the whole, contiguous tensor called `parameter` (elements)."""

    parameter: str
    view: StridedView


@dataclass(frozen=True, eq=False)
class PackedModel:
    """The tensors of a sharded trainer, before it is sharded.

    Attributes:
        tensors: canonical name -> where it lies.
        shapes: of the whole parameters, and of the buffers that a checkpoint has; of tied ones one.
        whole: names of those that every rank has whole: a module's buffers.
    """

    tensors: Mapping[str, Packed]
    shapes: Mapping[str, Shape]
    whole: Collection[str] = ()

    def local_numel(self, name: str, num_shards: int) -> int:
        """Elements of a parameter, or of a buffer, that each rank stores; FSDP2 pads the rows of the last ranks."""
        shape = self.shapes[name]
        return math.prod(shape if name in self.whole else (-(-shape[0] // num_shards), *shape[1:]))

    def numel_by_layer(self, num_shards: int) -> dict[str, int]:
        """Prefix of a layer, "" for what is in none -> elements of its parameters that each rank stores."""
        layers: dict[str, int] = {}
        for name in self.shapes.keys() - set(self.whole):
            found = re.match(r".*?\.\d+\.", name)
            layer = found[0] if found else ""
            layers[layer] = layers.get(layer, 0) + self.local_numel(name, num_shards)
        return layers

    def splits_evenly(self, name: str, num_shards: int) -> bool:
        """Whether all ranks have as many rows; only such memory is freed page by page (backends/fsdp)."""
        return name not in self.whole and self.shapes[name][0] % num_shards == 0


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
    """Yield the boxes of a canonical tensor that a rank holds.

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
    table: ModelTable, model: PackedModel, sizes: ShardedParallelism, dtype: str = "float32"
) -> SideLayout:
    """Where FSDP2 keeps every tensor, on all ranks; each parameter is a buffer of its own, split along its first dim.

    `dtype`: of the parameters. Elements are counted with the padding that makes all ranks' rows as many.

    Source: torch.distributed.fsdp.fully_shard; torch.chunk gives every rank ceil(n / num_shards) rows while there are.
    """
    side = SideBuilder(sizes.world_size, table.shapes, dtype, table.dtypes, is_offered_all=False)
    ranks_of = [np.arange(shard, sizes.world_size, sizes.num_shards) for shard in range(sizes.num_shards)]
    everyone = np.arange(sizes.world_size)
    pieces: dict[object, tuple[PlacedBox, ...]] = {}
    for tensor, place in model.tensors.items():
        shape, is_whole = model.shapes[place.parameter], place.parameter in model.whole
        key = place.view, shape, is_whole
        if key not in pieces:
            whole = LocalBox((0,) * len(shape), shape, 0, contiguous_strides(shape))
            parts = [(whole, everyone)] if is_whole else _parts_with(place.view, shape, ranks_of)
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
    for name in model.shapes:
        numel = model.local_numel(name, sizes.num_shards)
        side.add_elements(everyone, numel, of_expert=".experts." in name)
    return side.build()


def _parts_with(view: StridedView, shape: Shape, ranks_of: list[np.ndarray]) -> Iterator[tuple[LocalBox, np.ndarray]]:
    """The rows of each rank that has any of those in which a view lies."""
    rows, row = -(-shape[0] // len(ranks_of)), math.prod(shape[1:])
    last = view.offset + sum((size - 1) * stride for size, stride in zip(view.shape, view.strides, strict=True))
    for shard in range(view.offset // row // rows, last // row // rows + 1):
        first, end = shard * rows, min((shard + 1) * rows, shape[0])
        lengths = (end - first, *shape[1:])
        offsets = (first, *(0 for _ in shape[1:]))
        yield LocalBox(offsets, lengths, 0, contiguous_strides(lengths)), ranks_of[shard]
