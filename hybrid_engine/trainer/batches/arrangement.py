"""Arrangement of a user's rows into the rows that a model computes, and of results back.

    user's rows                    computed rows                          results, user's columns
    _ _ a b c                      a b c _            causal mask         0 0 x x x
    a b _ _ _                      a b _ _                                x x 0 0 0
    _ a b c d e _  (1 1 1 2 2)     a b c d e _ _      each sequence sees  0 x x x x x 0
                                                      only its tokens

A computed row starts with its first real token, padding becomes token 0, and columns that no row of
a micro batch needs are cut off. So left padding and right padding give the same bits, and a row of
one sequence needs no mask: with causal attention no token sees the padding after it.

Three keys, all [B, S], define the sequences: `attention_mask` (1 real, 0 padding), `position_ids`
that start at 0 in every sequence, and `sequence_ids` (number of the sequence, 0 for padding). All
are converted to sequence ids. A batch may have several of them if they agree.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain
from typing import Any

import torch
from torch.nn.functional import pad

from hybrid_engine.errors import BatchError, Violation, Violations, require_none
from hybrid_engine.memory.host_pages import round_up
from hybrid_engine.ports import Batch
from hybrid_engine.trainer.batches.image_rows import ImageRows, images_in

KEYS = ("attention_mask", "position_ids", "sequence_ids")

IGNORED = -100
"""Label of a token after which nothing is predicted, as in Hugging Face's losses."""

ROUTED_EXPERTS = "routed_experts"
"""Key of the experts [B, S, layers, k] of each token that routers take; -1: they select them."""

_LENGTH_STEP = 8
"""Computed rows have a multiple of this many tokens: kernels prefer that, and there are fewer
different lengths, of each of which a model keeps position embeddings."""


# -- sequences of a batch --------------------------------------------------------------------------


def sequence_ids_of(batch: Batch) -> torch.Tensor | None:
    """Return the sequence number [B, S] of each token, 0 for padding.

    Returns None if every row is one sequence without padding.
    """
    sequence_ids = batch.get("sequence_ids")
    if sequence_ids is not None:
        return sequence_ids
    mask = batch.get("attention_mask")
    positions = batch.get("position_ids")
    if positions is None:
        return None if mask is None else mask.long()
    # positions restart at 0 in each sequence; padding may have any position
    # 0 1 2 0 1 are sequences 1 1 1 2 2.
    is_first = positions == 0
    if mask is None:
        return is_first.cumsum(1)
    is_real = mask.bool()
    return (is_first & is_real).cumsum(1) * is_real


def begins_of(sequence_ids: torch.Tensor) -> torch.Tensor:
    """Return a mask [B, S] of the first token of each sequence, and of each stretch of padding."""
    begins = torch.ones_like(sequence_ids, dtype=torch.bool)
    begins[:, 1:] = sequence_ids[:, 1:] != sequence_ids[:, :-1]
    return begins


def positions_in(sequence_ids: torch.Tensor) -> torch.Tensor:
    """Return the position [B, S] of each token in its sequence, or in its stretch of padding."""
    columns = torch.arange(sequence_ids.shape[1], device=sequence_ids.device)
    columns = columns.expand_as(sequence_ids)
    # the running maximum repeats the column of the last begin until the next one
    # Ids 1 1 2 2 0 begin at 0, 2 and 4: starts 0 0 2 2 4, positions 0 1 0 1 0.
    starts = columns.where(begins_of(sequence_ids), 0).cummax(1).values
    return columns - starts


def sequence_faults(batch: Batch) -> Violations:
    """Yield violations of `KEYS`, which have the shape of `tokens` and hold integers."""
    mask = batch.get("attention_mask")
    positions = batch.get("position_ids")
    explicit_ids = batch.get("sequence_ids")
    if mask is not None and bool(((mask != 0) & (mask != 1)).any()):
        yield Violation(
            "attention_mask",
            "has values other than 0 and 1",
            "Use 1 for real tokens and 0 for padding",
            code="not-a-mask",
        )
        return
    if explicit_ids is not None and bool((explicit_ids < 0).any()):
        yield Violation(
            "sequence_ids",
            "has negative numbers",
            "Number sequences from 1; 0 is padding",
            code="out-of-range",
        )
        return
    sequence_ids = sequence_ids_of(batch)
    if sequence_ids is None:
        return
    is_masked_differently = (
        mask is not None
        and explicit_ids is not None
        and not torch.equal(mask.bool(), explicit_ids > 0)
    )
    if is_masked_differently:
        yield Violation(
            "sequence_ids",
            "is not 0 exactly where attention_mask is 0",
            "Leave one of them out",
            code="keys-disagree",
        )
        return
    # sorting a row joins the tokens of a sequence, so an interrupted one has fewer stretches then
    # 1 2 1 has three stretches, sorted 1 1 2 has two.
    sorted_ids = sequence_ids.sort(1).values
    interrupted = _format_rows(_num_stretches(sequence_ids) != _num_stretches(sorted_ids))
    if interrupted:
        yield Violation(
            "attention_mask" if explicit_ids is None else "sequence_ids",
            f"the tokens of a sequence are not adjacent in {interrupted}",
            "Put padding before or after a sequence, and keep its tokens together",
            code="sequence-interrupted",
        )
        return
    if positions is None:
        return
    if explicit_ids is not None:
        is_padding = explicit_ids == 0
    elif mask is not None:
        is_padding = mask == 0
    else:
        is_padding = torch.zeros_like(positions, dtype=torch.bool)
    # id 0 outside of padding: tokens before the first position 0
    is_wrong = (positions != positions_in(sequence_ids)) | (sequence_ids == 0)
    miscounted = _format_rows((is_wrong & ~is_padding).any(1))
    if miscounted:
        yield Violation(
            "position_ids",
            f"do not count 0, 1, 2, ... in each sequence in {miscounted}",
            "Leave them out: they follow from attention_mask or sequence_ids",
            code="positions-do-not-count",
        )


def require_one_sequence_a_row(batch: Batch, name: str, *, in_order: bool = False) -> None:
    """Raise BatchError for rows of several sequences.

    Args:
        batch: rows of tokens.
        name: the function that treats each row as one sequence, for the message.
        in_order: also raise if the sequence numbers are not in ascending order over the rows:
            `pack` numbers sequences in the order of its arguments, but puts long ones first.
    """
    sequence_ids = sequence_ids_of(batch)
    if sequence_ids is None or not sequence_ids.numel():
        return
    key = next(key for key in reversed(KEYS) if key in batch)
    remedy = "Make the batch with build_batch, one sequence a row"
    most = num_sequences(sequence_ids)
    if most > 1:
        raise BatchError.of(
            key,
            f"has rows of up to {most} sequences, but {name} requires one sequence a row",
            remedy,
            code="several-sequences",
        )
    if in_order and bool((sequence_ids.amax(1).diff() < 0).any()):
        raise BatchError.of(
            key,
            f"numbers the rows in another order than {name} requires",
            remedy,
            code="rows-reordered",
        )


def num_sequences(sequence_ids: torch.Tensor) -> int:
    """Return the largest number of sequences in a row."""
    return int(_num_stretches(sequence_ids).max()) if sequence_ids.numel() else 0


def _num_stretches(sequence_ids: torch.Tensor) -> torch.Tensor:
    """Return the number [B] of stretches of real tokens with the same id."""
    return (begins_of(sequence_ids) & (sequence_ids > 0)).sum(1)


def _format_rows(is_wrong: torch.Tensor) -> str:
    """Return the rows for which `is_wrong` [B] is true, in words; "" if there are none."""
    rows = is_wrong.nonzero().flatten().tolist()
    if not rows:
        return ""
    numbers = ", ".join(map(str, rows[:5]))
    more = ", ..." if len(rows) > 5 else ""
    return f"row{'s' if len(rows) > 1 else ''} {numbers}{more}"


# -- rows of a model -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rows:
    """A micro batch as a model computes it.

    Attributes:
        tokens: [b, L] int64.
        labels: [b, L] int64, all of them token ids; None if the model is to return logits.
        mask: [b, L]: 1 where MTP layers learn; None: everywhere.
        ids: [b, L] sequence number of each token, 0 for padding; None: every row is one sequence
            without padding.
        sequence_ids: `ids` of rows with several sequences; None: one sequence a row, which needs
            no mask.
        places: [b, S] column of the computed row for each of the user's tokens; None: unchanged.
        is_real: [b, S] mask of the user's tokens that are not padding; None: all.
        is_labelled: [b, S] mask of the user's labels that are not ignored; None: all.
        temperature: [b, L] fp32, divisor of the logits; None: 1 everywhere.
        routed_experts: [b, L, layers, k] experts of each token, -1 where routers select them;
            None: everywhere.
        images: of all rows, on the host; None: text alone.
    """

    tokens: torch.Tensor
    labels: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    ids: torch.Tensor | None = None
    sequence_ids: torch.Tensor | None = None
    places: torch.Tensor | None = None
    is_real: torch.Tensor | None = None
    is_labelled: torch.Tensor | None = None
    temperature: torch.Tensor | None = None
    routed_experts: torch.Tensor | None = None
    images: ImageRows | None = None

    def has_tokens_after(self, num_tokens: int) -> torch.Tensor:
        """Return a mask [b, L] of the real tokens that `num_tokens` of their sequence follow."""
        ids = torch.ones_like(self.tokens) if self.ids is None else self.ids
        # Ids 1 1 1 2 2 moved by one are 1 1 2 2 0: tokens 0, 1 and 3 have a token after them.
        later = pad(ids, (0, num_tokens))[:, num_tokens:]
        return (ids > 0) & (later == ids)

    @property
    def position_ids(self) -> torch.Tensor:
        """Position [b, L] of each token, from 0 in each sequence."""
        if self.sequence_ids is not None:
            return positions_in(self.sequence_ids)
        columns = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        return columns.expand_as(self.tokens)

    def to(self, device: torch.device) -> Rows:
        """Return a copy on `device`, except for images."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **_on_device(values, device))

    def restore(self, values: torch.Tensor) -> torch.Tensor:
        """Return values [b, L, ...] of computed tokens in the user's columns [b, S, ...].

        Padding gets 0.
        """
        # entropy is [b, L], most likely tokens are [b, L, k]
        further_dims = (1,) * (values.dim() - 2)
        if self.places is not None:
            places = self.places.view(*self.places.shape, *further_dims)
            values = values.gather(1, places.expand(*self.places.shape, *values.shape[2:]))
        if self.is_real is not None:
            values = values.where(self.is_real.view(*self.is_real.shape, *further_dims), 0)
        return values

    def restore_log_probs(self, values: torch.Tensor) -> torch.Tensor:
        """Restore log-probabilities [b, L] of the labels; ignored labels get 0 as well."""
        values = self.restore(values)
        return values if self.is_labelled is None else values.where(self.is_labelled, 0)


@dataclass(frozen=True)
class MicroBatch:
    """Rows that are computed at once.

    Attributes:
        batch: the user's rows, which a loss function receives.
        rows: the rows that the model computes.
    """

    batch: Batch
    rows: Rows


def micro_batches(
    batch: Batch,
    size: int,
    device: torch.device,
    multiple: int = 1,
    *,
    same_length: bool = False,
) -> list[MicroBatch]:
    """Split a batch into micro batches of `size` consecutive rows, on `device` except for images.

    Args:
        batch: this rank's share.
        size: rows in each micro batch.
        device: of the model.
        multiple, same_length: see `arranged`.

    Raises BatchError if the number of rows is not a multiple of `size`, or for inconsistent keys.
    """
    num_rows = batch["tokens"].shape[0]
    if num_rows % size:
        raise BatchError.of(
            "tokens",
            f"rows must be a multiple of micro_batch_size {size}, got {num_rows}",
            "Pad the batch",
            code="not-divisible",
        )
    parts = [
        {name: tensor[start : start + size] for name, tensor in batch.items()}
        for start in range(0, num_rows, size)
    ]
    # before the copy to the device: on a GPU each decision here would be a synchronization
    rows_of_parts = arranged(parts, multiple, same_length=same_length)
    result = []
    for part, rows in zip(parts, rows_of_parts, strict=True):
        result.append(MicroBatch({**part, **_on_device(part, device)}, rows.to(device)))
    return result


def _on_device(values: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Return copies of the tensors among `values`; images of all micro batches take much memory."""
    return {
        name: value.to(device) for name, value in values.items() if isinstance(value, torch.Tensor)
    }


def arranged(parts: Sequence[Batch], multiple: int, *, same_length: bool) -> list[Rows]:
    """Return the computed rows of each micro batch.

    Args:
        parts: the micro batches of a step, all with the same keys.
        multiple: the number of tokens in a row is a multiple of this.
        same_length: give all micro batches rows of one length, which pipelines require.

    Raises BatchError for inconsistent keys.
    """
    require_none(chain(*map(sequence_faults, parts)), BatchError)
    ids_of_parts = [ids for part in parts if (ids := sequence_ids_of(part)) is not None]
    if not ids_of_parts:
        return [_unchanged_rows(part) for part in parts]
    lengths = [_length(ids, multiple) for ids in ids_of_parts]
    if same_length:
        lengths = [max(lengths)] * len(lengths)
    # the same for all micro batches, because a schedule has the shapes of the first one
    is_packed = any(num_sequences(ids) > 1 for ids in ids_of_parts)
    return [
        _moved_rows(part, ids, length, is_packed=is_packed)
        for part, ids, length in zip(parts, ids_of_parts, lengths, strict=True)
    ]


def _unchanged_rows(part: Batch) -> Rows:
    labels, is_labelled = _labels_of(part)
    mask = part.get("mask")
    if is_labelled is not None:
        mask = _limited(mask, is_labelled)
    temperature = _temperature_of(part)
    tokens = part["tokens"].long()
    return Rows(
        tokens,
        labels,
        mask,
        is_labelled=is_labelled,
        temperature=temperature,
        routed_experts=part.get(ROUTED_EXPERTS),
        images=images_in(part),
    )


def _moved_rows(part: Batch, sequence_ids: torch.Tensor, length: int, *, is_packed: bool) -> Rows:
    """Return rows of `length` tokens that start with the first real token."""
    is_real = sequence_ids > 0
    width = sequence_ids.shape[1]
    columns = torch.arange(width, device=sequence_ids.device)
    # column of the first real token [b, 1]; 0 in a row of padding
    first = is_real.long().argmax(1, keepdim=True)
    # rotation to the left, and its inverse
    # With 2 columns of padding in front of 3 tokens, sources are 2 3 4 0 1 and places 3 4 0 1 2.
    sources = (columns[:length] + first) % width
    places = (columns - first) % width
    moved_ids = sequence_ids.gather(1, sources)

    labels, is_labelled = _labels_of(part)
    counts = is_real if is_labelled is None else is_real & is_labelled
    mask = _limited(part.get("mask"), counts).gather(1, sources)
    if is_packed:
        # MTP layers predict further tokens, which after the last one belong to another sequence
        mask = mask.where(~begins_of(moved_ids), 0)
    temperature = _temperature_of(part)
    experts = part.get(ROUTED_EXPERTS)
    if experts is not None:
        experts = experts.take_along_dim(sources[..., None, None], 1)
        experts = experts.where((moved_ids > 0)[..., None, None], -1)
    # otherwise `restore` needs no gather
    is_moved = length < width or bool(first.any())
    return Rows(
        part["tokens"].long().gather(1, sources).where(moved_ids > 0, 0),
        None if labels is None else labels.gather(1, sources),
        mask,
        moved_ids,
        moved_ids if is_packed else None,
        # padding that was cut off has no column; `restore` sets it to 0, whichever it reads
        places.clamp(max=length - 1) if is_moved else None,
        is_real,
        is_labelled,
        None if temperature is None else temperature.gather(1, sources),
        experts,
        images_in(part),
    )


def _length(sequence_ids: torch.Tensor, multiple: int) -> int:
    """Return the length of the longest row without outer padding, rounded up."""
    width = sequence_ids.shape[1]
    is_real = (sequence_ids > 0).long()
    num_before = is_real.argmax(1)
    num_after = is_real.flip(1).argmax(1)
    # a row that is all padding counts as one token
    lengths = (width - num_before - num_after).where(is_real.any(1), 1)
    # For 6 sequence parallel ranks a multiple of 24.
    step = math.lcm(multiple, _LENGTH_STEP)
    return min(width, round_up(int(lengths.max()), step))


def _labels_of(part: Batch) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return labels that are all token ids, and a mask of those not ignored (None: all)."""
    labels = part.get("labels")
    if labels is None:
        return None, None
    is_labelled = labels != IGNORED
    if bool(is_labelled.all()):
        return labels.long(), None
    # a model looks up every label, so ignored ones become a valid token id
    return labels.long().where(is_labelled, 0), is_labelled


def _temperature_of(part: Batch) -> torch.Tensor | None:
    """Return the temperature [b, S] fp32 from one value for each row or token; None if absent."""
    temperature = part.get("temperature")
    if temperature is None:
        return None
    # [b] becomes [b, 1], which is expanded to all tokens
    return temperature.float().view(len(temperature), -1).expand(part["tokens"].shape)


def _limited(mask: torch.Tensor | None, counts: torch.Tensor) -> torch.Tensor:
    """Return `mask` [b, S] (None: 1 everywhere) with 0 where `counts` is false."""
    return counts.float() if mask is None else mask.where(counts, 0)
