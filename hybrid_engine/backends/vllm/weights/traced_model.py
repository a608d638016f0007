"""A vLLM model as its loader sees it, and what vLLM's post-load processing then made of it.

trace_model(model, ...)      between the model's construction and its processing: layout, groups, storages
... vLLM processes the weights, which are zero ...
traced.processed(context)    what is live, what vLLM derived: all that an adaptor needs
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch

from hybrid_engine.backends.vllm.weights import postload
from hybrid_engine.backends.vllm.weights.groups import CommitGroup, find_groups
from hybrid_engine.backends.vllm.weights.quantization import materialize
from hybrid_engine.backends.vllm.weights.storages import WeightStorage, take_inventory
from hybrid_engine.backends.vllm.weights.traced_layout import build_layout
from hybrid_engine.backends.vllm.weights.tracing import LoadWeights, storage_key, trace_loader
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
        live: parameters that are no repacked module's, by storage.
        repacked: those that are, which vLLM may drop: holding them would keep their memory.
        attributes: of every repacked module.
    """

    model: torch.nn.Module
    rank: int
    layout: Layout
    dtypes: Mapping[str, torch.dtype]
    groups: Mapping[str, CommitGroup]
    storages: Mapping[str, WeightStorage]
    staged: tuple[str, ...]
    live: Mapping[str, torch.Tensor]
    repacked: Mapping[str, weakref.ref[torch.Tensor]]
    attributes: Mapping[str, frozenset[str]]

    @cached_property
    def sources(self) -> Mapping[str, frozenset[str]]:
        """Buffer -> canonical tensors that go into it."""
        found: dict[str, set[str]] = {}
        for shard in self.layout.shards:
            found.setdefault(shard.place.buffer.name, set()).add(shard.region.tensor)
        return {name: frozenset(tensors) for name, tensors in found.items()}

    def processed(self, context: Context, act_dtype: torch.dtype) -> ProcessedModel:
        """See what vLLM's post-load processing, which is over, has changed.

        Args:
            context: entered around every later run of it.
            act_dtype: of the model's activations, which attention's processing is told.
        """
        modules = dict(self.model.named_modules())
        live = dict(self.live)
        for name, parameter in self.repacked.items():
            tensor, storage = parameter(), self.storages[name]
            is_bound = all(binding.find(modules) is tensor for binding in storage.bindings)
            if tensor is not None and is_bound and storage_key(tensor) == storage.key:
                live[name] = tensor
        derived = {name: _attributes(modules[name]) - before for name, before in self.attributes.items()}
        return ProcessedModel(self, modules, live, derived, context, act_dtype)


@dataclass(frozen=True)
class ProcessedModel:
    """What is known once vLLM has processed the weights.

    Attributes:
        traced: what was known before.
        modules: by name.
        live: storage -> its parameter, where vLLM computes with what its loader fills: new weights are written there,
            for others may refer to it. Some are a repacked module's (a router's bias, a head).
        derived: repacked module -> attributes that the processing added, which hold something made of weights.
        context: see `Context`.
        act_dtype: of the model's activations.
    """

    traced: TracedModel
    modules: Mapping[str, torch.nn.Module]
    live: Mapping[str, torch.Tensor]
    derived: Mapping[str, frozenset[str]]
    context: Context
    act_dtype: torch.dtype


def trace_model(
    model: torch.nn.Module, tensors: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, torch.dtype], rank: int
) -> TracedModel:
    """Trace the loader of a freshly constructed model; its parameters are set to zero.

    Args:
        model: a vLLM model whose weights have not been processed.
        tensors: canonical names and shapes: those of a checkpoint on disk.
        dtypes: of all these tensors.
        rank: global rank.

    Raises ModelError or ParameterMismatchError; the model cannot be used then.
    """
    materialize(model)
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
    groups = find_groups(model, list(storages.values()), trace, next(model.parameters()).device)
    group_of = {buffer: name for name, group in groups.items() for buffer in group.buffers}
    padding = postload.vocabulary_padding(model)
    layout = build_layout(rank, tensors, dtypes, list(storages.values()), trace, padding, group_of)

    modules = dict(model.named_modules())
    attributes = {name: _attributes(modules[name]) for group in groups.values() for name in group.repacked}
    live, repacked = {}, {}
    for name, storage in storages.items():
        tensor = storage.bindings[0].find(modules)
        assert tensor is not None, name
        if any(binding.module in attributes for binding in storage.bindings):
            repacked[name] = weakref.ref(tensor)
        else:
            live[name] = tensor
    return TracedModel(model, rank, layout, dtypes, groups, storages, trace.staged, live, repacked, attributes)


def unwritten_extents(layout: Layout) -> dict[str, tuple[Extent, ...]]:
    """Buffer name -> intervals that no transfer writes: padding, or all of it where the model's loader writes."""
    num_written: Counter[str] = Counter()
    for shard in layout.shards:
        num_written[shard.place.buffer.name] += shard.region.numel
    unwritten = {}
    for buffer_id, buffer in layout.buffers.items():
        num_padding = sum(extent.stop - extent.start for extent in buffer.padding)
        is_whole = num_written[buffer_id.name] + num_padding == buffer.numel
        unwritten[buffer_id.name] = buffer.padding if is_whole else (Extent(0, buffer.numel),)
    return unwritten


def _attributes(module: torch.nn.Module) -> frozenset[str]:
    """Names of plain attributes, parameters and buffers."""
    return frozenset({*module.__dict__, *module._parameters, *module._buffers})
