"""State that layers derive from weights in their first forward and keep.

After a switch it must be derived from the new weights. Real models with such layers (attention
sinks) and with parameters that only the loader can write (Mamba) are in
backends/fsdp/test_derived_models.py.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

from hybrid_engine.backends.vllm.cpu.host_memory import CpuWeightMemory
from hybrid_engine.backends.vllm.weights.adaptor import VllmAdaptor
from hybrid_engine.backends.vllm.weights.forward_state import ForwardState
from hybrid_engine.backends.vllm.weights.processed_model import inspect_model
from hybrid_engine.backends.vllm.weights.traced_model import trace_model
from hybrid_engine.errors import ModelError
from hybrid_engine.ranks.torch_internals import TensorDict
from tests.harness.errors import refused

pytestmark = pytest.mark.slow  # imports vLLM

SIZE = 6


class Kernel:
    """An object of a layer with its own state."""

    transposed: torch.Tensor | None = None
    sinks: torch.Tensor


class Layer(torch.nn.Module):
    """Compute x * factor.

    Args:
        first: called at the start of every forward; keeps state after the first call.
        factor: returns the factor.
    """

    def __init__(self, first: Callable[[Any], None], factor: Callable[[Any], torch.Tensor]) -> None:
        super().__init__()
        self.first = first
        self.factor = factor
        self.weight = torch.nn.Parameter(torch.empty(SIZE), requires_grad=False)
        self.register_buffer("table", torch.zeros(SIZE))
        self.merged: torch.Tensor | None = None
        self.cache: TensorDict = {}
        self.parts: list[torch.Tensor] = []
        self.is_filled = False
        self.kernel = Kernel()
        self.number = None
        self.kernel.sinks = self.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.first(self)
        return x * self.factor(self)


def merged(layer: Any) -> None:
    if layer.merged is None:
        layer.merged = layer.weight * 1.0


def cached(layer: Any) -> None:
    layer.cache.setdefault("weight", layer.weight.clone())


def listed(layer: Any) -> None:
    layer.parts[:] = layer.parts or list(layer.weight.clone().chunk(2))


def in_a_kernel(layer: Any) -> None:
    if layer.kernel.transposed is None:
        layer.kernel.transposed = layer.weight.clone()


def written_in_place(layer: Any) -> None:
    if not layer.is_filled:
        layer.table.copy_(layer.weight)
        layer.is_filled = True


def written_in_place_with_a_late_flag(layer: Any) -> None:
    if not hasattr(layer, "is_ready"):
        layer.table.copy_(layer.weight)
        layer.is_ready = True


def cast(layer: Any) -> None:
    """Like vLLM's attention on a CPU, which casts its sinks."""
    layer.kernel.sinks = layer.kernel.sinks.to(torch.float64)


def read_as_a_number(layer: Any) -> None:
    if layer.number is None:
        layer.number = float(layer.weight[0])


Factor = Callable[[Any], torch.Tensor]
LAZY: dict[Callable[[Any], None], Factor] = {
    merged: lambda layer: layer.merged,
    cached: lambda layer: layer.cache["weight"],
    listed: lambda layer: torch.cat(layer.parts),
    in_a_kernel: lambda layer: layer.kernel.transposed,
    written_in_place: lambda layer: layer.table,
    written_in_place_with_a_late_flag: lambda layer: layer.table,
    cast: lambda layer: layer.kernel.sinks.to(torch.float32),
    read_as_a_number: lambda layer: layer.weight + (layer.number - layer.weight[0]),
}


class Model(torch.nn.Module):
    def __init__(self, first: Callable[[Any], None], factor: Factor) -> None:
        super().__init__()
        self.layer = Layer(first, factor)
        self.layer.is_used = 0

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            getattr(self.layer, name).data.copy_(tensor)


def build_adaptor(model: Model, has_graphs: bool = False) -> VllmAdaptor:
    traced = trace_model(model, {"weight": (SIZE,)}, {"weight": torch.float32}, rank=0)
    processed = inspect_model(
        traced, contextlib.nullcontext, torch.float32, has_graphs, has_graphs=has_graphs
    )
    return VllmAdaptor(processed, CpuWeightMemory())


def captured(first: Callable[[Any], None], factor: Factor) -> VllmAdaptor:
    """Return the adaptor of a model with graphs after its first forward."""
    model = Model(first, factor)
    adaptor = build_adaptor(model, has_graphs=True)
    model.layer(torch.ones(SIZE))
    return adaptor


def fill(adaptor: VllmAdaptor, weight: torch.Tensor) -> None:
    adaptor.allocate(["layer"])["layer.weight"].copy_(weight)
    adaptor.commit(["layer"])
    adaptor.finish_fill()


@pytest.mark.parametrize("releases", [True, False])
@pytest.mark.parametrize("first", LAZY, ids=lambda first: first.__name__)
def test_state_is_derived_from_the_new_weights_after_a_switch(
    first: Callable[[Any], None], releases: bool
) -> None:
    model = Model(first, LAZY[first])
    adaptor = build_adaptor(model)
    x = torch.ones(SIZE)
    model.layer(x)  # vLLM's profiling run
    for seed in range(3):
        weight = torch.randn(SIZE, generator=torch.Generator().manual_seed(seed))
        if releases:
            adaptor.release()
        fill(adaptor, weight)
        for _ in range(2):  # the second forward uses kept state
            assert torch.equal(model.layer(x), weight)


def test_state_that_does_not_depend_on_weights_stays() -> None:
    def count(layer: Any) -> None:
        layer.num_calls = getattr(layer, "num_calls", 0) + 1
        layer.is_used = True

    model = Model(count, lambda layer: layer.weight)
    adaptor = build_adaptor(model)
    model.layer.kv_cache = torch.ones(4)  # bound by vLLM after loading
    for seed in range(2):
        model.layer.kv_cache += 1
        model.layer(torch.ones(SIZE))
        fill(adaptor, torch.full((SIZE,), float(seed)))
    assert (model.layer.num_calls, model.layer.is_used, model.layer.kv_cache[0]) == (2, True, 3)


GRAPHED = [merged, cached, listed, in_a_kernel, written_in_place, cast]


@pytest.mark.parametrize("first", GRAPHED, ids=lambda first: first.__name__)
def test_state_in_captured_graphs_is_refused(first: Callable[[Any], None]) -> None:
    adaptor = captured(first, LAZY[first])
    adaptor.release()
    with refused(ModelError, "state-not-renewable", "layer.", "(Layer)"):
        adaptor.allocate(["layer"])


def test_views_and_scratch_memory_in_captured_graphs_are_accepted() -> None:
    def use(layer: Any) -> None:
        layer.merged = layer.weight.view(2, 3)
        layer.table.normal_()

    fill(captured(use, lambda layer: layer.weight), torch.ones(SIZE))


def test_a_refused_model_is_not_read_after_its_release(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(state: ForwardState) -> list[str]:
        raise AssertionError("released weights were read")

    adaptor = captured(merged, LAZY[merged])
    adaptor.release()
    monkeypatch.setattr(ForwardState, "forget", read)
    adaptor.release()
    for _ in range(2):
        with refused(ModelError, "state-not-renewable"):
            adaptor.allocate(["layer"])


@pytest.mark.parametrize("is_shared", [True, False])
def test_a_workspace_shared_by_vllm_is_accepted(
    is_shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    envs = importlib.import_module("vllm.envs")

    def use(layer: Any) -> None:
        layer.kernel.workspace = vars(envs)["shared"] if is_shared else vars(envs)["cache"][0]

    monkeypatch.setattr(envs, "shared", torch.zeros(SIZE), raising=False)
    monkeypatch.setattr(
        envs, "cache", [torch.zeros(SIZE)], raising=False
    )  # may hold derived weights
    adaptor = captured(use, lambda layer: layer.weight)
    refusal = refused(ModelError, "state-not-renewable", "layer.kernel.workspace")
    with contextlib.nullcontext() if is_shared else refusal:
        fill(adaptor, torch.ones(SIZE))


def test_flags_of_other_objects_are_kept() -> None:
    def warm_up(layer: Any) -> None:
        layer.number = float(layer.weight[0])
        layer.kernel.is_warm = True

    model = Model(warm_up, lambda layer: layer.weight)
    model.layer.kernel.is_warm = False
    adaptor = build_adaptor(model)
    model.layer(torch.ones(SIZE))
    adaptor.release()
    assert (model.layer.number, model.layer.kernel.is_warm) == (None, True)


def test_a_flag_is_reset_with_the_state_below_its_object() -> None:
    def transpose(layer: Any) -> None:
        if not layer.is_filled:
            layer.kernel.transposed = layer.weight.clone()
            layer.is_filled = True

    model = Model(transpose, lambda layer: layer.kernel.transposed)
    adaptor = build_adaptor(model)
    for value in (1.0, 2.0):
        fill(adaptor, torch.full((SIZE,), value))
        assert model.layer(torch.ones(SIZE))[0] == value
