"""Bits of tensors, short enough to bring back from a rank."""

from __future__ import annotations

import hashlib
from typing import Any

import torch


def digest(tensor: torch.Tensor) -> str:
    copy = tensor.detach().clone(memory_format=torch.contiguous_format)  # .numpy() would pin the live storage
    return hashlib.sha256(copy.view(torch.uint8).numpy().tobytes()).hexdigest()


def training_state(engine: Any) -> dict[str, str]:
    """Of every parameter buffer, main parameter and moment; an overlapped gather that is still owed is made.

    Megatron's main parameters and moments one by one: in which order an offload has gathered them follows from where
    they lay.
    """
    engine.weights.prepare()
    copied = [item for item in engine.offload_items() if item.action == "copy"]
    if isinstance(engine.optimizer, torch.optim.Optimizer):  # FSDP2's
        return {item.owner: digest(item.tensor) for item in copied}
    from megatron_patches import optimizer_tensors

    state = {item.owner: digest(item.tensor) for item in copied if item.kind != "optimizer"}
    return state | {f"{one.path} {one.key}": digest(one.tensor) for one in optimizer_tensors(engine.optimizer)}
