"""LoRA on Megatron's parallel linear layers, and its sum with the frozen weights.

    y = W x + (alpha / rank) * B A x           W frozen, A [rank, in], B [out, rank]

    column-parallel W (linear_qkv, linear_fc1):  A on every rank,         B cut along its rows as W is
    row-parallel W (linear_proj, linear_fc2):    A cut along its columns, B on every rank

So a rank's share of B A lies exactly where its share of W does, and weights are merged without communication.

Names are Megatron-Bridge's: `linear_qkv.to_wrap.weight`, `linear_qkv.adapter.linear_in.weight` (A),
`linear_qkv.adapter.linear_out.weight` (B). Source: Hu et al., "LoRA", arXiv 2106.09685.
"""

from __future__ import annotations

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

from hybrid_engine.backends.megatron.internals import mark_sequence_parallel
from hybrid_engine.backends.training_side import flat_storage_of, parts_in_elastic_buffers
from hybrid_engine.config import LoraConfig
from hybrid_engine.errors import ModelError
from hybrid_engine.ranks.torch_internals import torch_defaults

WRAPPED = "to_wrap."
"""Part of a wrapped parameter's name."""

LORA = ".adapter."
"""Part of a LoRA matrix's name."""


def add_lora(model: torch.nn.Module, lora: LoraConfig) -> None:
    """Freeze a model and add LoRA to the linear layers that `lora.target_modules` names, if this stage has them.

    Called before precision and DDP wrappers.

    Raises:
        ModelError: for a target that is not a parallel linear layer, or is part of an expert.
    """
    model.requires_grad_(False)
    targets = [
        (name, module) for name, module in model.named_modules() if name.rpartition(".")[2] in lora.target_modules
    ]
    if problems := [f"{name} ({problem})" for name, module in targets if (problem := _problem(module))]:
        raise ModelError(f"LoRA is not supported on {'; '.join(problems)}. Remove it from lora.target_modules")
    for name, module in targets:
        parent_name, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent_name), attribute, LoraLinear(module, lora))


def _problem(module: torch.nn.Module) -> str | None:
    if not isinstance(module, ColumnParallelLinear | RowParallelLinear):
        return f"a {type(module).__name__}; only megatron-core's own parallel linear layers are supported"
    return "part of an expert" if getattr(module, "is_expert", False) else None


class LoraLinear(torch.nn.Module):
    """A parallel linear layer with LoRA; called as the layer itself.

    Attributes:
        to_wrap: the frozen layer.
        adapter: A and B of this rank.
        scale: alpha / rank.
    """

    def __init__(self, to_wrap: ColumnParallelLinear | RowParallelLinear, lora: LoraConfig) -> None:
        super().__init__()
        self.to_wrap = to_wrap
        self.scale = lora.alpha / lora.rank
        self.adapter = _LoraPair(to_wrap, lora.rank)

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        output, bias = self.to_wrap(x, *args, **kwargs)
        return output + self.scale * self.adapter(x), bias

    @torch_defaults()  # autocast would multiply in bfloat16
    @torch.no_grad()
    def merged_weight(self) -> torch.Tensor:
        """W + scale * B A of this rank, summed in float32, in the dtype of W and of its shape."""
        delta = self.adapter.linear_out.weight.float() @ self.adapter.linear_in.weight.float()
        weight = self.to_wrap.weight
        return (weight.float() + self.scale * delta).to(weight.dtype)


class _LoraPair(torch.nn.Module):
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
                mark_sequence_parallel(matrix.weight)

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
        if not zero:  # drawn whole on every rank, from equal generators: values must not depend on the layout
            torch.nn.init.kaiming_uniform_(whole, a=math.sqrt(5))
        tp_rank = parallel_state.get_tensor_model_parallel_rank()
        part = whole if cut_dim is None else whole.chunk(tp_size, cut_dim)[tp_rank]
        self.weight = torch.nn.Parameter(part.to(device=like.device, dtype=like.dtype).contiguous())
        set_tensor_model_parallel_attributes(self.weight, cut_dim is not None, cut_dim or 0, 1)


def wrapped_layers(model_chunks: Sequence[torch.nn.Module]) -> Iterator[LoraLinear]:
    for chunk in model_chunks:
        for module in chunk.modules():
            if isinstance(module, LoraLinear):
                yield module


class LoraSums:
    """Memory for the sums of frozen weights and LoRA, which are resharded in place of the weights.

    The weights themselves are never written. One flat buffer of as many elements as the layers' weights have, which
    peers on the host can map. `fill` computes the sums; between two switches the memory may be released.

    Attributes:
        flat: the buffer.
        sums: of a weight, in it: contiguous, of the weight's shape.
        lora_of: the matrices that are added to a weight.
    """

    def __init__(self, layers: Sequence[LoraLinear]) -> None:
        self._layers = list(layers)
        weights = [layer.to_wrap.weight for layer in self._layers]
        parts = parts_in_elastic_buffers([weight.data for weight in weights])  # of one dtype, the training weights'
        self.flat = flat_storage_of(parts[0])
        self.sums: dict[torch.Tensor, torch.Tensor] = dict(zip(weights, parts, strict=True))
        self.lora_of = {layer.to_wrap.weight: list(layer.adapter.parameters()) for layer in self._layers}

    def fill(self) -> None:
        for layer in self._layers:
            self.sums[layer.to_wrap.weight].copy_(layer.merged_weight())
