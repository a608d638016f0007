"""Names of torch and transformers that this backend uses and that neither documents, each with its reason.

tests/hybrid_engine/backends/fsdp/test_model_checks.py looks each up in the installed versions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.core_model_loading import revert_weight_conversion

from hybrid_engine.ranks.torch_internals import PrivateName

__all__ = [
    "PRIVATE_NAMES",
    "StridedShard",
    "TorchDispatchMode",
    "checkpoint_wrapper",
    "initialize_module",
    "revert_weight_conversion",
]

PRIVATE_NAMES = (
    PrivateName(
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper:checkpoint_wrapper",
        "computes a layer again in the backward pass; transformers' own does so in training mode only, with dropout",
    ),
    PrivateName("torch.utils._python_dispatch:TorchDispatchMode", "sees the copies of a conversion"),
    PrivateName(
        "transformers.core_model_loading:revert_weight_conversion",
        "from the tensors of a model to those of a checkpoint, as save_pretrained writes them, without writing",
    ),
    PrivateName(
        "transformers:PreTrainedModel._init_weights",
        "random values of one module, and its buffers: init_weights draws for all modules, which must all have memory",
    ),
    PrivateName(
        "torch.nn:Module._apply",
        "what Module.to calls for every parameter: FSDP takes the tensors up that it is given there",
    ),
    PrivateName(
        "torch.distributed.tensor:DTensor.__create_chunk_list__",
        "offsets and lengths of the local part, as distributed checkpoints ask for them",
    ),
    PrivateName(
        "torch.distributed.tensor.placement_types:_StridedShard",
        "how FSDP2 places what tensor parallelism has split along the same dim before",
    ),
)


def initialize_module(model: torch.nn.Module, module: torch.nn.Module) -> None:
    """Draw the values of a module's own tensors as the transformers model that it is a part of does."""
    draw: Any = model._init_weights
    draw(module)
