"""Guards on the torch calls that read or write a model and its optimizer."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable

import pytest
import torch

from hybrid_engine.backends.training_side import guard_model, guard_optimizer
from hybrid_engine.memory.offload_items import KINDS


class Guarded:
    """A guarded model and optimizer; `requests` holds the kinds passed to the guard."""

    def __init__(self) -> None:
        self.requests: list[set[str]] = []
        self.model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.handles = [
            *guard_model(self.model, self.guard),
            *guard_optimizer(self.optimizer, self.guard),
        ]

    def guard(self, kinds: Iterable[str]) -> None:
        self.requests.append(set(kinds))

    def requests_of(self, call: Callable[[], object]) -> list[set[str]]:
        self.requests.clear()
        call()
        return self.requests


@pytest.mark.slow
def test_every_call_requests_the_kinds_it_needs() -> None:
    guarded = Guarded()
    weights = guarded.model.state_dict()
    moments = guarded.optimizer.state_dict()
    for call in (
        lambda: guarded.model(torch.zeros(1, 2)),
        guarded.model.state_dict,
        guarded.model[1].state_dict,
        lambda: guarded.model.load_state_dict(weights),
    ):
        requests = guarded.requests_of(call)
        assert requests == [{"param"}] * len(requests) != []
    for call in (
        guarded.optimizer.step,
        guarded.optimizer.state_dict,
        lambda: guarded.optimizer.load_state_dict(moments),
    ):
        assert guarded.requests_of(call) == [set(KINDS)]


@pytest.mark.parametrize("is_removed", [False, True])
def test_copies_and_models_without_guards_request_nothing(is_removed: bool) -> None:
    guarded = Guarded()
    model = guarded.model if is_removed else copy.deepcopy(guarded.model)
    for handle in guarded.handles if is_removed else ():
        handle.remove()
    assert guarded.requests_of(lambda: model.load_state_dict(model.state_dict())) == []
    assert guarded.requests_of(lambda: model(torch.zeros(1, 2))) == []
