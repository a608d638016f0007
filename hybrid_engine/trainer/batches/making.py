"""Rows from prompts and completions."""

from __future__ import annotations

import numbers
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from hybrid_engine.errors import BatchError, Violation, shortened

TokenIds = Sequence[int]


def build_batch(
    prompts: Sequence[TokenIds], completions: Sequence[TokenIds], seq_length: int, pad_token_id: int = 0
) -> dict[str, torch.Tensor]:
    """Rows of a prompt and its completion, padded on the right.

    Args:
        prompts: token ids of B prompts, one per completion.
        completions: token ids of B completions.
        seq_length: S; a sequence may have S + 1 tokens, of which the last is only predicted.
        pad_token_id: fills rows up; any token id will do.

    Returns `tokens` and `labels` [B, S] int64, where `labels[i, t]` is the token after `tokens[i, t]`; `mask` [B, S]
    fp32, 1 where the label is a token of the completion; `weights` [B, S], see `mean_weights`. Raises BatchError, which
    is a ValueError, naming everything that is not token ids, and every sequence that does not fit.
    """
    samples = samples_of(prompts, completions, seq_length, pad_token_id)
    rows = torch.full((len(samples), seq_length + 1), pad_token_id, dtype=torch.int64)
    mask = torch.zeros(len(samples), seq_length, dtype=torch.float32)
    for row, row_mask, sample in zip(rows, mask, samples, strict=True):
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


def samples_of(
    prompts: Sequence[TokenIds], completions: Sequence[TokenIds], seq_length: int, pad_token_id: int
) -> list[Sample]:
    """One sample for each completion. Raises BatchError as `build_batch`."""
    found = [
        *required_whole(seq_length, "seq_length", "Pass the number of tokens of a row", least=1),
        *required_whole(pad_token_id, "pad_token_id", "Pass any token id, as 0: what fills rows up has no weight"),
    ]
    starts, ends = (_all_token_ids(*each, found) for each in (("prompts", prompts), ("completions", completions)))
    if not found and len(starts) != len(ends):
        problem = f"{len(starts)} of them and {len(ends)} completions"
        remedy = "Pass one prompt for each completion: the prompt of a group as often as the group has completions"
        found.append(Violation("prompts", problem, remedy))
    if found:
        raise BatchError(found)
    samples = [Sample((*start, *end), len(start)) for start, end in zip(starts, ends, strict=True)]
    for number, sample in enumerate(samples):
        if sample.prompt_length == 0:
            found.append(Violation(f"prompts[{number}]", "has no tokens", "Leave it out, with its completion"))
        elif sample.length > seq_length:
            problem = f"with its completion has {sample.length + 1} tokens, but seq_length {seq_length} takes"
            remedy = "Raise seq_length, or cut the completion"
            found.append(Violation(f"prompts[{number}]", f"{problem} {seq_length + 1}", remedy))
    if found:
        raise BatchError(found)
    return samples


def required_whole(value: object, key: str, remedy: str, least: int | None = None) -> Iterator[Violation]:
    """What is wrong with a value that is to be a whole number."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or (least is not None and value < least):
        yield Violation(key, f"is {shortened(value)}", remedy)


def _all_token_ids(key: str, given: object, found: list[Violation]) -> list[tuple[int, ...]]:
    """Token ids of each, without those that have none: the first of these joins `found`."""
    if isinstance(given, str) or not hasattr(given, "__iter__"):
        found.append(Violation(key, f"is {shortened(given, 80)}", "Pass a list with token ids for each"))
        return []
    listed = list(given)
    read = [_token_ids(each) for each in listed]
    if None in read:
        first = read.index(None)
        others = f", and {count} more" if (count := read.count(None) - 1) else ""
        problem = f"is not a list of token ids but {shortened(listed[first], 80)}{others}"
        found.append(Violation(f"{key}[{first}]", problem, _remedy_for(listed[first])))
    return [each for each in read if each is not None]


def _token_ids(value: object) -> tuple[int, ...] | None:
    values = value.tolist() if hasattr(value, "tolist") else value  # of tensors and arrays
    if isinstance(values, str | bytes | bytearray) or not hasattr(values, "__iter__"):
        return None
    listed = list(values)
    if bool in set(map(type, listed)):  # Python counts it as 0 or 1
        return None
    try:
        return tuple(map(operator.index, listed))
    except TypeError:
        return None


def _remedy_for(value: object) -> str:
    """What to do about something that should be token ids."""
    if hasattr(value, "token_ids"):
        return "Pass its token_ids, and its prompt_token_ids as the prompt"
    if isinstance(value, str):
        return "Pass token ids: tokenizer(text).input_ids, or token_ids of what was generated"
    if isinstance(value, Sequence) and value and (hasattr(value[0], "token_ids") or hasattr(value[0], "__iter__")):
        flat = "flat = [one for group in groups for one in group]"
        return f"Flatten the groups, {flat}, and pass prompt_token_ids and token_ids of each"
    return "Pass a list of token ids for each sequence"


def mean_weights(mask: torch.Tensor, count: float | None = None, rows: float | None = None) -> torch.Tensor:
    """Weights [B, S] with which summing over tokens and averaging over rows is the mean over all of the mask.

    Micro batches hold different numbers of tokens; with weights made from the whole batch, the average of their losses
    is the loss of the batch, however it was split. Of a rank's own rows (`data="local"`) weights made from these alone
    give the mean of the ranks' means, in which a token counts for more on a rank with fewer.

    Args:
        mask: [B, S].
        count, rows: sum of the mask and number of rows of all data parallel ranks; both may be multiplied by the same
            number. Default: those of `mask`.

    Raises BatchError if no token counts.
    """
    total = mask.sum() if count is None else count
    if total == 0:
        problem = "is 0 everywhere: no token to learn from"
        raise BatchError([Violation("mask", problem, "Pass completions that have tokens")])
    return mask * ((mask.shape[0] if rows is None else rows) / total)
