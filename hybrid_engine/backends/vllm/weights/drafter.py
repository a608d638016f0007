"""A drafter of speculative decoding that a switch fills: vLLM's second model, joined to the first.

    traced = trace_drafter(drafter, ...)    its names begin with "drafter."
    ... vLLM processes it, then replaces its embedding and its head by the main model's ...
    model = join(main, drafter)             one ProcessedModel with the groups of both

vLLM shares embedding and head once both models are loaded. So the trace requires no sources for
whole parameters, and `join` drops the groups of modules that vLLM has replaced: a shared tensor is
written once, in the main model. All others must have a source.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Any, cast

import torch

from hybrid_engine.backends.vllm.weights.groups import CommitGroup
from hybrid_engine.backends.vllm.weights.processed_model import ProcessedModel
from hybrid_engine.backends.vllm.weights.traced_model import TracedModel, trace_model
from hybrid_engine.backends.vllm.weights.tracing import Dtypes, LoadWeights
from hybrid_engine.errors import ModelError, ParameterMismatchError, first_of
from hybrid_engine.records.layout import Layout
from hybrid_engine.records.regions import Shapes

_PREFIX = "drafter."
"""Prefix of the names of a drafter's modules and buffers, which occur in no main model."""


class _DrafterScope(torch.nn.Module):
    """A parent of a drafter, which gives its modules the prefix."""

    def __init__(self, drafter: torch.nn.Module) -> None:
        super().__init__()
        self.drafter = drafter

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
        return cast(LoadWeights, self.drafter.load_weights)(weights)


def trace_drafter(
    model: torch.nn.Module,
    tensors: Shapes,
    dtypes: Dtypes,
    rank: int,
) -> TracedModel:
    """Trace a drafter's loader as `trace_model` does; whole parameters may lack a source.

    Raises ModelError or ParameterMismatchError; the model is unusable then.
    """
    traced = trace_model(_DrafterScope(model), tensors, dtypes, rank, may_lack=True)
    if traced.staged:
        raise ModelError(
            f"{first_of(traced.staged, 4)}: only the drafter's own loader can write it. Leave "
            "generate_config.vllm.speculative_config out",
            code="drafter-staged",
        )
    return traced


def trace_new(
    model: torch.nn.Module,
    config: Any,
    tensors: Shapes,
    dtypes: Dtypes,
    rank: int,
    without_lora: str,
) -> TracedModel:
    """Trace a main model or a drafter, as `trace_model` does.

    Args:
        config: its vLLM `ModelConfig`.
        without_lora: how to build vLLM without LoRA; "" if it is built so.
    """
    if config.runner_type == "draft":
        return trace_drafter(model, tensors, dtypes, rank)
    traced = trace_model(model, tensors, dtypes, rank)
    if traced.staged and without_lora:
        raise ModelError(
            f"{', '.join(traced.staged)} can only be written by the model's own loader, which does "
            f"not know the layers that LoRA wraps: {without_lora}",
            code="staged-with-lora",
        )
    return traced


def join(main: ProcessedModel, drafter: ProcessedModel) -> ProcessedModel:
    """Return one model with the groups of both; call once vLLM has shared modules between them.

    Raises ModelError for a group of which vLLM has replaced only some modules, and
    ParameterMismatchError for the drafter's parameters without a source.
    """
    present = dict(drafter.traced.model.named_modules())
    modules = {
        name: module
        for name, module in drafter.modules.items()
        # "" is `_DrafterScope`, no module of vLLM's. A module that vLLM replaced is another object
        # now.
        if name and present.get(name) is module
    }
    groups = _kept_groups(drafter.traced, modules)
    names = [name for group in groups.values() for name in group.storages]
    derivations = {name: drafter.derivations[name] for name in groups.keys() & drafter.derivations}
    constants = {name: drafter.constants[name] for name in modules.keys() & drafter.constants}
    traced = replace(
        main.traced,
        layout=_joined_layout(main.traced.layout, drafter.traced, names),
        groups={**main.traced.groups, **groups},
        storages={
            **main.traced.storages,
            **{name: drafter.traced.storages[name] for name in names},
        },
    )
    return replace(
        main,
        traced=traced,
        modules={**main.modules, **modules},
        live={**main.live, **{name: drafter.live[name] for name in names if name in drafter.live}},
        derivations={**main.derivations, **derivations},
        in_place=main.in_place | drafter.in_place.intersection(names),
        constants={**main.constants, **constants},
        # A collective processing of either model needs a barrier with a group.
        barrier=main.barrier if main.barrier.is_collective else drafter.barrier,
        forward_state=main.forward_state.joined(drafter.forward_state, modules),
        contexts={derivation.first: drafter.context for derivation in derivations.values()},
    )


def without_drafter(layout: Layout) -> Layout:
    """Return the records of the main model."""
    shards = (shard for shard in layout.shards if not shard.place.buffer.name.startswith(_PREFIX))
    return replace(layout, shards=tuple(shards))


def _kept_groups(traced: TracedModel, modules: Collection[str]) -> dict[str, CommitGroup]:
    """Return the groups of modules that vLLM has not replaced."""
    kept = {}
    partly = []
    for name, group in traced.groups.items():
        storages = traced.storages_of(name)
        owners = {binding.module for storage in storages for binding in storage.bindings}
        num_kept = len(owners.intersection(modules))
        if num_kept == len(owners):
            kept[name] = group
        elif num_kept:
            partly.append(name)
    if partly:
        raise ModelError(
            f"vLLM has replaced some modules of {first_of(partly, 4)} and kept others, which are "
            "filled together",
            code="drafter-partly-shared",
        )
    return kept


def _joined_layout(main: Layout, drafter: TracedModel, names: Collection[str]) -> Layout:
    """Return the records of both models, those of the drafter only for storages `names`."""
    sourceless = [name for name in names if name not in drafter.sources]
    if sourceless:
        problem = (
            "a parameter of vLLM's drafter without a source: the trainer offers no tensor for it, "
            "and vLLM shares it with no parameter of the main model"
        )
        raise ParameterMismatchError([f"{name}: {problem}" for name in sourceless])
    layout = drafter.layout
    buffers = {key: buffer for key, buffer in layout.buffers.items() if key.name in set(names)}
    shards = (shard for shard in layout.shards if shard.place.buffer in buffers)
    return Layout(main.tensors, {**main.buffers, **buffers}, (*main.shards, *shards))
