"""A vLLM model between its construction and vLLM's processing of its weights.

trace + storages -> `TracedModel.layout`: shards of every storage, its padding, and a fault for
every element without a source
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
from hybrid_engine.backends.vllm.weights.derivation import ModelSnapshot, take_snapshot
from hybrid_engine.backends.vllm.weights.groups import STAGED, CommitGroup, find_groups
from hybrid_engine.backends.vllm.weights.tracing import (
    Dtypes,
    LoadWeights,
    Trace,
    TracedCopy,
    WeightStorage,
    dense_order,
    storage_key,
    take_inventory,
    trace_loader,
)
from hybrid_engine.errors import ParameterMismatchError, first_of
from hybrid_engine.records.layout import Buffer, BufferId, Extent, Layout, Shard
from hybrid_engine.records.regions import (
    LocalBox,
    Region,
    Shapes,
    StridedView,
    boxes_of_copy,
    subtract_all,
    union,
)

logger = logging.getLogger(__name__)

Context = Callable[[], contextlib.AbstractContextManager[Any]]
"""Makes the context of post-load processing: vLLM's current configuration."""


@dataclass(frozen=True)
class TracedModel:
    """A model before vLLM processes its weights, and the trace of its loader.

    Attributes:
        model: vLLM's model, with weights of zero.
        rank: global rank.
        layout: the records of this rank.
        dtypes: dtypes of all canonical tensors.
        groups: commit groups by name.
        storages: storages by name, in loader layout.
        staged: canonical tensors that go through the model's own loader at every reshard.
        snapshot: contents of the modules.
    """

    model: torch.nn.Module
    rank: int
    layout: Layout
    dtypes: Dtypes
    groups: Mapping[str, CommitGroup]
    storages: Mapping[str, WeightStorage]
    staged: tuple[str, ...]
    snapshot: ModelSnapshot

    def storages_of(self, group: str) -> list[WeightStorage]:
        return [self.storages[name] for name in self.groups[group].storages]

    @cached_property
    def sources(self) -> Mapping[str, frozenset[str]]:
        """Buffer -> canonical tensors that fill it."""
        sources: dict[str, set[str]] = {}
        for shard in self.layout.shards:
            sources.setdefault(shard.place.buffer.name, set()).add(shard.region.tensor)
        return {name: frozenset(tensors) for name, tensors in sources.items()}

    @cached_property
    def unwritten(self) -> Mapping[str, tuple[Extent, ...]]:
        """Buffer -> intervals that no transfer writes.

        These are padding, or the whole buffer if the model's loader writes it.
        """
        return {buffer_id.name: buffer.padding for buffer_id, buffer in self.layout.buffers.items()}


def trace_model(
    model: torch.nn.Module,
    tensors: Shapes,
    dtypes: Dtypes,
    rank: int,
    may_lack: bool = False,
) -> TracedModel:
    """Trace the loader of a new model, and set its weights to zero.

    Weights that vLLM will process get sentinels instead of zeros.

    Args:
        model: a vLLM model whose weights have not been processed.
        tensors: canonical names and shapes, as in a checkpoint on disk.
        dtypes: dtypes of all these tensors.
        rank: global rank.
        may_lack: whether whole parameters may have no source, because vLLM will replace them.

    Raises ModelError or ParameterMismatchError; the model is unusable then.
    """
    _materialize(model)
    defaults = _scales_of_caches(model)
    activations = _scales_of_activations(model)
    # vLLM's mark of a scale that no checkpoint has filled.
    absent = {key for key, parameter in activations.items() if parameter.isnan().all()}
    with torch.no_grad():
        for parameter in model.parameters():
            # Defaults keep the values that vLLM derives scales from, and NaN keeps its meaning.
            if storage_key(parameter) not in defaults | absent:
                parameter.zero_()
        for key, parameter in activations.items():
            if key not in absent:
                parameter.fill_(1)
    records = _records_of(model, tensors, dtypes, rank, may_lack)
    staged = records.trace.staged
    if staged:
        logger.warning(
            "%d canonical tensors cannot be traced and go through the model's "
            "own loader at every reshard: %s",
            len(staged),
            ", ".join(staged),
        )
    # vLLM does this later; the snapshot must not show the mode as a change of the processing.
    model.eval()
    modules = dict(model.named_modules())
    return TracedModel(
        model=model,
        rank=rank,
        layout=records.layout,
        dtypes=dtypes,
        groups=records.groups,
        storages=records.storages,
        staged=staged,
        snapshot=take_snapshot(modules, records.storages, records.groups),
    )


def trace_without_memory(
    model: torch.nn.Module,
    tensors: Shapes,
    dtypes: Dtypes,
    rank: int,
) -> Layout:
    """Return the layout of `trace_model` for a model on the meta device; its weights stay there."""
    with torch.device("meta"):
        _materialize(model)
    return _records_of(model, tensors, dtypes, rank).layout


def matrices_of_modules(
    model: torch.nn.Module,
    tensors: Shapes,
    dtypes: Dtypes,
) -> dict[str, list[list[str]]]:
    """Return, by module, the tensors that the loader copies to its matrices, as far as fused.

    Tensors in one list share a matrix, which is that of one expert in a parameter of several.

    Args:
        model: is on the meta device, and not quantised.
        tensors, dtypes: see `trace_model`.
    """
    on_meta = [tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.is_meta]
    trace = trace_loader(cast(LoadWeights, model.load_weights), tensors, dtypes, on_meta)
    matrices = {
        storage_key(parameter): (name.rpartition(".")[0], parameter)
        for name, parameter in model.named_parameters()
        if parameter.dim() >= 2
    }
    fused: dict[str, dict[tuple[int, int], set[str]]] = {}
    for copy in trace.copies:
        if copy.storage in matrices:
            module, parameter = matrices[copy.storage]
            # A parameter of experts is [E, rows, columns]: a step of dim 0 is one expert.
            number = copy.dst.offset // parameter.stride(0) if parameter.dim() > 2 else 0
            of_module = fused.setdefault(module, {})
            of_module.setdefault((copy.storage, number), set()).add(copy.tensor)
    return {
        module: [sorted(names) for names in of_module.values()]
        for module, of_module in fused.items()
    }


@dataclass(frozen=True)
class _Records:
    """Results of tracing a loader; see `TracedModel`."""

    trace: Trace
    storages: Mapping[str, WeightStorage]
    groups: Mapping[str, CommitGroup]
    layout: Layout


def _records_of(
    model: torch.nn.Module,
    tensors: Shapes,
    dtypes: Dtypes,
    rank: int,
    may_lack: bool = False,
) -> _Records:
    on_meta = [tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.is_meta]
    load_weights = cast(LoadWeights, model.load_weights)
    trace = trace_loader(load_weights, tensors, dtypes, on_meta)
    written = {copy.storage for copy in trace.copies}
    written |= {write.storage for write in trace.staged_writes}
    # Buffers that the loader does not write are constants, not weights.
    optional = _scales_of_caches(model) | _scales_of_activations(model).keys()
    inventory = take_inventory(model, written, optional - written)
    storages = {storage.name: storage for storage in inventory}
    groups = find_groups(model, list(storages.values()), trace)
    _require_separate_loads(load_weights, tensors, dtypes, on_meta, trace, storages, groups)
    layout = build_layout(
        rank,
        tensors,
        dtypes,
        list(storages.values()),
        trace,
        padding=_vocabulary_padding(model),
        group_of={buffer: name for name, group in groups.items() for buffer in group.buffers},
        may_lack=may_lack,
    )
    return _Records(trace, storages, groups, layout)


def _require_separate_loads(
    load_weights: LoadWeights,
    tensors: Shapes,
    dtypes: Dtypes,
    on_meta: Sequence[torch.Tensor],
    trace: Trace,
    storages: Mapping[str, WeightStorage],
    groups: Mapping[str, CommitGroup],
) -> None:
    """Raise ParameterMismatchError unless the loader can write each group's staged tensors alone.

    At each commit it is called with the staged tensors of one group, when the rest of that group is
    filled and other groups may be committed. So it must write all of them, and nothing else.
    """
    names = {storage.key: storage.name for storage in storages.values()}
    expected = {
        (names[write.storage], write.dst) for write in trace.staged_writes if write.storage in names
    }
    findings = []
    # Each group by itself, as at a commit.
    for group in groups.values():
        if not group.staged:
            continue
        shapes = {name: tensors[name] for name in group.staged}
        alone = trace_loader(load_weights, shapes, dtypes, on_meta)
        actual = {(names.get(write.storage), write.dst) for write in alone.staged_writes}
        # Offered alone, a staged tensor may even be traced exactly, which is as good.
        actual |= {(names.get(copy.storage), copy.dst) for copy in alone.copies}
        due = {(name, dst) for name, dst in expected if name in group.storages}
        incomplete = {name for name, _ in due - actual}
        written = {names[key] for key in alone.written & names.keys()}
        surplus = written - {name for name, _ in due}
        problems = [f"leaves some of {name} as it was" for name in sorted(incomplete)]
        problems += [f"also writes {name}" for name in sorted(surplus)]
        if problems:
            findings.append(
                f"{first_of(group.staged, 4)}: only the model's own loader can write it, "
                f"and offered it without the other tensors the loader {' and '.join(problems)}. "
                "Serve this model with a loader that treats tensors one by one"
            )
    if findings:
        raise ParameterMismatchError(findings)


def _materialize(model: torch.nn.Module) -> None:
    """Allocate the weights of layers that vLLM quantises while loading, in unquantised layout.

    vLLM leaves them on the meta device until its loader arrives. From here on they are loaded
    weights that await their post-load processing, which quantises them. So tracing, planning and
    writing treat them as the weights of any other layer.
    """
    for module in model.modules():
        if getattr(getattr(module, "quant_method", None), "uses_meta_device", False):
            info = internals.LAYERWISE_INFO(module)
            internals.MATERIALIZE_LAYER(module, info)
            parameter: Any  # vLLM looks for the loader as an attribute of the parameter
            for parameter in module.parameters(recurse=False):
                parameter.weight_loader = internals.ORIGINAL_LOADER(parameter)
            info.reset()


def _scales_of_caches(model: torch.nn.Module) -> frozenset[int]:
    """Return the storages of the parameters that attention has for the scales of its cache.

    A checkpoint may lack them: vLLM then uses defaults, which it derives from their initial values.
    """
    method = internals.CACHE_METHOD
    return frozenset(
        storage_key(parameter)
        for module in model.modules()
        if isinstance(getattr(module, "quant_method", None), method)
        for parameter in module.parameters(recurse=False)
    )


def _scales_of_activations(model: torch.nn.Module) -> dict[int, torch.nn.Parameter]:
    """Return the parameters that layers have for scales of activations and do not need.

    vLLM creates them for 4-bit weights although activations stay as they are. A checkpoint lacks
    them.
    """
    return {
        storage_key(parameter): parameter
        for module in model.modules()
        if _leaves_activations(getattr(module, "quant_method", None))
        for name, parameter in module.named_parameters(recurse=False)
        if name.endswith(("input_scale", "input_global_scale"))
    }


def _leaves_activations(method: object) -> bool:
    """Return whether a method of a layer quantises weights only, by the attributes it may have."""
    spec = getattr(method, "spec", None)
    return getattr(method, "use_a16", spec is not None and spec.activation is None)


def _vocabulary_padding(model: torch.nn.Module) -> Mapping[str, tuple[Extent, ...]]:
    """Return the rows beyond the vocabulary: parameter name -> element intervals of its storage.

    The storage is row-major.
    """
    embedding = internals.VOCABULARY_EMBEDDING
    padding = {}
    for module_name, module in model.named_modules():
        if not isinstance(module, embedding):
            continue
        # Rows: original vocabulary, its padding, added vocabulary, its padding.
        shard = module.shard_indices
        end_of_added = shard.num_org_elements_padded + shard.num_added_elements
        rows = (
            Extent(shard.num_org_elements, shard.num_org_elements_padded),
            Extent(end_of_added, shard.num_elements_padded),
        )
        for name, parameter in module._parameters.items():
            # Only parameters with a row per token: a scale of the whole weight has another length.
            if parameter is None or parameter.shape[0] != shard.num_elements_padded:
                continue
            width = parameter.numel() // parameter.shape[0]
            start = parameter.storage_offset()
            padding[f"{module_name}.{name}"] = tuple(
                Extent(start + part.start * width, start + part.stop * width)
                for part in rows
                if part.start < part.stop
            )
    return padding


# -- from a trace to the layout --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Write:
    """A traced copy with the boxes of the parameter that it writes.

    All boxes lie between elements `start` and `stop` of the storage.
    """

    copy: TracedCopy
    boxes: tuple[Region, ...]
    start: int
    stop: int


def build_layout(
    rank: int,
    tensors: Shapes,
    dtypes: Dtypes,
    storages: Sequence[WeightStorage],
    trace: Trace,
    padding: Mapping[str, tuple[Extent, ...]],
    group_of: Mapping[str, str],
    may_lack: bool = False,
) -> Layout:
    """Return the records of one rank.

    Args:
        rank: global rank.
        tensors: canonical names and shapes.
        dtypes: dtypes of these tensors.
        storages: the model's storages.
        trace: trace of the model's loader.
        padding: storage name -> intervals that have no canonical tensor on purpose.
        group_of: storage name, or `STAGED` + tensor name -> commit group.
        may_lack: see `trace_model`.

    Raises ParameterMismatchError with a line for every parameter without a source (in whole or in
    part), every element written twice by different copies, and every copy to an unknown storage.
    """
    known = {storage.key for storage in storages}
    findings = [
        f"{copy.tensor}: the loader copies it to a tensor of shape {copy.dst.shape} that is not a "
        "parameter or buffer of the model, so its destination is unknown"
        for copy in trace.copies
        if copy.storage not in known
    ]
    copies: dict[int, list[TracedCopy]] = {}
    for copy in trace.copies:
        copies.setdefault(copy.storage, []).append(copy)
    by_loader = {write.storage for write in trace.staged_writes}
    buffers: dict[BufferId, Buffer] = {}
    shards: list[Shard] = []
    for storage in storages:
        writes, faults = _last_writes(storage, copies.get(storage.key, ()))
        pads = padding.get(storage.name, ())
        lacks = may_lack and not writes and storage.key not in by_loader
        if not lacks:
            findings += faults or _uncovered(storage, writes, trace, pads)
        buffer_id = BufferId(rank, storage.name)
        if lacks or storage.key in by_loader:
            # No transfer writes it: to the plan all of it is padding.
            unwritten: tuple[Extent, ...] = (Extent(0, storage.numel),)
        else:
            # The declared padding, and elements that an allocator left around the parameter.
            start = storage.view.offset
            around = (Extent(0, start), *pads, Extent(start + storage.num_weights, storage.numel))
            unwritten = tuple(extent for extent in around if extent.start < extent.stop)
        dtype = _name_of(storage.dtype)
        buffers[buffer_id] = Buffer(storage.numel, dtype, group_of[storage.name], unwritten)
        for write in writes:
            shape = tensors[write.copy.tensor]
            for box in boxes_of_copy(shape, write.copy.src, write.copy.dst):
                shards.append(Shard.of(write.copy.tensor, box, buffer_id))
    for name in trace.staged:
        shape = tensors[name]
        numel = math.prod(shape)
        buffer_id = BufferId(rank, STAGED + name)
        buffers[buffer_id] = Buffer(numel, _name_of(dtypes[name]), group_of[STAGED + name])
        if numel:
            shards.append(Shard.of(name, LocalBox.whole(shape), buffer_id))
    if findings:
        raise ParameterMismatchError(findings)
    return Layout(dict(tensors), buffers, tuple(shards))


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _boxes(storage: WeightStorage, dst: StridedView) -> tuple[Region, ...]:
    """Return view `dst` of a storage as boxes of its parameter.

    The parameter's dims are ordered from the outermost stride in.
    """
    order = dense_order(storage.view)
    assert order is not None, storage.name
    shape = tuple(storage.view.shape[dim] for dim in order)
    local = StridedView(dst.offset - storage.view.offset, dst.shape, dst.strides)
    # Strides of 0 split nothing, so that `local` alone decides the boxes.
    flat = StridedView(0, dst.shape, (0,) * len(dst.shape))
    boxes = boxes_of_copy(shape, local, flat)
    return tuple(Region(storage.name, box.offsets, box.lengths) for box in boxes)


def _last_writes(
    storage: WeightStorage,
    copies: Sequence[TracedCopy],
) -> tuple[list[_Write], list[str]]:
    """Return the copies into a storage that no later one covers, and faults for other overlaps."""
    writes = [
        _Write(copy, _boxes(storage, copy.dst), copy.dst.offset, copy.dst.stop)
        for copy in copies
        if math.prod(copy.dst.shape)
    ]
    order = sorted(range(len(writes)), key=lambda index: writes[index].start)
    overwritten: set[int] = set()
    faults: list[str] = []
    # A sweep over the storage: only writes whose intervals overlap are compared box by box.
    active: list[int] = []
    for index in order:
        # `order` is by start, so a write that ends before this one starts meets no later one
        # either.
        active = [other for other in active if writes[other].stop > writes[index].start]
        for other in active:
            # Indices are in the order of the loader, whatever the order of the sweep.
            earlier = writes[min(index, other)]
            later = writes[max(index, other)]
            if not any(a.intersect(b) for a in earlier.boxes for b in later.boxes):
                continue
            # A later write may replace an earlier one whole: then the later one counts. In part,
            # neither of the two says what the elements are.
            if subtract_all(earlier.boxes, later.boxes):
                faults.append(
                    f"{storage.name}: {earlier.copy.tensor} and {later.copy.tensor} "
                    "write some of the same elements"
                )
            else:
                overwritten.add(min(index, other))
        active.append(index)
    last = [write for index, write in enumerate(writes) if index not in overwritten]
    return last, faults


def _uncovered(
    storage: WeightStorage,
    writes: Sequence[_Write],
    trace: Trace,
    padding: Sequence[Extent],
) -> list[str]:
    """Return a fault if elements of the parameter have no canonical tensor and are not padding."""
    boxes = [box for write in writes for box in write.boxes]
    staged_writes = [write for write in trace.staged_writes if write.storage == storage.key]
    # Staged writes may overlap, traced ones do not.
    staged = union([box for write in staged_writes for box in _boxes(storage, write.dst)])
    covered = sum(box.numel for box in [*boxes, *staged])
    num_padding = sum(extent.stop - extent.start for extent in padding)
    # Nothing is counted twice here: traced boxes are disjoint, or `_last_writes` has reported them.
    if covered + num_padding == storage.num_weights:
        return []
    sources = sorted({write.copy.tensor for write in writes})
    if sources:
        origin = f"(from {', '.join(sources[:3])}{', …' if len(sources) > 3 else ''})"
    else:
        origin = "(nothing offered)"
    return [
        f"{storage.name}: a vLLM parameter without a source: checkpoint tensors fill {covered} "
        f"{origin} of its {storage.num_weights} elements and {num_padding} are padding. Offer the "
        "missing tensors under the names they have in a checkpoint of this config"
    ]
