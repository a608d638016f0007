"""Layers whose methods do to weights what kernels want done, in one small model: after a fill they compute with what a
fresh load gives, bit by bit, and at the old addresses where these must stay."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hybrid_engine.backends.vllm.weights import derivation as derivations
from hybrid_engine.backends.vllm.weights.adaptor import VllmAdaptor
from hybrid_engine.backends.vllm.weights.held import held_by_all
from hybrid_engine.backends.vllm.weights.looking import look
from hybrid_engine.backends.vllm.weights.storages import flat_view
from hybrid_engine.backends.vllm.weights.traced_model import trace_model
from hybrid_engine.backends.vllm.weights.weight_memory import HostMemory, WeightMemory
from hybrid_engine.errors import ModelError

pytestmark = pytest.mark.slow  # imports vLLM

ROWS, COLUMNS, BLOCK = 12, 8, 4


# -- what is done to a layer's weight, of shape [ROWS, COLUMNS] --------------------------------------------------------


def transposed(layer: Any, method: Any) -> None:
    replace(layer, weight=layer.weight.t().contiguous())


def shuffled_in_place(layer: Any, method: Any) -> None:
    """As experts for FlashInfer's TRTLLM kernels: same storage, same shape, other order."""
    layer.weight.data.copy_(layer.weight.data.view(ROWS // BLOCK, BLOCK, COLUMNS).flip(0, 1).reshape(ROWS, COLUMNS))


def padded(layer: Any, method: Any) -> None:
    wide = torch.nn.functional.pad(layer.weight.data, (0, 3, 0, 1))
    replace(layer, weight=wide[:, :-1])


def quantised(layer: Any, method: Any) -> None:
    """Blocks with scales, once; the kernel's object refers to the layer's scales."""
    if getattr(layer, "_already_called_process_weights_after_loading", False):
        return
    blocks = layer.weight.data.view(ROWS // BLOCK, BLOCK, COLUMNS)
    scales = blocks.abs().amax((1, 2)) / 127
    replace(layer, weight=(blocks / scales[:, None, None]).round().to(torch.int8).view(ROWS, COLUMNS), scales=scales)
    method.kernel = SimpleNamespace(scales=layer.scales, config={"block": BLOCK})
    layer._already_called_process_weights_after_loading = True


def with_added_tensors(layer: Any, method: Any) -> None:
    """The weight stays; what is made of it is where no parameter is."""
    layer.sums = layer.weight.data.sum(1)
    method.tables = [{"squares": layer.weight.data**2}, (layer.weight.data.amax(0),)]


def with_data_rebound(layer: Any, method: Any) -> None:
    layer.weight.data = layer.weight.data.flip(0).contiguous()


def with_a_closure(layer: Any, method: Any) -> None:
    packed = layer.weight.data.t().contiguous()
    layer.compute = lambda x: x @ packed
    del layer.weight


def with_repeated_elements(layer: Any, method: Any) -> None:
    layer.largest = layer.weight.data.abs().amax().expand(3, ROWS)


def with_aliases(layer: Any, method: Any) -> None:
    """As MLA: views of the weight in other shapes."""
    replace(layer, upper=layer.weight.data[: ROWS // 2].t(), lower=layer.weight.data[ROWS // 2 :])


def untouched(layer: Any, method: Any) -> None:
    """A new parameter over the same storage, a padding that pads nothing, a kernel without weights."""
    layer.weight.data.copy_(layer.weight.data)
    replace(layer, weight=layer.weight.data.contiguous())
    method.kernel = SimpleNamespace(layout="row-major", weight=layer.weight)
    layer.dispatch = torch.nn.functional.linear


def with_halves_swapped(layer: Any, method: Any) -> None:
    """vLLM's own, of experts for FlashInfer's CUTLASS kernels."""
    from vllm.model_executor.layers.quantization.utils.flashinfer_utils import swap_w13_to_w31

    replace(layer, weight=swap_w13_to_w31(layer.weight.data[None])[0])


def in_an_order(layer: Any, method: Any) -> None:
    """By a tensor that is there before the weights are, and that no buffer is."""
    replace(layer, weight=layer.weight.data[method.order])


DERIVED = [
    in_an_order,
    transposed,
    shuffled_in_place,
    padded,
    quantised,
    with_added_tensors,
    with_data_rebound,
    with_a_closure,
    with_repeated_elements,
    with_halves_swapped,
]
LIVE = [with_aliases, untouched]
AS_MODULES = [with_added_tensors, untouched]


def with_as_many_as_there_are(layer: Any, method: Any) -> None:
    layer.positive = layer.weight.data[layer.weight.data > 0]


def with_a_number(layer: Any, method: Any) -> None:
    layer.scale_float = layer.weight.data.abs().max().item()
    layer.scaled = layer.weight.data / layer.scale_float


def with_hidden_memory(layer: Any, method: Any) -> None:
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    method.packed = new(id(layer), None, None)


def once_only(layer: Any, method: Any) -> None:
    _processed.append(layer)
    if _processed.count(layer) > 1:
        raise NotImplementedError("in-place reloads are not supported yet")
    transposed(layer, method)


_processed: list[torch.nn.Module] = []
REFUSED = {
    with_as_many_as_there_are: "layer.positive is float32",
    with_a_number: "layer.scale_float is a number that depends on the weights",
    with_hidden_memory: "layer.quant_method.packed is a PyCapsule, which hides memory",
    once_only: "its processing cannot run again: NotImplementedError: in-place reloads are not supported yet",
}


# -- the model ---------------------------------------------------------------------------------------------------------


def replace(layer: torch.nn.Module, **tensors: torch.Tensor) -> None:
    from vllm.model_executor import utils

    for name, tensor in tensors.items():
        utils.replace_parameter(layer, name, tensor)


def layer_of(processing: Callable[[Any, Any], None]) -> torch.nn.Module:
    """A layer with such a method; as vLLM's methods of experts are, those in `AS_MODULES` are modules."""
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

    bases = (QuantizeMethodBase, torch.nn.Module) if processing in AS_MODULES else (QuantizeMethodBase,)

    class Method(*bases):
        def __init__(self) -> None:
            super().__init__()
            self.order = torch.arange(ROWS).roll(5)

        def create_weights(self, layer: Any, *sizes: Any, **attributes: Any) -> None: ...

        def apply(self, layer: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
            raise NotImplementedError

        def process_weights_after_loading(self, layer: Any) -> None:
            processing(layer, self)

    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(torch.empty(ROWS, COLUMNS), requires_grad=False)
    layer.quant_method = Method()
    return layer


class Model(torch.nn.Module):
    def __init__(self, **processing: Callable[[Any, Any], None]) -> None:
        super().__init__()
        for name, each in processing.items():
            self.add_module(name, layer_of(each))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            getattr(self, name).weight.data.copy_(tensor)

    def process(self) -> None:
        """As vLLM does."""
        for layer in self.children():
            layer.quant_method.process_weights_after_loading(layer)

    def held(self) -> dict[str, torch.Tensor]:
        """All tensors in it, by path."""
        modules = dict(self.named_modules())
        return {path: each for path, each in held_by_all(modules, modules).tensors.items() if each.numel()}

    def weights(self, seed: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return {name: torch.randn(ROWS, COLUMNS, generator=generator) for name, _ in self.named_children()}


class Forgetful(WeightMemory):
    """As vLLM's sleep mode of level 2: all that a model holds is garbage once it was freed, but for buffers."""

    frees_all_at_once = True

    def __init__(self, model: Model) -> None:
        self._model = model

    def free(self, live: Any) -> None:
        for tensor in self._model.held().values():
            flat_view(tensor.detach()).fill_(3)


def built(model: Model, keeps_addresses: bool) -> VllmAdaptor:
    """As vLLM's start-up makes one."""
    shapes = {name: tuple(weight.shape) for name, weight in model.weights(0).items()}
    traced = trace_model(model, shapes, dict.fromkeys(shapes, torch.float32), rank=0)
    model.process()
    processed = look(traced, contextlib.nullcontext, torch.float32, keeps_addresses)
    return VllmAdaptor(processed, Forgetful(model) if keeps_addresses else HostMemory())


def fill(adaptor: VllmAdaptor, model: Model, seed: int) -> None:
    adaptor.release()
    for name, weight in model.weights(seed).items():
        for flat in adaptor.allocate([name]).values():
            flat.copy_(weight.flatten())
        adaptor.commit([name])
    adaptor.finish_fill()


def loaded(processing: Callable[[Any, Any], None], seed: int) -> dict[str, torch.Tensor]:
    """What vLLM holds after a load of its own."""
    model = Model(layer=processing)
    model.load_weights(model.weights(seed).items())
    model.process()
    return model.held()


def different(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    return [
        path
        for path in sorted({*found, *expected})
        if path not in found or path not in expected or not derivations.same_bytes(found[path], expected[path])
    ]


def addresses(tensors: dict[str, torch.Tensor]) -> dict[str, tuple[int, tuple[int, ...]]]:
    return {path: (tensor.data_ptr(), tensor.stride()) for path, tensor in tensors.items()}


# -- tests -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keeps_addresses", [True, False], ids=["in place", "anew"])
@pytest.mark.parametrize("processing", [*DERIVED, *LIVE], ids=lambda processing: processing.__name__)
def test_a_fill_leaves_what_a_fresh_load_would(processing: Callable[[Any, Any], None], keeps_addresses: bool) -> None:
    model = Model(layer=processing)
    adaptor = built(model, keeps_addresses)
    before = addresses(model.held())
    for seed in range(2):
        fill(adaptor, model, seed)
        assert different(model.held(), loaded(processing, seed)) == []
        assert not keeps_addresses or addresses(model.held()) == before


@pytest.mark.parametrize("processing", LIVE, ids=lambda processing: processing.__name__)
def test_weights_that_are_computed_with_as_loaded_are_written_and_not_processed(
    processing: Callable[[Any, Any], None],
) -> None:
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
    held = {path: each.untyped_storage().nbytes() for path, each in model.held().items() if not path.endswith("order")}
    assert adaptor.resident_nbytes() == sum(held.values()) == 0


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
    with pytest.raises(ModelError, match=r"layer.pair\[0\] refers to the first weights from where that cannot be"):
        built(model, keeps_addresses=True)


def test_where_addresses_may_change_numbers_and_sizes_may_too() -> None:
    for processing in (with_as_many_as_there_are, with_a_number):
        model = Model(layer=processing)
        adaptor = built(model, keeps_addresses=False)
        fill(adaptor, model, 3)
        assert different(model.held(), loaded(processing, 3)) == []


def test_what_nobody_can_do_again_is_refused() -> None:
    class Hooked(Model):
        def process(self) -> None:
            self.plain.weight.data = self.plain.weight.data.clone()
            self.fused = torch.cat([self.plain.weight.data, self.layer.weight.data])

    model = Hooked(layer=untouched, plain=untouched)
    del model.plain.quant_method
    with pytest.raises(ModelError) as refusal:
        built(model, keeps_addresses=True)
    assert "  - plain (Module): plain.weight was changed after loading, by something else. " in str(refusal.value)
    assert "  - the model (Hooked): fused was made after loading, by something else. " in str(refusal.value)


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


@pytest.mark.parametrize("processing", [quantised, with_added_tensors], ids=lambda processing: processing.__name__)
def test_a_method_that_was_wrapped_after_loading_stays_wrapped(processing: Callable[[Any, Any], None]) -> None:
    """As vLLM does with methods of experts that are spread over ranks; the wrapper processes nothing."""
    model = Model(layer=processing)
    adaptor = built(model, keeps_addresses=True)
    wrapper = layer_of(fail if processing is not with_added_tensors else processing).quant_method
    wrapper.old_quant_method, model.layer.quant_method = model.layer.quant_method, wrapper
    fill(adaptor, model, 2)
    assert model.layer.quant_method is wrapper
    model.layer.quant_method = wrapper.old_quant_method
    assert different(model.held(), loaded(processing, 2)) == []


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
    assert different(model.held(), loaded(quantised, 1)) == []


def fail(*_: object) -> None:
    raise MemoryError


@pytest.mark.parametrize("keeps_addresses", [True, False], ids=["in place", "anew"])
def test_a_proof_sees_what_was_not_taken_up(keeps_addresses: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(**{processing.__name__: processing for processing in [*DERIVED, *LIVE]})
    adaptor = built(model, keeps_addresses)
    unproven: list[str] = []
    with adaptor.proving(model.weights(0), unproven.append):
        fill(adaptor, model, 0)
        assert unproven == []
        if keeps_addresses:
            monkeypatch.setattr(derivations.Derivation, "renew", lambda self, tensors: None)
            fill(adaptor, model, 1)
            told = "\n".join(unproven)
            for processing in DERIVED:
                assert f"vLLM's {processing.__name__} (Method) computes with other weights than it was given" in told
            assert not any(f"{processing.__name__}:" in told for processing in LIVE)
