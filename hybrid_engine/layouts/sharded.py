"""A sharded trainer's side (FSDP2): ranks split every parameter along one dim.

`Packed` describes the place of each tensor of a checkpoint in a parameter. A rank holds the part
of the tensor that is in its part of the parameter. The live adaptor (backends/fsdp) creates its
records with the same function, `held_boxes`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from hybrid_engine.layouts.parallelism import ShardedParallelism
from hybrid_engine.models.table import ModelTable
from hybrid_engine.records.holdings import (
    BoxOwners,
    PlacedBox,
    PlacedBoxes,
    SideBuilder,
    SideLayout,
)
from hybrid_engine.records.regions import (
    LocalBox,
    Shape,
    Shapes,
    StridedView,
    boxes_of_copy,
    contiguous_strides,
)


@dataclass(frozen=True, slots=True)
class Packed:
    """Place of a canonical tensor: a view, in elements, of the whole contiguous `parameter`."""

    parameter: str
    view: StridedView


@dataclass(frozen=True, eq=False)
class PackedModel:
    """Tensors of a sharded trainer before sharding.

    Attributes:
        tensors: place of each canonical tensor.
        shapes: shapes of the whole parameters, and of the buffers that a checkpoint has. Tied
            parameters are listed once.
        whole: names that every rank holds whole: the buffers of modules.
    """

    tensors: Mapping[str, Packed]
    shapes: Shapes
    whole: Collection[str] = ()

    def local_numel(self, name: str, num_shards: int) -> int:
        """Return the elements of a parameter or buffer that each rank stores.

        FSDP2 pads the rows of the last ranks.
        """
        shape = self.shapes[name]
        if name in self.whole:
            return math.prod(shape)
        # 10 rows on 4 ranks: 3, 3, 3, 1, in buffers of 3 rows each.
        rows = -(-shape[0] // num_shards)
        return rows * math.prod(shape[1:])

    def numel_by_layer(self) -> dict[str, int]:
        """Return the elements of all parameters, by prefix of the layer.

        Parameters outside of layers are at "".
        """
        layers: dict[str, int] = {}
        for name in self.shapes.keys() - set(self.whole):
            # "model.layers.3.mlp.up_proj.weight" -> "model.layers.3."
            prefix = re.match(r".*?\.\d+\.", name)
            layer = prefix[0] if prefix else ""
            layers[layer] = layers.get(layer, 0) + math.prod(self.shapes[name])
        return layers

    def splits_evenly(self, name: str, num_shards: int) -> bool:
        """Return whether all ranks have equally many rows of a parameter.

        Only the memory of these is freed page by page (backends/fsdp).
        """
        return name not in self.whole and self.shapes[name][0] % num_shards == 0


def held_boxes(packed: StridedView, parameter: Shape, part: LocalBox) -> Iterator[LocalBox]:
    """Yield the boxes of a canonical tensor that a rank holds.

    Args:
        packed: the canonical tensor, as a view of the whole parameter.
        parameter: shape of the whole parameter.
        part: the rank's part of the parameter.

    Raises:
        ValueError: a dim of the parameter holds several dims of the canonical tensor.
    """
    shape = packed.shape
    unit = contiguous_strides(shape)
    for box in boxes_of_copy(parameter, packed, StridedView(0, shape, unit)):
        # A box of the parameter, with its place in the canonical tensor. Cut it to the rank's part.
        first = tuple(map(max, box.offsets, part.offsets))
        last = tuple(
            map(min, _ends(box.offsets, box.lengths), _ends(part.offsets, part.lengths)),
        )
        sizes = [high - low for low, high in zip(first, last, strict=True)]
        # The box lies in the parameter, but outside of the rank's part.
        if min(sizes, default=1) <= 0:
            continue
        position = box.position_of(first)
        # The index of flat element `position` in the canonical tensor: row-major, like its storage.
        offsets = tuple(position // step % size for step, size in zip(unit, shape, strict=True))
        lengths = [1] * len(shape)
        strides = [0] * len(shape)
        for dim, size in enumerate(sizes):
            if size == 1:
                continue
            along = _dim_of(box.strides[dim], unit, shape)
            if along is None or offsets[along] + size > shape[along]:
                raise ValueError(
                    f"dim {dim} of parameter shape {parameter} holds several dims of the tensor"
                )
            lengths[along] = size
            # The rank steps through its buffer, so its strides count, not those of the canonical
            # tensor.
            strides[along] = part.strides[dim]
        yield LocalBox(offsets, tuple(lengths), part.position_of(first), tuple(strides))


def _ends(offsets: Shape, lengths: Shape) -> Shape:
    return tuple(low + size for low, size in zip(offsets, lengths, strict=True))


def _dim_of(stride: int, unit: Shape, shape: Shape) -> int | None:
    """Return the dim of which `stride` is a single step; dims of one element are skipped."""
    for dim, step in enumerate(unit):
        if step == stride and shape[dim] > 1:
            return dim
    return None


def sharded_side(
    table: ModelTable,
    model: PackedModel,
    sizes: ShardedParallelism,
    dtype: str = "float32",
) -> SideLayout:
    """Return FSDP2's part of every tensor on all ranks.

    Each parameter is a separate buffer, split along its first dim. Elements are counted with the
    padding that gives all ranks equally many rows.

    Args:
        table: name table of the model.
        model: places of the tensors in the parameters.
        sizes: parallel sizes.
        dtype: dtype of the parameters.

    Source: torch.distributed.fsdp.fully_shard; torch.chunk gives every rank ceil(n / num_shards)
    rows until none are left.
    """
    side = SideBuilder(
        sizes.world_size,
        table.shapes,
        dtype,
        table.dtypes,
        is_offered_all=False,
    )
    # 8 ranks in 2 replicas: shard 1 is on ranks 1 and 5.
    ranks_of = [
        np.arange(shard, sizes.world_size, sizes.num_shards) for shard in range(sizes.num_shards)
    ]
    everyone = np.arange(sizes.world_size)
    boxes_of: dict[object, tuple[PlacedBox, ...]] = {}
    for tensor, place in model.tensors.items():
        shape = model.shapes[place.parameter]
        is_whole = place.parameter in model.whole
        key = (place.view, shape, is_whole)
        if key not in boxes_of:
            if is_whole:
                parts = iter([(LocalBox.whole(shape), everyone)])
            else:
                parts = _parts_with(place.view, shape, ranks_of)
            boxes_of[key] = tuple(_placed(place.view, shape, parts))
        side.add(tensor, PlacedBoxes(boxes_of[key], {"name": place.parameter}, group=""))
    for name in model.shapes:
        numel = model.local_numel(name, sizes.num_shards)
        side.add_elements(everyone, numel, of_expert=".experts." in name)
    return side.build()


def _placed(
    view: StridedView,
    shape: Shape,
    parts: Iterator[tuple[LocalBox, np.ndarray]],
) -> Iterator[PlacedBox]:
    """Yield the boxes of a view in each part of a parameter."""
    for part, ranks in parts:
        for box in held_boxes(view, shape, part):
            owners = BoxOwners(box.offsets, box.lengths, ranks)
            yield PlacedBox(owners, "{name}", math.prod(part.lengths), box.start, box.strides)


def _parts_with(
    view: StridedView,
    shape: Shape,
    ranks_of: list[np.ndarray],
) -> Iterator[tuple[LocalBox, np.ndarray]]:
    """Yield the rows of each shard that may hold elements of a view, with the shard's ranks."""
    rows_per_shard = -(-shape[0] // len(ranks_of))
    numel_per_shard = rows_per_shard * math.prod(shape[1:])
    # A projection that is packed behind others in a parameter starts in a later shard. The shards
    # between its first and last element all have rows, so no part below is empty.
    first_shard = view.offset // numel_per_shard
    last_shard = (view.stop - 1) // numel_per_shard
    for shard in range(first_shard, last_shard + 1):
        first = shard * rows_per_shard
        end = min(first + rows_per_shard, shape[0])
        lengths = (end - first, *shape[1:])
        offsets = (first, *(0 for _ in shape[1:]))
        yield LocalBox(offsets, lengths, 0, contiguous_strides(lengths)), ranks_of[shard]
