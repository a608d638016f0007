"""What is refused of a batch at the boundary, before any rank computes: all violations at once.

Ranks that compute rows together pass the same, bit by bit: TP and PP ranks each compute a part of them. All ranks take
a step with the same learning rate, or replicas of a weight would part. Of global data all ranks pass the same token ids
and masks, too, though each data parallel rank computes its rows alone: results are joined. Most often it is a reward
with randomness in it that differs, and nothing else would show that.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from hybrid_engine.errors import BatchError, Violation, shortened
from hybrid_engine.ports import Batch, Data
from hybrid_engine.ranks.agreement import Agreement
from hybrid_engine.ranks.digests import box_digest, text_digest
from hybrid_engine.trainer.batches.arrangement import IGNORED, KEYS, num_sequences, sequence_faults, sequence_ids_of
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
    yield from _temperature_violations(batch)
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


def _temperature_violations(batch: Batch) -> Iterator[Violation]:
    if (given := batch.get("temperature")) is None:
        return
    shape = batch["tokens"].shape
    if given.shape not in (shape[:1], shape):
        remedy = f"Pass one for each row, [{shape[0]}], or for each token, {list(shape)}"
        yield Violation("temperature", f"has shape {list(given.shape)}", remedy)
    elif (wrong := given[~((given > 0) & given.isfinite())]).numel():
        remedy = "Pass what was sampled with, and 1 for what is greedy or padding"
        yield Violation("temperature", f"has {wrong[0].item()}, and logits are divided by it", remedy)


Contents = dict[str, tuple[str, int]]
"""Name of a tensor -> its shape and type, and the digest of its bytes."""


@dataclass(frozen=True)
class _Passed:
    """What a rank passes.

    Attributes:
        dp_rank: whose part it computes.
        call: name -> the argument; the same on all ranks, for those that join their results would wait for one that
            keeps its own.
        whole: of tensors in which all ranks pass the same.
        share: of this part of the other tensors.
        learning_rate: of the step; NaN where there is none, or nothing that this rank trains.
    """

    dp_rank: int
    call: dict[str, str]
    whole: Contents
    share: Contents
    learning_rate: float


def agreed_share(
    batch: Batch,
    limits: BatchLimits,
    agreement: Agreement,
    call: str,
    data: Data = "global",
    outputs: Outputs = NO_OUTPUTS,
    *,
    needs_labels: bool = True,
    learning_rate: float = math.nan,
) -> Batch:
    """As `own_share`, but all ranks raise what one of them finds, before any of them computes. Collective.

    `call`: what it is for, in messages. `learning_rate`: of the step that follows; NaN for none.

    Raises BatchError on all ranks as well where they pass what differs, by name, and StateError where they make
    different calls.
    """
    phase = f"checking the batch for: {call}"
    with agreement.phase(phase):
        share = own_share(batch, limits, data, outputs, needs_labels=needs_labels)
        exact = {name: tensor for name, tensor in batch.items() if data == "global" and _is_exact(tensor)}
        others = {name: tensor for name, tensor in share.items() if name not in exact}
        passed = _Passed(
            limits.dp_rank,
            call={
                "data": repr(data),
                "entropy": str(bool(outputs.entropy)),
                "top_k": str(outputs.top_k),
                "tokens": f"shape {list(share['tokens'].shape)}",
            },
            whole=_contents(exact, agreement.world_size > 1),
            share=_contents(others, limits.dp_size < agreement.world_size),
            learning_rate=learning_rate,
        )
    of_share: list[int | None] = [None] * limits.dp_size
    of_share[limits.dp_rank] = text_digest(repr(passed.share))
    of_all = [text_digest(repr(passed.call)), text_digest(repr(passed.whole))]
    rate = None if math.isnan(learning_rate) else text_digest(repr(learning_rate))
    if not agreement.is_same([*of_all, rate, *of_share], phase):
        raise BatchError(list(_differences(agreement.gather(passed, _Passed, phase))))
    return share


def _is_exact(tensor: torch.Tensor) -> bool:
    """What is computed on each rank by itself has the same bits everywhere only if it has no rounding."""
    return not (tensor.is_floating_point() or tensor.is_complex())


def _contents(tensors: Batch, is_compared: bool) -> Contents:
    """Those of no tensor where nobody is there to compare them with."""
    if not (tensors and is_compared):
        return {}
    return {
        name: (f"shape {list(tensor.shape)} and type {str(tensor.dtype).removeprefix('torch.')}", box_digest(tensor))
        for name, tensor in sorted(tensors.items())
    }


def _differences(passed: Sequence[_Passed]) -> Iterator[Violation]:
    """Of each name the first two ranks that differ; the same on all ranks."""
    rates = {rank: each.learning_rate for rank, each in enumerate(passed) if not math.isnan(each.learning_rate)}
    first, rate = next(iter(rates.items()), (0, math.nan))
    if differing := [rank for rank in rates if rates[rank] != rate]:
        problem = f"{rate} on rank {first}, {rates[differing[0]]} on rank {differing[0]}"
        yield Violation("learning_rate", problem, "Call set_learning_rate with the same on every rank")
    remedy = 'Pass the same, and as many rows and columns, on every rank; data="local" is for parts of their own'
    for name, argument in passed[0].call.items():
        for rank, other in enumerate(passed):
            if other.call[name] != argument:
                yield Violation(name, f"{argument} on rank 0, {other.call[name]} on rank {rank}", remedy)
                break
    if any(each.call != passed[0].call for each in passed):
        return
    remedy = "Compute it on one rank and broadcast it; it must be the same bit for bit"
    found: dict[str, str] = {}
    firsts: dict[int, int] = {}  # of each part, who computes it together
    for rank, each in enumerate(passed):
        first_of_part = firsts.setdefault(each.dp_rank, rank)
        compared = ((0, passed[0].whole, each.whole), (first_of_part, passed[first_of_part].share, each.share))
        for first, here, there in compared:
            for name in sorted(here.keys() | there.keys()):
                if name not in found and here.get(name) != there.get(name):
                    found[name] = _difference(here.get(name), there.get(name), first, rank)
    yield from (Violation(name, problem, remedy) for name, problem in sorted(found.items()))


def _difference(here: tuple[str, int] | None, there: tuple[str, int] | None, first: int, other: int) -> str:
    if here is None or there is None:
        lacks, has = (first, other) if here is None else (other, first)
        return f"is missing on rank {lacks}, and not on rank {has}"
    if here[0] != there[0]:
        return f"has {here[0]} on rank {first}, {there[0]} on rank {other}"
    return f"has other values on rank {other} than on rank {first}; both must pass the same"
