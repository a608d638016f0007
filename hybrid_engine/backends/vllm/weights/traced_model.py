"""A vLLM model as its loader sees it, between its construction and vLLM's processing of its weights."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch

from hybrid_engine.backends.vllm import internals
from hybrid_engine.backends.vllm.weights.derivation import Snapshot, take_snapshot
from hybrid_engine.backends.vllm.weights.groups import CommitGroup, find_groups
from hybrid_engine.backends.vllm.weights.traced_layout import build_layout
from hybrid_engine.backends.vllm.weights.tracing import LoadWeights, WeightStorage, take_inventory, trace_loader
from hybrid_engine.records.layout import Extent, Layout

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
        num_written: Counter[str] = Counter()
        for shard in self.layout.shards:
            num_written[shard.place.buffer.name] += shard.region.numel
        found = {}
        for buffer_id, buffer in self.layout.buffers.items():
            num_padding = sum(extent.stop - extent.start for extent in buffer.padding)
            is_whole = num_written[buffer_id.name] + num_padding == buffer.numel
            found[buffer_id.name] = buffer.padding if is_whole else (Extent(0, buffer.numel),)
        return found


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
    trace = trace_loader(cast(LoadWeights, model.load_weights), tensors, dtypes)
    if trace.staged:
        logger.warning(
            "%d canonical tensors cannot be traced and go through the model's own loader at every reshard: %s",
            len(trace.staged),
            ", ".join(trace.staged),
        )
    written = {copy.storage for copy in trace.copies} | {write.storage for write in trace.staged_writes}
    storages = {storage.name: storage for storage in take_inventory(model, written)}
    groups = find_groups(model, list(storages.values()), trace)
    group_of = {buffer: name for name, group in groups.items() for buffer in group.buffers}
    layout = build_layout(rank, tensors, dtypes, list(storages.values()), trace, _vocabulary_padding(model), group_of)
    model.eval()  # as vLLM does later: the mode is none of what the processing changes
    snapshot = take_snapshot(dict(model.named_modules()), storages, groups)
    return TracedModel(model, rank, layout, dtypes, groups, storages, trace.staged, snapshot)


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
