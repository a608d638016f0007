"""Tracing the loaders of small modules, without vLLM; the loaders on real values are the oracle."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch

from hybrid_engine.backends.vllm.weights.groups import STAGED
from hybrid_engine.backends.vllm.weights.traced_model import build_layout
from hybrid_engine.backends.vllm.weights.tracing import (
    Trace,
    flat_view,
    take_inventory,
    trace_loader,
)
from hybrid_engine.errors import ModelError, ParameterMismatchError
from hybrid_engine.ranks.torch_internals import TensorDict
from hybrid_engine.records.layout import Extent, Layout
from hybrid_engine.records.validation import layout_faults
from tests.harness.errors import refused
from tests.zoo.megatron_models import region_slices, view_of

Weights = Iterable[tuple[str, torch.Tensor]]
Load = Callable[["Model", TensorDict], None]
SHAPES = {"a": (4, 6), "b": (4, 6)}
DTYPES = dict.fromkeys(SHAPES, torch.float32)


class Model(torch.nn.Module):
    """Parameters `w` [8, 6] and `v` [6]; no loader fills `v`, some write less on `tp_rank` 1."""

    def __init__(self, load: Load, with_v: bool = False, tp_rank: int = 0) -> None:
        super().__init__()
        self.tp_rank = tp_rank
        self.w = torch.nn.Parameter(torch.zeros(8, 6))
        self.v = torch.nn.Parameter(torch.zeros(6)) if with_v else None
        self._load = load

    def load_weights(self, weights: Weights) -> None:
        self._load(self, dict(weights))


def _trace(model: Model) -> tuple[Trace, Callable[[], Layout]]:
    trace = trace_loader(model.load_weights, SHAPES, DTYPES)
    storages = take_inventory(model, {copy.storage for copy in trace.copies})
    groups = {storage.name: "" for storage in storages} | {
        STAGED + name: "" for name in trace.staged
    }
    return trace, lambda: build_layout(3, SHAPES, DTYPES, storages, trace, {}, groups)


def _stack(model: Model, weights: TensorDict) -> None:
    model.w.data[:4].copy_(weights["a"])
    model.w.data[4:].copy_(weights["b"])


def _reshard(model: Model, trace: Trace, layout: Layout, weights: TensorDict) -> None:
    """Write the records, then run the loader, like a switch."""
    assert layout_faults(layout, exact=True) == []
    buffers = {name: flat_view(parameter.data) for name, parameter in model.named_parameters()}
    staged = {name: torch.zeros(SHAPES[name]) for name in trace.staged}
    buffers |= {STAGED + name: flat_view(tensor) for name, tensor in staged.items()}
    for shard in layout.shards:
        view_of(buffers, shard).copy_(weights[shard.region.tensor][region_slices(shard)])
    if staged:
        with torch.no_grad():
            model.load_weights(staged.items())


def _loaded(load: Load, weights: TensorDict, tp_rank: int) -> torch.Tensor:
    model = Model(load, tp_rank=tp_rank)
    with torch.no_grad():
        model.load_weights([(name, tensor.clone()) for name, tensor in weights.items()])
    return model.w


def _transposed_halves(model: Model, weights: TensorDict) -> None:
    model.w.data.view(2, 4, 6).transpose(1, 2)[0].copy_(weights["a"].t())
    model.w.data[4:, :3].copy_(weights["b"].narrow(1, 3, 3))
    model.w.data[4:, 3:].copy_(weights["b"][:, :3])


def _written_twice(model: Model, weights: TensorDict) -> None:
    _stack(model, weights)
    model.w.data[:4].copy_(weights["b"])


def _contiguous(model: Model, weights: TensorDict) -> None:
    """Clone parts of a clone of a transposed tensor, with halves swapped between ranks."""
    model.w.data[:4].copy_(weights["a"].clone())
    columns = weights["b"].t().contiguous()
    for half in range(2):
        part = columns[:, 2 * half : 2 * half + 2].contiguous()
        model.w.data[4:].view(2, 2, 6)[(half + model.tp_rank) % 2].copy_(part.t())


def _reshaped(model: Model, weights: TensorDict) -> None:
    """Like the rows of Llama 4's heads: a reshape of a permuted view, which must copy."""
    rows = [weights[name].view(2, 2, 6).permute(1, 0, 2).reshape(4, 6) for name in SHAPES]
    model.w.data.view(2, 2, 2, 6)[model.tp_rank].copy_(
        rows[0].view(2, 2, 6).transpose(0, 1).reshape(2, 2, 6)
    )
    model.w.data[4 * (1 - model.tp_rank) :][:4].copy_(
        rows[1][:, :1].expand(4, 6).clone().view(4, 6)
    )


def _clone_of_a_permuted_view(model: Model, weights: TensorDict) -> None:
    """A clone keeps strides, so its storage is not row-major for its shape."""
    clone = weights["a"].view(2, 2, 6).permute(2, 0, 1).clone()
    model.w.data[:4].view(2, 2, 6).copy_(clone[:, :, :].permute(1, 2, 0))
    model.w.data[4:].view(2, 2, 6).copy_(weights["b"].view(2, 2, 6).permute(1, 0, 2).clone())


@pytest.mark.parametrize("tp_rank", [0, 1])
@pytest.mark.parametrize(
    "load",
    [
        _stack,
        _transposed_halves,
        _written_twice,
        _contiguous,
        _reshaped,
        _clone_of_a_permuted_view,
    ],
)
def test_records_equal_the_loader(load: Load, tp_rank: int) -> None:
    weights = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    model = Model(load, tp_rank=tp_rank)
    trace, layout = _trace(model)
    assert trace.staged == ()
    assert not model.w.any(), "tracing wrote to a parameter"
    _reshard(model, trace, layout(), weights)
    assert torch.equal(model.w, _loaded(load, weights, tp_rank))


def _cast(model: Model, weights: TensorDict) -> None:
    """The computed rows of one tensor overlap records of the other."""
    _stack(model, weights)
    model.w.data[:5].copy_((weights["a"] * 2).to(torch.bfloat16).repeat(2, 1)[:5])


def _joined(model: Model, weights: TensorDict) -> None:
    model.w.data.copy_(torch.cat([weights["a"], weights["b"]]))


def _changed_in_place(model: Model, weights: TensorDict) -> None:
    weights["a"].add_(1)
    _stack(model, weights)


def _through_a_real_temporary(model: Model, weights: TensorDict) -> None:
    temporary = torch.empty(4, 6)
    temporary.copy_(weights["a"])
    model.w.data[:4].copy_(temporary)
    model.w.data[4:].copy_(weights["b"])


def _scalar(model: Model, weights: TensorDict) -> None:
    model.w.data.fill_(weights["a"][0, 0].item())
    model.w.data[4:].copy_(weights["b"])


def _zeroed_afterwards(model: Model, weights: TensorDict) -> None:
    _stack(model, weights)
    if model.tp_rank:
        model.w.data[2:4].zero_()


def _changed_clone(model: Model, weights: TensorDict) -> None:
    clone = weights["a"].clone()
    clone[:2].fill_(1.0)
    _stack(model, {**weights, "a": clone})


@pytest.mark.parametrize("tp_rank", [0, 1])
@pytest.mark.parametrize(
    "load",
    [
        _cast,
        _joined,
        _changed_in_place,
        _through_a_real_temporary,
        _scalar,
        _zeroed_afterwards,
        _changed_clone,
    ],
)
def test_computed_weights_are_written_by_the_loader_at_every_reshard(
    load: Load, tp_rank: int
) -> None:
    model = Model(load, tp_rank=tp_rank)
    trace, layout = _trace(model)
    is_exact = load is _zeroed_afterwards and not tp_rank
    # Whole storages, so that no record is overwritten.
    assert trace.staged == (() if is_exact else ("a", "b"))
    for seed in range(2):
        weights = {
            name: torch.randn(shape, generator=torch.Generator().manual_seed(seed))
            for name, shape in SHAPES.items()
        }
        _reshard(model, trace, layout(), weights)
        assert torch.equal(model.w, _loaded(load, weights, tp_rank))


def _half(model: Model, weights: TensorDict) -> None:
    model.w.data[:4].copy_(weights["a"])


def _overlap(model: Model, weights: TensorDict) -> None:
    _stack(model, weights)
    model.w.data[2:6].copy_(weights["b"])


def _astray(model: Model, weights: TensorDict) -> None:
    _stack(model, weights)
    torch.empty(6, 4).copy_(weights["a"].t())


def test_every_uncovered_parameter_is_named_with_both_sizes() -> None:
    with pytest.raises(ParameterMismatchError) as caught:
        _trace(Model(_half, with_v=True))[1]()
    half, empty = caught.value.findings
    assert (
        "w: a vLLM parameter without a source: checkpoint tensors fill 24 (from a) "
        "of its 48 elements" in half
    )
    assert (
        "v: a vLLM parameter without a source: checkpoint tensors fill 0 (nothing offered) of its 6"
        in empty
    )


@pytest.mark.parametrize(
    ("load", "message"), [(_overlap, "same elements"), (_astray, "not a parameter or buffer")]
)
def test_ambiguous_and_stray_copies_are_refused(load: Load, message: str) -> None:
    with pytest.raises(ParameterMismatchError, match=message):
        _trace(Model(load))[1]()


def test_declared_padding_is_counted_and_recorded() -> None:
    model = Model(_half)
    trace = trace_loader(model.load_weights, SHAPES, DTYPES)
    storages = take_inventory(model, ())
    layout = build_layout(
        0, SHAPES, DTYPES, storages, trace, {"w": (Extent(24, 48),)}, {"w": "group"}
    )
    (buffer,) = layout.buffers.values()
    assert buffer.padding == (Extent(24, 48),)
    assert buffer.group == "group"


def test_the_error_of_a_loader_names_the_tensor() -> None:
    def load(model: Model, weights: TensorDict) -> None:
        model.w.data[:4].copy_(weights["a"][:, :5])

    with refused(ModelError, "loader-failed", "b (4, 6)"):
        _trace(Model(load))
