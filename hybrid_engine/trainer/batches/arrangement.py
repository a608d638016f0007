"""The rows that a model computes in place of the user's.

    user's rows                    computed rows                          back, in the user's places
    _ _ a b c                      a b c _            causal, as always   0 0 x x x
    a b _ _ _                      a b _ _                                x x 0 0 0
    _ a b c d e _  (1 1 1 2 2)     a b c d e _ _      each sequence sees  0 x x x x x 0
                                                      its own tokens

A row begins with its first real token, padding is token 0, and what no row of a micro batch needs is cut off. So left
padding is right padding, to the last bit, and a row of one sequence needs no mask: a causal model never sees what comes
after it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch

from hybrid_engine.errors import BatchError, Violation
from hybrid_engine.ports import Batch
from hybrid_engine.trainer.batches.sequences import (
    begins_of,
    num_sequences,
    positions_in,
    sequence_faults,
    sequence_ids_of,
)

IGNORED = -100
"""The label, as Hugging Face has it, of a token that nothing is to be predicted after."""

ROUNDED_TO = 8
"""Rows are cut to a multiple of this many tokens: kernels like it, and embeddings are kept for fewer lengths."""


@dataclass(frozen=True)
class Rows:
    """A micro batch as a model computes it.

    Attributes:
        tokens: [b, L] int64.
        labels: [b, L] int64, all of them tokens; None where logits are asked for.
        mask: [b, L]: 1 where MTP layers learn; None: everywhere.
        sequence_ids: [b, L] number of each token's sequence, 0 for padding; None: one sequence a row, which needs no
            mask.
        places: [b, S] column of the computed row for each of the user's tokens; None: the same.
        is_real: [b, S] which of the user's tokens are not padding; None: all.
        is_labelled: [b, S] which of the user's labels count; None: all.
    """

    tokens: torch.Tensor
    labels: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    sequence_ids: torch.Tensor | None = None
    places: torch.Tensor | None = None
    is_real: torch.Tensor | None = None
    is_labelled: torch.Tensor | None = None

    @property
    def position_ids(self) -> torch.Tensor:
        """[b, L], from 0 in each sequence."""
        if self.sequence_ids is not None:
            return positions_in(self.sequence_ids)
        return torch.arange(self.tokens.shape[1], device=self.tokens.device).expand_as(self.tokens)

    def to(self, device: torch.device) -> Rows:
        """The same on `device`."""
        tensors = {each.name: getattr(self, each.name) for each in fields(self)}
        return replace(self, **{name: one.to(device) for name, one in tensors.items() if one is not None})

    def restore(self, values: torch.Tensor) -> torch.Tensor:
        """Values [b, L, ...] of computed tokens in the places [b, S, ...] of the user's, 0 for padding."""
        further = (1,) * (values.dim() - 2)
        if self.places is not None:
            places = self.places.view(*self.places.shape, *further)
            values = values.gather(1, places.expand(*self.places.shape, *values.shape[2:]))
        return values if self.is_real is None else values.where(self.is_real.view(*self.is_real.shape, *further), 0)

    def restore_log_probs(self, values: torch.Tensor) -> torch.Tensor:
        """As `restore`, of log-probabilities [b, L] of the labels; 0 where the label is ignored, too."""
        values = self.restore(values)
        return values if self.is_labelled is None else values.where(self.is_labelled, 0)


@dataclass(frozen=True)
class MicroBatch:
    """What is computed at once.

    Attributes:
        given: as the user gave it, which is what a loss function gets.
        rows: as the model gets it.
    """

    given: Batch
    rows: Rows


def micro_batches(
    batch: Batch, size: int, device: torch.device, multiple: int = 1, *, same_length: bool = False
) -> list[MicroBatch]:
    """Consecutive parts of `size` sequences, on `device`.

    Args:
        batch: this rank's share.
        size: sequences in each.
        device: of the model.
        multiple, same_length: as in `arranged`.

    Raises BatchError for a batch that does not divide, or for keys that cannot be honoured.
    """
    num_rows = batch["tokens"].shape[0]
    if num_rows % size:
        problem = f"rows must be a multiple of micro_batch_size {size}, got {num_rows}"
        raise BatchError([Violation("tokens", problem, "Pad the batch")])
    parts = [
        {name: tensor[start : start + size] for name, tensor in batch.items()} for start in range(0, num_rows, size)
    ]
    rows = arranged(parts, multiple, same_length=same_length)  # where the batch is: on a GPU every look would wait
    return [
        MicroBatch({name: tensor.to(device) for name, tensor in part.items()}, each.to(device))
        for part, each in zip(parts, rows, strict=True)
    ]


def arranged(parts: Sequence[Batch], multiple: int = 1, *, same_length: bool = False) -> list[Rows]:
    """What is computed for each micro batch.

    Args:
        parts: the micro batches of a step, all with the same keys.
        multiple: of which the number of tokens in a row must be one.
        same_length: all micro batches get rows of one length, as pipelines need it.

    Raises BatchError for keys that cannot be honoured.
    """
    if faults := [fault for part in parts for fault in sequence_faults(part)]:
        raise BatchError(faults)
    found = [sequence_ids_of(part) for part in parts]
    known = [each for each in found if each is not None]
    if not known:
        return [_as_it_is(part) for part in parts]
    lengths = [_length(each, multiple) for each in known]
    if same_length:
        lengths = [max(lengths)] * len(lengths)
    is_packed = any(num_sequences(each) > 1 for each in known)
    return [_rearranged(*each, is_packed=is_packed) for each in zip(parts, known, lengths, strict=True)]


def _as_it_is(part: Batch) -> Rows:
    labels, is_labelled = _labels_of(part)
    mask = part.get("mask")
    if is_labelled is not None:
        mask = _learned(mask, is_labelled)
    return Rows(part["tokens"].long(), labels, mask, is_labelled=is_labelled)


def _rearranged(part: Batch, sequence_ids: torch.Tensor, length: int, *, is_packed: bool) -> Rows:
    is_real = sequence_ids > 0
    width = sequence_ids.shape[1]
    columns = torch.arange(width, device=sequence_ids.device)
    first = is_real.long().argmax(1, keepdim=True)
    places = (columns - first) % width
    sources = (columns[:length] + first) % width
    own_ids = sequence_ids.gather(1, sources)
    labels, is_labelled = _labels_of(part)
    mask = _learned(part.get("mask"), is_real if is_labelled is None else is_real & is_labelled).gather(1, sources)
    if is_packed:  # what MTP would learn after the last token of a sequence is another's first
        mask = mask.where(~begins_of(own_ids), 0)
    moved = length < width or bool(first.any())
    return Rows(
        part["tokens"].long().gather(1, sources).where(own_ids > 0, 0),
        None if labels is None else labels.gather(1, sources),
        mask,
        own_ids if is_packed else None,
        places.clamp(max=length - 1) if moved else None,
        is_real,
        is_labelled,
    )


def _length(sequence_ids: torch.Tensor, multiple: int) -> int:
    """Tokens from the first real one of a row to the last, of the longest row, rounded up."""
    width = sequence_ids.shape[1]
    is_real = (sequence_ids > 0).long()
    padding_before, padding_after = is_real.argmax(1), is_real.flip(1).argmax(1)
    longest = int((width - padding_before - padding_after).where(is_real.any(1), 1).max())
    step = math.lcm(multiple, ROUNDED_TO)
    return min(width, -(-longest // step) * step)


def _labels_of(part: Batch) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Labels that are all tokens, and which of them count; None where all do."""
    if (labels := part.get("labels")) is None:
        return None, None
    is_labelled = labels != IGNORED
    if bool(is_labelled.all()):
        return labels.long(), None
    return labels.long().where(is_labelled, 0), is_labelled


def _learned(mask: torch.Tensor | None, counted: torch.Tensor) -> torch.Tensor:
    """`mask` [b, S], 0 also where nothing is counted."""
    return counted.float() if mask is None else mask.where(counted, 0)
