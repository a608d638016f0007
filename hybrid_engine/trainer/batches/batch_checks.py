"""What is refused of a batch at the boundary, before any rank computes: all violations at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from hybrid_engine.errors import BatchError, Violation, shortened
from hybrid_engine.ports import Batch
from hybrid_engine.ports import Data as Data
from hybrid_engine.trainer.batches.arrangement import IGNORED
from hybrid_engine.trainer.batches.sequences import KEYS, num_sequences, sequence_faults, sequence_ids_of
from hybrid_engine.trainer.batches.token_outputs import NO_OUTPUTS, Outputs

_TENSORS_ONLY = "A batch has tensors only; the loss function can read other values where it is defined"


@dataclass(frozen=True)
class BatchLimits:
    """What a trainer can compute.

    Attributes:
        vocab_size: number of tokens.
        micro_batch_size: rows that are computed at once.
        dp_rank, dp_size: this data parallel rank, and their number.
        seq_length: the most tokens a row may have; None where the trainer was not told.
        row_multiple: of which the tokens of a row must be a multiple.
        no_packing: why rows of several sequences cannot be computed; empty where they can.
    """

    vocab_size: int
    micro_batch_size: int
    dp_rank: int
    dp_size: int
    seq_length: int | None = None
    row_multiple: int = 1
    no_packing: str = ""


def own_share(
    batch: Batch,
    limits: BatchLimits,
    data: Data = "global",
    outputs: Outputs = NO_OUTPUTS,
    *,
    needs_labels: bool = True,
) -> Batch:
    """This data parallel rank's consecutive part of a global batch, or a local one as it is; checked.

    Raises BatchError with every violation.
    """
    if violations := [*_data_violations(data), *_violations(batch, limits, data, outputs, needs_labels)]:
        raise BatchError(violations)
    if data == "local":
        return batch
    size = batch["tokens"].shape[0] // limits.dp_size
    return {name: tensor[limits.dp_rank * size : (limits.dp_rank + 1) * size] for name, tensor in batch.items()}


def _data_violations(data: str) -> Iterator[Violation]:
    if data not in ("global", "local"):
        remedy = 'Use "global" where all ranks pass the same, "local" where each data parallel rank passes its own'
        yield Violation("data", f"{shortened(data)} is unknown", remedy)


def _violations(
    given: object, limits: BatchLimits, data: Data, outputs: Outputs, needs_labels: bool
) -> Iterator[Violation]:
    yield from _output_violations(outputs.top_k, limits)
    if not isinstance(given, Mapping):
        yield Violation("batch", f"is {type(given).__name__}", "Pass a dict of tensors: tokens, labels, ...")
        return
    required = ("tokens", "labels") if needs_labels else ("tokens",)
    broken = list(_shape_violations(given, required))
    yield from broken
    if broken:
        return
    batch: Batch = given
    yield from _size_violations(batch["tokens"].shape, limits, limits.dp_size if data == "global" else 1)
    yield from _token_violations(batch, limits)
    for name in outputs.names:
        if name in batch:
            yield Violation(name, "is in the batch and was asked for as an output", "Give the batch's another name")
    faults = list(sequence_faults(batch))
    yield from faults
    ids = None if faults else sequence_ids_of(batch)
    if limits.no_packing and ids is not None and num_sequences(ids) > 1:
        key = next(key for key in reversed(KEYS) if key in batch)
        yield Violation(key, f"rows have several sequences, but {limits.no_packing}", "Give each a row of its own")


def _output_violations(k: object, limits: BatchLimits) -> Iterator[Violation]:
    if isinstance(k, bool) or not isinstance(k, int) or not 0 <= k <= limits.vocab_size:
        problem = f"{shortened(k)} is not a number of tokens out of {limits.vocab_size}"
        yield Violation("top_k", problem, "Give 0 for none, or how many to report")


def _shape_violations(batch: Mapping[str, object], required: Sequence[str]) -> Iterator[Violation]:
    """Everything is a tensor, and those that the engine reads have the shape of `tokens`, and integers."""
    remedy = "Pass tokens and labels [B, S] of integers; labels[i, t] is the token after tokens[i, t]"
    for key in required:
        if key not in batch:
            hint = "Tokens are input_ids[:, :-1], labels input_ids[:, 1:]. " if "input_ids" in batch else ""
            yield Violation(key, f"is missing among {shortened(list(batch))}", hint + remedy)
    for key, value in batch.items():
        if not isinstance(value, torch.Tensor):
            yield Violation(str(key), f"is {type(value).__name__}", _TENSORS_ONLY)
    tokens = batch.get("tokens")
    if not isinstance(tokens, torch.Tensor):
        return
    if tokens.dim() != 2 or not tokens.numel():
        yield Violation("tokens", f"has shape {list(tokens.shape)}", "Pass [B, S], both at least 1")
        return
    for key, value in batch.items():
        if not isinstance(value, torch.Tensor):
            continue
        is_read = key in ("tokens", "labels", "mask", *KEYS)
        if is_read and value.shape != tokens.shape:
            problem = f"has shape {list(value.shape)}, tokens {list(tokens.shape)}"
            yield Violation(key, problem, f"Pass one value for each token{_shift_of(key, value, tokens)}")
        elif not value.dim() or value.shape[0] != tokens.shape[0]:
            problem = f"has shape {list(value.shape)}, and the batch has {tokens.shape[0]} rows"
            remedy = "Pass a tensor with as many rows as the batch; the loss function can read other values"
            yield Violation(key, problem, f"{remedy} where it is defined")
        if key != "mask" and is_read and (value.is_floating_point() or value.is_complex()):
            yield Violation(key, f"has type {str(value.dtype).removeprefix('torch.')}", "Pass integers")


def _shift_of(key: str, value: torch.Tensor, tokens: torch.Tensor) -> str:
    """What is missing where a tensor has the column that shifting took from the tokens."""
    if value.dim() != 2 or value.shape != (tokens.shape[0], tokens.shape[1] + 1):
        return ""
    cut = "[:, 1:]" if key in ("labels", "mask") else "[:, :-1]"
    return f": if tokens are shifted, {key}{cut}"


def _size_violations(shape: torch.Size, limits: BatchLimits, num_parts: int) -> Iterator[Violation]:
    num_rows, length = shape
    if num_rows % (num_parts * limits.micro_batch_size):
        step = num_parts * limits.micro_batch_size
        ranks = f"{num_parts} data parallel ranks in " if num_parts > 1 else ""
        problem = f"{num_rows} rows do not split over {ranks}micro batches of {limits.micro_batch_size}"
        remedy = f"Add rows, up to {-(-num_rows // step) * step}, to which your loss gives no weight"
        yield Violation("tokens", problem, remedy)
    if limits.seq_length is not None and length > limits.seq_length:
        problem = f"rows of {length} tokens are longer than actor_config.seq_length {limits.seq_length}"
        yield Violation("tokens", problem, "Cut them, or raise the key")
    if length % limits.row_multiple:
        problem = f"rows of {length} tokens do not split over {limits.row_multiple} tensor parallel ranks"
        more = -(-length // limits.row_multiple) * limits.row_multiple
        yield Violation("tokens", problem, f"Pad them to {more}, for actor_config.sequence_parallel")


def _token_violations(batch: Batch, limits: BatchLimits) -> Iterator[Violation]:
    """Tokens and labels are in the vocabulary."""
    for key in ("tokens", "labels"):
        if (values := batch.get(key)) is None:
            continue
        wrong = (values < 0) | (values >= limits.vocab_size)
        if key == "labels":
            wrong &= values != IGNORED
        if bool(wrong.any()):
            row, column = wrong.nonzero()[0].tolist()
            value, num_others = int(values[row, column]), int(wrong.sum()) - 1
            others = f", nor are {num_others} others" if num_others else ""
            problem = f"{value} at [{row}, {column}] is no token of a vocabulary of {limits.vocab_size}{others}"
            ignored = f", and {IGNORED} where nothing is predicted" if key == "labels" else ""
            yield Violation(key, problem, f"Pass token ids{ignored}")
