"""The rows that a model computes in place of the user's.

    user's rows                    computed rows                          back, in the user's places
    _ _ a b c                      a b c _            causal, as always   0 0 x x x
    a b _ _ _                      a b _ _                                x x 0 0 0
    _ a b c d e _  (1 1 1 2 2)     a b c d e _ _      each sequence sees  0 x x x x x 0
                                                      its own tokens

A row begins with its first real token, padding is token 0, and what no row of a micro batch needs is cut off. So left
padding is right padding, to the last bit, and a row of one sequence needs no mask: a causal model never sees what comes
after it.

Three keys say which tokens are one sequence, all [B, S]: `attention_mask` (1 real, 0 padding), `position_ids` that
begin at 0 with every sequence, and `sequence_ids` (number of the sequence, 0 for padding). All become the last. Several
may be given if they agree.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace

import torch

from hybrid_engine.errors import BatchError, Violation
from hybrid_engine.ports import Batch

KEYS = ("attention_mask", "position_ids", "sequence_ids")


def sequence_ids_of(batch: Batch) -> torch.Tensor | None:
    """Number [B, S] of each token's sequence, 0 for padding; None where every row is one sequence without padding."""
    given, mask, positions = (batch.get(key) for key in ("sequence_ids", "attention_mask", "position_ids"))
    if given is not None:
        return given
    if positions is None:
        return None if mask is None else mask.long()
    begins = positions == 0
    if mask is None:
        return begins.cumsum(1)
    real = mask.bool()
    return (begins & real).cumsum(1) * real


def begins_of(sequence_ids: torch.Tensor) -> torch.Tensor:
    """Which tokens [B, S] are the first of a sequence, or of a stretch of padding."""
    begins = torch.ones_like(sequence_ids, dtype=torch.bool)
    begins[:, 1:] = sequence_ids[:, 1:] != sequence_ids[:, :-1]
    return begins


def positions_in(sequence_ids: torch.Tensor) -> torch.Tensor:
    """Position [B, S] of each token in its sequence, or in its stretch of padding."""
    columns = torch.arange(sequence_ids.shape[1], device=sequence_ids.device).expand_as(sequence_ids)
    return columns - columns.where(begins_of(sequence_ids), 0).cummax(1).values


def sequence_faults(batch: Batch) -> Iterator[Violation]:
    """Whatever of `KEYS` no trainer can honour; the keys have the shape of `tokens` and hold integers."""
    mask, positions, given = (batch.get(key) for key in KEYS)
    if mask is not None and bool(((mask != 0) & (mask != 1)).any()):
        yield Violation("attention_mask", "has values other than 0 and 1", "Give 1 for real tokens, 0 for padding")
        return
    if given is not None and bool((given < 0).any()):
        yield Violation("sequence_ids", "has negative numbers", "Number sequences from 1; 0 is padding")
        return
    sequence_ids = sequence_ids_of(batch)
    if sequence_ids is None:
        return
    if mask is not None and given is not None and not torch.equal(mask.bool(), given > 0):
        yield Violation("sequence_ids", "is not 0 exactly where attention_mask is", "Leave one of them out")
        return
    if rows := _rows_with(_num_stretches(sequence_ids) != _num_sequences(sequence_ids)):
        key = "attention_mask" if given is None else "sequence_ids"
        problem = f"the tokens of a sequence are not next to each other in {rows}"
        yield Violation(key, problem, "Put padding before or after a sequence, and its tokens side by side")
        return
    if positions is not None:
        is_padding = given == 0 if given is not None else torch.zeros_like(positions) if mask is None else mask == 0
        wrong = (positions != positions_in(sequence_ids)) | (sequence_ids == 0)  # 0: before the first that counts 0
        if rows := _rows_with((wrong & ~is_padding.bool()).any(1)):
            problem = f"do not count 0, 1, 2, ... in each sequence in {rows}"
            yield Violation("position_ids", problem, "Leave them out: they follow from attention_mask or sequence_ids")


def require_one_sequence_a_row(batch: Batch, name: str, *, in_order: bool = False) -> None:
    """Raise BatchError for rows of several sequences.

    Args:
        batch: rows in which something takes each row for a sequence.
        name: of that, for the message.
        in_order: also raise for rows in another order than their sequences' numbers: `pack` numbers sequences as they
            were given, but puts long ones first.
    """
    sequence_ids = sequence_ids_of(batch)
    if sequence_ids is None or not sequence_ids.numel():
        return
    if (most := num_sequences(sequence_ids)) > 1:
        problem = f"has rows of up to {most} sequences, and {name} takes a row for one"
    elif in_order and bool((sequence_ids.amax(1).diff() < 0).any()):
        problem = f"numbers the rows in another order than {name} takes them in"
    else:
        return
    key = next(key for key in reversed(KEYS) if key in batch)
    raise BatchError([Violation(key, problem, "Make the batch with build_batch, one sequence a row")])


def num_sequences(sequence_ids: torch.Tensor) -> int:
    """The most sequences that a row has."""
    return int(_num_stretches(sequence_ids).max()) if sequence_ids.numel() else 0


def _num_stretches(sequence_ids: torch.Tensor) -> torch.Tensor:
    """How often [B] a sequence begins; more often than there are sequences where one is interrupted."""
    return (begins_of(sequence_ids) & (sequence_ids > 0)).sum(1)


def _num_sequences(sequence_ids: torch.Tensor) -> torch.Tensor:
    return _num_stretches(sequence_ids.sort(1).values)


def _rows_with(wrong: torch.Tensor) -> str:
    """The rows for which `wrong` [B] is true, in words; empty for none."""
    rows = wrong.nonzero().flatten().tolist()
    if not rows:
        return ""
    shown = ", ".join(map(str, rows[:5]))
    return f"row{'s' if len(rows) > 1 else ''} {shown}{', ...' if len(rows) > 5 else ''}"


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
        temperature: [b, L] fp32, by which logits are divided; None: 1 everywhere.
    """

    tokens: torch.Tensor
    labels: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    sequence_ids: torch.Tensor | None = None
    places: torch.Tensor | None = None
    is_real: torch.Tensor | None = None
    is_labelled: torch.Tensor | None = None
    temperature: torch.Tensor | None = None

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
    return Rows(part["tokens"].long(), labels, mask, is_labelled=is_labelled, temperature=_temperature_of(part))


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
    temperature = _temperature_of(part)
    return Rows(
        part["tokens"].long().gather(1, sources).where(own_ids > 0, 0),
        None if labels is None else labels.gather(1, sources),
        mask,
        own_ids if is_packed else None,
        places.clamp(max=length - 1) if moved else None,
        is_real,
        is_labelled,
        None if temperature is None else temperature.gather(1, sources),
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


def _temperature_of(part: Batch) -> torch.Tensor | None:
    """[b, S] fp32, of a value for each row or for each token; None where there is none."""
    if (given := part.get("temperature")) is None:
        return None
    return given.float().view(len(given), -1).expand(part["tokens"].shape)


def _learned(mask: torch.Tensor | None, counted: torch.Tensor) -> torch.Tensor:
    """`mask` [b, S], 0 also where nothing is counted."""
    return counted.float() if mask is None else mask.where(counted, 0)
