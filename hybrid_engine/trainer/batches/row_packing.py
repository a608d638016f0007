"""Several sequences in a row, which contains less padding than one.

Of prompts and completions:

    multiple = limits.dp_size * limits.rows_of_rank     # of worker.actor.engine.limits
    packed = pack(prompts, completions, seq_length, multiple_of=multiple)
    packed.batch["advantages"] = packed.spread(advantages)      # one value a sequence -> [R, S]
    packed.batch["old_log_probs"] = worker.compute_log_probs(packed.batch)
    packed.unpack(packed.batch["old_log_probs"])                # [R, S] -> one tensor a sequence

Of a batch with one sequence a row, for one call; results return to its rows:

    packed = pack_rows(batch, multiple_of=multiple)
    batch["old_log_probs"] = packed.restore(worker.compute_log_probs(packed.batch))     # [B, S]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hybrid_engine.errors import BatchError, Violation, Violations, require_none
from hybrid_engine.ports import Batch
from hybrid_engine.ranks.torch_internals import Tensors
from hybrid_engine.trainer.batches.arrangement import (
    KEYS,
    ROUTED_EXPERTS,
    require_one_sequence_a_row,
    sequence_faults,
    sequence_ids_of,
)
from hybrid_engine.trainer.batches.batch_building import (
    Drawn,
    NewBatch,
    TokenIds,
    batch_of,
    described,
    mean_weights,
    required_whole,
    samples_of,
)
from hybrid_engine.trainer.batches.batch_checks import shape_violations
from hybrid_engine.trainer.batches.image_rows import image_violations, with_images

_MEANS_OVER_ROWS = ("weights", "token_weights")
"""Keys of weights whose weighted sums are averaged over rows (`mean_weights`)."""


@dataclass(frozen=True)
class RowSlice:
    """Columns `start` to `start + length` of a row, which hold one sequence."""

    row: int
    start: int
    length: int

    @property
    def columns(self) -> slice:
        """Slice of the row's columns."""
        return slice(self.start, self.start + self.length)


@dataclass(frozen=True)
class PackedRows:
    """A batch of R rows of several sequences.

    Attributes:
        batch: `tokens`, `labels` and `sequence_ids` (number of the sequence from 1, 0 for padding),
            all [R, S], with the other tensors of the rows that were packed; values of a row are
            repeated at each of its tokens.
        places: location of each sequence, in the order of the rows that were packed.
        sources: location of each sequence in these rows.
        width: number of columns of these rows.
    """

    batch: NewBatch
    places: tuple[RowSlice, ...]
    sources: tuple[RowSlice, ...]
    width: int

    def unpack(self, values: torch.Tensor) -> list[torch.Tensor]:
        """Return the values [length, ...] of each sequence, from values [R, S, ...] of the rows.

        Raises BatchError for another shape.
        """
        self._require_tokens(values)
        return [values[place.row, place.columns] for place in self.places]

    def restore(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values [B, width, ...] in the rows that were packed, 0 for padding.

        `values`: [R, S, ...], of the packed rows. Raises BatchError for another shape.
        """
        self._require_tokens(values)
        restored = values.new_zeros(len(self.sources), self.width, *values.shape[2:])
        restored[_positions(self.sources)] = values[_positions(self.places)]
        return restored

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """Return the value of each token's sequence [R, S], from one value a sequence [N].

        Padding gets 0. Raises BatchError for another shape.
        """
        if not isinstance(values, torch.Tensor) or values.shape != (len(self.places),):
            raise BatchError.of(
                "values",
                f"{described(values)}, but there are {len(self.places)} sequences",
                "Pass a tensor with one value for each sequence",
                code="wrong-shape",
            )
        # sequence ids are indices: 0 is padding, sequences count from 1
        with_padding = torch.cat([values.new_zeros(1), values])
        return with_padding[self.batch["sequence_ids"].to(values.device)]

    def _require_tokens(self, values: torch.Tensor) -> None:
        tokens = self.batch["tokens"]
        if not isinstance(values, torch.Tensor) or values.shape[:2] != tokens.shape:
            raise BatchError.of(
                "values",
                f"{described(values)}, but the rows have {list(tokens.shape)}",
                "Pass a value for each token of the packed rows",
                code="wrong-shape",
            )


def pack(
    prompts: Sequence[TokenIds],
    completions: Sequence[TokenIds | Drawn],
    seq_length: int,
    *,
    multiple_of: int = 1,
    pad_token_id: int = 0,
) -> PackedRows:
    """Pack prompts with their completions into rows of `seq_length` tokens.

    The batch has `tokens`, `labels`, `sequence_ids`, `mask`, `weights` and, as in `build_batch`,
    `temperature` and `routed_experts`; all [R, S, ...].

    Args:
        prompts: token ids of N prompts.
        completions: N completions; both as in `build_batch`.
        seq_length: S; a sequence takes a column for each token but its last, which is only
            predicted.
        multiple_of: see `pack_rows`.
        pad_token_id: token id of padding.

    Raises BatchError as `build_batch`, and if no token was sampled.
    """
    samples = samples_of(prompts, completions, seq_length, pad_token_id)
    lengths = torch.tensor([sample.length for sample in samples])
    # no wider than needed, because there is a row for each sequence
    width = max((sample.length for sample in samples), default=1)
    batch = with_images(batch_of(samples, width, pad_token_id), completions)
    batch["attention_mask"] = (torch.arange(width) < lengths[:, None]).long()
    packed = pack_rows(batch, seq_length, multiple_of=multiple_of, pad_token_id=pad_token_id)
    packed.batch["weights"] = mean_weights(packed.batch["mask"])
    return packed


def pack_rows(
    batch: Batch,
    seq_length: int | None = None,
    *,
    multiple_of: int = 1,
    pad_token_id: int = 0,
) -> PackedRows:
    """Pack rows [B, S] of one sequence each into fewer rows.

    Long sequences are placed first, each into the first row in which it fits. If `multiple_of` adds
    rows, each is placed into the row with the fewest tokens instead. An update of the packed rows
    is that of the rows, up to rounding: `weights` and `token_weights`, whose sums are averaged over
    rows, are scaled to the number of packed rows.

    Args:
        batch: `tokens` [B, S], keys that define the sequences, and tensors [B], one value a row, or
            [B, S, ...], one value a token.
        seq_length: columns of the packed rows; default: S.
        multiple_of: the number of rows is a multiple of this. `update` requires data parallel
            ranks times `BatchLimits.rows_of_rank`. Added rows are padding, with weights of 0.
        pad_token_id: token id of padding.

    Raises BatchError for rows of several sequences, keys that do not define them as
    `worker.update` requires, and tensors of another shape.
    """
    remedy = "Pass a number of rows, at least 1"
    require_none(required_whole(multiple_of, "multiple_of", remedy, least=1), BatchError)
    require_none(image_violations(batch, "pack_rows takes rows of text alone"), BatchError)
    keys = {name: tensor for name, tensor in batch.items() if name in ("tokens", *KEYS)}
    require_none(shape_violations(keys, ["tokens"]), BatchError)
    require_none(sequence_faults(keys), BatchError)
    require_one_sequence_a_row(batch, "pack_rows")
    tokens = batch["tokens"]
    num_sequences, width = tokens.shape
    sequence_ids = sequence_ids_of(batch)
    is_real = torch.ones_like(tokens) if sequence_ids is None else (sequence_ids > 0).long()
    columns = {name: tensor for name, tensor in batch.items() if name not in KEYS}
    require_none(_column_violations(columns, num_sequences, width), BatchError)
    lengths = is_real.sum(1).tolist()
    size = width if seq_length is None else seq_length
    if max(lengths) > size:
        raise BatchError.of(
            "tokens",
            f"has a sequence of {max(lengths)} tokens, but rows have {size}",
            "Raise seq_length",
            code="sequence-too-long",
        )
    starts = is_real.argmax(1).tolist()
    sources = tuple(map(RowSlice, range(num_sequences), starts, lengths))
    places = _placed(lengths, size) or []
    num_used_rows = len({place.row for place in places})
    # 5 rows with `multiple_of` 4 become 8.
    num_rows = max(1, -(-num_used_rows // multiple_of)) * multiple_of
    if num_rows > num_used_rows:
        # a micro batch is computed as long as its longest row, so sequences move to added rows
        places = _placed(lengths, size, num_rows) or places

    taken = _positions(sources)
    placed = _positions(places)
    numbers = torch.arange(1, num_sequences + 1, device=tokens.device)
    packed_ids = torch.zeros(num_rows, size, dtype=torch.int64, device=tokens.device)
    packed_ids[placed] = numbers[taken[0]]
    packed = {"sequence_ids": packed_ids}
    paddings = {
        **dict.fromkeys(("tokens", "labels"), pad_token_id),
        "temperature": 1,
        ROUTED_EXPERTS: -1,
    }
    for name, tensor in columns.items():
        padding = paddings.get(name, 0)
        column = tensor.new_full((num_rows, size, *tensor.shape[2:]), padding)
        column[placed] = tensor[taken[0]] if tensor.dim() == 1 else tensor[taken]
        packed[name] = column
    for name in _MEANS_OVER_ROWS:
        if name in packed:
            # The mean over rows divides by `num_rows` where it divided by `num_sequences`.
            packed[name] = packed[name] * (num_rows / num_sequences)
    return PackedRows(packed, tuple(places), sources, width)


def _column_violations(columns: Tensors, num_rows: int, width: int) -> Violations:
    """Yield tensors that have neither a value for each row nor one for each token."""
    for name, tensor in columns.items():
        shape = getattr(tensor, "shape", ())
        if shape != (num_rows,) and shape[:2] != (num_rows, width):
            yield Violation(
                name,
                f"{described(tensor)}, but the rows are [{num_rows}, {width}]",
                f"Pass [{num_rows}], or [{num_rows}, {width}, ...]",
                code="wrong-shape",
            )


def _positions(slices: Sequence[RowSlice]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows and columns [tokens] of all tokens of some slices, slice by slice."""
    lengths = torch.tensor([place.length for place in slices], dtype=torch.int64)
    rows = torch.tensor([place.row for place in slices], dtype=torch.int64)
    starts = torch.tensor([place.start for place in slices], dtype=torch.int64)
    # number of a token in its slice
    # Lengths 3 and 2 start at 0 and 3: 0 1 2 3 4 less 0 0 0 3 3 is 0 1 2 0 1.
    offsets = torch.arange(int(lengths.sum())) - (lengths.cumsum(0) - lengths).repeat_interleave(
        lengths
    )
    return rows.repeat_interleave(lengths), starts.repeat_interleave(lengths) + offsets


def _placed(lengths: Sequence[int], size: int, num_rows: int = 0) -> list[RowSlice] | None:
    """Return a place for each length: the longest first, into the first row with room for it.

    Of `num_rows` rows, if any, into the row with the fewest tokens; None if one does not fit there.
    """
    # no more rows than sequences are needed; numpy searches thousands of rows in microseconds
    room = np.full(num_rows or len(lengths), size)
    places: dict[int, RowSlice] = {}
    # the sort is stable, so sequences of one length keep their order
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        length = lengths[index]
        # the first of the largest values: the most room, or the first row with room enough
        row = int((room if num_rows else room >= length).argmax())
        if room[row] < length:
            return None
        places[index] = RowSlice(row, size - int(room[row]), length)
        room[row] -= length
    return [places[index] for index in range(len(lengths))]
