"""What torch and Megatron offer to read or write training state by, refused while the state is off the device.

    forward pass, `state_dict`, `load_state_dict` of a model and of each module in it      parameters
    `step`, `state_dict`, `load_state_dict` of an optimizer                                everything

So whatever saves by these (save_pretrained, torch.distributed.checkpoint, Megatron's `sharded_state_dict`) is refused,
too. A parameter or a moment that is read or written itself is not: torch has no hook there.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from hybrid_engine.memory.offload_items import KINDS

Guard = Callable[[Iterable[str]], object]
"""Called with kinds of training state; raises StateError where they may be off the device."""


def guard_model(model: torch.nn.Module, guard: Guard) -> Iterator[RemovableHandle]:
    """Have `guard` called whenever the model, or a module in it, is asked for what needs its parameters."""
    own = weakref.WeakSet(model.modules())  # a copy of the model has its hooks, and parameters of its own

    def needs_parameters(module: torch.nn.Module, *_: Any) -> None:
        if module in own:
            guard(["param"])

    # before FSDP2's own, which gathers parameters
    yield model.register_forward_pre_hook(needs_parameters, prepend=True)
    for module in model.modules():
        yield module.register_state_dict_pre_hook(needs_parameters)
        yield module.register_load_state_dict_pre_hook(needs_parameters)


def guard_optimizer(optimizer: torch.optim.Optimizer, guard: Guard) -> Iterator[RemovableHandle]:
    """Have `guard` called whenever the optimizer steps, and when its state is read or written as a whole."""

    def needs_all(*_: Any) -> None:
        guard(KINDS)

    yield optimizer.register_step_pre_hook(needs_all)
    yield optimizer.register_state_dict_pre_hook(needs_all)
    yield optimizer.register_load_state_dict_pre_hook(needs_all)
