"""Tracing loaders of small modules that need no vLLM: every way a weight can travel, and every way it can get lost."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch

from hybrid_engine.backends.vllm.weights.groups import STAGED
from hybrid_engine.backends.vllm.weights.traced_model import build_layout
from hybrid_engine.backends.vllm.weights.tracing import Trace, flat_view, take_inventory, trace_loader
from hybrid_engine.errors import ModelError, ParameterMismatchError
from hybrid_engine.records.layout import Extent, Layout
from tests.zoo.megatron_models import region_slices, view_of

Weights = Iterable[tuple[str, torch.Tensor]]
SHAPES = {"a": (4, 6), "b": (4, 6)}
DTYPES = dict.fromkeys(SHAPES, torch.float32)


class Model(torch.nn.Module):
    """Two parameters: `w` [8, 6], and `v` [6], which stays empty unless asked for."""

    def __init__(self, load: Callable[[Model, dict[str, torch.Tensor]], None], with_v: bool = False) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(8, 6))
        self.v = torch.nn.Parameter(torch.zeros(6)) if with_v else None
        self._load = load

    def load_weights(self, weights: Weights) -> None:
        self._load(self, dict(weights))


def _trace(model: Model) -> tuple[Trace, Callable[[], Layout]]:
    trace = trace_loader(model.load_weights, SHAPES, DTYPES)
    storages = take_inventory(model, {copy.storage for copy in trace.copies})
    groups = {storage.name: "" for storage in storages} | {STAGED + name: "" for name in trace.staged}
    return trace, lambda: build_layout(3, SHAPES, DTYPES, storages, trace, {}, groups)


def _stack(model: Model, weights: dict[str, torch.Tensor]) -> None:
    model.w.data[:4].copy_(weights["a"])
    model.w.data[4:].copy_(weights["b"])


def _fill(model: Model, layout: Layout, weights: dict[str, torch.Tensor]) -> None:
    buffers = {name: flat_view(parameter.data) for name, parameter in model.named_parameters()}
    for shard in layout.shards:
        view_of(buffers, shard).copy_(weights[shard.region.tensor][region_slices(shard)])


def _transposed_halves(model: Model, weights: dict[str, torch.Tensor]) -> None:
    model.w.data.view(2, 4, 6).transpose(1, 2)[0].copy_(weights["a"].t())
    model.w.data[4:, :3].copy_(weights["b"].narrow(1, 3, 3))
    model.w.data[4:, 3:].copy_(weights["b"][:, :3])


def _broadcast(model: Model, weights: dict[str, torch.Tensor]) -> None:
    model.w.data.view(2, 4, 6).copy_(weights["a"])


def _written_twice(model: Model, weights: dict[str, torch.Tensor]) -> None:
    _stack(model, weights)
    model.w.data[:4].copy_(weights["b"])


@pytest.mark.parametrize("load", [_stack, _transposed_halves, _broadcast, _written_twice])
def test_records_do_what_the_loader_does(load: Callable[[Model, dict[str, torch.Tensor]], None]) -> None:
    weights = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    expected, model = Model(load), Model(load)
    expected.load_weights(weights.items())
    trace, layout = _trace(model)
    assert trace.staged == (), "tracing wrote"
    assert not model.w.any(), "tracing wrote"
    _fill(model, layout(), weights)
    assert torch.equal(model.w, expected.w)


def _cast(model: Model, weights: dict[str, torch.Tensor]) -> None:
    _stack(model, weights)
    model.w.data[:4].copy_((weights["a"] * 2).to(torch.bfloat16))


def _joined(model: Model, weights: dict[str, torch.Tensor]) -> None:
    model.w.data.copy_(torch.cat([weights["a"], weights["b"]]))


def _changed_in_place(model: Model, weights: dict[str, torch.Tensor]) -> None:
    weights["a"].add_(1)
    _stack(model, weights)


def _through_a_real_temporary(model: Model, weights: dict[str, torch.Tensor]) -> None:
    temporary = torch.empty(4, 6)
    temporary.copy_(weights["a"])
    model.w.data[:4].copy_(temporary)
    model.w.data[4:].copy_(weights["b"])


def _transformed_after(model: Model, weights: dict[str, torch.Tensor]) -> None:
    _stack(model, weights)
    model.w.data.mul_(2)


def _scalar(model: Model, weights: dict[str, torch.Tensor]) -> None:
    model.w.data.fill_(weights["a"][0, 0].item())
    model.w.data[4:].copy_(weights["b"])


@pytest.mark.parametrize(
    ("load", "staged"),
    [
        (_cast, ("a",)),
        (_joined, ("a", "b")),
        (_changed_in_place, ("a",)),
        (_through_a_real_temporary, ("a",)),
        (_transformed_after, ("a", "b")),
        (_scalar, ("a",)),
    ],
)
def test_computed_sources_are_staged_and_counted_as_covered(
    load: Callable[[Model, dict[str, torch.Tensor]], None], staged: tuple[str, ...]
) -> None:
    trace, layout = _trace(Model(load))
    assert trace.staged == staged
    buffers = layout().buffers
    assert {buffer_id.name for buffer_id in buffers} == {"w", *(STAGED + name for name in staged)}
    assert all(shard.region.tensor not in staged or STAGED in shard.place.buffer.name for shard in layout().shards)


def _half(model: Model, weights: dict[str, torch.Tensor]) -> None:
    model.w.data[:4].copy_(weights["a"])


def _overlap(model: Model, weights: dict[str, torch.Tensor]) -> None:
    _stack(model, weights)
    model.w.data[2:6].copy_(weights["b"])


def _astray(model: Model, weights: dict[str, torch.Tensor]) -> None:
    _stack(model, weights)
    torch.empty(6, 4).copy_(weights["a"].t())


def test_every_uncovered_parameter_is_named_with_both_numbers() -> None:
    with pytest.raises(ParameterMismatchError) as caught:
        _trace(Model(_half, with_v=True))[1]()
    half, nothing = caught.value.findings
    assert "w: a vLLM parameter without a source: checkpoint tensors fill 24 (from a) of its 48 elements" in half
    assert "v: a vLLM parameter without a source: checkpoint tensors fill 0 (nothing offered) of its 6" in nothing


@pytest.mark.parametrize(("load", "message"), [(_overlap, "same elements"), (_astray, "no parameter or buffer")])
def test_ambiguous_and_stray_copies_are_refused(
    load: Callable[[Model, dict[str, torch.Tensor]], None], message: str
) -> None:
    with pytest.raises(ParameterMismatchError, match=message):
        _trace(Model(load))[1]()


def test_declared_padding_counts_and_is_in_the_buffer() -> None:
    model = Model(_half)
    trace = trace_loader(model.load_weights, SHAPES, DTYPES)
    storages = take_inventory(model, ())
    layout = build_layout(0, SHAPES, DTYPES, storages, trace, {"w": (Extent(24, 48),)}, {"w": "group"})
    (buffer,) = layout.buffers.values()
    assert buffer.padding == (Extent(24, 48),)
    assert buffer.group == "group"


def test_a_loader_that_fails_names_the_tensor() -> None:
    def load(model: Model, weights: dict[str, torch.Tensor]) -> None:
        model.w.data[:4].copy_(weights["a"][:, :5])

    with pytest.raises(ModelError, match=r"while b \(4, 6\) was offered"):
        _trace(Model(load))
