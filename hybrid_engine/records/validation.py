"""Checks of layouts that return every fault they find.

A destination buffer is right when each of its elements is written exactly once or is declared padding. Volume alone
would accept an overlap next to a gap of the same size, so bounds, disjointness and volume are checked together.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hybrid_engine.records.layout import Buffer, BufferId, Layout, Shard


def layout_faults(layout: Layout, *, exact: bool) -> list[str]:
    """Every fault of a layout, in a stable order; empty when it is right.

    Args:
        layout: of one rank or of many.
        exact: destination side: buffers must be covered exactly once. Source side: only bounds are checked, since a
            training buffer may hold padding and replicas.
    """
    faults: list[str] = []
    shards_by_buffer: dict[BufferId, list[Shard]] = {buffer_id: [] for buffer_id in sorted(layout.buffers)}
    for shard in layout.shards:
        fault = shard_fault(layout, shard)
        if fault is None:
            shards_by_buffer[shard.place.buffer].append(shard)
        else:
            faults.append(fault)
    for buffer_id, shards in shards_by_buffer.items():
        buffer = layout.buffers[buffer_id]
        out_of_bounds = [fault for shard in shards if (fault := _bounds_fault(buffer, shard))]
        out_of_bounds += [
            f"{_label(buffer_id)}: padding [{extent.start}, {extent.stop}) reaches beyond its {buffer.numel} elements"
            for extent in buffer.padding
            if extent.stop > buffer.numel
        ]
        faults.extend(out_of_bounds)
        if exact and not out_of_bounds:
            faults.extend(_coverage_faults(buffer_id, buffer, shards))
    return faults + dtype_faults(layout)


def dtype_faults(layout: Layout) -> list[str]:
    """Tensors that are held in several dtypes: what of them crosses a link, and in how many bytes, would be unclear."""
    return [
        f"{tensor}: held as {' and as '.join(sorted(dtypes))}; a tensor has one dtype on each side"
        for tensor, dtypes in sorted(_dtypes_by_tensor(layout).items())
        if len(dtypes) > 1
    ]


def unusable_tensors(layout: Layout) -> set[str]:
    """Tensors of which nothing more can be said: their records or dtypes are at fault."""
    several = {tensor for tensor, dtypes in _dtypes_by_tensor(layout).items() if len(dtypes) > 1}
    return several | {shard.region.tensor for shard in layout.shards if shard_fault(layout, shard)}


def _dtypes_by_tensor(layout: Layout) -> dict[str, set[str]]:
    dtypes: dict[str, set[str]] = {}
    for shard in layout.shards:
        if (buffer := layout.buffers.get(shard.place.buffer)) is not None:
            dtypes.setdefault(shard.region.tensor, set()).add(buffer.dtype)
    return dtypes


def shard_fault(layout: Layout, shard: Shard) -> str | None:
    """Why a shard does not belong to its layout: tensor, region or buffer unknown; None when it does."""
    region, buffer_id = shard.region, shard.place.buffer
    shape = layout.tensors.get(region.tensor)
    if shape is None:
        return f"{region.tensor}: rank {buffer_id.rank} has a shard of it, but its layout does not declare the tensor"
    if len(shape) != len(region.lengths) or any(end > size for end, size in zip(region.ends, shape, strict=True)):
        return (
            f"{region.tensor}: shard [{region.offsets}, {region.ends}) on rank {buffer_id.rank} "
            f"is outside shape {shape}"
        )
    if buffer_id not in layout.buffers:
        return f"{region.tensor}: its {_label(buffer_id)} is not declared"
    return None


def undeclared_faults(layout: Layout) -> list[str]:
    """Every shard of a tensor or buffer that the layout does not declare."""
    return [
        fault
        for shard in layout.shards
        if (shard.region.tensor not in layout.tensors or shard.place.buffer not in layout.buffers)
        and (fault := shard_fault(layout, shard))
    ]


def _bounds_fault(buffer: Buffer, shard: Shard) -> str | None:
    low, high = shard.place.offset, shard.place.offset
    for length, stride in zip(shard.region.lengths, shard.place.strides, strict=True):
        reach = (length - 1) * stride
        low, high = low + min(reach, 0), high + max(reach, 0)
    if low < 0 or high >= buffer.numel:
        return (
            f"{shard.region.tensor}: elements [{low}, {high}] of buffer {shard.place.buffer.name!r} "
            f"on rank {shard.place.buffer.rank}, which has {buffer.numel}"
        )
    return None


def _coverage_faults(buffer_id: BufferId, buffer: Buffer, shards: Sequence[Shard]) -> list[str]:
    label = _label(buffer_id)
    written = sum(shard.region.numel for shard in shards)
    padding = sum(extent.stop - extent.start for extent in buffer.padding)
    faults = []
    if written + padding != buffer.numel:
        faults.append(f"{label}: {buffer.numel} elements, but {written} are written and {padding} are padding")
    overlap = _first_overlap(buffer, shards)
    if overlap is not None:
        faults.append(f"{label}: element {overlap} is written more than once, or written and padding")
    return faults


def _first_overlap(buffer: Buffer, shards: Sequence[Shard]) -> int | None:
    """The first element that is covered twice, or None. Runs are sorted; with other shards elements are counted."""
    if all(_is_contiguous(shard) for shard in shards):
        intervals = [(shard.place.offset, shard.place.offset + shard.region.numel) for shard in shards]
        return _first_interval_overlap(intervals + [(extent.start, extent.stop) for extent in buffer.padding])
    counts = np.zeros(buffer.numel, dtype=np.int32)
    for shard in shards:
        np.add.at(counts, _elements(shard), 1)
    for extent in buffer.padding:
        counts[extent.start : extent.stop] += 1
    doubled = np.flatnonzero(counts > 1)
    return int(doubled[0]) if doubled.size else None


def _first_interval_overlap(intervals: list[tuple[int, int]]) -> int | None:
    end = 0
    for start, stop in sorted(intervals):
        if start < end:
            return start
        end = stop
    return None


def _is_contiguous(shard: Shard) -> bool:
    """One run of consecutive elements, in whatever order."""
    width = 1
    for stride, length in sorted(zip(shard.place.strides, shard.region.lengths, strict=True)):
        if length > 1 and stride != width:
            return False
        width *= length
    return True


def _elements(shard: Shard) -> np.ndarray:
    """Where each element of a shard lies in its buffer."""
    positions = np.array(shard.place.offset)
    for length, stride in zip(shard.region.lengths, shard.place.strides, strict=True):
        positions = np.add.outer(positions, np.arange(length) * stride)
    return positions


def _label(buffer_id: BufferId) -> str:
    return f"buffer {buffer_id.name!r} on rank {buffer_id.rank}"
