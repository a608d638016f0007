"""What of a sharded model and its optimizers is on the device, and what becomes of it when they are offloaded.

    what                                        kind        action
    parameters, persistent buffers              param       copy
    sums of weights and LoRA                    param       drop: computed at every switch
    gradients                                   grad        copy: accumulated ones outlive a switch
    optimizer state                             optimizer   copy
    other buffers, numbers (Adam's step)        -           stay: small, listed by `reachable`

Gathered parameters are freed before anything leaves. Storages that are not elastic are resized to 0 bytes and back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from hybrid_engine.backends.fsdp.adaptor import FsdpAdaptor
from hybrid_engine.backends.fsdp.sharded_tensors import local_of
from hybrid_engine.memory.offload_items import OffloadItem, Reached


class TrainingState:
    """Of one model and the optimizers of its parameters."""

    def __init__(self, weights: FsdpAdaptor, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._weights = weights
        self._optimizers = optimizers
        self._parameter_names: dict[torch.Tensor, str] = {
            tensor: name for name, tensor in weights.tensors.tensors.items() if isinstance(tensor, torch.nn.Parameter)
        }

    def items(self) -> list[OffloadItem]:
        """Everything that can leave the device."""
        scratch = self._weights.scratch
        items = [
            OffloadItem(name, "param", flat, "drop" if name in scratch else "copy")
            for name, flat in self._weights.buffers().items()
        ]
        items += [OffloadItem(owner, "grad", tensor) for owner, tensor in self._gradients()]
        items += [
            OffloadItem(owner, "optimizer", tensor) for owner, tensor in self._optimizer_state() if tensor.numel() > 1
        ]
        return items

    def reachable(self) -> Iterator[Reached]:
        """Every tensor to which model and optimizers refer."""
        tensors = self._weights.tensors.tensors
        for name, tensor in tensors.items():
            yield Reached(name, local_of(tensor))
        for name, tensor in self._weights.model.named_buffers():
            if name not in tensors:
                yield Reached(name, tensor, "a module's buffer")
        for owner, tensor in self._gradients():
            yield Reached(owner, tensor)
        for owner, tensor in self._optimizer_state():
            yield Reached(owner, tensor, "a number" if tensor.numel() == 1 else None)

    def _gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        for parameter, name in self._parameter_names.items():
            if parameter.grad is not None:
                yield f"{name}.grad", local_of(parameter.grad)

    def _optimizer_state(self) -> Iterator[tuple[str, torch.Tensor]]:
        for index, optimizer in enumerate(self._optimizers):
            for parameter, state in optimizer.state.items():
                name = self._parameter_names.get(parameter, "a parameter of another model")
                yield from _tensors_in(f"optimizer[{index}] of {name}", state)


def _tensors_in(path: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors that a parameter's state holds, at any depth; of sharded ones the local part."""
    if isinstance(value, torch.Tensor):
        yield path, local_of(value)
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _tensors_in(f"{path}[{key!r}]", inner)
    elif isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            yield from _tensors_in(f"{path}[{index}]", inner)
