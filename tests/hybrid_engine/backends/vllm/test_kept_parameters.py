"""Processing that keeps a layer's Parameter, as vLLM's does since 0.33: what it leaves in the memory that was filled is
neither lent to the next group nor moved, and what a layer computes with is what a fresh load gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hybrid_engine.errors import ModelError
from tests.hybrid_engine.backends.vllm.made_up_methods import (
    COLUMNS,
    DERIVED,
    LIVE,
    ROWS,
    Model,
    addresses,
    built,
    different,
    fill,
    loaded,
    replace,
    shuffled_in_place,
    transposed,
    with_halves_swapped,
)

pytestmark = pytest.mark.slow  # imports vLLM

Processing = Callable[[Any, Any], None]


def keep_parameter(layer: torch.nn.Module, name: str, new: torch.Tensor) -> None:
    """As 0.33's `replace_parameter`: the Parameter stays, and so does its memory where new values have its shape,
    strides and dtype."""
    old = getattr(layer, name, None)
    if not isinstance(old, torch.nn.Parameter):
        setattr(layer, name, torch.nn.Parameter(new, requires_grad=False))
    elif (old.shape, old.stride(), old.dtype) == (new.shape, new.stride(), new.dtype):
        old.data.copy_(new)
    else:
        old.data = new


@pytest.fixture(autouse=True)
def _as_in_0_33(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.model_executor.utils.replace_parameter", keep_parameter)


@pytest.mark.parametrize("keeps_addresses", [True, False], ids=["in place", "anew"])
@pytest.mark.parametrize("processing", [*DERIVED, *LIVE], ids=lambda processing: processing.__name__)
def test_a_fill_leaves_what_a_fresh_load_would(processing: Processing, keeps_addresses: bool) -> None:
    model = Model(layer=processing)
    adaptor = built(model, keeps_addresses)
    before = addresses(model.held())
    for seed in range(2):
        fill(adaptor, model, seed)
        assert different(model.held(), loaded(processing, seed).held()) == []
        assert not keeps_addresses or addresses(model.held()) == before


def test_what_stays_in_the_memory_that_was_filled_is_not_written_by_the_next_group() -> None:
    by_name = {processing.__name__: processing for processing in [*DERIVED, *LIVE]}
    model = Model(**by_name)
    adaptor = built(model, keeps_addresses=False)
    for seed in range(2):
        fill(adaptor, model, seed)
        for name, processing in by_name.items():
            alone = Model(**{name: processing})
            alone.load_weights([(name, model.weights(seed)[name])])
            alone.process()
            held = {path: each for path, each in model.held().items() if path.startswith(f"{name}.")}
            assert different(held, alone.held()) == []


def test_memory_that_stays_is_its_own_and_no_loan() -> None:
    """A loan is of all groups that are filled at once: one that stays would keep the memory of all."""
    model = Model(shuffled=shuffled_in_place, swapped=with_halves_swapped, transposed=transposed)
    adaptor = built(model, keeps_addresses=False)
    fill(adaptor, model, 0)
    for layer in (model.shuffled, model.swapped):
        assert layer.weight.untyped_storage().nbytes() == ROWS * COLUMNS * layer.weight.itemsize
        assert layer.weight.untyped_storage().resizable()  # what is lent is not


@pytest.mark.parametrize("turn", [2, 3], ids=["in the rehearsal", "in a commit"])
def test_a_live_weight_stays_where_it_is_though_its_parameter_is_let_lie_elsewhere(turn: int) -> None:
    turns = []

    def restless(layer: Any, method: Any) -> None:
        layer.sums = layer.weight.data.sum(1)
        turns.append(layer)
        if len(turns) == turn:
            replace(layer, weight=layer.weight.data.clone().as_strided((ROWS, COLUMNS), (1, ROWS)))

    model = Model(layer=restless)
    weight, address = model.layer.weight, model.layer.weight.data_ptr()
    if turn == 2:
        with pytest.raises(ModelError, match=r"layer\.weight is there in addition"):
            built(model, keeps_addresses=True)
    else:
        fill(built(model, keeps_addresses=True), model, 1)
        assert torch.equal(weight, model.weights(1)["layer"])
    assert model.layer.weight is weight
    assert weight.data_ptr() == address


@pytest.mark.parametrize("keeps_addresses", [True, False], ids=["in place", "anew"])
def test_a_proof_knows_what_a_layer_was_given_though_its_parameter_has_another_shape(keeps_addresses: bool) -> None:
    from vllm.model_executor.layers.linear import LinearMethodBase

    class Transposing(LinearMethodBase):
        def create_weights(self, *sizes: Any, **attributes: Any) -> None: ...

        def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
            return x @ layer.weight

        def process_weights_after_loading(self, layer: Any) -> None:
            transposed(layer, self)

    model = Model(layer=transposed)
    model.layer.quant_method = Transposing()
    adaptor = built(model, keeps_addresses)
    unproven: list[str] = []
    with adaptor.proving(model.weights(0), unproven.append):
        fill(adaptor, model, 0)
    assert unproven == []
