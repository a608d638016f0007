"""How filled weights of a group become those that vLLM computes with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import cast

import torch

from hybrid_engine.backends.vllm.weights import postload
from hybrid_engine.backends.vllm.weights.groups import CommitGroup
from hybrid_engine.backends.vllm.weights.proof import GroupProof, Process
from hybrid_engine.backends.vllm.weights.traced_layout import STAGED
from hybrid_engine.backends.vllm.weights.traced_model import ProcessedModel
from hybrid_engine.backends.vllm.weights.tracing import LoadWeights

Observer = Callable[[str, torch.Tensor], None]
"""Called with a parameter's full name and its loader-layout tensor, filled, before vLLM processes it."""


def commit_group(
    model: ProcessedModel,
    group: CommitGroup,
    tensors: dict[str, torch.Tensor],
    observe: Observer,
    proof: GroupProof | None = None,
) -> None:
    """Bind tensors as at load, then run vLLM's own post-load processing of the modules that repack.

    Args:
        model: whose weights they become.
        group: which of them.
        tensors: filled, by buffer; each is removed once it is not needed.
        observe: is shown every parameter.
        proof: sees whether the modules take up their weights.

    Memory: loader layout and what is made of it, module by module.
    """
    bind_group(model, group, tensors)
    if group.staged:
        staged = [(name, tensors.pop(STAGED + name)) for name in group.staged]
        cast(LoadWeights, model.traced.model.load_weights)(iter(staged))
        del staged
    for name in group.storages:
        observe(name, tensors.pop(name))
    run = _process if proof is None else proof.process
    for name in group.repacked:
        run(model, name, postload.process)
    for name in group.attention:
        run(model, name, partial(postload.process_attention, dtype=model.act_dtype))
    if proof is not None:
        proof.require_live(model, group)


def _process(model: ProcessedModel, name: str, process: Process) -> None:
    process(model.modules[name])


def bind_group(model: ProcessedModel, group: CommitGroup, tensors: Mapping[str, torch.Tensor]) -> None:
    """Make tensors in loader layout, by buffer, the modules' parameters and buffers, as at load."""
    for name in group.storages:
        for binding in model.traced.storages[name].bindings:
            binding.put(model.modules, tensors[name])


def drop_group(model: ProcessedModel, group: CommitGroup) -> None:
    """Forget what vLLM derived from a group's repacked weights, and those weights, so that their memory is free."""
    for name in group.repacked:
        module = model.modules[name]
        for attribute in model.derived[name]:
            for table in (module.__dict__, module._parameters, module._buffers):
                table.pop(attribute, None)
        postload.forget_kernel(postload.post_load_method(module))
    for storage in (model.traced.storages[name] for name in group.storages if name not in model.live):
        placeholder = storage.placeholder()
        for binding in storage.bindings:
            binding.put(model.modules, placeholder)
