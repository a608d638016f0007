"""Several sequences in a row, so that less of a batch is padding.

packed = pack(prompts, completions, seq_length, multiple_of=dp_size * micro_batch_size)
packed.batch["advantages"] = packed.spread(advantages)              # one value a sequence -> [R, S]
packed.batch["old_log_probs"] = worker.compute_log_probs(packed.batch)
packed.unpack(packed.batch["old_log_probs"])                        # [R, S] -> a tensor for each sequence
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hybrid_engine.errors import BatchError, Violation
from hybrid_engine.trainer.batches.making import TokenIds, mean_weights, required_whole, samples_of
from hybrid_engine.trainer.batches.tensor_shapes import described


@dataclass(frozen=True)
class Place:
    """Where a sequence is: columns `start` to `start + length` of a row."""

    row: int
    start: int
    length: int

    @property
    def columns(self) -> slice:
        """Of the row."""
        return slice(self.start, self.start + self.length)


@dataclass(frozen=True)
class PackedRows:
    """A batch of rows of several sequences.

    Attributes:
        batch: `tokens`, `labels`, `sequence_ids` (the number of the sequence from 1, 0 for padding), `mask` and
            `weights`, all [R, S]; as those of `build_batch`.
        places: of each sequence, in the order in which they were given.
    """

    batch: dict[str, torch.Tensor]
    places: tuple[Place, ...]

    def unpack(self, values: torch.Tensor) -> list[torch.Tensor]:
        """Of values [R, S, ...], those of each sequence [length, ...]. Raises BatchError for another shape."""
        tokens = self.batch["tokens"]
        if not isinstance(values, torch.Tensor) or values.shape[:2] != tokens.shape:
            problem, remedy = f"{described(values)}, and the rows {list(tokens.shape)}", "Pass a value for each token"
            raise BatchError([Violation("values", problem, f"{remedy} of the packed rows")])
        return [values[place.row, place.columns] for place in self.places]

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """Values [N], one a sequence, at each of its tokens [R, S]; 0 for padding. Raises BatchError for others."""
        if not isinstance(values, torch.Tensor) or values.shape != (len(self.places),):
            problem = f"{described(values)}, and there are {len(self.places)} sequences"
            raise BatchError([Violation("values", problem, "Pass a tensor with one value for each sequence")])
        padded = torch.cat([values.new_zeros(1), values])
        return padded[self.batch["sequence_ids"].to(values.device)]


def pack(
    prompts: Sequence[TokenIds],
    completions: Sequence[TokenIds],
    seq_length: int,
    *,
    multiple_of: int = 1,
    pad_token_id: int = 0,
) -> PackedRows:
    """Put prompts and their completions side by side into rows of `seq_length` tokens, long ones first (first fit).

    Args:
        prompts: token ids of N prompts.
        completions: of N completions.
        seq_length: S; a sequence takes a column for each token but its last, which is only predicted.
        multiple_of: the number of rows is one: data parallel ranks times micro batch size, as `update` asks for it.
            Rows that are added for it are padding, with weights of 0.
        pad_token_id: fills rows up.

    Raises BatchError as `build_batch`, and when no token is a completion's.
    """
    if found := [*required_whole(multiple_of, "multiple_of", "Pass a number of rows, at least 1", least=1)]:
        raise BatchError(found)
    samples = samples_of(prompts, completions, seq_length, pad_token_id)
    places = _first_fit([sample.length for sample in samples], seq_length)
    num_rows = max((place.row + 1 for place in places), default=0)
    num_rows = max(1, -(-num_rows // multiple_of)) * multiple_of
    tokens, labels = (torch.full((num_rows, seq_length), pad_token_id, dtype=torch.int64) for _ in range(2))
    sequence_ids, mask = torch.zeros_like(tokens), torch.zeros(num_rows, seq_length, dtype=torch.float32)
    for number, (sample, place) in enumerate(zip(samples, places, strict=True), start=1):
        token_ids = torch.tensor(sample.token_ids)
        tokens[place.row, place.columns], labels[place.row, place.columns] = token_ids[:-1], token_ids[1:]
        sequence_ids[place.row, place.columns] = number
        mask[place.row, place.columns] = sample.mask
    batch = {"tokens": tokens, "labels": labels, "sequence_ids": sequence_ids, "mask": mask}
    return PackedRows({**batch, "weights": mean_weights(mask)}, tuple(places))


def _first_fit(lengths: Sequence[int], size: int) -> list[Place]:
    """Where each goes: the longest first, into the first row with room for it."""
    used: list[int] = []
    places: dict[int, Place] = {}
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        length = lengths[index]
        row = next((number for number, taken in enumerate(used) if taken + length <= size), len(used))
        if row == len(used):
            used.append(0)
        places[index] = Place(row, used[row], length)
        used[row] += length
    return [places[index] for index in range(len(lengths))]
