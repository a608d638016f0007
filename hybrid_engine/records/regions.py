"""Boxes of canonical tensors, and the strided views that hold them.

A canonical tensor is a Hugging Face checkpoint tensor (HF name, HF shape, row-major). A `Region`
is a box of it. All arithmetic of the planner is box algebra: intersect and subtract.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

Shape = tuple[int, ...]
"""Number of elements along each dim of a tensor or box."""
Shapes = Mapping[str, Shape]
"""Tensor -> shape."""
Offsets = tuple[int, ...]
"""Index of an element, one number per dim."""
Strides = tuple[int, ...]
"""Elements of a buffer from one index to the next, per dim."""


@dataclass(frozen=True, slots=True, order=True)
class Region:
    """The box [offsets, offsets + lengths) of canonical tensor `tensor`, in elements per dim.

    A scalar has empty tuples and one element. Lengths are at least 1: there is no empty box.
    """

    tensor: str
    offsets: Offsets
    lengths: Shape

    def __post_init__(self) -> None:
        if len(self.offsets) != len(self.lengths):
            raise ValueError(
                f"{self.tensor}: {len(self.offsets)} offsets but {len(self.lengths)} lengths"
            )
        if any(offset < 0 for offset in self.offsets) or any(length < 1 for length in self.lengths):
            raise ValueError(
                f"{self.tensor}: offsets must be >= 0 and lengths >= 1, "
                f"got {self.offsets} and {self.lengths}"
            )

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.lengths)

    @property
    def ends(self) -> Offsets:
        """Last index plus one, per dim."""
        bounds = zip(self.offsets, self.lengths, strict=True)
        return tuple(offset + length for offset, length in bounds)

    def intersect(self, other: Region) -> Region | None:
        """Return the common box, or None if the boxes are disjoint."""
        if self.tensor != other.tensor:
            return None
        offsets = tuple(map(max, self.offsets, other.offsets))
        ends = map(min, self.ends, other.ends)
        lengths = tuple(end - offset for offset, end in zip(offsets, ends, strict=True))
        if any(length < 1 for length in lengths):
            return None
        return Region(self.tensor, offsets, lengths)

    def subtract(self, other: Region) -> list[Region]:
        """Return disjoint boxes, at most two per dim, that cover `self` without `other`."""
        common = self.intersect(other)
        if common is None:
            return [self]
        pieces = []
        # Dim by dim, cut off the parts before and after `common`. The rest, [offsets, offsets +
        # lengths), then has the bounds of `common` in that dim.
        offsets = list(self.offsets)
        lengths = list(self.lengths)
        # The middle [1:3, 1:3] of a 4 x 4 box leaves row 0, row 3, and then of rows 1 and 2 only
        # column 0 and column 3: four boxes, where cutting every dim at once would give eight.
        for dim, (low, high) in enumerate(zip(common.offsets, common.ends, strict=True)):
            end = offsets[dim] + lengths[dim]
            for start, stop in ((offsets[dim], low), (high, end)):
                if start < stop:
                    offsets[dim] = start
                    lengths[dim] = stop - start
                    pieces.append(Region(self.tensor, tuple(offsets), tuple(lengths)))
            offsets[dim] = low
            lengths[dim] = high - low
        return pieces


def subtract_all(regions: Iterable[Region], others: Iterable[Region]) -> list[Region]:
    """Return boxes that cover `regions` without any of `others`; disjoint if `regions` are."""
    remaining = list(regions)
    for other in others:
        remaining = [piece for region in remaining for piece in region.subtract(other)]
    return remaining


def union(regions: Iterable[Region]) -> list[Region]:
    """Return disjoint boxes that cover exactly the elements of `regions`."""
    disjoint: list[Region] = []
    for region in regions:
        # Add only the part that is not covered yet.
        disjoint.extend(subtract_all([region], disjoint))
    return disjoint


def contiguous_strides(shape: Shape) -> Strides:
    """Return the row-major strides of `shape`, in elements."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


@dataclass(frozen=True, slots=True)
class StridedView:
    """A strided window on a flat storage, in elements.

    Element (i0, i1, …) is at `offset + sum(i_d * strides[d])`.
    """

    offset: int
    shape: Shape
    strides: Strides

    @property
    def stop(self) -> int:
        """Position of the last element plus one; the offset if the view is empty."""
        if not math.prod(self.shape):
            return self.offset
        steps = zip(self.shape, self.strides, strict=True)
        return self.offset + sum((size - 1) * stride for size, stride in steps) + 1


@dataclass(frozen=True, slots=True)
class LocalBox:
    """A box of a tensor, with its place in flat memory of a rank.

    Attributes:
        offsets: start of the box in the tensor.
        lengths: elements per dim; some are 0 if the rank holds nothing.
        start: position of the box's first element in the memory.
        strides: elements from one index to the next in the memory, per dim.
    """

    offsets: Offsets
    lengths: Shape
    start: int
    strides: Strides

    @classmethod
    def whole(cls, shape: Shape) -> LocalBox:
        """Return the box that is all of a tensor, contiguous from the start of the memory."""
        return cls((0,) * len(shape), shape, 0, contiguous_strides(shape))

    def position_of(self, index: Offsets) -> int:
        """Return the position in the memory of an element of the tensor in this box."""
        steps = zip(index, self.offsets, self.strides, strict=True)
        return self.start + sum((i - first) * stride for i, first, stride in steps)

    def view_of(self, part: Region) -> StridedView:
        """Return the place of a box inside this one."""
        return StridedView(self.position_of(part.offsets), part.lengths, self.strides)


def splits_of(shape: Shape, finer: Shape) -> tuple[Shape, ...] | None:
    """Return, for each dim of a shape, the dims of a finer shape that it is split into.

    None if `finer` is no refinement: if the product of some of its dims is no dim of `shape`.
    """
    remaining = list(finer)
    splits = []
    for index, size in enumerate(shape):
        # (8, 6) and (8, 3, 2): 8 takes 8, and 6 takes 3 and 2.
        split = [remaining.pop(0)] if remaining else []
        # Leave a dim for each that follows.
        while math.prod(split) < size and len(remaining) > len(shape) - index - 1:
            split.append(remaining.pop(0))
        if not split or math.prod(split) != size:
            return None
        splits.append(tuple(split))
    return None if remaining else tuple(splits)


def refined_boxes(region: Region, strides: Strides, splits: tuple[Shape, ...]) -> list[LocalBox]:
    """Return the boxes of a region in a finer shape of its tensor.

    Args:
        region: box of the tensor.
        strides: strides of the box in a buffer.
        splits: see `splits_of`.

    `start` of a box is relative to the first element of the region.
    """
    boxes = [LocalBox((), (), 0, ())]
    for first, length, stride, split in zip(
        region.offsets, region.lengths, strides, splits, strict=True
    ):
        parts = [
            LocalBox(
                tuple(index for index, _ in runs),
                tuple(count for _, count in runs),
                (start - first) * stride,
                tuple(unit * stride for unit in contiguous_strides(split)),
            )
            # [1, 6) of a dim of 6 that is split into (3, 2): row 0 from column 1, then rows 1 and 2
            # whole.
            for start, runs in _runs_of(first, first + length, split)
        ]
        boxes = [
            LocalBox(
                box.offsets + part.offsets,
                box.lengths + part.lengths,
                box.start + part.start,
                box.strides + part.strides,
            )
            for box in boxes
            for part in parts
        ]
    return boxes


def _runs_of(start: int, stop: int, split: Shape) -> Iterator[tuple[int, list[tuple[int, int]]]]:
    """Yield boxes that cover an interval of a dim that is split into several.

    Each is (its first index in the dim, (first index, length) in each dim of the split).
    """
    _, *inner = split
    if not inner:
        yield start, [(start, stop - start)]
        return
    unit = math.prod(inner)
    whole = [(0, length) for length in inner]
    position = start
    while position < stop:
        row, column = divmod(position, unit)
        num_rows = (stop - position) // unit
        # At the start of a row, take all rows that are whole. Otherwise, or for a last row that is
        # cut short, take a part of one row.
        if column == 0 and num_rows:
            yield position, [(row, num_rows), *whole]
            position += num_rows * unit
            continue
        end = min(stop, (row + 1) * unit)
        for first, runs in _runs_of(column, column + end - position, tuple(inner)):
            yield position + first - column, [(row, 1), *runs]
        position = end


@dataclass(slots=True)
class _LoopNest:
    """A loop of a copy nest: `size` steps of `src` and `dst` elements in the two storages."""

    size: int
    src: int
    dst: int


def boxes_of_copy(shape: Shape, src: StridedView, dst: StridedView) -> list[LocalBox]:
    """Express the copy `dst[...] = src[...]` as boxes of the canonical tensor under `src`.

    Args:
        shape: the canonical tensor's shape; its storage is row-major and starts at element 0.
        src: the view that is read: any chain of narrow, view, transpose, unsqueeze or expand.
        dst: the view that is written, with the same shape as `src`.

    Every element of `dst` is in exactly one box, whose place is in the storage of `dst`. Loops that
    are not a box of the canonical tensor (steps, broadcasts, several loops over one dim that do not
    merge) are unrolled into one box per step.

    Raises:
        ValueError: the views have different shapes.
    """
    if src.shape != dst.shape:
        raise ValueError(f"a copy of shape {src.shape} into shape {dst.shape}")
    canonical = contiguous_strides(shape)
    loops = []
    for size, src_stride, dst_stride in zip(src.shape, src.strides, dst.strides, strict=True):
        if size == 0:
            return []
        # A loop of one step never steps, and its stride may be any number.
        if size != 1:
            loops.append(_LoopNest(size, src_stride, dst_stride))
    split: list[_LoopNest] = []
    for loop in _merged(loops):
        split += _split(loop, shape, canonical, src.offset)
    box_loops, unrolled = _choose_box_loops(split, shape, canonical, src.offset)
    copies = []
    for index in _steps(unrolled):
        # The first element of this step's box, in both storages.
        src_start = src.offset
        dst_start = dst.offset
        for i, loop in zip(index, unrolled, strict=True):
            src_start += i * loop.src
            dst_start += i * loop.dst
        # A dim without a loop stays at one index: length 1, and the stride is never used.
        dims = [box_loops.get(dim, _LoopNest(1, 0, 0)) for dim in range(len(shape))]
        copies.append(
            LocalBox(
                offsets=_unravel(src_start, shape, canonical),
                lengths=tuple(loop.size for loop in dims),
                start=dst_start,
                strides=tuple(loop.dst for loop in dims),
            )
        )
    return copies


def _steps(loops: list[_LoopNest]) -> Iterator[tuple[int, ...]]:
    """Yield every index of a loop nest."""
    return itertools.product(*(range(loop.size) for loop in loops))


def _unravel(
    position: int,
    shape: Shape,
    canonical: Strides,
) -> Offsets:
    """Return the row-major index of a flat position."""
    dims = zip(shape, canonical, strict=True)
    return tuple(position // stride % size for size, stride in dims)


def _dim_of(stride: int, shape: Shape, canonical: Strides) -> int | None:
    """Return the canonical dim along which a source stride steps; None if there is none."""
    for dim, (size, unit) in enumerate(zip(shape, canonical, strict=True)):
        # Steps of several units are possible; a dim of size 1 has no steps.
        if size > 1 and stride >= unit and stride % unit == 0 and stride < unit * size:
            return dim
    return None


def _split(
    loop: _LoopNest,
    shape: Shape,
    canonical: Strides,
    start: int,
) -> Iterator[_LoopNest]:
    """Split a loop over several canonical dims (a flattened view) at the dims' borders.

    The loop has to start at such a border and cover whole dims. Otherwise it is not split, since no
    split would produce boxes.
    """
    dim = _dim_of(loop.src, shape, canonical)
    if dim is None or canonical[dim] != loop.src:
        yield loop
        return
    size = shape[dim]
    is_longer = loop.size > size and loop.size % size == 0
    # A view of 6 elements of a tensor [4, 3] from element 3 is rows 1 and 2. From element 1 it is
    # parts of three rows: no loop starts at a border, and it becomes 6 boxes of one element.
    if is_longer and _unravel(start, shape, canonical)[dim] == 0:
        outer = _LoopNest(loop.size // size, loop.src * size, loop.dst * size)
        yield from _split(outer, shape, canonical, start)
        yield _LoopNest(size, loop.src, loop.dst)
    else:
        yield loop


def _merged(loops: list[_LoopNest]) -> list[_LoopNest]:
    """Merge pairs of loops that together form one longer loop on both sides.

    An outer loop of n steps of m*s elements around an inner loop of m steps of s elements makes
    n*m steps of s: after its last step, the inner loop continues exactly where the outer loop
    steps to. Views that split a dim (heads out of rows) become one loop again, and thus one box.
    """
    merged = sorted(loops, key=lambda loop: (loop.src, loop.dst))
    changed = True
    while changed:
        changed = False
        for inner, outer in itertools.combinations(merged, 2):
            continues_src = outer.src == inner.src * inner.size
            continues_dst = outer.dst == inner.dst * inner.size
            # A broadcast (stride 0) reads one element repeatedly and is not part of a longer loop.
            if continues_src and continues_dst and inner.src > 0:
                merged.remove(outer)
                inner.size *= outer.size
                changed = True
                break
    return merged


def _choose_box_loops(
    loops: list[_LoopNest],
    shape: Shape,
    canonical: Strides,
    start: int,
) -> tuple[dict[int, _LoopNest], list[_LoopNest]]:
    """Choose the longest loop of each canonical dim that takes single steps within bounds.

    Returns:
        The chosen loops by dim, and the other loops, which are unrolled.
    """
    box_loops: dict[int, _LoopNest] = {}
    unrolled: list[_LoopNest] = []
    # The longest first: each loop that is not chosen multiplies the number of boxes by its size.
    for loop in sorted(loops, key=lambda loop: -loop.size):
        dim = _dim_of(loop.src, shape, canonical)
        if dim is not None and canonical[dim] == loop.src and dim not in box_loops:
            box_loops[dim] = loop
        else:
            unrolled.append(loop)
    # Unrolling a loop shifts the boxes of the others, so check again after each.
    while True:
        dim = _dim_out_of_bounds(box_loops, unrolled, shape, canonical, start)
        if dim is None:
            return box_loops, unrolled
        unrolled.append(box_loops.pop(dim))


def _dim_out_of_bounds(
    box_loops: dict[int, _LoopNest],
    unrolled: list[_LoopNest],
    shape: Shape,
    canonical: Strides,
    start: int,
) -> int | None:
    """Return a dim in which the box of some unrolled step crosses the border (the view wraps)."""
    for index in _steps(unrolled):
        shift = sum(i * loop.src for i, loop in zip(index, unrolled, strict=True))
        origin = _unravel(start + shift, shape, canonical)
        # A view [2, 2] of a tensor [4, 3] with strides (3, 1) from element 2 has elements 2, 3, 5,
        # 6. Its second column is column 0 of the next rows, so it is two boxes of one column.
        for dim, loop in box_loops.items():
            if origin[dim] + loop.size > shape[dim]:
                return dim
    return None
