"""What a training script may have set of torch around any call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def other_torch_modes() -> Iterator[None]:
    """Everything that changes what is computed, or what a tensor made here can be used for."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
            yield
    finally:
        torch.set_default_dtype(dtype)
