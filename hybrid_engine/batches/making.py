"""Rows from prompts and completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

TokenIds = Sequence[int]


def build_batch(
    prompts: Sequence[TokenIds], completions: Sequence[TokenIds], seq_length: int, pad_token_id: int = 0
) -> dict[str, torch.Tensor]:
    """Rows of a prompt and its completion, padded on the right.

    Args:
        prompts: token ids of B prompts.
        completions: of B completions.
        seq_length: S; a sequence may have S + 1 tokens, of which the last is only predicted.
        pad_token_id: fills rows up.

    Returns `tokens` and `labels` [B, S] int64, where `labels[i, t]` is the token after `tokens[i, t]`; `mask` [B, S]
    fp32, 1 where the label is a token of the completion; `weights` [B, S], see `mean_weights`. Raises ValueError when a
    sequence does not fit.
    """
    rows = torch.full((len(prompts), seq_length + 1), pad_token_id, dtype=torch.int64)
    mask = torch.zeros(len(prompts), seq_length)
    for row, row_mask, sample in zip(rows, mask, samples_of(prompts, completions, seq_length), strict=True):
        row[: len(sample.token_ids)] = torch.tensor(sample.token_ids)
        row_mask[: sample.length] = sample.mask
    return {
        "tokens": rows[:, :-1].contiguous(),
        "labels": rows[:, 1:].contiguous(),
        "mask": mask,
        "weights": mean_weights(mask),
    }


@dataclass(frozen=True)
class Sample:
    """A prompt and its completion."""

    token_ids: tuple[int, ...]
    prompt_length: int

    @property
    def length(self) -> int:
        """Columns of a row that it takes: the last token is only predicted."""
        return len(self.token_ids) - 1

    @property
    def mask(self) -> torch.Tensor:
        """[length] fp32, 1 where the label is a token of the completion."""
        return (torch.arange(self.length) >= self.prompt_length - 1).float()


def samples_of(prompts: Sequence[TokenIds], completions: Sequence[TokenIds], seq_length: int) -> list[Sample]:
    """One sample for each prompt. Raises ValueError naming all that do not fit into `seq_length` columns."""
    samples = [
        Sample((*prompt, *completion), len(prompt)) for prompt, completion in zip(prompts, completions, strict=True)
    ]
    faults = [
        f"prompt {number} is empty"
        if sample.prompt_length == 0
        else f"sequence {number} has {sample.length + 1} tokens, but seq_length {seq_length} takes {seq_length + 1}"
        for number, sample in enumerate(samples)
        if sample.prompt_length == 0 or sample.length > seq_length
    ]
    if faults:
        raise ValueError("; ".join(faults))
    return samples


def mean_weights(mask: torch.Tensor, count: float | None = None, rows: float | None = None) -> torch.Tensor:
    """Weights [B, S] with which summing over tokens and averaging over rows is the mean over all of the mask.

    Micro batches hold different numbers of tokens; with weights made from the whole batch, the average of their losses
    is the loss of the batch, however it was split. Of a rank's own rows (`data="local"`) weights made from these alone
    give the mean of the ranks' means, in which a token counts for more on a rank with fewer.

    Args:
        mask: [B, S].
        count, rows: sum of the mask and number of rows on all data parallel ranks, or both as many times that; default:
            those of `mask`.

    Raises ValueError if no token counts.
    """
    total = mask.sum() if count is None else count
    if total == 0:
        raise ValueError("no token to learn from: the mask is empty")
    return mask * ((mask.shape[0] if rows is None else rows) / total)
