"""LoRA on Megatron's parallel linear layers.

    y = W x + (alpha / rank) * B A x           W frozen, A [rank, in], B [out, rank]

    column-parallel W (linear_qkv, linear_fc1):  A replicated, B split along its rows like W
    row-parallel W (linear_proj, linear_fc2):    A split along its columns, B replicated

Each rank's part of B A therefore covers exactly its part of W, and merging needs no communication.
Every expert of megatron-core's own layers has an adapter; expert tensor parallelism splits it.

Names are Megatron-Bridge's: `linear_qkv.to_wrap.weight`, `linear_qkv.adapter.linear_in.weight` (A),
`linear_qkv.adapter.linear_out.weight` (B). Source: Hu et al., "LoRA", arXiv 2106.09685.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)

from hybrid_engine.backends.megatron.internals import mark_of_expert, mark_sequence_parallel
from hybrid_engine.config import LoraConfig
from hybrid_engine.errors import ModelError


def add_lora(model: torch.nn.Module, lora: LoraConfig) -> None:
    """Freeze a model and add LoRA to the linear layers of this stage in `lora.target_modules`.

    Called before precision and DDP wrappers are added.

    Raises:
        ModelError: a target is not a parallel linear layer of megatron-core.
    """
    model.requires_grad_(False)
    targets = [
        (name, module)
        for name, module in model.named_modules()
        if name.rpartition(".")[2] in lora.target_modules
    ]
    problems = []
    for name, module in targets:
        if not isinstance(module, ColumnParallelLinear | RowParallelLinear):
            problems.append(
                f"{name} (a {type(module).__name__}, not a ColumnParallelLinear or "
                "RowParallelLinear of megatron-core)"
            )
    if problems:
        raise ModelError(
            f"LoRA is not supported on {'; '.join(problems)}. Remove it from lora.target_modules",
            code="lora-unsupported",
        )
    for name, module in targets:
        parent_name, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent_name), attribute, LoraLinear(module, lora))


class LoraLinear(torch.nn.Module):
    """Parallel linear layer with LoRA; called like the layer itself.

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

    def forward(
        self,
        x: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        output, bias = self.to_wrap(x, *args, **kwargs)
        return output + self.scale * self.adapter(x), bias


class _LoraPair(torch.nn.Module):
    """A and B of one rank.

    Inputs and outputs are split along the sequence if the layer splits them.
    """

    def __init__(self, layer: ColumnParallelLinear | RowParallelLinear, rank: int) -> None:
        super().__init__()
        self.is_column = isinstance(layer, ColumnParallelLinear)
        self.group = layer.tp_group
        # Others gather the inputs of experts and sum their outputs: the token dispatcher.
        self.is_local = bool(layer.explicit_expert_comm)
        self.sequence_parallel = bool(layer.sequence_parallel) and not self.is_local
        rows, columns = layer.weight.shape
        self.linear_in = _Matrix(rank, columns, layer, None if self.is_column else 1)
        # B starts at zero, so that training starts from the frozen model.
        self.linear_out = _Matrix(rows, rank, layer, 0 if self.is_column else None, zero=True)
        for matrix in (self.linear_in, self.linear_out):
            # Each rank has seen only its part of the sequence when it computes this gradient: of A
            # in a column-parallel layer, of B in a row-parallel one.
            if matrix.split_dim is None and self.sequence_parallel:
                mark_sequence_parallel(matrix.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return B A x without the scale: [s, b, in] -> [s, b, out] of this rank."""
        a, b = self.linear_in.weight, self.linear_out.weight
        if self.is_local:
            # Ranks of a replicated matrix have parts of its gradient, like those of the input.
            if self.is_column:
                a = copy_to_tensor_model_parallel_region(a, group=self.group)
            else:
                b = copy_to_tensor_model_parallel_region(b, group=self.group)
        inner = torch.nn.functional.linear(x, a)
        if not self.is_local:
            inner = self._communicated(inner)
        return torch.nn.functional.linear(inner, b)

    def _communicated(self, inner: torch.Tensor) -> torch.Tensor:
        if self.is_column:
            if self.sequence_parallel:
                return gather_from_sequence_parallel_region(inner, group=self.group)
            return copy_to_tensor_model_parallel_region(inner, group=self.group)
        # Each rank has the product of its columns of A with its part of x: a summand of A x.
        if self.sequence_parallel:
            return reduce_scatter_to_sequence_parallel_region(inner, group=self.group)
        return reduce_from_tensor_model_parallel_region(inner, group=self.group)


class _Matrix(torch.nn.Module):
    """Weight [rows, columns] on this rank.

    The ranks of a layer split it along `split_dim`, or replicate it if that is None.
    """

    def __init__(
        self,
        rows: int,
        columns: int,
        layer: ColumnParallelLinear | RowParallelLinear,
        split_dim: int | None,
        zero: bool = False,
    ) -> None:
        super().__init__()
        self.split_dim = split_dim
        shape = [rows, columns]
        group = layer.tp_group
        part = 0
        num_parts = 1
        if split_dim is not None:
            part = group.rank()
            num_parts = group.size()
            # The layer's weight is this rank's part, so this restores the whole length.
            shape[split_dim] *= num_parts
        whole = torch.zeros(shape)
        # Every rank draws the whole matrix from an equal generator, so that values do not depend on
        # the layout.
        if not zero:
            torch.nn.init.kaiming_uniform_(whole, a=math.sqrt(5))
        values = whole.chunk(num_parts, split_dim or 0)[part]
        like = layer.weight
        self.weight = torch.nn.Parameter(
            values.to(device=like.device, dtype=like.dtype).contiguous()
        )
        is_split = split_dim is not None
        if layer.is_expert:
            # A replicated matrix counts on the first rank only, or the norm would include it
            # several times.
            mark_of_expert(self.weight, like, counted=is_split or group.rank() == 0)
        set_tensor_model_parallel_attributes(
            self.weight, is_split or layer.is_expert, split_dim or 0, 1
        )
