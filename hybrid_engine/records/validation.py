"""Checks of layouts. Each returns every fault it finds.

A destination buffer is right if each of its elements is written exactly once or is declared
padding. Volume alone would accept an overlap next to a gap of the same size, so bounds,
disjointness and volume are checked together.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hybrid_engine.records.layout import Buffer, BufferId, Layout, Shard


def layout_faults(layout: Layout, *, exact: bool) -> list[str]:
    """Return every fault of a layout in a stable order.

    Args:
        layout: of one rank or of many.
        exact: True on the destination side, where buffers must be covered exactly once. On the
            source side only bounds are checked, since a training buffer may hold padding and
            replicas.
    """
    faults: list[str] = []
    shards_by_buffer: dict[BufferId, list[Shard]] = {
        buffer_id: [] for buffer_id in sorted(layout.buffers)
    }
    for shard in layout.shards:
        fault = shard_fault(layout, shard)
        if fault is None:
            shards_by_buffer[shard.place.buffer].append(shard)
        else:
            faults.append(fault)
    for buffer_id, shards in shards_by_buffer.items():
        buffer = layout.buffers[buffer_id]
        out_of_bounds = []
        for shard in shards:
            fault = _bounds_fault(buffer, shard)
            if fault is not None:
                out_of_bounds.append(fault)
        for extent in buffer.padding:
            if extent.stop > buffer.numel:
                out_of_bounds.append(
                    f"{_label(buffer_id)}: padding [{extent.start}, {extent.stop}) reaches "
                    f"beyond its {buffer.numel} elements"
                )
        faults.extend(out_of_bounds)
        # Coverage is counted in an array of the buffer's size, so everything has to be in bounds.
        if exact and not out_of_bounds:
            faults.extend(_coverage_faults(buffer_id, buffer, shards))
    return faults + dtype_faults(layout)


def dtype_faults(layout: Layout) -> list[str]:
    """Return a fault for each tensor that ranks hold in several dtypes.

    The dtype on the wire, and the number of bytes, would be ambiguous.
    """
    return [
        f"{tensor}: held as {' and as '.join(sorted(dtypes))}; a tensor has one dtype on each side"
        for tensor, dtypes in sorted(_dtypes_by_tensor(layout).items())
        if len(dtypes) > 1
    ]


def unusable_tensors(layout: Layout) -> set[str]:
    """Return the tensors with faulty records or dtypes, which further checks have to skip."""
    unusable = {tensor for tensor, dtypes in _dtypes_by_tensor(layout).items() if len(dtypes) > 1}
    for shard in layout.shards:
        if shard_fault(layout, shard) is not None:
            unusable.add(shard.region.tensor)
    return unusable


def _dtypes_by_tensor(layout: Layout) -> dict[str, set[str]]:
    dtypes: dict[str, set[str]] = {}
    for shard in layout.shards:
        buffer = layout.buffers.get(shard.place.buffer)
        if buffer is not None:
            dtypes.setdefault(shard.region.tensor, set()).add(buffer.dtype)
    return dtypes


def shard_fault(layout: Layout, shard: Shard) -> str | None:
    """Return a fault if a shard's tensor, region or buffer is not in its layout."""
    region = shard.region
    rank = shard.place.buffer.rank
    shape = layout.tensors.get(region.tensor)
    if shape is None:
        return (
            f"{region.tensor}: rank {rank} has a shard of it, "
            "but its layout does not declare the tensor"
        )
    has_same_dims = len(shape) == len(region.lengths)
    # The number of dims first: `zip` with `strict` raises for different ones.
    if not has_same_dims or any(end > size for end, size in zip(region.ends, shape, strict=True)):
        return (
            f"{region.tensor}: shard [{region.offsets}, {region.ends}) "
            f"on rank {rank} is outside shape {shape}"
        )
    if shard.place.buffer not in layout.buffers:
        return f"{region.tensor}: its {_label(shard.place.buffer)} is not declared"
    return None


def undeclared_faults(layout: Layout) -> list[str]:
    """Return a fault for each shard of a tensor or buffer that the layout does not declare."""
    faults = []
    for shard in layout.shards:
        if shard.region.tensor in layout.tensors and shard.place.buffer in layout.buffers:
            continue
        fault = shard_fault(layout, shard)
        if fault is not None:
            faults.append(fault)
    return faults


def _bounds_fault(buffer: Buffer, shard: Shard) -> str | None:
    low = high = shard.place.offset
    for length, stride in zip(shard.region.lengths, shard.place.strides, strict=True):
        # A negative stride reaches below the offset.
        reach = (length - 1) * stride
        low += min(reach, 0)
        high += max(reach, 0)
    if low >= 0 and high < buffer.numel:
        return None
    return (
        f"{shard.region.tensor}: elements [{low}, {high}] of buffer {shard.place.buffer.name!r} "
        f"on rank {shard.place.buffer.rank}, which has {buffer.numel}"
    )


def _coverage_faults(buffer_id: BufferId, buffer: Buffer, shards: Sequence[Shard]) -> list[str]:
    label = _label(buffer_id)
    written = sum(shard.region.numel for shard in shards)
    padding = sum(extent.stop - extent.start for extent in buffer.padding)
    faults = []
    if written + padding != buffer.numel:
        faults.append(
            f"{label}: {buffer.numel} elements, but {written} are written and {padding} are padding"
        )
    overlap = _first_overlap(buffer, shards)
    if overlap is not None:
        faults.append(
            f"{label}: element {overlap} is written more than once, or written and padding"
        )
    return faults


def _first_overlap(buffer: Buffer, shards: Sequence[Shard]) -> int | None:
    """Return the first element that is covered twice, or None."""
    if all(_is_contiguous(shard) for shard in shards):
        # The usual case: sort intervals instead of counting every element.
        intervals = [(extent.start, extent.stop) for extent in buffer.padding]
        for shard in shards:
            start = shard.place.offset
            intervals.append((start, start + shard.region.numel))
        end = 0
        # Up to the first overlap each interval starts at or after the previous end, so `end` only
        # grows.
        for start, stop in sorted(intervals):
            if start < end:
                return start
            end = stop
        return None
    counts = np.zeros(buffer.numel, dtype=np.int32)
    for shard in shards:
        np.add.at(counts, _elements(shard), 1)
    for extent in buffer.padding:
        counts[extent.start : extent.stop] += 1
    doubled = np.flatnonzero(counts > 1)
    return int(doubled[0]) if doubled.size else None


def _is_contiguous(shard: Shard) -> bool:
    """Return whether a shard is one run of consecutive elements, in any order of dims."""
    width = 1
    # [3, 4] stored transposed has strides (1, 3): 3 elements of stride 1, then 4 of stride 3, 12 in
    # a row. A negative stride sorts first and differs from 1.
    for stride, length in sorted(zip(shard.place.strides, shard.region.lengths, strict=True)):
        if length > 1 and stride != width:
            return False
        width *= length
    return True


def _elements(shard: Shard) -> np.ndarray:
    """Return the position of each element of a shard in its buffer, int array."""
    # Starts as a scalar and gains a dim per canonical dim: [] -> [3] -> [3, 4].
    positions = np.array(shard.place.offset)
    for length, stride in zip(shard.region.lengths, shard.place.strides, strict=True):
        positions = np.add.outer(positions, np.arange(length) * stride)
    return positions


def _label(buffer_id: BufferId) -> str:
    return f"buffer {buffer_id.name!r} on rank {buffer_id.rank}"
