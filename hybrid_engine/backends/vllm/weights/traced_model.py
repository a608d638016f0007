"""A vLLM model as its loader sees it, between its construction and vLLM's processing of its weights.

trace + storages -> `TracedModel.layout`: shards of every storage, its padding, and a complaint for what is not covered
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch

from hybrid_engine.backends.vllm import internals
from hybrid_engine.backends.vllm.weights.derivation import Snapshot, take_snapshot
from hybrid_engine.backends.vllm.weights.groups import STAGED, CommitGroup, find_groups
from hybrid_engine.backends.vllm.weights.tracing import (
    LoadWeights,
    Trace,
    TracedCopy,
    WeightStorage,
    dense_order,
    take_inventory,
    trace_loader,
)
from hybrid_engine.errors import ParameterMismatchError, first_of
from hybrid_engine.records.layout import Buffer, BufferId, Extent, Layout, Place, Shard
from hybrid_engine.records.regions import Region, StridedView, boxes_of_copy, contiguous_strides, subtract_all, union

logger = logging.getLogger(__name__)

Context = Callable[[], contextlib.AbstractContextManager[Any]]
"""What post-load processing runs in: vLLM's current configuration."""


@dataclass(frozen=True)
class TracedModel:
    """What is known before vLLM processes the weights.

    Attributes:
        model: with weights of zero.
        rank: global rank.
        layout: the records of this rank.
        dtypes: of all canonical tensors.
        groups: by name.
        storages: by name, in loader layout.
        staged: canonical tensors that go through the model's own loader at every reshard.
        snapshot: what its modules held.
    """

    model: torch.nn.Module
    rank: int
    layout: Layout
    dtypes: Mapping[str, torch.dtype]
    groups: Mapping[str, CommitGroup]
    storages: Mapping[str, WeightStorage]
    staged: tuple[str, ...]
    snapshot: Snapshot

    def storages_of(self, group: str) -> list[WeightStorage]:
        return [self.storages[name] for name in self.groups[group].storages]

    @cached_property
    def sources(self) -> Mapping[str, frozenset[str]]:
        """Buffer -> canonical tensors that go into it."""
        found: dict[str, set[str]] = {}
        for shard in self.layout.shards:
            found.setdefault(shard.place.buffer.name, set()).add(shard.region.tensor)
        return {name: frozenset(tensors) for name, tensors in found.items()}

    @cached_property
    def unwritten(self) -> Mapping[str, tuple[Extent, ...]]:
        """Buffer -> intervals that no transfer writes: padding, or all of it where the model's loader writes."""
        return {buffer_id.name: buffer.padding for buffer_id, buffer in self.layout.buffers.items()}


def trace_model(
    model: torch.nn.Module, tensors: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, torch.dtype], rank: int
) -> TracedModel:
    """Trace the loader of a freshly constructed model; its weights become zero, those to be processed sentinels.

    Args:
        model: a vLLM model whose weights have not been processed.
        tensors: canonical names and shapes: those of a checkpoint on disk.
        dtypes: of all these tensors.
        rank: global rank.

    Raises ModelError or ParameterMismatchError; the model cannot be used then.
    """
    _materialize(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    records = _records_of(model, tensors, dtypes, rank)
    if staged := records.trace.staged:
        logger.warning(
            "%d canonical tensors cannot be traced and go through the model's own loader at every reshard: %s",
            len(staged),
            ", ".join(staged),
        )
    model.eval()  # as vLLM does later: the mode is none of what the processing changes
    snapshot = take_snapshot(dict(model.named_modules()), records.storages, records.groups)
    return TracedModel(model, rank, records.layout, dtypes, records.groups, records.storages, staged, snapshot)


def trace_without_memory(
    model: torch.nn.Module, tensors: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, torch.dtype], rank: int
) -> Layout:
    """The layout that `trace_model` finds in a model whose weights are on the meta device, where they stay."""
    with torch.device("meta"):
        _materialize(model)
    return _records_of(model, tensors, dtypes, rank).layout


@dataclass(frozen=True)
class _Records:
    """What a loader does with a model: see `TracedModel`."""

    trace: Trace
    storages: Mapping[str, WeightStorage]
    groups: Mapping[str, CommitGroup]
    layout: Layout


def _records_of(
    model: torch.nn.Module, tensors: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, torch.dtype], rank: int
) -> _Records:
    on_meta = [tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.is_meta]
    trace = trace_loader(cast(LoadWeights, model.load_weights), tensors, dtypes, on_meta)
    written = {copy.storage for copy in trace.copies} | {write.storage for write in trace.staged_writes}
    storages = {storage.name: storage for storage in take_inventory(model, written)}
    groups = find_groups(model, list(storages.values()), trace)
    _require_separate_loads(model, tensors, dtypes, on_meta, trace, storages, groups)
    group_of = {buffer: name for name, group in groups.items() for buffer in group.buffers}
    layout = build_layout(rank, tensors, dtypes, list(storages.values()), trace, _vocabulary_padding(model), group_of)
    return _Records(trace, storages, groups, layout)


def _require_separate_loads(
    model: torch.nn.Module,
    tensors: Mapping[str, tuple[int, ...]],
    dtypes: Mapping[str, torch.dtype],
    on_meta: Sequence[torch.Tensor],
    trace: Trace,
    storages: Mapping[str, WeightStorage],
    groups: Mapping[str, CommitGroup],
) -> None:
    """Raise ParameterMismatchError unless the loader writes the staged tensors of a group, and no others, by itself.

    It is called with these alone at each commit, when the rest of the group is filled and other
    groups may be committed.
    """
    names, findings = {storage.key: storage.name for storage in storages.values()}, []
    expected = {(names[write.storage], write.dst) for write in trace.staged_writes if write.storage in names}
    for group in (each for each in groups.values() if each.staged):
        shapes = {name: tensors[name] for name in group.staged}
        alone = trace_loader(cast(LoadWeights, model.load_weights), shapes, dtypes, on_meta)
        writes = [(write.storage, write.dst) for write in alone.staged_writes]
        writes += [(copy.storage, copy.dst) for copy in alone.copies]
        found = {(names.get(key), dst) for key, dst in writes}
        due = {(name, dst) for name, dst in expected if name in group.storages}
        written = {names[key] for key in alone.written & names.keys()}
        problems = [f"leaves some of {name} as it was" for name in sorted({name for name, _ in due - found})]
        problems += [f"writes {name} too" for name in sorted(written - {name for name, _ in due})]
        if problems:
            findings.append(
                f"{first_of(group.staged, 4)}: only the model's own loader can write it, and offered it without the "
                f"other tensors the loader {' and '.join(problems)}. Serve this model with a loader that treats "
                "tensors one by one"
            )
    if findings:
        raise ParameterMismatchError(findings)


def _materialize(model: torch.nn.Module) -> None:
    """Make the weights of layers that vLLM quantises while loading real, in the unquantised layer's layout.

    vLLM leaves them on the meta device until the loader comes. From here on they are loaded ones that wait for their
    post-load processing, which quantises: tracing, planning and writing are those of any other layer.
    """
    for module in model.modules():
        if getattr(getattr(module, "quant_method", None), "uses_meta_device", False):
            info = internals.LAYERWISE_INFO.load()(module)
            internals.MATERIALIZE_LAYER.load()(module, info)
            parameter: Any  # vLLM looks for the loader as an attribute of the parameter
            for parameter in module.parameters(recurse=False):
                parameter.weight_loader = internals.ORIGINAL_LOADER.load()(parameter)
            info.reset()


def _vocabulary_padding(model: torch.nn.Module) -> Mapping[str, tuple[Extent, ...]]:
    """Parameter name -> rows of it beyond the vocabulary, as element intervals of its (row-major) storage."""
    embedding = internals.VOCABULARY_EMBEDDING.load()
    padding = {}
    for module_name, module in model.named_modules():
        if not isinstance(module, embedding):
            continue
        shard = module.shard_indices
        rows = (
            Extent(shard.num_org_elements, shard.num_org_elements_padded),
            Extent(shard.num_org_elements_padded + shard.num_added_elements, shard.num_elements_padded),
        )
        for name, parameter in module._parameters.items():
            if parameter is None or parameter.shape[0] != shard.num_elements_padded:
                continue
            width = parameter.numel() // parameter.shape[0]
            start = parameter.storage_offset()
            padding[f"{module_name}.{name}"] = tuple(
                Extent(start + part.start * width, start + part.stop * width) for part in rows if part.start < part.stop
            )
    return padding


# -- from a trace to the layout ----------------------------------------------------------------------------------------


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

    Args, beside those of `trace_model`:
        padding: storage name -> intervals without a canonical tensor on purpose.
        group_of: storage name, or `STAGED` + tensor name -> commit group.

    Raises ParameterMismatchError with one line for every parameter without a source (in whole or in part), every
    element written twice by different copies, and every copy that goes nowhere.
    """
    findings = _stray_copies(trace, {storage.key for storage in storages})
    copies: dict[int, list[TracedCopy]] = {}
    for copy in trace.copies:
        copies.setdefault(copy.storage, []).append(copy)
    by_loader = {write.storage for write in trace.staged_writes}
    buffers: dict[BufferId, Buffer] = {}
    shards: list[Shard] = []
    for storage in storages:
        writes, faults = _last_writes(storage, copies.get(storage.key, ()))
        pads = padding.get(storage.name, ())
        findings += faults or _uncovered(storage, writes, trace, pads)
        buffer_id = BufferId(rank, storage.name)
        # no transfer writes what the model's loader does: to the plan all of it is padding
        unwritten = (Extent(0, storage.numel),) if storage.key in by_loader else _all_padding(storage, pads)
        buffers[buffer_id] = Buffer(storage.numel, _name_of(storage.dtype), group_of[storage.name], unwritten)
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
    return _Write(copy, _boxes(storage, copy.dst), copy.dst.offset, copy.dst.stop)


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
    covered = sum(box.numel for box in [*boxes, *union(staged)])
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
