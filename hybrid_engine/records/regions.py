"""Boxes of canonical tensors, and the strided views that hold them.

A canonical tensor is a Hugging Face checkpoint tensor (HF name, HF shape, row-major). A `Region` is a box of it.
All arithmetic of the planner is box algebra: intersect and subtract.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Region:
    """The box [offsets, offsets + lengths) of canonical tensor `tensor`; elements, one entry per dim.

    A scalar has empty tuples and one element. Lengths are at least 1: an empty box cannot be made.
    """

    tensor: str
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.offsets) != len(self.lengths):
            raise ValueError(f"{self.tensor}: {len(self.offsets)} offsets but {len(self.lengths)} lengths")
        if any(offset < 0 for offset in self.offsets) or any(length < 1 for length in self.lengths):
            raise ValueError(
                f"{self.tensor}: offsets must be >= 0 and lengths >= 1, got {self.offsets} and {self.lengths}"
            )

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.lengths)

    @property
    def ends(self) -> tuple[int, ...]:
        """One past the last index, per dim."""
        return tuple(offset + length for offset, length in zip(self.offsets, self.lengths, strict=True))

    def intersect(self, other: Region) -> Region | None:
        """The common box, or None when there is none."""
        if self.tensor != other.tensor:
            return None
        offsets = tuple(map(max, self.offsets, other.offsets))
        lengths = tuple(end - offset for offset, end in zip(offsets, map(min, self.ends, other.ends), strict=True))
        if any(length < 1 for length in lengths):
            return None
        return Region(self.tensor, offsets, lengths)

    def subtract(self, other: Region) -> list[Region]:
        """Disjoint boxes that cover self without other (at most two per dim)."""
        common = self.intersect(other)
        if common is None:
            return [self]
        pieces = []
        # Dim by dim, cut off what lies before and behind `common`; what is left is as wide as `common` in that dim.
        offsets, lengths = list(self.offsets), list(self.lengths)
        for dim, (low, high) in enumerate(zip(common.offsets, common.ends, strict=True)):
            end = offsets[dim] + lengths[dim]
            for start, stop in ((offsets[dim], low), (high, end)):
                if start < stop:
                    piece_offsets, piece_lengths = offsets.copy(), lengths.copy()
                    piece_offsets[dim], piece_lengths[dim] = start, stop - start
                    pieces.append(Region(self.tensor, tuple(piece_offsets), tuple(piece_lengths)))
            offsets[dim], lengths[dim] = low, high - low
        return pieces


def subtract_all(regions: Iterable[Region], others: Iterable[Region]) -> list[Region]:
    """Boxes that cover `regions` without any of `others`; disjoint if `regions` are."""
    remaining = list(regions)
    for other in others:
        remaining = [piece for region in remaining for piece in region.subtract(other)]
    return remaining


def union(regions: Iterable[Region]) -> list[Region]:
    """Disjoint boxes that cover exactly what `regions` cover."""
    disjoint: list[Region] = []
    for region in regions:
        disjoint.extend(subtract_all([region], disjoint))
    return disjoint


def joined(regions: Iterable[Region]) -> list[Region]:
    """Join boxes that differ in one dim only and touch, dim by dim; sorted."""
    boxes = sorted(regions)
    for dim in range(len(boxes[0].lengths)):
        # Boxes that differ in this dim only become neighbours, in order along it.
        in_lines = sorted((_without(box, dim), box.offsets[dim], box) for box in boxes)
        boxes = [in_lines[0][-1]]
        for *_, box in in_lines[1:]:
            last = boxes[-1]
            if _without(last, dim) == _without(box, dim) and last.ends[dim] == box.offsets[dim]:
                lengths = list(last.lengths)
                lengths[dim] += box.lengths[dim]
                boxes[-1] = Region(last.tensor, last.offsets, tuple(lengths))
            else:
                boxes.append(box)
    return sorted(boxes)


def _without(box: Region, dim: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """A box's bounds in the other dims."""
    return box.offsets[:dim] + box.offsets[dim + 1 :], box.lengths[:dim] + box.lengths[dim + 1 :]


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides of `shape`, in elements."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


@dataclass(frozen=True, slots=True)
class StridedView:
    """A strided window on a flat storage: element (i0, i1, …) is at `offset + sum(i_d * strides[d])`; elements."""

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def stop(self) -> int:
        """One past the last element; the offset where there is none."""
        if not math.prod(self.shape):
            return self.offset
        return self.offset + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True)) + 1


@dataclass(frozen=True, slots=True)
class ViewCopy:
    """One box of a copy between views: `lengths` elements from canonical `offsets` go to `dst_offset`/`dst_strides`."""

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    dst_offset: int
    dst_strides: tuple[int, ...]

    def view_of(self, part: Region) -> StridedView:
        """Where a box inside this one goes."""
        steps = zip(part.offsets, self.offsets, self.dst_strides, strict=True)
        start = self.dst_offset + sum((offset - first) * stride for offset, first, stride in steps)
        return StridedView(start, part.lengths, self.dst_strides)


@dataclass(slots=True)
class _Axis:
    """One loop of a copy nest: `size` steps of `src` elements in the source and `dst` in the destination."""

    size: int
    src: int
    dst: int


def boxes_of_copy(shape: tuple[int, ...], src: StridedView, dst: StridedView) -> list[ViewCopy]:
    """Write the copy `dst[...] = src[...]` as boxes of the canonical tensor that `src` is a view of.

    Args:
        shape: the canonical tensor's shape; its storage is row-major and starts at element 0.
        src: the view that is read: any chain of narrow, view, transpose, unsqueeze or expand.
        dst: the view that is written, of the same shape as `src`.

    Every element of `dst` appears in exactly one box. Loops that are not a box of the canonical tensor (steps,
    broadcasts, several loops over one dim that do not merge) are unrolled into one box per step.
    """
    if src.shape != dst.shape:
        raise ValueError(f"a copy of shape {src.shape} into shape {dst.shape}")
    canonical = contiguous_strides(shape)
    axes = [
        _Axis(size, src_stride, dst_stride)
        for size, src_stride, dst_stride in zip(src.shape, src.strides, dst.strides, strict=True)
        if size != 1
    ]
    if any(axis.size == 0 for axis in axes):
        return []
    axes = [part for axis in _merge_axes(axes) for part in _split_axis(axis, shape, canonical, src.offset)]
    box_axes, unrolled = _choose_box_axes(axes, shape, canonical, src.offset)
    copies = []
    for index in _steps(unrolled):
        # One step of the loops that unroll: the element where its box begins, in both storages.
        start = src.offset + sum(i * axis.src for i, axis in zip(index, unrolled, strict=True))
        copies.append(
            ViewCopy(
                offsets=_unravel(start, shape, canonical),
                lengths=tuple(box_axes[dim].size if dim in box_axes else 1 for dim in range(len(shape))),
                dst_offset=dst.offset + sum(i * axis.dst for i, axis in zip(index, unrolled, strict=True)),
                dst_strides=tuple(box_axes[dim].dst if dim in box_axes else 0 for dim in range(len(shape))),
            )
        )
    return copies


def _steps(axes: list[_Axis]) -> Iterator[tuple[int, ...]]:
    """Every index of a loop nest."""
    return itertools.product(*(range(axis.size) for axis in axes))


def _unravel(position: int, shape: tuple[int, ...], canonical: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major index of flat `position`: how many strides of each dim fit, counted anew in every row of the dim."""
    return tuple(position // stride % size for size, stride in zip(shape, canonical, strict=True))


def _dim_of(stride: int, shape: tuple[int, ...], canonical: tuple[int, ...]) -> int | None:
    """The canonical dim along which a source stride steps, if it steps along one."""
    for dim, (size, unit) in enumerate(zip(shape, canonical, strict=True)):
        if size > 1 and stride >= unit and stride % unit == 0 and stride < unit * size:
            return dim
    return None


def _split_axis(axis: _Axis, shape: tuple[int, ...], canonical: tuple[int, ...], start: int) -> Iterator[_Axis]:
    """Split a loop that runs over several canonical dims (a flattened view) at the dims' borders.

    Only where it begins at such a border and goes over whole dims: else no split makes boxes of it.
    """
    dim = _dim_of(axis.src, shape, canonical)
    if dim is None or canonical[dim] != axis.src:
        yield axis
        return
    size = shape[dim]
    if axis.size > size and axis.size % size == 0 and _unravel(start, shape, canonical)[dim] == 0:
        outer = _Axis(axis.size // size, axis.src * size, axis.dst * size)
        yield from _split_axis(outer, shape, canonical, start)
        yield _Axis(size, axis.src, axis.dst)
    else:
        yield axis


def _merge_axes(axes: list[_Axis]) -> list[_Axis]:
    """Merge pairs of loops that together are one longer loop on both sides.

    An outer loop of n steps of m*s elements around an inner one of m steps of s elements goes through n*m steps of s:
    when the inner loop ends, the outer one goes on exactly where the next inner step would be. Views that split a dim
    (heads out of rows) come out as one loop again, so that they are one box.
    """
    merged = sorted(axes, key=lambda axis: (axis.src, axis.dst))
    changed = True
    while changed:
        changed = False
        for inner, outer in itertools.permutations(merged, 2):
            same_loop = outer.src == inner.src * inner.size and outer.dst == inner.dst * inner.size
            if same_loop and inner.src > 0:  # a broadcast (0) reads one element again and again: not a longer loop
                merged.remove(outer)
                inner.size *= outer.size
                changed = True
                break
    return merged


def _choose_box_axes(
    axes: list[_Axis], shape: tuple[int, ...], canonical: tuple[int, ...], start: int
) -> tuple[dict[int, _Axis], list[_Axis]]:
    """Per canonical dim the longest loop that walks it by single steps inside its bounds; all others unroll."""
    box_axes: dict[int, _Axis] = {}
    unrolled: list[_Axis] = []
    for axis in sorted(axes, key=lambda axis: -axis.size):
        dim = _dim_of(axis.src, shape, canonical)
        if dim is not None and canonical[dim] == axis.src and dim not in box_axes:  # single steps along a free dim
            box_axes[dim] = axis
        else:
            unrolled.append(axis)
    while (dim := _dim_out_of_bounds(box_axes, unrolled, shape, canonical, start)) is not None:
        unrolled.append(box_axes.pop(dim))
    return box_axes, unrolled


def _dim_out_of_bounds(
    box_axes: dict[int, _Axis],
    unrolled: list[_Axis],
    shape: tuple[int, ...],
    canonical: tuple[int, ...],
    start: int,
) -> int | None:
    """A dim in which some unrolled step would push its box over the border (the view wraps), if there is one."""
    for index in _steps(unrolled):
        shift = sum(i * axis.src for i, axis in zip(index, unrolled, strict=True))
        origin = _unravel(start + shift, shape, canonical)
        for dim, axis in box_axes.items():
            if origin[dim] + axis.size > shape[dim]:
                return dim
    return None
