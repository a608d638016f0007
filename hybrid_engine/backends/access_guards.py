"""Hooks that refuse access to training state while it is off the device.

    forward pass, `state_dict`, `load_state_dict` of a model and of each module in it      parameters
    `step`, `state_dict`, `load_state_dict` of an optimizer                                everything

So whatever saves by these (save_pretrained, torch.distributed.checkpoint, Megatron's `sharded_state_dict`) is refused,
too. A parameter or a moment that is read or written itself is not: torch has no hook there.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from hybrid_engine.memory.offload_items import KINDS

Guard = Callable[[Iterable[str]], None]
"""Called with kinds of training state; raises StateError where they may be off the device."""


class GuardedState:
    """Base of training sides whose state may leave the device.

    Attributes:
        guard: called with the kinds of state that a call is about to use. Set by `HybridEngine`, which moves them;
            until then nothing leaves the device.
    """

    guard: Guard

    def __init__(self) -> None:
        self.guard = lambda kinds: None
        self._ends = ExitStack()
        weakref.finalize(self, self._ends.close)

    def close(self) -> None:
        """Let models and optimizers be their owner's alone, or another engine's; idempotent."""
        self._ends.close()
        self.guard = lambda kinds: None

    def _watch(self, models: Iterable[torch.nn.Module], optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Have `guard` called by whatever needs the state of these, while this object is there and not closed."""
        own = weakref.ref(self)

        def guard(kinds: Iterable[str]) -> None:
            if (state := own()) is not None:
                state.guard(kinds)

        for model in models:
            self._remove_at_end(guard_model(model, guard))
        for optimizer in optimizers:
            self._remove_at_end(guard_optimizer(optimizer, guard))

    def _remove_at_end(self, handles: Iterable[RemovableHandle]) -> None:
        for handle in handles:
            self._ends.callback(handle.remove)


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
