"""Which tokens of a row are one sequence.

Three keys say it, all [B, S]: `attention_mask` (1 real, 0 padding), `position_ids` that begin at 0 with every sequence,
and `sequence_ids` (number of the sequence, 0 for padding). All become the last. Several may be given if they agree.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from hybrid_engine.errors import Violation
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
