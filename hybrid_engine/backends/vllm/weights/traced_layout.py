"""From a trace to the layout: shards of every storage, its padding, and a complaint for whatever is not covered."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from hybrid_engine.backends.vllm.weights.tracing import Trace, TracedCopy, WeightStorage, dense_order
from hybrid_engine.errors import ParameterMismatchError
from hybrid_engine.records.layout import Buffer, BufferId, Extent, Layout, Place, Shard
from hybrid_engine.records.regions import (
    Region,
    StridedView,
    boxes_of_copy,
    contiguous_strides,
    subtract_all,
    union,
)

STAGED = "staged:"
"""Prefix of buffers that hold a whole canonical tensor for the model's own loader."""


@dataclass(frozen=True, slots=True)
class _Write:
    """A traced copy with the boxes of the parameter that it writes; `start` and `stop` bound them (elements)."""

    copy: TracedCopy
    boxes: tuple[Region, ...]
    start: int
    stop: int


def build_layout(
    rank: int,
    tensors: Mapping[str, tuple[int, ...]],
    dtypes: Mapping[str, torch.dtype],
    storages: Sequence[WeightStorage],
    trace: Trace,
    padding: Mapping[str, tuple[Extent, ...]],
    group_of: Mapping[str, str],
) -> Layout:
    """The records of one rank.

    Args:
        rank: global rank.
        tensors: canonical name -> shape, as offered to the loader.
        dtypes: canonical name -> its dtype; staged buffers have it.
        storages: the model's, see `take_inventory`.
        trace: what the loader does.
        padding: storage name -> intervals without a canonical tensor on purpose.
        group_of: storage name, or `STAGED` + tensor name -> commit group.

    Raises ParameterMismatchError with one line for every parameter without a source (in whole or in part), every
    element written twice by different copies, and every copy that goes nowhere.
    """
    findings = _stray_copies(trace, {storage.key for storage in storages})
    copies: dict[int, list[TracedCopy]] = {}
    for copy in trace.copies:
        copies.setdefault(copy.storage, []).append(copy)
    buffers: dict[BufferId, Buffer] = {}
    shards: list[Shard] = []
    for storage in storages:
        writes, faults = _last_writes(storage, copies.get(storage.key, ()))
        pads = padding.get(storage.name, ())
        findings += faults or _uncovered(storage, writes, trace, pads)
        buffer_id = BufferId(rank, storage.name)
        buffers[buffer_id] = Buffer(
            storage.numel,
            _name_of(storage.dtype),
            group_of[storage.name],
            _all_padding(storage, pads),
        )
        for write in writes:
            shards += _shards_of(write.copy, tensors[write.copy.tensor], buffer_id)
    for name in trace.staged:
        buffer_id, shape = BufferId(rank, STAGED + name), tensors[name]
        buffers[buffer_id] = Buffer(math.prod(shape), _name_of(dtypes[name]), group_of[STAGED + name])
        if math.prod(shape):
            region = Region(name, (0,) * len(shape), shape)
            shards.append(Shard(region, Place(buffer_id, 0, contiguous_strides(shape))))
    if findings:
        raise ParameterMismatchError(findings)
    return Layout(dict(tensors), buffers, tuple(shards))


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _shards_of(copy: TracedCopy, shape: tuple[int, ...], buffer_id: BufferId) -> list[Shard]:
    return [
        Shard(Region(copy.tensor, box.offsets, box.lengths), Place(buffer_id, box.dst_offset, box.dst_strides))
        for box in boxes_of_copy(shape, copy.src, copy.dst)
    ]


def _stray_copies(trace: Trace, known: set[int]) -> list[str]:
    return [
        f"{copy.tensor}: the loader copies it to a tensor of shape {copy.dst.shape} that is no parameter or buffer of "
        "the model, so where it ends up is unknown"
        for copy in trace.copies
        if copy.storage not in known
    ]


def _boxes(storage: WeightStorage, dst: StridedView) -> tuple[Region, ...]:
    """The boxes of the parameter (its dims ordered from the outermost stride in) that a view of its storage is."""
    order = dense_order(storage.view)
    assert order is not None, storage.name
    shape = tuple(storage.view.shape[dim] for dim in order)
    local = StridedView(dst.offset - storage.view.offset, dst.shape, dst.strides)
    flat = StridedView(0, dst.shape, (0,) * len(dst.shape))
    return tuple(Region(storage.name, box.offsets, box.lengths) for box in boxes_of_copy(shape, local, flat))


def _write_of(storage: WeightStorage, copy: TracedCopy) -> _Write | None:
    if not math.prod(copy.dst.shape):
        return None
    span = sum((size - 1) * stride for size, stride in zip(copy.dst.shape, copy.dst.strides, strict=True))
    return _Write(copy, _boxes(storage, copy.dst), copy.dst.offset, copy.dst.offset + span + 1)


def _last_writes(storage: WeightStorage, copies: Sequence[TracedCopy]) -> tuple[list[_Write], list[str]]:
    """The copies into a storage without those that a later one covers whole; faults for other overlaps."""
    writes = [write for copy in copies if (write := _write_of(storage, copy))]
    order = sorted(range(len(writes)), key=lambda index: writes[index].start)
    overwritten: set[int] = set()
    faults: list[str] = []
    active: list[int] = []
    for index in order:
        active = [other for other in active if writes[other].stop > writes[index].start]
        for other in active:
            earlier, later = sorted((index, other))
            if not _overlap(writes[earlier], writes[later]):
                continue
            if subtract_all(writes[earlier].boxes, writes[later].boxes):
                faults.append(
                    f"{storage.name}: {writes[earlier].copy.tensor} and {writes[later].copy.tensor} write some of the "
                    "same elements"
                )
            else:
                overwritten.add(earlier)
        active.append(index)
    return [write for index, write in enumerate(writes) if index not in overwritten], faults


def _overlap(one: _Write, other: _Write) -> bool:
    return any(a.intersect(b) for a in one.boxes for b in other.boxes)


def _uncovered(storage: WeightStorage, writes: Sequence[_Write], trace: Trace, padding: Sequence[Extent]) -> list[str]:
    """A complaint when elements of the parameter have neither a canonical tensor nor a reason to have none."""
    boxes = [box for write in writes for box in write.boxes]
    staged_writes = [write for write in trace.staged_writes if write.storage == storage.key]
    staged = [box for write in staged_writes for box in _boxes(storage, write.dst)]
    covered = sum(box.numel for box in boxes)
    if staged:
        covered += sum(box.numel for box in subtract_all(union(staged), boxes))
    num_padding = sum(extent.stop - extent.start for extent in padding)
    if covered + num_padding == storage.num_weights:
        return []
    sources = sorted({write.copy.tensor for write in writes})
    where = f"(from {', '.join(sources[:3])}{', …' if len(sources) > 3 else ''})" if sources else "(nothing offered)"
    return [
        f"{storage.name}: a vLLM parameter without a source: checkpoint tensors fill {covered} {where} of its "
        f"{storage.num_weights} elements and {num_padding} are padding. Offer the missing tensors under the names they "
        "have in a checkpoint of this config"
    ]


def _all_padding(storage: WeightStorage, padding: Sequence[Extent]) -> tuple[Extent, ...]:
    """Declared padding and what an allocator left before and after the parameter."""
    ends = (
        Extent(0, storage.view.offset),
        *padding,
        Extent(storage.view.offset + storage.num_weights, storage.numel),
    )
    return tuple(extent for extent in ends if extent.start < extent.stop)
