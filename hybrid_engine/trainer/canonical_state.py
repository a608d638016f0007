"""Training state by canonical names: boxes of tensors that any layout, of any trainer, can read.

    weights (a trainer's)      tensors of this rank, each with the canonical boxes in it, and with
                               what an optimizer steps and keeps for it, or for a flat part of it
    add_boxes(entries, ...)    key -> `Boxes`: their place in whole tensors, and views of memory
    checkpoint                 torch's planner finds out which boxes a rank reads

Elements without a canonical name (padding of the vocabulary, adapters) are entries of their rank,
for the same layout only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from hybrid_engine.backends.training_side import gaps
from hybrid_engine.records.layout import Shard
from hybrid_engine.records.regions import Offsets, Shape, Shapes, Strides

TENSOR = "tensor"
STEPPED = "stepped"


@dataclass(frozen=True, eq=False)
class Weight:
    """A parameter or buffer on this rank, and the state of an optimizer for it.

    Attributes:
        name: unique on this rank.
        tensor: its values, contiguous on this rank. Those of what is stepped count; it is copied.
        names: canonical tensors in it, also those of which this rank has no element.
        shards: canonical boxes in it; places count from its first element on this rank.
        stepped: what the optimizer steps on: a part of the flat values, perhaps in another dtype,
            or the tensor itself; None: nothing.
        start: number of the element at which `stepped` begins.
        optimizer: torch's optimizer of `stepped`.
        is_copy: another rank saves the same values.
    """

    name: str
    tensor: torch.Tensor
    names: Sequence[str]
    shards: Sequence[Shard]
    stepped: torch.Tensor | None = None
    start: int = 0
    optimizer: torch.optim.Optimizer | None = None
    is_copy: bool = False

    @property
    def saved(self) -> Mapping[str, Any]:
        """Values by kind: TENSOR or STEPPED, which is restored in place, then optimizer state.

        The optimizer has no state before its first step.
        """
        if self.stepped is None:
            return {TENSOR: self.tensor}
        state = {} if self.optimizer is None else self.optimizer.state.get(self.stepped, {})
        return {STEPPED: self.stepped, **state}


@dataclass(eq=False)
class Boxes:
    """Boxes of one canonical tensor in memory of this rank; torch's planners write and read them.

    Attributes:
        shape: of the whole tensor.
        dtype: of all boxes.
        views: offset of each box in the whole tensor -> its elements.
    """

    shape: Shape
    dtype: torch.dtype
    views: dict[Offsets, torch.Tensor] = field(default_factory=dict)

    def size(self) -> torch.Size:
        return torch.Size(self.shape)

    def view(self, index: MetadataIndex) -> torch.Tensor:
        """Return the elements of a box."""
        assert index.offset is not None
        return self.views[tuple(index.offset)]

    def __create_write_items__(self, key: str, _: object) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(key, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk,
                    properties=TensorProperties(self.dtype),
                    size=self.size(),
                ),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(torch.Size(offsets), view.shape)
            for offsets, view in self.views.items()
        ]


Entries = dict[str, Any]
"""Key of a checkpoint -> `Boxes`, tensor, or plain value."""


def flat_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return the flat elements of a tensor, or of this rank's part of a DTensor; contiguous."""
    local = tensor.detach()
    return (local.to_local() if isinstance(local, DTensor) else local).view(-1)


def boxes_between(
    lengths: Shape,
    strides: Strides,
    first: int,
    start: int,
    stop: int,
) -> Iterator[tuple[Offsets, Shape, int]]:
    """Cut a strided box to the elements that lie in [start, stop) of flat memory.

    Yields offsets in the box and lengths of at most a few boxes, and the place of their first
    elements. An element further along a dim of a larger stride lies behind all others, as in any
    dense tensor.

    Args:
        lengths, strides: of the box, in elements.
        first: place of its first element.
        start, stop: the interval.
    """
    reach = sum((length - 1) * stride for length, stride in zip(lengths, strides, strict=True))
    if first >= stop or first + reach < start:
        return
    if first >= start and first + reach < stop:
        yield (0,) * len(lengths), lengths, first
        return
    # Along the largest stride, whole steps lie in the interval, and a part of one at either end.
    # Rows of 4 at a step of 10 in [12, 30): row 2 is whole (low 2, high 3), row 1 has its last two.
    dim = max(range(len(lengths)), key=lambda dim: (lengths[dim] > 1, strides[dim]))
    step = strides[dim]
    # How far one step along this dim reaches, by the other dims.
    rest = reach - (lengths[dim] - 1) * step
    low = max(-((first - start) // step), 0)
    high = min((stop - 1 - rest - first) // step + 1, lengths[dim])
    steps = {(index, index + 1) for index in (low - 1, high) if 0 <= index < lengths[dim]}
    if low < high:
        steps.add((low, high))
    for begin, end in sorted(steps):
        part = (*lengths[:dim], end - begin, *lengths[dim + 1 :])
        place = first + begin * step
        for offsets, inner, inner_place in boxes_between(part, strides, place, start, stop):
            shifted = (*offsets[:dim], offsets[dim] + begin, *offsets[dim + 1 :])
            yield shifted, inner, inner_place


def add_boxes(
    entries: Entries,
    key: str,
    shapes: Shapes,
    weight: Weight,
    values: torch.Tensor,
) -> None:
    """Add the canonical boxes in `values` to the entries of their tensors, as views.

    Args:
        entries: get the boxes, by key.
        key: key with {} for the canonical name.
        shapes: canonical name -> shape of the whole tensor.
        weight: whose boxes they are.
        values: of `weight.saved`, or a tensor alike, with a value for each element.
    """
    flat = flat_part(values)
    start = weight.start
    for shard in weight.shards:
        region = shard.region
        place = shard.place
        for offsets, lengths, first in boxes_between(
            region.lengths, place.strides, place.offset, start, start + flat.numel()
        ):
            boxes = entries.setdefault(
                key.format(region.tensor), Boxes(shapes[region.tensor], flat.dtype)
            )
            whole = tuple(map(sum, zip(region.offsets, offsets, strict=True)))
            # Places count from the weight's first element, views from that of the storage.
            offset = int(flat.storage_offset()) + first - start
            boxes.views[whole] = flat.as_strided(lengths, place.strides, offset)


def add_parts(entries: Entries, key: str, weight: Weight, values: torch.Tensor) -> None:
    """Add the elements of `values` that are in no canonical box, each run as an entry, as views.

    Arguments as for `add_boxes`; `key`: of this rank, the number of the run is appended.
    """
    flat = flat_part(values)
    runs = [shard.place.extent(shard.region.lengths) for shard in weight.shards]
    for number, gap in enumerate(gaps(flat_part(weight.tensor).numel(), runs)):
        # Of the flat values an optimizer may step on a part, which may begin within the run.
        first = max(gap.start - weight.start, 0)
        last = min(gap.stop - weight.start, flat.numel())
        if first < last:
            entries[f"{key}.{number}"] = flat[first:last]
