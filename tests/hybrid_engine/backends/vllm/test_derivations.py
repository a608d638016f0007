"""Layers that process weights for kernels: a fill equals a fresh load bitwise."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hybrid_engine.backends.vllm.process_state import ProcessSettings
from hybrid_engine.backends.vllm.weights.processing_barrier import ProcessingBarrier
from hybrid_engine.errors import ModelError, StateError
from hybrid_engine.ranks.job import Job
from hybrid_engine.ranks.torch_internals import TensorDict
from tests.harness.errors import has_code, refused
from tests.hybrid_engine.backends.vllm.made_up_methods import (
    COLUMNS,
    DERIVED,
    LIVE,
    REFUSED,
    ROWS,
    WRITTEN,
    Model,
    addresses,
    build_adaptor,
    fill,
    layer_of,
    load,
    quantised,
    replace,
    shuffled_in_place,
    transposed,
    untouched,
    with_a_number,
    with_a_number_beside_the_weight,
    with_added_tensors,
    with_as_many_as_there_are,
)
from tests.hybrid_engine.backends.vllm.support import differences

pytestmark = pytest.mark.slow  # imports vLLM

Processing = Callable[[Any, Any], None]


def keep_parameter(layer: torch.nn.Module, name: str, new: torch.Tensor) -> None:
    """Like vLLM 0.33: keep the Parameter, and its memory if the new values fit."""
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
def _both_versions(request: pytest.FixtureRequest) -> None:
    """vLLM's methods replace Parameters, or keep them."""
    if request.param:
        request.getfixturevalue("keeping")


@pytest.mark.usefixtures("_both_versions")
@pytest.mark.parametrize("keeps_addresses", [True, False], ids=["in place", "anew"])
@pytest.mark.parametrize(
    "processing", [*DERIVED, *WRITTEN, *LIVE], ids=lambda processing: processing.__name__
)
def test_a_fill_equals_a_fresh_load(processing: Processing, keeps_addresses: bool) -> None:
    # The second layer must not overwrite what the first may have kept in staging memory.
    layers = {"layer": processing, "next": processing}
    model = Model(**layers)
    adaptor = build_adaptor(model, keeps_addresses)
    before = addresses(model.held())
    for seed in range(2):
        fill(adaptor, model, seed)
        assert differences(model.held(), load(seed, **layers).held()) == []
        assert not keeps_addresses or addresses(model.held()) == before


@pytest.mark.parametrize("processing", LIVE, ids=lambda processing: processing.__name__)
def test_live_weights_are_written_without_processing(processing: Processing) -> None:
    model = Model(layer=processing)
    adaptor = build_adaptor(model, keeps_addresses=True)
    model.layer.quant_method.process_weights_after_loading = pytest.fail
    fill(adaptor, model, 0)
    assert adaptor.allocate(["layer"])["layer.weight"].data_ptr() == model.layer.weight.data_ptr()


def test_no_older_tensor_is_held_where_addresses_may_change() -> None:
    model = Model(
        **{
            processing.__name__: processing
            for processing in DERIVED
            if processing is not with_added_tensors
        }
    )
    adaptor = build_adaptor(model, keeps_addresses=False)
    fill(adaptor, model, 0)
    adaptor.release()
    constants = ("order", "scale", "total")  # written at construction, not by loading
    tensors = {
        path: tensor for path, tensor in model.held().items() if not path.endswith(constants)
    }
    held = [path for path, tensor in tensors.items() if tensor.untyped_storage().nbytes()]
    # A live weight keeps its storage; the system takes back its pages.
    assert held == ["with_repeated_elements._parameters.weight"]
    assert adaptor.resident_nbytes() == 0


def test_all_weights_that_cannot_be_renewed_are_refused_at_once() -> None:
    with pytest.raises(ModelError) as refusal:
        build_adaptor(
            Model(
                transposed=transposed, **{processing.__name__: processing for processing in REFUSED}
            ),
            keeps_addresses=True,
        )
    lines = str(refusal.value).splitlines()
    assert lines[0] == f"vLLM computes with weights that cannot be renewed ({len(REFUSED)}):"
    for processing, problem in REFUSED.items():
        name = processing.__name__
        assert any(
            line.startswith(f"  - {name} (Method): {problem.replace('layer.', f'{name}.')}")
            for line in lines
        )


def test_a_reference_that_cannot_be_updated_is_refused() -> None:
    model = Model(layer=transposed)
    model.layer.pair = (model.layer.weight,)
    with refused(ModelError, "weights-not-renewable", "layer.pair[0]"):
        build_adaptor(model, keeps_addresses=True)


def test_numbers_and_sizes_may_change_where_addresses_may() -> None:
    for processing in (with_as_many_as_there_are, with_a_number, with_a_number_beside_the_weight):
        model = Model(layer=processing)
        adaptor = build_adaptor(model, keeps_addresses=False)
        fill(adaptor, model, 3)
        fresh = load(3, layer=processing)
        assert differences(model.held(), fresh.held()) == []
        assert model.numbers() == fresh.numbers()


def test_processing_that_cannot_be_repeated_is_refused() -> None:
    class Hooked(Model):
        def process(self) -> None:
            self.plain.weight.data = self.plain.weight.data.clone()
            self.fused = torch.cat([self.plain.weight.data, self.layer.weight.data])

    model = Hooked(layer=untouched, plain=untouched)
    del model.plain.quant_method
    with pytest.raises(ModelError) as refusal:
        build_adaptor(model, keeps_addresses=True)
    named = ("plain (Module): plain.weight", "the model (Hooked): fused")
    assert has_code("weights-not-renewable", *named)(refusal.value)


class Attention(Model):
    """A layer inside of attention, like MLA's `kv_b_proj`, or referred to by it, like sinks."""

    def __init__(self, derive: Callable[[Any, torch.Tensor], None], is_inside: bool) -> None:
        from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

        class Layer(torch.nn.Module, AttentionLayerBase):
            def get_attn_backend(self) -> Any: ...

            def get_kv_cache_spec(self, vllm_config: Any) -> Any: ...

            def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
                derive(
                    self, (self.inner if is_inside else self.impl.source).weight.data.to(act_dtype)
                )

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

    def weights(self, seed: int) -> TensorDict:
        return {"layer": super().weights(seed)["layer"]}


def viewed(attention: Any, weight: torch.Tensor) -> None:
    replace(attention, W_UV=weight[: ROWS // 2].t(), W_UK_T=weight[ROWS // 2 :])


def copied(attention: Any, weight: torch.Tensor) -> None:
    attention.impl.sinks = weight.double()


@pytest.mark.parametrize(("derive", "num_runs"), [(viewed, 0), (copied, 1)])
@pytest.mark.parametrize("is_inside", [True, False], ids=["inside", "referred to"])
def test_attention_repeats_only_derivations_that_are_not_views(
    derive: Callable[[Any, torch.Tensor], None], num_runs: int, is_inside: bool
) -> None:
    model = Attention(derive, is_inside)
    fresh = Attention(derive, is_inside)
    adaptor = build_adaptor(model, keeps_addresses=True)
    kv_cache = model.attention.kv_cache = torch.ones(5)  # vLLM allocates it after loading
    before = addresses(model.held())
    runs = []
    process = model.attention.process_weights_after_loading
    model.attention.process_weights_after_loading = lambda dtype: (
        runs.append(dtype),
        process(dtype),
    )
    fill(adaptor, model, 4)
    fresh.load_weights(fresh.weights(4).items())
    fresh.process()
    del model.attention.process_weights_after_loading
    assert model.attention.kv_cache is kv_cache
    assert model.layer.dispatch is torch.nn.functional.linear
    del model.attention.kv_cache
    assert differences(model.held(), fresh.held()) == []
    assert addresses(model.held()).items() <= before.items()
    assert len(runs) == num_runs


@pytest.mark.parametrize("keeps_addresses", [True, False])
def test_constants_rewritten_by_the_processing_are_not_forward_state(keeps_addresses: bool) -> None:
    def derive(attention: Any, weight: torch.Tensor) -> None:
        copied(attention, weight)
        attention._k_scale.fill_(1.0)  # vLLM's attention rewrites its scales

    model = Attention(derive, is_inside=False)
    model.attention.register_buffer("_k_scale", torch.ones(1))
    adaptor = build_adaptor(model, keeps_addresses=keeps_addresses)
    model.attention.isa = "vec"  # set by vLLM with the KV cache
    for seed in range(3):
        fill(adaptor, model, seed)
        assert model.attention.isa == "vec"


@pytest.mark.parametrize(
    "processing", [quantised, with_added_tensors], ids=lambda processing: processing.__name__
)
def test_a_method_wrapped_after_loading_stays_wrapped(processing: Processing) -> None:
    model = Model(layer=processing)
    adaptor = build_adaptor(model, keeps_addresses=True)
    wrapper = layer_of(fail if processing is not with_added_tensors else processing).quant_method
    wrapper.old_quant_method = model.layer.quant_method  # vLLM does so for experts over ranks
    model.layer.quant_method = wrapper
    fill(adaptor, model, 2)
    assert model.layer.quant_method is wrapper
    model.layer.quant_method = wrapper.old_quant_method
    assert differences(model.held(), load(2, layer=processing).held()) == []


def test_a_failed_processing_leaves_the_module_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(layer=quantised)
    adaptor = build_adaptor(model, keeps_addresses=True)
    fill(adaptor, model, 0)
    before = addresses(model.held())
    adaptor.allocate(["layer"])
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(model.layer.quant_method, "process_weights_after_loading", fail)
        adaptor.commit(["layer"])
    assert addresses(model.held()) == before
    fill(adaptor, model, 1)
    assert differences(model.held(), load(1, layer=quantised).held()) == []


def test_nothing_is_processed_together_with_a_failed_rank(job: None) -> None:
    model = Model(layer=quantised)
    with contextlib.ExitStack() as ends:
        barrier = ProcessingBarrier(0, Job.join(60).new_group(ends))
        adaptor = build_adaptor(model, keeps_addresses=True, barrier=barrier)
        adaptor.release()
        adaptor.allocate(["layer"])
        with adaptor.observed(fail), pytest.raises(MemoryError):
            adaptor.commit(["layer"])
        assert barrier.is_over  # its peers raise
        fill(adaptor, model, 1)
        adaptor.allocate(["layer"])
        adaptor.abandon()
        with refused(StateError, "processing-is-over", "processing layer"):
            adaptor.commit(["layer"])


def fail(*_: object) -> None:
    raise MemoryError


def test_weights_are_processed_with_the_settings_of_the_first_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Model(layer=transposed)
    seen = []
    before = ProcessSettings.now()
    build_settings = dataclasses.replace(
        before, matmul_precision="high", stream=None, num_threads=None
    )
    adaptor = build_adaptor(model, keeps_addresses=True, settings=build_settings)
    process = model.layer.quant_method.process_weights_after_loading

    def set_and_process(layer: torch.nn.Module) -> None:
        seen.append((torch.get_float32_matmul_precision(), torch.get_num_threads()))
        torch.set_float32_matmul_precision("medium")
        monkeypatch.setenv("SET_BY_A_KERNEL", "1")
        process(layer)

    monkeypatch.setattr(model.layer.quant_method, "process_weights_after_loading", set_and_process)
    # As in vLLM's linear layers.
    monkeypatch.setattr(
        torch.nn.Module,
        "update_param_tp_status",
        lambda layer: seen.append(layer.weight.shape),
        raising=False,
    )
    fill(adaptor, model, 0)
    assert seen == [("high", before.num_threads), (COLUMNS, ROWS)]
    assert ProcessSettings.now() == before  # changes by the processing are undone


# -- methods that keep a layer's Parameter ---------------------------------------------------------


@pytest.mark.usefixtures("keeping")
def test_kept_weights_do_not_hold_staging_memory() -> None:
    model = Model(shuffled=shuffled_in_place, transposed=transposed)
    adaptor = build_adaptor(model, keeps_addresses=False)
    fill(adaptor, model, 0)
    # A tensor in staging memory would keep the memory of all groups filled together.
    storage = model.shuffled.weight.untyped_storage()
    assert storage.nbytes() == ROWS * COLUMNS * model.shuffled.weight.itemsize
    assert storage.resizable()  # lent memory is not


@pytest.mark.usefixtures("keeping")
@pytest.mark.parametrize("turn", [2, 3], ids=["in the rehearsal", "in a commit"])
def test_a_live_weight_keeps_its_address_if_its_parameter_moves(turn: int) -> None:
    turns = []

    def restless(layer: Any, method: Any) -> None:
        layer.sums = layer.weight.data.sum(1)
        turns.append(layer)
        if len(turns) == turn:
            replace(layer, weight=layer.weight.data.clone().as_strided((ROWS, COLUMNS), (1, ROWS)))

    model = Model(layer=restless)
    weight = model.layer.weight
    address = model.layer.weight.data_ptr()
    if turn == 2:
        with refused(ModelError, "weights-not-renewable", "layer.weight"):
            build_adaptor(model, keeps_addresses=True)
    else:
        fill(build_adaptor(model, keeps_addresses=True), model, 1)
        assert torch.equal(weight, model.weights(1)["layer"])
    assert model.layer.weight is weight
    assert weight.data_ptr() == address
