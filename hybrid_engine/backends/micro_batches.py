"""A batch, cut into what is computed at once."""

from __future__ import annotations

import torch

from hybrid_engine.ports import Batch


def micro_batches(batch: Batch, size: int, device: torch.device) -> list[Batch]:
    """Consecutive parts of `size` sequences, on `device`. Raises ValueError where it does not divide."""
    num_sequences = batch["tokens"].shape[0]
    if num_sequences % size:
        raise ValueError(
            f"number of sequences must be a multiple of micro_batch_size {size}, got {num_sequences}; pad the batch"
        )
    return [
        {name: tensor[start : start + size].to(device) for name, tensor in batch.items()}
        for start in range(0, num_sequences, size)
    ]
