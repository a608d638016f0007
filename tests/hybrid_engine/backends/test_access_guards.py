"""What torch offers to read or write a model and an optimizer by calls a guard, of this model alone."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable

import pytest
import torch

from hybrid_engine.backends.training_side import guard_model, guard_optimizer
from hybrid_engine.memory.offload_items import KINDS


class Guarded:
    """A model and an optimizer, and what was asked for."""

    def __init__(self) -> None:
        self.asked: list[set[str]] = []
        self.model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.handles = [*guard_model(self.model, self.guard), *guard_optimizer(self.optimizer, self.guard)]

    def guard(self, kinds: Iterable[str]) -> None:
        self.asked.append(set(kinds))

    def asked_by(self, call: Callable[[], object]) -> list[set[str]]:
        self.asked.clear()
        call()
        return self.asked


@pytest.mark.slow
def test_each_entrance_asks_for_what_it_needs() -> None:
    one = Guarded()
    weights, moments = one.model.state_dict(), one.optimizer.state_dict()
    parameters: dict[str, Callable[[], object]] = {
        "forward": lambda: one.model(torch.zeros(1, 2)),
        "state_dict": one.model.state_dict,
        "of a layer": one.model[1].state_dict,
        "load_state_dict": lambda: one.model.load_state_dict(weights),
    }
    for name, call in parameters.items():
        asked = one.asked_by(call)
        assert asked, name
        assert all(kinds == {"param"} for kinds in asked), name
    everything = {
        "step": one.optimizer.step,
        "state_dict": one.optimizer.state_dict,
        "load_state_dict": lambda: one.optimizer.load_state_dict(moments),
    }
    for name, call in everything.items():
        assert one.asked_by(call) == [set(KINDS)], name


@pytest.mark.parametrize("is_removed", [False, True])
def test_a_copy_and_a_model_that_was_given_back_ask_nobody(is_removed: bool) -> None:
    one = Guarded()
    model = one.model if is_removed else copy.deepcopy(one.model)
    for handle in one.handles if is_removed else ():
        handle.remove()
    assert one.asked_by(lambda: model.load_state_dict(model.state_dict())) == []
    assert one.asked_by(lambda: model(torch.zeros(1, 2))) == []
