"""The few `torch.distributed` calls of megatron that gloo does not support (torch 2.13), built from others.

Megatron's modules see these in place of the originals (`cuda_names`); torch keeps its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_patches.errors import CpuUnsupportedError


def new_group(*args: Any, **kwargs: Any) -> Any:
    """`dist.new_group` without NCCL: its options are ignored, "nccl" means the default backend."""
    if kwargs.get("backend") == "nccl":
        kwargs["backend"] = None
    kwargs["pg_options"] = None
    return dist.new_group(*args, **kwargs)


def all_gather(
    tensor_list: Sequence[torch.Tensor],
    tensor: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> dist.Work | None:
    """`dist.all_gather`, also of tensors that differ in their first dim, as NCCL allows (MoE dispatch).

    Uneven parts are padded to the longest, which takes group size times the longest part in extra memory.
    """
    longest = max(part.shape[0] if part.dim() else 0 for part in tensor_list)
    if all(part.shape == tensor_list[0].shape for part in tensor_list):
        return dist.all_gather(tensor_list, tensor, group=group, async_op=async_op)
    _refuse_async(async_op, "all_gather")
    padded = tensor.new_zeros((longest, *tensor.shape[1:]))
    padded[: tensor.shape[0]] = tensor
    received = [torch.empty_like(padded) for _ in tensor_list]
    dist.all_gather(received, padded, group=group)
    for part, full in zip(tensor_list, received, strict=True):
        part.copy_(full[: part.shape[0]])
    return None


def reduce_scatter(
    output: torch.Tensor,
    input_list: Sequence[torch.Tensor],
    op: Any = dist.ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> dist.Work | None:
    """`dist.reduce_scatter`, also of parts that differ in their first dim.

    Uneven parts are all-reduced as one tensor, of which this rank keeps its own part. Takes the volume of all parts in
    extra memory.
    """
    if all(part.shape == input_list[0].shape for part in input_list):
        return dist.reduce_scatter(output, list(input_list), op=op, group=group, async_op=async_op)
    _refuse_async(async_op, "reduce_scatter")
    reduced = torch.cat(list(input_list))
    dist.all_reduce(reduced, op=op, group=group)
    output.copy_(reduced.split([part.shape[0] for part in input_list])[dist.get_rank(group)])
    return None


def _refuse_async(async_op: bool, name: str) -> None:
    if async_op:
        raise CpuUnsupportedError(f"{name} of uneven parts on gloo requires async_op=False")


OVERRIDES = {"new_group": new_group, "all_gather": all_gather, "reduce_scatter": reduce_scatter}
"""Names of `torch.distributed` that are replaced for megatron's modules."""
