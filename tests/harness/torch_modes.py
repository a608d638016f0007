"""Modes of torch that a training script may have set around any call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def other_torch_modes() -> Iterator[None]:
    """Set every mode that changes computations, or the permitted uses of new tensors."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
            yield
    finally:
        torch.set_default_dtype(dtype)
