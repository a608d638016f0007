"""Puts the weights that are outside of DDP's buffers into elastic memory, which peers on the host can map.

An optimizer may be there already: to these weights Megatron's refer by their parameters alone, not by views.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.utils import unwrap_model

from hybrid_engine.backends.megatron.internals import restore_float32_bias
from hybrid_engine.errors import ModelError
from hybrid_engine.memory.elastic import allocate_elastic, exported_buffer_of
from hybrid_engine.models.table import ModelTable
from megatron_patches.buffers import data_of, iter_buffers


def keep_expert_bias_in_float32(chunks: Sequence[torch.nn.Module]) -> None:
    """Undo what Float16Module did to the routers' biases."""
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, TopKRouter):
                restore_float32_bias(module)


def move_loose_parameters(chunks: Sequence[torch.nn.Module]) -> None:
    """Move the parameters outside of DDP's buffers: frozen ones and, without the distributed optimizer, all.

    Those that lie in elastic memory already stay there.

    Raises:
        ModelError: when experts that are one parameter are among them: only Megatron's DDP can move their data.
    """
    records = [record for record in iter_buffers(chunks) if record.param_data is not None]
    in_buffers = {slot.param for record in records for slot in record.slots}
    loose = [
        [each for each in chunk.parameters() if each not in in_buffers and exported_buffer_of(data_of(each)) is None]
        for chunk in chunks
    ]
    if grouped := sum(data_of(parameter) is not parameter for parameters in loose for parameter in parameters):
        raise ModelError(
            f"{grouped} weights that hold several experts each are outside of DDP's buffers and cannot be moved: use "
            "the distributed optimizer and freeze none of them, or turn moe_single_grouped_weight off"
        )
    for parameters in loose:
        _move_together(parameters)


def move_published_buffers(chunks: Sequence[torch.nn.Module], table: ModelTable) -> None:
    """Move the modules' persistent buffers that are resharded."""
    for chunk in chunks:
        buffers = unwrap_model(chunk).named_buffers()
        _move_together([tensor for name, tensor in buffers if table.match(name) is not None])


def _move_together(tensors: Sequence[torch.Tensor]) -> None:
    # one elastic buffer per dtype, for each takes whole pages and a file descriptor
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        same = [tensor for tensor in tensors if tensor.dtype is dtype]
        sizes = [tensor.numel() for tensor in same]
        flat = allocate_elastic(sum(sizes), dtype, same[0].device, "param")
        for tensor, part in zip(same, flat.split(sizes), strict=True):
            part.copy_(tensor.data.reshape(-1))
            tensor.data = part.view(tensor.shape)
