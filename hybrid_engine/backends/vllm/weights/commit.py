"""How filled weights of a group become those that vLLM computes with."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch

from hybrid_engine.backends.vllm.weights.derivation import Derivation
from hybrid_engine.backends.vllm.weights.held import held_by_all
from hybrid_engine.backends.vllm.weights.proof import GroupProof
from hybrid_engine.backends.vllm.weights.traced_layout import STAGED
from hybrid_engine.backends.vllm.weights.traced_model import ProcessedModel
from hybrid_engine.backends.vllm.weights.tracing import LoadWeights
from hybrid_engine.errors import ModelError

Observer = Callable[[str, torch.Tensor], None]
"""Called with a parameter's full name and its loader-layout tensor, filled, before vLLM processes it."""


def commit_group(
    model: ProcessedModel,
    name: str,
    tensors: dict[str, torch.Tensor],
    observe: Observer,
    proof: GroupProof | None = None,
) -> None:
    """Bind tensors as at load, then have vLLM derive again what it derived from them.

    Args:
        model: whose weights they become.
        name: of the group.
        tensors: filled, by buffer; each is removed once it is not needed.
        observe: is shown every parameter.
        proof: sees whether the modules take up their weights.

    Memory: loader layout and what is made of it, module by module; where addresses are kept, of all the group.
    """
    derivation = model.derivations.get(name)
    if derivation is None:
        model.bind(model.traced.groups[name], tensors)
        _load(model, name, tensors, observe)
    elif model.keeps_addresses:
        tensors.update(model.stand_ins(name))
        with model.as_loaded(name, tensors):
            _derive(model, name, derivation, tensors, observe, proof)
            _renew(model, derivation)
    else:
        derivation.load(tensors)
        model.bind(model.traced.groups[name], tensors)
        _derive(model, name, derivation, tensors, observe, proof)
    if proof is not None:
        proof.require_live(model, name)
        proof.require_derived(model, name)


def _derive(
    model: ProcessedModel,
    name: str,
    derivation: Derivation,
    tensors: dict[str, torch.Tensor],
    observe: Observer,
    proof: GroupProof | None,
) -> None:
    model.restore_constants(derivation.reached)
    _load(model, name, tensors, observe)
    if proof is not None:
        proof.remember(model, name)
    model.process(derivation)


def _load(model: ProcessedModel, name: str, tensors: dict[str, torch.Tensor], observe: Observer) -> None:
    """Have the model's own loader write what only it can; then nobody but the modules holds the tensors."""
    group = model.traced.groups[name]
    if group.staged:
        staged = [(each, tensors.pop(STAGED + each)) for each in group.staged]
        cast(LoadWeights, model.traced.model.load_weights)(iter(staged))
    for storage in group.storages:
        observe(storage, tensors.pop(storage))


def _renew(model: ProcessedModel, derivation: Derivation) -> None:
    """Copy what was derived into the tensors that are live."""
    made = held_by_all(model.modules, derivation.reached).owned(derivation.known)
    if problems := derivation.misfits(made):
        raise ModelError("; ".join(problems))
    derivation.renew(made)


def drop_group(model: ProcessedModel, name: str) -> None:
    """Forget what vLLM derived from a group's weights, and those that are not live, so that their memory is free."""
    if model.keeps_addresses:
        return
    group, storages = model.traced.groups[name], model.traced.storages
    tensors = {
        each: model.live[each] if each in model.live else storages[each].placeholder() for each in group.storages
    }
    if name in model.derivations:
        model.derivations[name].load(tensors)
        model.bind(group, tensors)
