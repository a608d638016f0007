"""Layers whose methods do to weights what kernels want done, in one small model: after a fill they compute with what a
fresh load gives, bit by bit, and at the old addresses where these must stay."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hybrid_engine.backends.vllm.process_state import ProcessSettings
from hybrid_engine.errors import ModelError
from tests.harness.errors import has_code
from tests.hybrid_engine.backends.vllm.made_up_methods import (
    COLUMNS,
    DERIVED,
    LIVE,
    REFUSED,
    ROWS,
    WRITTEN,
    Model,
    addresses,
    built,
    different,
    fill,
    layer_of,
    loaded,
    quantised,
    replace,
    shuffled_in_place,
    transposed,
    untouched,
    with_a_number,
    with_a_number_beside_the_weight,
    with_added_tensors,
    with_as_many_as_there_are,
    with_halves_swapped,
)

pytestmark = pytest.mark.slow  # imports vLLM

Processing = Callable[[Any, Any], None]


def keep_parameter(layer: torch.nn.Module, name: str, new: torch.Tensor) -> None:
    """As `replace_parameter` of vLLM 0.33: the Parameter stays, and so does its memory where new values have its shape,
    strides and dtype."""
    old = getattr(layer, name, None)
    if not isinstance(old, torch.nn.Parameter):
        setattr(layer, name, torch.nn.Parameter(new, requires_grad=False))
    elif (old.shape, old.stride(), old.dtype) == (new.shape, new.stride(), new.dtype):
        old.data.copy_(new)
    else:
        old.data = new


@pytest.fixture
def keeping(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.model_executor.utils.replace_parameter", keep_parameter)


@pytest.fixture(params=[False, True], ids=["replacing", "keeping"])
def _either_way(request: pytest.FixtureRequest) -> None:
    """vLLM's methods replace Parameters, or let them stay."""
    if request.param:
        request.getfixturevalue("keeping")


@pytest.mark.usefixtures("_either_way")
@pytest.mark.parametrize("keeps_addresses", [True, False], ids=["in place", "anew"])
@pytest.mark.parametrize("processing", [*DERIVED, *WRITTEN, *LIVE], ids=lambda processing: processing.__name__)
def test_a_fill_leaves_what_a_fresh_load_would(processing: Processing, keeps_addresses: bool) -> None:
    model = Model(layer=processing)
    adaptor = built(model, keeps_addresses)
    before = addresses(model.held())
    for seed in range(2):
        fill(adaptor, model, seed)
        assert different(model.held(), loaded(processing, seed).held()) == []
        assert not keeps_addresses or addresses(model.held()) == before


@pytest.mark.parametrize("processing", LIVE, ids=lambda processing: processing.__name__)
def test_weights_that_are_computed_with_as_loaded_are_written_and_not_processed(processing: Processing) -> None:
    model = Model(layer=processing)
    adaptor = built(model, keeps_addresses=True)
    model.layer.quant_method.process_weights_after_loading = pytest.fail
    fill(adaptor, model, 0)
    assert adaptor.allocate(["layer"])["layer.weight"].data_ptr() == model.layer.weight.data_ptr()


def test_nothing_of_an_older_load_is_held_where_addresses_may_change() -> None:
    model = Model(**{processing.__name__: processing for processing in DERIVED if processing is not with_added_tensors})
    adaptor = built(model, keeps_addresses=False)
    fill(adaptor, model, 0)
    adaptor.release()
    constants = ("order", "scale", "total")
    tensors = {path: each for path, each in model.held().items() if not path.endswith(constants)}
    held = [path for path, each in tensors.items() if each.untyped_storage().nbytes()]
    assert held == ["with_repeated_elements._parameters.weight"]  # live: the system takes its pages, its storage stays
    assert adaptor.resident_nbytes() == 0


def test_all_that_cannot_be_renewed_is_refused_at_once_before_a_switch() -> None:
    with pytest.raises(ModelError) as refusal:
        built(Model(transposed=transposed, **{each.__name__: each for each in REFUSED}), keeps_addresses=True)
    lines = str(refusal.value).splitlines()
    assert lines[0] == f"vLLM computes with weights that cannot be renewed ({len(REFUSED)}):"
    for processing, problem in REFUSED.items():
        name = processing.__name__
        assert any(line.startswith(f"  - {name} (Method): {problem.replace('layer.', f'{name}.')}") for line in lines)


def test_a_reference_that_cannot_follow_is_refused() -> None:
    model = Model(layer=transposed)
    model.layer.pair = (model.layer.weight,)
    with pytest.raises(ModelError, check=has_code("weights-not-renewable", "layer.pair[0]")):
        built(model, keeps_addresses=True)


def test_where_addresses_may_change_numbers_and_sizes_may_too() -> None:
    for processing in (with_as_many_as_there_are, with_a_number, with_a_number_beside_the_weight):
        model = Model(layer=processing)
        adaptor = built(model, keeps_addresses=False)
        fill(adaptor, model, 3)
        fresh = loaded(processing, 3)
        assert different(model.held(), fresh.held()) == []
        assert model.numbers() == fresh.numbers()


def test_what_nobody_can_do_again_is_refused() -> None:
    class Hooked(Model):
        def process(self) -> None:
            self.plain.weight.data = self.plain.weight.data.clone()
            self.fused = torch.cat([self.plain.weight.data, self.layer.weight.data])

    model = Hooked(layer=untouched, plain=untouched)
    del model.plain.quant_method
    with pytest.raises(ModelError) as refusal:
        built(model, keeps_addresses=True)
    named = ("plain (Module): plain.weight", "the model (Hooked): fused")
    assert has_code("weights-not-renewable", *named)(refusal.value)


class Attention(Model):
    """A layer that attention has inside, as MLA's `kv_b_proj`, or refers to, as sinks."""

    def __init__(self, derive: Callable[[Any, torch.Tensor], None], is_inside: bool) -> None:
        from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

        class Layer(torch.nn.Module, AttentionLayerBase):
            def get_attn_backend(self) -> Any: ...

            def get_kv_cache_spec(self, vllm_config: Any) -> Any: ...

            def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
                derive(self, (self.inner if is_inside else self.impl.source).weight.data.to(act_dtype))

        super().__init__(layer=untouched)
        self.attention = Layer()
        self.attention.kv_cache = torch.tensor([])
        self.attention.impl = SimpleNamespace(source=None, backend="TRITON_MLA")
        if is_inside:
            self.attention.inner = self.layer
        else:
            self.attention.impl.source = SimpleNamespace(weight=self.layer.weight)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for _, tensor in weights:
            self.layer.weight.data.copy_(tensor)

    def process(self) -> None:
        self.layer.quant_method.process_weights_after_loading(self.layer)
        self.attention.process_weights_after_loading(torch.float32)

    def weights(self, seed: int) -> dict[str, torch.Tensor]:
        return {"layer": super().weights(seed)["layer"]}


def viewed(attention: Any, weight: torch.Tensor) -> None:
    replace(attention, W_UV=weight[: ROWS // 2].t(), W_UK_T=weight[ROWS // 2 :])


def copied(attention: Any, weight: torch.Tensor) -> None:
    attention.impl.sinks = weight.double()


@pytest.mark.parametrize(("derive", "num_runs"), [(viewed, 0), (copied, 1)])
@pytest.mark.parametrize("is_inside", [True, False], ids=["inside", "referred to"])
def test_attention_derives_again_only_what_is_no_view(
    derive: Callable[[Any, torch.Tensor], None], num_runs: int, is_inside: bool
) -> None:
    model, fresh = Attention(derive, is_inside), Attention(derive, is_inside)
    adaptor = built(model, keeps_addresses=True)
    kv_cache = model.attention.kv_cache = torch.ones(5)  # vLLM makes it once the model is loaded
    before, runs, process = addresses(model.held()), [], model.attention.process_weights_after_loading
    model.attention.process_weights_after_loading = lambda dtype: (runs.append(dtype), process(dtype))
    fill(adaptor, model, 4)
    fresh.load_weights(fresh.weights(4).items())
    fresh.process()
    del model.attention.process_weights_after_loading
    assert model.attention.kv_cache is kv_cache
    assert model.layer.dispatch is torch.nn.functional.linear
    del model.attention.kv_cache
    assert different(model.held(), fresh.held()) == []
    assert addresses(model.held()).items() <= before.items()
    assert len(runs) == num_runs


@pytest.mark.parametrize("keeps_addresses", [True, False])
def test_a_constant_that_the_processing_writes_again_is_no_state_of_a_forward(keeps_addresses: bool) -> None:
    """vLLM's attention fills its scales again with what they were, and gains attributes once caches exist."""

    def derive(attention: Any, weight: torch.Tensor) -> None:
        copied(attention, weight)
        attention._k_scale.fill_(1.0)

    model = Attention(derive, is_inside=False)
    model.attention.register_buffer("_k_scale", torch.ones(1))
    adaptor = built(model, keeps_addresses=keeps_addresses)
    model.attention.isa = "vec"
    for seed in range(3):
        fill(adaptor, model, seed)
        assert model.attention.isa == "vec"


@pytest.mark.parametrize("processing", [quantised, with_added_tensors], ids=lambda processing: processing.__name__)
def test_a_method_that_was_wrapped_after_loading_stays_wrapped(processing: Processing) -> None:
    """As vLLM does with methods of experts that are spread over ranks; the wrapper processes nothing."""
    model = Model(layer=processing)
    adaptor = built(model, keeps_addresses=True)
    wrapper = layer_of(fail if processing is not with_added_tensors else processing).quant_method
    wrapper.old_quant_method, model.layer.quant_method = model.layer.quant_method, wrapper
    fill(adaptor, model, 2)
    assert model.layer.quant_method is wrapper
    model.layer.quant_method = wrapper.old_quant_method
    assert different(model.held(), loaded(processing, 2).held()) == []


def test_a_failed_processing_leaves_the_module_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(layer=quantised)
    adaptor = built(model, keeps_addresses=True)
    fill(adaptor, model, 0)
    before = addresses(model.held())
    adaptor.allocate(["layer"])
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(model.layer.quant_method, "process_weights_after_loading", fail)
        adaptor.commit(["layer"])
    assert addresses(model.held()) == before
    fill(adaptor, model, 1)
    assert different(model.held(), loaded(quantised, 1).held()) == []


def fail(*_: object) -> None:
    raise MemoryError


def test_weights_are_processed_under_the_settings_of_the_first_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """And whatever the processing sets, the process is as before."""
    model, found = Model(layer=transposed), []
    before = ProcessSettings.now()
    of_build = dataclasses.replace(before, matmul_precision="high", stream=None, num_threads=None)
    adaptor = built(model, keeps_addresses=True, settings=of_build)
    process = model.layer.quant_method.process_weights_after_loading

    def set_and_process(layer: torch.nn.Module) -> None:
        found.append((torch.get_float32_matmul_precision(), torch.get_num_threads()))
        torch.set_float32_matmul_precision("medium")
        monkeypatch.setenv("SET_BY_A_KERNEL", "1")
        process(layer)

    monkeypatch.setattr(model.layer.quant_method, "process_weights_after_loading", set_and_process)
    fill(adaptor, model, 0)
    assert found == [("high", before.num_threads)]
    assert ProcessSettings.now() == before


# -- methods that keep a layer's Parameter -----------------------------------------------------------------------------


@pytest.mark.usefixtures("keeping")
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


@pytest.mark.usefixtures("keeping")
def test_memory_that_stays_is_its_own_and_no_loan() -> None:
    """A loan is of all groups that are filled at once: one that stays would keep the memory of all."""
    model = Model(shuffled=shuffled_in_place, swapped=with_halves_swapped, transposed=transposed)
    adaptor = built(model, keeps_addresses=False)
    fill(adaptor, model, 0)
    for layer in (model.shuffled, model.swapped):
        assert layer.weight.untyped_storage().nbytes() == ROWS * COLUMNS * layer.weight.itemsize
        assert layer.weight.untyped_storage().resizable()  # what is lent is not


@pytest.mark.usefixtures("keeping")
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
        with pytest.raises(ModelError, check=has_code("weights-not-renewable", "layer.weight")):
            built(model, keeps_addresses=True)
    else:
        fill(built(model, keeps_addresses=True), model, 1)
        assert torch.equal(weight, model.weights(1)["layer"])
    assert model.layer.weight is weight
    assert weight.data_ptr() == address
