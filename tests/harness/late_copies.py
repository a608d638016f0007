"""Copies to the device that are made when they are waited for, as a device makes them behind other
work.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hybrid_engine.memory.arena import Copier, QueuedCopy

SECONDS = 1.0
SECONDS_EXPOSED = 0.25


class LateCopies:
    """Makes copies of all `Copier`s late, on the CPU.

    Attributes:
        under_way: copies that nobody has waited for.
        errors: raised by the next waits, one each.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.under_way: list[LateCopy] = []
        self.errors: list[Exception] = []
        copy = Copier.copy

        def late(
            copier: Copier, destination: torch.Tensor, source: torch.Tensor, direction: Any
        ) -> QueuedCopy:
            if direction == "to host":
                return copy(copier, destination, source, direction)
            self.under_way.append(LateCopy(self, destination, source))
            return self.under_way[-1]

        patch.setattr(Copier, "copy", late)


class LateCopy(QueuedCopy):
    def __init__(self, copies: LateCopies, *tensors: torch.Tensor) -> None:
        self._copies = copies
        self._tensors = tensors

    def wait(self) -> float:
        if self._copies.errors:
            raise self._copies.errors.pop()
        if self in self._copies.under_way:
            destination, source = self._tensors
            destination.copy_(source)
            self._copies.under_way.remove(self)
        return SECONDS

    def seconds_after(self, _reached: object) -> float:
        return SECONDS_EXPOSED
