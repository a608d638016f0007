"""Token sequences as the rectangular batches that training wants."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from examples.gpt_rl import grpo
from examples.gpt_rl.task import PADDING


def build_batch(
    prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], seq_length: int
) -> dict[str, torch.Tensor]:
    """Prompt and response of B sequences, side by side, padded on the right.

    Returns `tokens` and `labels` [B, S] int64, where `labels[i, t]` is the token after `tokens[i, t]`; `mask` [B, S]
    fp32, 1 where the label is a token of the response; `weights` [B, S], see `grpo.mean_weights`. S is `seq_length`.
    Raises ValueError when a sequence does not fit.
    """
    rows = torch.full((len(prompts), seq_length + 1), PADDING, dtype=torch.int64)
    mask = torch.zeros(len(prompts), seq_length)
    for row, row_mask, prompt, response in zip(rows, mask, prompts, responses, strict=True):
        sequence = [*prompt, *response]
        if len(sequence) > seq_length + 1:
            raise ValueError(f"{len(sequence)} tokens, but seq_length {seq_length} takes {seq_length + 1}")
        row[: len(sequence)] = torch.tensor(sequence)
        row_mask[len(prompt) - 1 : len(sequence) - 1] = 1
    return {
        "tokens": rows[:, :-1].contiguous(),
        "labels": rows[:, 1:].contiguous(),
        "mask": mask,
        "weights": grpo.mean_weights(mask),
    }


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
    return [{**part, "weights": grpo.mean_weights(part["mask"])} for part in parts]
