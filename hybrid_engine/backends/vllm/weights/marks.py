"""Values by which one sees whether a storage still holds what was put into it, element by element.

As small as those of vLLM's dummy loader, so that the model computes with them without overflow. Two marks, which
differ in scale too, so that whatever depends on the weights differs.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from enum import Enum

import torch

_PERIOD = 1_048_573  # a prime, lest a permutation of rows or blocks maps the pattern onto itself
_LARGEST = 1e-3


class Mark(Enum):
    """Which values: the value seeds them."""

    LOADED = 0
    REHEARSED = 1

    def write(self, flat: torch.Tensor) -> None:
        """Fill a 1-D tensor."""
        for part, values in self._parts(flat):
            part.copy_(values)

    def is_in(self, flat: torch.Tensor) -> bool:
        """Whether a 1-D tensor holds exactly these values."""
        return all(torch.equal(part, values) for part, values in self._parts(flat))

    def _parts(self, flat: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        values = _values(self.value)[: flat.numel()].to(flat.device, flat.dtype)
        for start in range(0, flat.numel(), _PERIOD):
            part = flat[start : start + _PERIOD]
            yield part, values[: part.numel()]


@functools.cache
def _values(seed: int) -> torch.Tensor:
    """On the host: what is made inside vLLM's memory pool does not outlast its sleep."""
    values = torch.rand(_PERIOD, generator=torch.Generator().manual_seed(seed), device="cpu", dtype=torch.float32)
    return (values * 2 - 1) * (_LARGEST / (1 + seed))


def is_marked_dtype(dtype: torch.dtype) -> bool:
    """Whether weights of this dtype can hold a mark."""
    return dtype.is_floating_point
