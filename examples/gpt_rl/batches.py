"""What the example does with batches (`hybrid_engine.build_batch`) between sampling and learning."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hybrid_engine.trainer.batches import mean_weights


def align_log_probs(values: Sequence[Sequence[float]], mask: torch.Tensor) -> torch.Tensor:
    """Put per-sequence lists, one value per response token, where `mask` [B, S] has its ones; zeros elsewhere."""
    aligned = torch.zeros_like(mask)
    aligned[mask.bool()] = torch.tensor([value for sequence in values for value in sequence], dtype=mask.dtype)
    return aligned


def split_minibatches(
    batch: dict[str, torch.Tensor], num_minibatches: int, generator: torch.Generator
) -> list[dict[str, torch.Tensor]]:
    """Shuffle the B sequences and cut them into equal parts, each with `weights` of its own."""
    order = torch.randperm(batch["tokens"].shape[0], generator=generator)
    parts = [{name: tensor[rows] for name, tensor in batch.items()} for rows in order.chunk(num_minibatches)]
    return [{**part, "weights": mean_weights(part["mask"])} for part in parts]
