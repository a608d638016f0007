"""Optimizer state moves to elastic memory of the device without a second copy."""

from __future__ import annotations

import pytest
import torch

from hybrid_engine.memory.cuda_driver import taken_nbytes
from hybrid_engine.memory.device_pages import CHUNK_NBYTES
from hybrid_engine.memory.elastic import reserve_elastic, restore_elastic
from megatron_patches import optimizers
from megatron_patches.optimizers import OptimizerTensor

DEVICE = torch.device("cuda", 0)
NUM_TENSORS = 32
NUMEL = 3 * 2**20
MOST_KEPT_NBYTES = 48 * 2**20


def test_old_memory_is_released_while_new_memory_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver's count includes memory that torch keeps of moved tensors."""
    monkeypatch.setattr(optimizers, "_MOST_CACHED_NBYTES", MOST_KEPT_NBYTES)
    torch.cuda.empty_cache()
    tensors = [torch.full((NUMEL,), float(number), device=DEVICE) for number in range(NUM_TENSORS)]
    before = taken_nbytes(DEVICE)
    taken: list[int] = []

    def give_memory(flat: torch.Tensor, stop: int) -> None:
        restore_elastic(flat, stop)
        taken.append(taken_nbytes(DEVICE))

    home = optimizers._BufferPlace()
    moved = [OptimizerTensor(str(number), "moment", "exp_avg", tensor) for number, tensor in enumerate(tensors)]
    home.adopt(moved, "", reserve_elastic, give_memory)
    assert home.without(moved) == []
    assert all(bool((tensor == number).all()) for number, tensor in enumerate(tensors))
    state_nbytes = 4 * NUM_TENSORS * NUMEL
    slack = CHUNK_NBYTES + 4 * NUMEL
    assert state_nbytes > 4 * (MOST_KEPT_NBYTES + slack), "a second copy would not be detected"
    assert max(taken) - before <= MOST_KEPT_NBYTES + slack
