"""Tensors that must have the shape of another, as messages describe them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hybrid_engine.errors import BatchError, Violation


def described(value: object) -> str:
    """What a value is, e.g. `has shape [4]` or `is list`."""
    return f"has shape {list(value.shape)}" if isinstance(value, torch.Tensor) else f"is {type(value).__name__}"


def require_alike(num_dims: int | None, remedies: Mapping[str, str], **given: object) -> None:
    """Raise BatchError unless all that is given are tensors of the shape that the first one has.

    Args:
        num_dims: of the first one; None: any.
        remedies: name -> what to do where that one differs; default: to pass a tensor of that shape.
        given: by the names of messages.
    """
    reference, *others = given
    first = given[reference]
    if not isinstance(first, torch.Tensor) or num_dims not in (None, first.dim()):
        shape = " [B, S]" if num_dims == 2 else ""
        raise BatchError([Violation(reference, described(first), f"Pass a tensor{shape}")])
    shape = str(list(first.shape))
    found = [
        Violation(
            name,
            f"{described(value)}, but {reference} has {shape}",
            remedies.get(name, f"Pass a tensor of shape {shape}"),
        )
        for name in others
        if not isinstance(value := given[name], torch.Tensor) or value.shape != first.shape
    ]
    if found:
        raise BatchError(found)
