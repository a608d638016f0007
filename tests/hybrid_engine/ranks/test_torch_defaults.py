"""What is computed inside is the same in every mode of torch, and the mode is back afterwards."""

from __future__ import annotations

import torch

from hybrid_engine.ranks.torch_defaults import torch_defaults
from tests.harness.torch_modes import other_torch_modes


@torch_defaults()
def product() -> torch.Tensor:
    return torch.full((2, 2), 1.001) @ torch.ones(2, 2)


def test_modes_of_the_caller_are_suspended_and_come_back() -> None:
    expected = product()
    with other_torch_modes():
        for _ in range(2):
            found = product()
            assert found.dtype is torch.float32
            assert torch.equal(found, expected)
            assert not found.is_inference()
            outside = torch.ones(2, 2, dtype=torch.float32) @ torch.ones(2, 2, dtype=torch.float32)
            assert outside.is_inference()
            assert outside.dtype is torch.ones(1).dtype is torch.bfloat16
    with torch.no_grad(), torch_defaults():
        assert not torch.is_grad_enabled()
