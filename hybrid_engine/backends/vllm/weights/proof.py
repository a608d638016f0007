"""Whether vLLM computes with what a group was filled with, found out while it is committed.

    live parameter        is it the tensor that was filled, as it was filled?
    dense layer           what its kernel makes of unit vectors is the weight, whatever the kernel packed it into
    quantised layer       a copy of the layer is processed anew: do both kernels make the same of unit vectors?
      experts, MLA        the same, and do both layers hold the same bytes?

Reading through a kernel is exact, for each output is one weight and zeros; only -0, and subnormal numbers, which
kernels may take for 0, are not told from 0. A copy shares nothing with its layer that the processing could have kept
values in, except what is global. Kernel objects of experts that hold weights out of sight are not read.

Memory: two copies of a layer's weights. Time: of a dense layer, a forward pass of as many tokens as it has inputs; of
the others their processing, once more.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from hybrid_engine.backends.vllm import internals
from hybrid_engine.backends.vllm.weights import postload
from hybrid_engine.backends.vllm.weights.groups import CommitGroup
from hybrid_engine.backends.vllm.weights.traced_model import ProcessedModel, TracedModel

_MOST_OUTPUTS = 1 << 22
"""Elements that a kernel puts out at once."""

_NUM_NAMED = 4  # tensors in a message: a layer of experts has hundreds

_STATEFUL = ("quant_method", "impl")
"""Attributes of a layer, beside its tensors, in which the processing may keep what it makes of weights."""

Process = Callable[[torch.nn.Module], object]
"""A post-load processing of one module."""


@dataclass(frozen=True)
class CommitProof:
    """What is to be proved, and who is told of what is not so."""

    tensors: Collection[str]
    unproven: Callable[[str], None]

    def of_group(self, model: TracedModel, group: CommitGroup) -> GroupProof | None:
        """For a group that one of the canonical tensors goes into."""
        names = sorted({name for buffer in group.buffers for name in model.sources.get(buffer, ())})
        if not any(name in self.tensors for name in names):
            return None
        more = f" and {len(names) - _NUM_NAMED} more" if len(names) > _NUM_NAMED else ""
        return GroupProof(f"{', '.join(names[:_NUM_NAMED])}{more}: on rank {model.rank}", self.unproven)


class GroupProof:
    """Of one group in one commit."""

    def __init__(self, what: str, unproven: Callable[[str], None]) -> None:
        """`what`: the tensors and the rank, for messages."""
        self._what, self._unproven = what, unproven

    def process(self, model: ProcessedModel, name: str, process: Process) -> None:
        """Run a module's post-load processing, and see whether the module has taken up the weights that it held."""
        module = model.modules[name]
        twin = _copied(module)
        process(module)
        method, weight = postload.post_load_method(module), twin._parameters.get("weight")
        if weight is not None and not (weight.ndim == 2 and postload.is_linear_method(method)):
            weight = None
        if weight is not None and postload.is_dense_method(method) and bool(weight.isfinite().all()):
            is_same = _is_kept(module, twin) and _reads_back(module, weight)
        else:
            process(twin)
            is_same = _same_tensors(module, twin) and (weight is None or _same_kernels(module, twin, weight))
        if not is_same:
            kind = type(module).__name__ if method is None else type(method).__name__
            self._unproven(f"{self._what}, vLLM's {name} ({kind}) computes with other weights than it was given")

    def require_live(self, model: ProcessedModel, group: CommitGroup) -> None:
        """After the processing: see whether modules still hold the live tensors, which were filled in place."""
        for storage in (model.traced.storages[name] for name in group.storages if name in model.live):
            live = model.live[storage.name]
            for binding in storage.bindings:
                found = binding.find(model.modules)
                if found is None or (found.data_ptr(), found.shape) != (live.data_ptr(), live.shape):
                    self._unproven(f"{self._what}, vLLM's {binding.name} is not the tensor that was filled")


# -- reading through kernels ------------------------------------------------------------------------------------------


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


def _reads_back(layer: torch.nn.Module, weight: torch.Tensor) -> bool:
    """Whether a dense layer's kernel holds this weight."""
    return all(_same_values(out, weight[:, at].t()) for at, out in _outputs(layer, weight))


def _same_kernels(layer: torch.nn.Module, twin: torch.nn.Module, weight: torch.Tensor) -> bool:
    """Whether the kernels of two linear layers make the same of unit vectors; `weight` as of `_outputs`."""
    pairs = zip(_outputs(layer, weight), _outputs(twin, weight), strict=True)
    return all(_same_bytes(one, other) for (_, one), (_, other) in pairs)


def _is_kept(layer: torch.nn.Module, given: torch.nn.Module) -> bool:
    """Whether what a layer still holds as it was loaded (a bias, the weight of an embedding) is what was given."""
    pairs = ((layer._parameters.get(name), parameter) for name, parameter in given._parameters.items())
    held = [(one, other) for one, other in pairs if one is not None and other is not None and one.numel()]
    return all(one.shape == other.shape and _same_values(one, other) for one, other in held)


def _same_values(found: torch.Tensor, given: torch.Tensor) -> bool:
    """Whether the values are the same in the dtype that was given, but for signs of zero and subnormal numbers."""
    tiny = torch.finfo(torch.float32).tiny
    one, other = (torch.where(each.abs() < tiny, 0, each) for each in (found.detach().to(given.dtype), given.detach()))
    return torch.equal(one, other)


# -- copies of layers --------------------------------------------------------------------------------------------------


def _copied(module: torch.nn.Module) -> torch.nn.Module:
    """A copy with parameters, buffers and children of its own, and of what else processing may keep things in."""
    twin: torch.nn.Module = object.__new__(type(module))
    twin.__dict__.update(module.__dict__)
    for table in ("_parameters", "_buffers"):
        tensors = module.__dict__[table].items()
        twin.__dict__[table] = {name: None if tensor is None else _cloned(tensor) for name, tensor in tensors}
    children = module._modules.items()
    twin.__dict__["_modules"] = {name: None if child is None else _copied(child) for name, child in children}
    twin.__dict__.update({name: _copied_state(module.__dict__[name]) for name in _STATEFUL if name in module.__dict__})
    return twin


def _cloned(tensor: torch.Tensor) -> torch.Tensor:
    """With the class and attributes of vLLM's parameters."""
    copied: torch.Tensor = internals.MAKE_SUBCLASS.load()(type(tensor), tensor.detach().clone(), False)
    copied.__dict__.update(tensor.__dict__)
    return copied


def _copied_state(state: Any) -> Any:
    """A copy of a method or an implementation, and of the kernels in it."""
    copied = copy.copy(state)
    for name, value in vars(copied).items():
        if type(value).__module__.startswith("vllm.") and not isinstance(value, (torch.nn.Module, torch.Tensor, type)):
            vars(copied)[name] = copy.copy(value)
    return copied


def _same_tensors(module: torch.nn.Module, twin: torch.nn.Module) -> bool:
    found, expected = dict(_tensors(module)), dict(_tensors(twin))
    return found.keys() == expected.keys() and all(_same_bytes(found[name], expected[name]) for name in expected)


def _tensors(module: torch.nn.Module, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """All that a layer holds: parameters, buffers, plain attributes, and those of what it computes with."""
    states = [vars(module.__dict__[name]) for name in _STATEFUL if name in module.__dict__]
    for number, table in enumerate((module._parameters, module._buffers, module.__dict__, *states)):
        for name, value in table.items():
            if isinstance(value, torch.Tensor):
                yield f"{prefix}{name} {number}", value
    for name, child in module._modules.items():
        if child is not None:
            yield from _tensors(child, f"{prefix}{name}.")


def _same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one is other or (one.shape, one.dtype) != (other.shape, other.dtype):
        return one is other
    return torch.equal(*(each.detach().reshape(-1).view(torch.uint8) for each in (one, other)))
