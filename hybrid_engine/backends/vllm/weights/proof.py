"""Whether vLLM computes with what a group was filled with, found out while it is committed.

    live parameter        is it the tensor that was filled, as it was filled? At the end of the fill, has it changed?
    dense layer           what its kernel makes of unit vectors is the weight, whatever the kernel packed it into
    experts, MLA, ...     copies of the modules process the same weights anew: do both hold the same bytes?
      quantised layer     the same, and do both kernels make the same of unit vectors?

Reading through a kernel is exact, for each output is one weight and zeros; only -0, and subnormal numbers, which
kernels may take for 0, are not told from 0. A copy is as the loader left the module, and shares nothing with it that
the processing could have kept values in, except what is global. Kernels that hold weights out of sight are not read.

Memory: three copies of a group's weights. Time: of a dense layer, a forward pass of as many tokens as it has inputs; of
the others their processing, once more.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hybrid_engine.backends.vllm.weights import postload
from hybrid_engine.backends.vllm.weights.derivation import same_bytes
from hybrid_engine.backends.vllm.weights.groups import CommitGroup
from hybrid_engine.backends.vllm.weights.held import held_by
from hybrid_engine.backends.vllm.weights.storages import flat_view
from hybrid_engine.backends.vllm.weights.traced_model import ProcessedModel, TracedModel
from hybrid_engine.errors import first_of

_MOST_OUTPUTS = 1 << 22
"""Elements that a kernel puts out at once."""

_NUM_NAMED = 4  # tensors in a message: a layer of experts has hundreds

_STATEFUL = ("quant_method", "impl")
"""Attributes of a layer, beside its tensors, in which the processing may keep what it makes of weights."""

_Given = Mapping[str, torch.Tensor]
"""Attribute of a module -> what it was given there, in loader layout."""


@dataclass(frozen=True)
class CommitProof:
    """What is to be proved, and who is told of what is not so."""

    tensors: Collection[str]
    unproven: Callable[[str], None]

    def of_group(self, model: TracedModel, group: CommitGroup) -> GroupProof:
        """Of one group, wanted if one of the canonical tensors goes into it."""
        names = sorted({name for buffer in group.buffers for name in model.sources.get(buffer, ())})
        is_wanted = any(name in self.tensors for name in names)
        return GroupProof(f"{first_of(names, _NUM_NAMED)}: on rank {model.rank}", self.unproven, is_wanted)


class GroupProof:
    """Of one group in one commit.

    Attributes:
        is_wanted: on this rank.
    """

    def __init__(self, what: str, unproven: Callable[[str], None], is_wanted: bool) -> None:
        """`what`: the tensors and the rank, for messages."""
        self._what, self._unproven, self.is_wanted = what, unproven, is_wanted
        self._given: dict[str, torch.Tensor] = {}  # by storage

    def report_changed(self) -> None:
        """Say that what vLLM computes with is not what was committed."""
        self._unproven(f"{self._what}, vLLM's weights changed after they were committed")

    def remember(self, model: ProcessedModel, name: str) -> None:
        """Before the processing: keep copies of the weights that it is given."""
        for storage in (model.traced.storages[each] for each in model.traced.groups[name].storages):
            bound = storage.bindings[0].find(model.modules)
            assert bound is not None, storage.name
            self._given[storage.name] = storage.create(flat_view(bound.detach()).clone())

    def require_live(self, model: ProcessedModel, name: str) -> None:
        """After the processing: see whether modules still hold the live tensors, which were filled in place."""
        for storage in (
            model.traced.storages[each] for each in model.traced.groups[name].storages if each in model.live
        ):
            live = model.live[storage.name]
            for binding in storage.bindings:
                found = binding.find(model.modules)
                if found is None or (found.data_ptr(), found.shape) != (live.data_ptr(), live.shape):
                    self._unproven(f"{self._what}, vLLM's {binding.name} is not the tensor that was filled")

    def require_derived(self, model: ProcessedModel, name: str) -> None:
        """After the processing: see whether modules have taken up the weights that they were given."""
        derivation = model.derivations.get(name)
        if derivation is None:
            return
        given = {each: self._given_to(model, name, each) for each in derivation.reached}
        if all(_is_readable(model.modules[each], given[each]) for each in derivation.reached):
            different = [each for each in derivation.reached if not _takes_up(model.modules[each], given[each])]
        else:
            different = self._processed_anew(model, name, given)
        for each in different:
            method = postload.post_load_method(model.modules[each])
            kind = type(model.modules[each] if method is None else method).__name__
            self._unproven(f"{self._what}, vLLM's {each} ({kind}) computes with other weights than it was given")
        self._given.clear()

    def _given_to(self, model: ProcessedModel, name: str, module: str) -> dict[str, torch.Tensor]:
        """Attribute -> what a module of a group was given there."""
        storages = (model.traced.storages[each] for each in model.traced.groups[name].storages)
        pairs = ((storage, binding) for storage in storages for binding in storage.bindings)
        return {each.attribute: self._given[storage.name] for storage, each in pairs if each.module == module}

    def _processed_anew(self, model: ProcessedModel, name: str, given: Mapping[str, _Given]) -> list[str]:
        """Modules that hold, or compute, other than what vLLM makes of the same weights once more."""
        present = {each: _state(model.modules[each], each, given[each]) for each in given}
        storages = model.traced.storages
        # others over the same memory: the processing may let a parameter have another shape
        bound = {each: storages[each].create(flat_view(tensor)) for each, tensor in self._given.items()}
        with model.as_loaded(name, bound) as derivation, model.constants_restored(derivation.reached):
            copies = _Copies(model.modules)
            model.process(derivation, copies)
            anew = {each: _state(copies[each], each, given[each]) for each in given}
        return [each for each in given if not _same_tensors(present[each], anew[each])]


# -- reading through kernels ------------------------------------------------------------------------------------------


def _is_readable(layer: torch.nn.Module, given: _Given) -> bool:
    """Whether a layer multiplies by the very values that it was given, so that its kernel tells what they are."""
    weight = given.get("weight")
    is_dense = postload.is_dense_method(postload.post_load_method(layer))
    return is_dense and weight is not None and weight.ndim == 2 and bool(weight.isfinite().all())


def _takes_up(layer: torch.nn.Module, given: _Given) -> bool:
    """Whether the kernel of such a layer holds its weight, and the layer what else it holds as it was loaded (a bias,
    the weight of an embedding)."""
    for attribute, tensor in given.items():
        held = getattr(layer, attribute, None)
        if held is not None and held.numel() and (held.shape != tensor.shape or not _same_values(held, tensor)):
            return False
    weight = given["weight"]
    return all(_same_values(out, weight[:, at].t()) for at, out in _outputs(layer, weight))


def _outputs(layer: torch.nn.Module, weight: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
    """What the kernel of a linear layer makes of unit vectors: which inputs, and [inputs, outputs].

    `weight`: [outputs, inputs], as it was loaded.
    """
    method: Any = postload.post_load_method(layer)
    num_outputs, num_inputs = weight.shape
    step = max(1, _MOST_OUTPUTS // max(num_outputs, num_inputs))
    for start in range(0, num_inputs, step):
        stop = min(start + step, num_inputs)
        vectors = torch.zeros(stop - start, num_inputs, dtype=weight.dtype, device=weight.device)
        vectors[:, start:stop].fill_diagonal_(1)
        yield slice(start, stop), method.apply(layer, vectors)


def _same_values(found: torch.Tensor, given: torch.Tensor) -> bool:
    """Whether the values are the same in the dtype that was given, but for signs of zero and subnormal numbers."""
    tiny = torch.finfo(torch.float32).tiny
    one, other = (torch.where(each.abs() < tiny, 0, each) for each in (found.detach().to(given.dtype), given.detach()))
    return torch.equal(one, other)


# -- processing anew ---------------------------------------------------------------------------------------------------


class _Copies(dict[str, torch.nn.Module]):
    """Copies of modules by name, made when they are asked for; those inside each other have copies of each other."""

    def __init__(self, modules: Mapping[str, torch.nn.Module]) -> None:
        super().__init__()
        self._modules = modules
        self._copies: dict[int, torch.nn.Module] = {}

    def __missing__(self, name: str) -> torch.nn.Module:
        self[name] = copied = self._copied(self._modules[name])
        return copied

    def _copied(self, module: torch.nn.Module) -> torch.nn.Module:
        """With tables, buffers and children of its own, and with what else processing may keep things in."""
        if id(module) in self._copies:
            return self._copies[id(module)]
        twin: torch.nn.Module = object.__new__(type(module))
        self._copies[id(module)] = twin
        twin.__dict__.update(module.__dict__)
        buffers = {name: None if buffer is None else buffer.clone() for name, buffer in module._buffers.items()}
        children = {name: None if child is None else self._copied(child) for name, child in module._modules.items()}
        twin.__dict__.update(_parameters=dict(module._parameters), _buffers=buffers, _modules=children)
        states = {name: module.__dict__[name] for name in _STATEFUL if name in module.__dict__}
        twin.__dict__.update({name: self._copied_state(state) for name, state in states.items()})
        return twin

    def _copied_state(self, state: Any) -> Any:
        """A copy of a method or an implementation, of the kernels in it, and of the modules that it refers to."""
        copied = copy.copy(state)
        for name, value in vars(copied).items():
            if isinstance(value, torch.nn.Module):
                vars(copied)[name] = self._copied(value)
            elif type(value).__module__.startswith("vllm.") and not isinstance(value, torch.Tensor | type):
                vars(copied)[name] = copy.copy(value)
        return copied


def _state(module: torch.nn.Module, name: str, given: _Given) -> dict[str, torch.Tensor]:
    """All tensors that a module holds, by path, and what the kernel of a linear layer makes of unit vectors."""
    tensors, weight = dict(held_by(module, name).tensors), given.get("weight")
    if weight is not None and weight.ndim == 2 and postload.is_linear_method(postload.post_load_method(module)):
        tensors |= {f"inputs from {at.start}": out for at, out in _outputs(module, weight)}
    return tensors


def _same_tensors(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> bool:
    pairs = ((found[path], expected[path]) for path in found.keys() & expected.keys())
    return found.keys() == expected.keys() and all(one is other or same_bytes(one, other) for one, other in pairs)
