"""Layers with made-up weight processing, like vLLM's kernels need it, and an adaptor for them."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import torch

from hybrid_engine.backends.vllm.cpu.host_memory import CpuWeightMemory
from hybrid_engine.backends.vllm.process_state import ProcessSettings
from hybrid_engine.backends.vllm.weights.adaptor import VllmAdaptor
from hybrid_engine.backends.vllm.weights.postload import module_tensors
from hybrid_engine.backends.vllm.weights.processed_model import inspect_model
from hybrid_engine.backends.vllm.weights.processing_barrier import ProcessingBarrier
from hybrid_engine.backends.vllm.weights.traced_model import trace_model
from hybrid_engine.backends.vllm.weights.tracing import flat_view
from hybrid_engine.backends.vllm.weights.weight_memory import WeightMemory
from hybrid_engine.ranks.torch_internals import TensorDict

ROWS = 12
COLUMNS = 8
BLOCK = 4


# -- processing of a layer's weight [ROWS, COLUMNS] ------------------------------------------------


def transposed(layer: Any, method: Any) -> None:
    replace(layer, weight=layer.weight.t().contiguous())


def shuffled_in_place(layer: Any, method: Any) -> None:
    """Like experts for FlashInfer's TRTLLM kernels: same storage and shape, other order."""
    layer.weight.data.copy_(
        layer.weight.data.view(ROWS // BLOCK, BLOCK, COLUMNS).flip(0, 1).reshape(ROWS, COLUMNS)
    )


def padded(layer: Any, method: Any) -> None:
    wide = torch.nn.functional.pad(layer.weight.data, (0, 3, 0, 1))
    replace(layer, weight=wide[:, :-1])


def quantised(layer: Any, method: Any) -> None:
    """Quantise blocks with scales, once; the kernel's object refers to the layer's scales."""
    if getattr(layer, "_already_called_process_weights_after_loading", False):
        return
    blocks = layer.weight.data.view(ROWS // BLOCK, BLOCK, COLUMNS)
    scales = blocks.abs().amax((1, 2)) / 127
    replace(
        layer,
        weight=(blocks / scales[:, None, None]).round().to(torch.int8).view(ROWS, COLUMNS),
        scales=scales,
    )
    method.kernel = SimpleNamespace(scales=layer.scales, config={"block": BLOCK})
    layer._already_called_process_weights_after_loading = True


def with_added_tensors(layer: Any, method: Any) -> None:
    """Keep the weight and store derived tensors outside of parameters."""
    layer.sums = layer.weight.data.sum(1)
    method.tables = [{"squares": layer.weight.data**2}, (layer.weight.data.amax(0),)]


def with_a_closure(layer: Any, method: Any) -> None:
    packed = layer.weight.data.t().contiguous()
    layer.compute = lambda x: x @ packed
    del layer.weight


def with_repeated_elements(layer: Any, method: Any) -> None:
    layer.largest = layer.weight.data.abs().amax().expand(3, ROWS)


def with_aliases(layer: Any, method: Any) -> None:
    """Like MLA: views of the weight in other shapes."""
    replace(layer, upper=layer.weight.data[: ROWS // 2].t(), lower=layer.weight.data[ROWS // 2 :])


def untouched(layer: Any, method: Any) -> None:
    """New parameter over the same storage, zero-width padding, kernel without weights."""
    layer.weight.data.copy_(layer.weight.data)
    replace(layer, weight=layer.weight.data.contiguous())
    method.kernel = SimpleNamespace(layout="row-major", weight=layer.weight)
    layer.dispatch = torch.nn.functional.linear


def in_an_order(layer: Any, method: Any) -> None:
    """Permute by a tensor that exists before the weights and is not a buffer."""
    replace(layer, weight=layer.weight.data[method.order])


def scaled_in_place(layer: Any, method: Any) -> None:
    """Scale an older tensor in place that is not a buffer; its old values matter."""
    method.scale.mul_(layer.weight.data.abs().amax(1))


def added_to_a_buffer(layer: Any, method: Any) -> None:
    layer.total.add_(layer.weight.data.sum(0))


def with_a_constant_filled(layer: Any, method: Any) -> None:
    """Write constants, like vLLM's default scales, and numbers of the kernel."""
    method.scale.fill_(0.5)
    layer.total.zero_()
    layer.block = BLOCK
    method.kernel = SimpleNamespace(clamp=float("nan"), tiles=[BLOCK, 2 * BLOCK])


DERIVED = [
    in_an_order,
    transposed,
    shuffled_in_place,
    padded,
    quantised,
    with_added_tensors,
    with_a_closure,
    with_repeated_elements,
]
WRITTEN = [scaled_in_place, added_to_a_buffer]
LIVE = [with_aliases, untouched, with_a_constant_filled]
AS_MODULES = [with_added_tensors, untouched]


def with_as_many_as_there_are(layer: Any, method: Any) -> None:
    layer.positive = layer.weight.data[layer.weight.data > 0]


def with_a_number(layer: Any, method: Any) -> None:
    layer.scale_float = layer.weight.data.abs().max().item()
    layer.scaled = layer.weight.data / layer.scale_float


def with_a_number_beside_the_weight(layer: Any, method: Any) -> None:
    method.kernel = SimpleNamespace(largest=layer.weight.data.abs().max().item())


def with_hidden_memory(layer: Any, method: Any) -> None:
    new = ctypes.pythonapi.PyCapsule_New
    new.restype = ctypes.py_object
    new.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
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
    with_a_number_beside_the_weight: "layer.quant_method.kernel.largest is a number that "
    "depends on the weights",
    with_hidden_memory: "layer.quant_method.packed is a PyCapsule, which hides memory",
    once_only: "its processing cannot run again: NotImplementedError: in-place reloads are "
    "not supported yet",
}


# -- model -----------------------------------------------------------------------------------------


def replace(layer: torch.nn.Module, **tensors: torch.Tensor) -> None:
    from vllm.model_executor import utils

    for name, tensor in tensors.items():
        utils.replace_parameter(layer, name, tensor)


def layer_of(processing: Callable[[Any, Any], None]) -> torch.nn.Module:
    """Return a layer with this processing; methods in `AS_MODULES` are modules."""
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

    bases = (
        (QuantizeMethodBase, torch.nn.Module) if processing in AS_MODULES else (QuantizeMethodBase,)
    )

    class Method(*bases):
        def __init__(self) -> None:
            super().__init__()
            self.order = torch.arange(ROWS).roll(5)
            self.scale = torch.linspace(1, 2, ROWS)

        def create_weights(self, layer: Any, *sizes: Any, **attributes: Any) -> None: ...

        def apply(self, layer: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
            raise NotImplementedError

        def process_weights_after_loading(self, layer: Any) -> None:
            processing(layer, self)

    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(torch.empty(ROWS, COLUMNS), requires_grad=False)
    layer.register_buffer("total", torch.linspace(3, 4, COLUMNS))
    layer.quant_method = Method()
    return layer


class Model(torch.nn.Module):
    def __init__(self, **processing: Callable[[Any, Any], None]) -> None:
        super().__init__()
        for name, process_weights in processing.items():
            self.add_module(name, layer_of(process_weights))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            getattr(self, name).weight.data.copy_(tensor)

    def process(self) -> None:
        """Process all layers, like vLLM after loading."""
        for layer in self.children():
            layer.quant_method.process_weights_after_loading(layer)

    def held(self) -> TensorDict:
        """Return all tensors in the model, by path."""
        modules = dict(self.named_modules())
        tensors = module_tensors(modules, modules).tensors
        return {path: tensor for path, tensor in tensors.items() if tensor.numel()}

    def numbers(self) -> dict[str, float]:
        """Return all numbers in the model, by path."""
        modules = dict(self.named_modules())
        return module_tensors(modules, modules).numbers

    def weights(self, seed: int) -> TensorDict:
        generator = torch.Generator().manual_seed(seed)
        return {
            name: torch.randn(ROWS, COLUMNS, generator=generator)
            for name, _ in self.named_children()
        }


class Forgetful(WeightMemory):
    """Memory like that of segments that sleep: what is freed becomes garbage."""

    frees_all_at_once = True

    def free(self, live: Any) -> None:
        for tensor in live.values():
            flat_view(tensor.detach()).fill_(3)


def build_adaptor(
    model: Model,
    keeps_addresses: bool,
    barrier: ProcessingBarrier | None = None,
    rank: int = 0,
    settings: ProcessSettings | None = None,
    keeps_memory: bool = False,
) -> VllmAdaptor:
    """Build an adaptor like vLLM's start-up."""
    shapes = {name: tuple(weight.shape) for name, weight in model.weights(0).items()}
    traced = trace_model(model, shapes, dict.fromkeys(shapes, torch.float32), rank)
    model.process()
    processed = inspect_model(
        traced, contextlib.nullcontext, torch.float32, keeps_addresses, barrier
    )
    memory = Forgetful() if keeps_addresses else CpuWeightMemory()
    return VllmAdaptor(processed, memory, keeps_memory, settings=settings)


def fill(adaptor: VllmAdaptor, model: Model, seed: int) -> None:
    adaptor.release()
    for name, weight in model.weights(seed).items():
        for flat in adaptor.allocate([name]).values():
            flat.copy_(weight.flatten())
        adaptor.commit([name])
    adaptor.finish_fill()


def load(seed: int, **processing: Callable[[Any, Any], None]) -> Model:
    """Return a model after vLLM's own load."""
    model = Model(**processing)
    model.load_weights(model.weights(seed).items())
    model.process()
    return model


def addresses(tensors: TensorDict) -> dict[str, tuple[int, tuple[int, ...]]]:
    return {path: (tensor.data_ptr(), tensor.stride()) for path, tensor in tensors.items()}
