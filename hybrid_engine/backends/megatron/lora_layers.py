"""Low-rank adapters on Megatron's parallel linear layers, and their sum with the frozen weights.

    y = W x + (alpha / rank) * B A x           W frozen, A [rank, in], B [out, rank]

    column-parallel W (linear_qkv, linear_fc1):  A on every rank,         B cut along its rows as W is
    row-parallel W (linear_proj, linear_fc2):    A cut along its columns, B on every rank

So a rank's share of B A lies exactly where its share of W does, and weights are merged without a word to other ranks.

Names are Megatron-Bridge's: `linear_qkv.to_wrap.weight`, `linear_qkv.adapter.linear_in.weight` (A),
`linear_qkv.adapter.linear_out.weight` (B). Source: Hu et al., "LoRA", arXiv 2106.09685.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)

from hybrid_engine.config import LoraConfig
from hybrid_engine.errors import ModelError
from hybrid_engine.memory.elastic import allocate_elastic

WRAPPED = "to_wrap."
"""Part of a wrapped parameter's name."""

ADAPTER = ".adapter."
"""Part of an adapter parameter's name."""


def add_adapters(model: torch.nn.Module, lora: LoraConfig) -> list[str]:
    """Freeze a model and put adapters on the linear layers that `lora.target_modules` names; returns their names.

    Call before precision and DDP wrappers. Names that no model has are found in the configuration; a stage need not
    have them all. Raises ModelError for a target that is no parallel linear layer outside of experts.
    """
    model.requires_grad_(False)
    targets = [
        (name, module) for name, module in model.named_modules() if name.rpartition(".")[2] in lora.target_modules
    ]
    if problems := [problem for name, module in targets for problem in _problems(name, module)]:
        raise ModelError(f"adapters cannot be put on {'; '.join(problems)}. Take it out of lora.target_modules")
    for name, module in targets:
        parent_name, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent_name), attribute, LoraLinear(module, lora))
    return [name for name, _ in targets]


def _problems(name: str, module: torch.nn.Module) -> Iterator[str]:
    if not isinstance(module, ColumnParallelLinear | RowParallelLinear):
        yield f"{name} (a {type(module).__name__}; only megatron-core's own parallel linear layers are tried)"
    elif getattr(module, "is_expert", False):
        yield f"{name} (part of an expert)"


class LoraLinear(torch.nn.Module):
    """A parallel linear layer with an adapter; called as the layer itself.

    Attributes:
        to_wrap: the frozen layer.
        adapter: A and B of this rank.
        scale: alpha / rank.
    """

    def __init__(self, to_wrap: ColumnParallelLinear | RowParallelLinear, lora: LoraConfig) -> None:
        super().__init__()
        self.to_wrap = to_wrap
        self.scale = lora.alpha / lora.rank
        self.adapter = _Adapter(to_wrap, lora.rank)

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The layer's output with the adapter's added, and the layer's bias."""
        output, bias = self.to_wrap(x, *args, **kwargs)
        return output + self.scale * self.adapter(x), bias

    @torch.no_grad()
    def merged_weight(self) -> torch.Tensor:
        """W + scale * B A of this rank, summed in float32, in the dtype of W and of its shape."""
        delta = self.adapter.linear_out.weight.float() @ self.adapter.linear_in.weight.float()
        weight = self.to_wrap.weight
        return (weight.float() + self.scale * delta).to(weight.dtype)


class _Adapter(torch.nn.Module):
    """A and B of one rank. Inputs and outputs are cut along the sequence where the layer's are."""

    def __init__(self, layer: ColumnParallelLinear | RowParallelLinear, rank: int) -> None:
        super().__init__()
        self.is_column = isinstance(layer, ColumnParallelLinear)
        self.sequence_parallel = bool(layer.sequence_parallel)
        rows, columns = layer.weight.shape
        self.linear_in = _Matrix(rank, columns, layer.weight, cut_dim=None if self.is_column else 1)
        self.linear_out = _Matrix(rows, rank, layer.weight, cut_dim=0 if self.is_column else None, zero=True)
        for matrix in (self.linear_in, self.linear_out):
            if matrix.cut_dim is None and self.sequence_parallel:
                # each rank sees its part of the sequence: Megatron sums such gradients over the ranks
                matrix.weight.sequence_parallel = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[s, b, in] -> [s, b, out] of this rank, without the scale."""
        inner = torch.nn.functional.linear(x, self.linear_in.weight)
        if self.is_column:
            if self.sequence_parallel:
                inner = gather_from_sequence_parallel_region(inner)
            else:
                inner = copy_to_tensor_model_parallel_region(inner)
        elif self.sequence_parallel:
            inner = reduce_scatter_to_sequence_parallel_region(inner)
        else:
            inner = reduce_from_tensor_model_parallel_region(inner)
        return torch.nn.functional.linear(inner, self.linear_out.weight)


class _Matrix(torch.nn.Module):
    """A weight, [rows, columns] on this rank, that tensor parallelism cuts along `cut_dim` or not at all."""

    def __init__(self, rows: int, columns: int, like: torch.Tensor, cut_dim: int | None, zero: bool = False) -> None:
        super().__init__()
        self.cut_dim = cut_dim
        tp_size = parallel_state.get_tensor_model_parallel_world_size() if cut_dim is not None else 1
        whole = torch.zeros(rows * tp_size if cut_dim == 0 else rows, columns * tp_size if cut_dim == 1 else columns)
        if not zero:  # drawn whole on every rank, whose generators are alike, so that the layout does not matter
            torch.nn.init.kaiming_uniform_(whole, a=math.sqrt(5))
        part = whole if cut_dim is None else whole.chunk(tp_size, cut_dim)[_tp_rank()]
        self.weight = torch.nn.Parameter(part.to(device=like.device, dtype=like.dtype).contiguous())
        set_tensor_model_parallel_attributes(self.weight, cut_dim is not None, cut_dim or 0, 1)


def _tp_rank() -> int:
    return parallel_state.get_tensor_model_parallel_rank()


def wrapped_layers(model_chunks: Sequence[torch.nn.Module]) -> Iterator[LoraLinear]:
    """Every layer with an adapter."""
    for chunk in model_chunks:
        for module in chunk.modules():
            if isinstance(module, LoraLinear):
                yield module


class MergedWeights:
    """Memory for the sums of frozen weights and their adapters: what leaves training in the base's place.

    The base itself is never written. One flat buffer of as many elements as the adapted weights have; peers on the host
    can map it. `fill` computes the sums; between two switches the memory may be given back.
    """

    def __init__(self, layers: Sequence[LoraLinear]) -> None:
        self._layers = list(layers)
        weights = [layer.to_wrap.weight for layer in self._layers]
        sizes = [weight.numel() for weight in weights]
        self.flat = allocate_elastic(sum(sizes), weights[0].dtype, weights[0].device, "param")
        starts = itertools.accumulate(sizes, initial=0)
        self.offsets: dict[torch.Tensor, int] = dict(zip(weights, starts, strict=False))

    def fill(self) -> None:
        """Compute all sums anew."""
        for layer in self._layers:
            self.view_of(layer.to_wrap.weight).copy_(layer.merged_weight())

    def view_of(self, weight: torch.Tensor) -> torch.Tensor:
        """Where the sum for a base weight lies; contiguous, of the weight's shape."""
        start = self.offsets[weight]
        return self.flat[start : start + weight.numel()].view(weight.shape)
