"""Digests of tensors, small enough to return from a rank."""

from __future__ import annotations

import hashlib
from typing import Any

import torch


def digest(tensor: torch.Tensor) -> str:
    copy = tensor.detach().clone(
        memory_format=torch.contiguous_format
    )  # .numpy() would pin the live storage
    return hashlib.sha256(copy.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def training_state(model: Any) -> dict[str, str]:
    """Return digests of every parameter buffer, main parameter and moment.

    A pending overlapped gather is completed first. Megatron's main parameters and moments count one
    by one, since the order in which an offload gathers them depends on their addresses.
    """
    model.weights.prepare()
    copied = [item for item in model.offload_items() if item.action == "copy"]
    optimizer = getattr(model, "optimizer", None)  # Megatron's
    if optimizer is None:
        return {item.owner: digest(item.tensor) for item in copied}
    from megatron_patches import optimizer_tensors

    state = {item.owner: digest(item.tensor) for item in copied if item.kind != "optimizer"}
    for part in optimizer_tensors(optimizer):
        state[f"{part.path} {part.key}"] = digest(part.tensor)
    return state
