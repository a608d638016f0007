"""Checks of a batch before any rank computes with it; all violations are reported at once.

Ranks that compute the same rows (TP and PP ranks) must pass the same values, bit by bit, because
each of them computes a part of every row. All ranks must take a step with the same learning rate,
or the replicas of a weight would diverge. If the data are global, all ranks must also pass the same
token ids and masks, because results are joined although each data parallel rank computes only its
own rows. The usual cause of a difference is a reward with randomness in it, which no other check
would find.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from hybrid_engine.backends.training_side import dtype_name
from hybrid_engine.errors import BatchError, Violation, Violations, require_none, shortened
from hybrid_engine.memory.host_pages import round_up
from hybrid_engine.ports import Batch, Data
from hybrid_engine.ranks.agreement import Agreement
from hybrid_engine.ranks.digests import box_digest, text_digest
from hybrid_engine.trainer.batches.arrangement import (
    IGNORED,
    KEYS,
    ROUTED_EXPERTS,
    num_sequences,
    sequence_faults,
    sequence_ids_of,
)
from hybrid_engine.trainer.batches.image_rows import IMAGES, image_violations, images_in
from hybrid_engine.trainer.batches.token_outputs import NO_OUTPUTS, Outputs


@dataclass(frozen=True)
class Routing:
    """Number of layers of a model, experts of a layer, and experts that compute a token."""

    num_layers: int
    top_k: int
    num_experts: int


@dataclass(frozen=True)
class BatchLimits:
    """Limits of the batches that a trainer can compute.

    Attributes:
        vocab_size: number of token ids.
        micro_batch_size: rows that are computed at once.
        dp_rank, dp_size: this data parallel rank, and the number of such ranks.
        seq_length: largest number of tokens in a row; None if the trainer has no limit.
        row_multiple: the number of tokens in a row must be a multiple of this.
        no_packing: reason why rows of several sequences are unsupported; "" if they are supported.
        routing: of the model, if it takes `routed_experts` of a batch; otherwise it ignores them.
        no_replay: reason why `routed_experts` are refused; "" if they are not.
        no_images: reason why images are unsupported; "" if they are supported.
        micro_batch_multiple: the number of micro batches of a rank must be a multiple of this, with
            virtual pipeline stages that of the stages.
    """

    vocab_size: int
    micro_batch_size: int
    dp_rank: int
    dp_size: int
    seq_length: int | None = None
    row_multiple: int = 1
    no_packing: str = ""
    routing: Routing | None = None
    no_replay: str = ""
    no_images: str = "this model is trained on text alone"
    micro_batch_multiple: int = 1

    @property
    def rows_of_rank(self) -> int:
        """Number of which the rows of a data parallel rank must be a multiple."""
        return self.micro_batch_size * self.micro_batch_multiple


def own_share(
    batch: Batch,
    limits: BatchLimits,
    data: Data = "global",
    outputs: Outputs = NO_OUTPUTS,
    *,
    needs_labels: bool = True,
) -> Batch:
    """Check a batch and return this data parallel rank's consecutive rows of it.

    A local batch is returned unchanged. Raises BatchError with every violation.
    """
    require_none(_violations(batch, limits, data, outputs, needs_labels), BatchError)
    if data == "local":
        return batch
    # 8 rows on 2 data parallel ranks: rank 1 has rows 4 to 7.
    size = batch["tokens"].shape[0] // limits.dp_size
    start = limits.dp_rank * size
    return {name: tensor[start : start + size] for name, tensor in batch.items()}


def _violations(
    batch: object,
    limits: BatchLimits,
    data: Data,
    outputs: Outputs,
    needs_labels: bool,
) -> Violations:
    """Yield all violations of a batch. Values are read only if all shapes are valid."""
    if data not in ("global", "local"):
        yield Violation(
            "data",
            f"{shortened(data)} is unknown",
            'Use "global" if all ranks pass the same batch, or "local" if each data parallel '
            "rank passes its own part",
            code="unknown-value",
        )
    # a caller may pass anything; a bool is an int as well
    if not (type(outputs.top_k) is int and 0 <= outputs.top_k <= limits.vocab_size):
        yield Violation(
            "top_k",
            f"{shortened(outputs.top_k)} is not between 0 and the vocabulary size "
            f"{limits.vocab_size}",
            "Pass the number of tokens to report, or 0 for none",
            code="out-of-range",
        )
    if not isinstance(batch, Mapping):
        yield Violation(
            "batch",
            f"is {type(batch).__name__}",
            "Pass a dict of tensors: tokens, labels, ...",
            code="not-a-dict",
        )
        return
    required = ("tokens", "labels") if needs_labels else ("tokens",)
    tensors = _tensors(batch)
    violations = list(shape_violations(tensors, required))
    if not violations:
        violations = image_violations(batch, limits.no_images)
    yield from violations
    if violations:
        return
    # a local batch is not divided over ranks
    num_parts = limits.dp_size if data == "global" else 1
    yield from _size_violations(batch["tokens"].shape, limits, num_parts)
    yield from _token_violations(batch, limits.vocab_size)
    yield from _temperature_violations(batch)
    yield from _routing_violations(batch, limits)
    for name in outputs.names:
        if name in batch:
            yield Violation(
                name,
                "is a key of the batch and also a requested output",
                "Rename the batch's key",
                code="key-in-use",
            )
    faults = list(sequence_faults(batch))
    yield from faults
    # the ids mean something only if the keys that define them are consistent
    sequence_ids = None if faults else sequence_ids_of(batch)
    if limits.no_packing and sequence_ids is not None and num_sequences(sequence_ids) > 1:
        # The most explicit one: sequence ids, then positions, then the mask.
        key = next(key for key in reversed(KEYS) if key in batch)
        yield Violation(
            key,
            f"rows have several sequences, but {limits.no_packing}",
            "Put each sequence into its own row",
            code="packing-unsupported",
        )


def shape_violations(batch: Mapping[str, object], required: Sequence[str]) -> Violations:
    """Yield violations unless every value is a tensor with one row per sequence.

    Keys that the engine reads must have the shape of `tokens`; all of these but `mask` must hold
    integers.
    """
    for key in required:
        if key not in batch:
            problem = f"is missing among {shortened(list(batch))}"
            remedy = (
                "Pass tokens and labels [B, S] of integers; labels[i, t] is the token after "
                "tokens[i, t]"
            )
            if "input_ids" in batch:
                # a batch as transformers models take it
                remedy = f"Tokens are input_ids[:, :-1], labels input_ids[:, 1:]. {remedy}"
            yield Violation(key, problem, remedy, code="missing-key")
    for key, value in batch.items():
        if not isinstance(value, torch.Tensor):
            yield Violation(
                str(key),
                f"is {type(value).__name__}",
                "A batch contains only tensors; a loss function can read other values from the "
                "scope in which it is defined",
                code="not-a-tensor",
            )
    tokens = batch.get("tokens")
    if not isinstance(tokens, torch.Tensor):
        return
    if tokens.dim() != 2 or not tokens.numel():
        yield Violation(
            "tokens",
            f"has shape {list(tokens.shape)}",
            "Pass [B, S], both at least 1",
            code="wrong-shape",
        )
        return
    for key, value in batch.items():
        if not isinstance(value, torch.Tensor):
            continue
        # other keys are for the loss function, which may give them any further dims
        is_read = key in ("tokens", "labels", "mask", *KEYS)
        if is_read and value.shape != tokens.shape:
            yield Violation(
                key,
                f"has shape {list(value.shape)}, tokens {list(tokens.shape)}",
                f"Pass one value for each token{_shift_hint(key, value, tokens)}",
                code="wrong-shape",
            )
        elif not value.dim() or value.shape[0] != tokens.shape[0]:
            yield Violation(
                key,
                f"has shape {list(value.shape)}, but the batch has {tokens.shape[0]} rows",
                "Pass a tensor with one row for each row of the batch; a loss function can read "
                "other values from the scope in which it is defined",
                code="wrong-number-of-rows",
            )
        if key != "mask" and is_read and (value.is_floating_point() or value.is_complex()):
            yield Violation(
                key, f"has type {dtype_name(value)}", "Pass integers", code="not-integers"
            )


def _shift_hint(key: str, value: torch.Tensor, tokens: torch.Tensor) -> str:
    """Return the slice that a tensor lacks if it is one column longer than the shifted tokens."""
    num_rows, length = tokens.shape
    if value.dim() != 2 or value.shape != (num_rows, length + 1):
        return ""
    # Labels and mask are of the token after each: they lack the first column, others the last.
    columns = "[:, 1:]" if key in ("labels", "mask") else "[:, :-1]"
    return f": if tokens are shifted, {key}{columns}"


def _size_violations(shape: torch.Size, limits: BatchLimits, num_parts: int) -> Violations:
    num_rows, length = shape
    rows_per_step = num_parts * limits.rows_of_rank
    if num_rows % rows_per_step:
        problem = (
            f"{num_rows} rows are not a multiple of {rows_per_step}: data parallel ranks, "
            f"{num_parts}, x micro_batch_size, {limits.micro_batch_size}, x micro batches that "
            f"virtual stages take together, {limits.micro_batch_multiple}"
        )
        num_padded_rows = round_up(num_rows, rows_per_step)
        yield Violation(
            "tokens",
            problem,
            f"Add rows to which your loss gives no weight, up to {num_padded_rows}",
            code="not-divisible",
        )
    if limits.seq_length is not None and length > limits.seq_length:
        yield Violation(
            "tokens",
            f"rows of {length} tokens are longer than actor_config.seq_length {limits.seq_length}",
            "Cut them, or raise seq_length",
            code="rows-too-long",
        )
    if length % limits.row_multiple:
        problem = (
            f"rows of {length} tokens cannot be divided over {limits.row_multiple} tensor "
            "parallel ranks"
        )
        padded_length = round_up(length, limits.row_multiple)
        yield Violation(
            "tokens",
            problem,
            f"Pad them to {padded_length}, for actor_config.sequence_parallel",
            code="not-divisible",
        )


def _token_violations(batch: Batch, vocab_size: int) -> Violations:
    """Yield violations for tokens and labels that are not in the vocabulary."""
    for key in ("tokens", "labels"):
        values = batch.get(key)
        if values is None:
            continue
        is_invalid = (values < 0) | (values >= vocab_size)
        if key == "labels":
            is_invalid &= values != IGNORED
        if bool(is_invalid.any()):
            # one example and the number of others are enough to find the mistake
            row, column = is_invalid.nonzero()[0].tolist()
            num_others = int(is_invalid.sum()) - 1
            others = f", and {num_others} more" if num_others else ""
            problem = (
                f"token id {int(values[row, column])} at [{row}, {column}] is out of range for "
                f"vocab_size {vocab_size}{others}"
            )
            ignored = f", or {IGNORED} where nothing is predicted" if key == "labels" else ""
            yield Violation(key, problem, f"Pass token ids{ignored}", code="not-a-token")


def _temperature_violations(batch: Batch) -> Violations:
    temperature = batch.get("temperature")
    if temperature is None:
        return
    shape = batch["tokens"].shape
    if temperature.shape not in (shape[:1], shape):
        yield Violation(
            "temperature",
            f"has shape {list(temperature.shape)}",
            f"Pass one value for each row, [{shape[0]}], or for each token, {list(shape)}",
            code="wrong-shape",
        )
        return
    invalid = temperature[~((temperature > 0) & temperature.isfinite())]
    if invalid.numel():
        yield Violation(
            "temperature",
            f"has {invalid[0].item()}, but logits are divided by it",
            "Pass the sampling temperature, and 1 for greedy tokens and padding",
            code="out-of-range",
        )


def _routing_violations(batch: Batch, limits: BatchLimits) -> Violations:
    """Yield violations of `routed_experts` [B, S, layers, k]."""
    experts = batch.get(ROUTED_EXPERTS)
    if experts is None:
        return
    if limits.no_replay:
        yield Violation(
            ROUTED_EXPERTS,
            limits.no_replay,
            "Leave it out, and generate_config.router_replay",
            code="replay-unsupported",
        )
        return
    routing = limits.routing
    if routing is None:
        return
    shape = (*batch["tokens"].shape, routing.num_layers, routing.top_k)
    if experts.shape != shape or experts.is_floating_point():
        yield Violation(
            ROUTED_EXPERTS,
            f"has shape {list(experts.shape)} and type {dtype_name(experts)}",
            f"Pass integers {list(shape)}: the experts of each token in every layer, or -1 where "
            "the trainer selects them",
            code="wrong-shape",
        )
    elif bool(((experts < -1) | (experts >= routing.num_experts)).any()):
        low, high = int(experts.min()), int(experts.max())
        yield Violation(
            ROUTED_EXPERTS,
            f"has numbers from {low} to {high}, but there are {routing.num_experts} experts",
            "Pass numbers of experts, or -1 where the trainer selects them",
            code="out-of-range",
        )


Contents = dict[str, tuple[str, int]]
"""Name of a tensor -> description of its shape and type, and digest of its bytes."""


@dataclass(frozen=True)
class _Arguments:
    """Arguments of a rank, reduced to digests that ranks can compare.

    Attributes:
        dp_rank: data parallel rank; ranks of one `dp_rank` compute the same rows.
        call: name -> argument. Must be the same on all ranks: ranks that join their results would
            wait for a rank that does not.
        whole: tensors of which all ranks must pass the same.
        share: tensors of which only ranks with the same `dp_rank` must pass the same.
        learning_rate: of the step; NaN if there is no step, or if this rank trains nothing.
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
    """Check a batch on all ranks, and return this rank's share of it as `own_share` does.

    Collective. If a rank finds a violation, all ranks raise before any of them computes.

    Args:
        batch, limits, data, outputs, needs_labels: see `own_share`.
        agreement: of all ranks.
        call: name of the call, for messages.
        learning_rate: of the step that follows; NaN for none.

    Raises:
        BatchError: on all ranks, also if they pass different values; names each of them.
        StateError: if ranks make different calls.
    """
    phase = f"checking the batch for: {call}"
    with agreement.phase(phase):
        share = own_share(batch, limits, data, outputs, needs_labels=needs_labels)
        # ranks that compute a value separately get the same bits only if it needs no rounding
        exact = {
            name: tensor
            for name, tensor in _tensors(batch).items()
            if data == "global" and not (tensor.is_floating_point() or tensor.is_complex())
        }
        # such as advantages and old log-probabilities
        rounded = {name: tensor for name, tensor in _tensors(share).items() if name not in exact}
        arguments = _Arguments(
            limits.dp_rank,
            # as text, because a difference is shown in a message
            call={
                "data": repr(data),
                "entropy": str(bool(outputs.entropy)),
                "top_k": str(outputs.top_k),
                "tokens": f"shape {list(share['tokens'].shape)}",
                IMAGES: "none" if images_in(batch) is None else "some",
            },
            whole=_contents(exact) if agreement.world_size > 1 else {},
            # no other rank has this share if there are as many data parallel ranks as ranks
            share=_contents(rounded) if limits.dp_size < agreement.world_size else {},
            learning_rate=learning_rate,
        )
    # Ranks exchange digests only, of 8 bytes each. The arguments are gathered if these differ, to
    # describe the difference.
    digests = [text_digest(repr(arguments.call)), text_digest(repr(arguments.whole))]
    rate_digest = None if math.isnan(learning_rate) else text_digest(repr(learning_rate))
    # a rank takes part only in the comparison of its own share: None is not compared
    share_digests: list[int | None] = [None] * limits.dp_size
    share_digests[limits.dp_rank] = text_digest(repr(arguments.share))
    if not agreement.is_same([*digests, rate_digest, *share_digests], phase):
        by_rank = agreement.gather(arguments, _Arguments, phase)
        raise BatchError([*_differences(by_rank)])
    return share


def _tensors(batch: Batch) -> Batch:
    """Return the tensors of a batch, without images."""
    # Processors compute the images' values on each rank, so their rows are compared by the tokens.
    return {name: tensor for name, tensor in batch.items() if name != IMAGES}


def _contents(tensors: Batch) -> Contents:
    contents = {}
    for name, tensor in sorted(tensors.items()):
        description = f"shape {list(tensor.shape)} and type {dtype_name(tensor)}"
        contents[name] = (description, box_digest(tensor))
    return contents


def _differences(by_rank: Sequence[_Arguments]) -> Violations:
    """Yield a violation for each argument that differs, with the first two ranks that differ.

    All ranks yield the same.
    """
    rates = {
        rank: arguments.learning_rate
        for rank, arguments in enumerate(by_rank)
        if not math.isnan(arguments.learning_rate)
    }
    # without any rate there is nothing to compare
    first_rank, first_rate = next(iter(rates.items()), (0, math.nan))
    for rank, rate in rates.items():
        if rate != first_rate:
            yield Violation(
                "learning_rate",
                f"{first_rate} on rank {first_rank}, {rate} on rank {rank}",
                "Call set_learning_rate with the same value on every rank",
                code="differs-between-ranks",
            )
            break
    calls = [arguments.call for arguments in by_rank]
    for name, argument in calls[0].items():
        for rank, call in enumerate(calls):
            if call[name] != argument:
                yield Violation(
                    name,
                    f"{argument} on rank 0, {call[name]} on rank {rank}",
                    "Pass the same argument, and the same number of rows and columns, on every "
                    'rank; use data="local" if each rank passes its own part',
                    code="differs-between-ranks",
                )
                break
    if any(call != calls[0] for call in calls):
        return  # with different calls, the tensors differ as well
    problems: dict[str, str] = {}
    first_rank_of_share: dict[int, int] = {}
    for rank, arguments in enumerate(by_rank):
        # ranks of one data parallel rank compute the same rows
        first_rank = first_rank_of_share.setdefault(arguments.dp_rank, rank)
        _add_differences(problems, by_rank[0].whole, arguments.whole, 0, rank)
        _add_differences(problems, by_rank[first_rank].share, arguments.share, first_rank, rank)
    remedy = "Compute it on one rank and broadcast it; it must be the same bit for bit"
    for name, problem in sorted(problems.items()):
        yield Violation(name, problem, remedy, code="differs-between-ranks")


def _add_differences(
    problems: dict[str, str],
    expected: Contents,
    contents: Contents,
    first_rank: int,
    rank: int,
) -> None:
    """Add the tensors in which `rank` differs from `first_rank` to `problems`, by name."""
    for name in sorted(expected.keys() | contents.keys()):
        if name in problems or expected.get(name) == contents.get(name):
            continue
        if name not in contents:
            problems[name] = f"is missing on rank {rank}, but not on rank {first_rank}"
        elif name not in expected:
            problems[name] = f"is missing on rank {first_rank}, but not on rank {rank}"
        elif expected[name][0] != contents[name][0]:
            problems[name] = (
                f"has {expected[name][0]} on rank {first_rank}, {contents[name][0]} on rank {rank}"
            )
        else:
            problems[name] = (
                f"has other values on rank {rank} than on rank {first_rank}, which compute "
                "the same rows or join their results"
            )
