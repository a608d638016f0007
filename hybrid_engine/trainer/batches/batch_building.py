"""Batches made of prompts and completions, one sequence a row."""

from __future__ import annotations

import numbers
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from hybrid_engine.errors import BatchError, Violation, Violations, require_none, shortened
from hybrid_engine.ranks.torch_internals import TensorDict
from hybrid_engine.trainer.batches.arrangement import ROUTED_EXPERTS
from hybrid_engine.trainer.batches.image_rows import with_images

if TYPE_CHECKING:
    from hybrid_engine.backends.vllm.engine_settings import RoutedExperts

NewBatch = TensorDict
"""A `Batch` that its maker may add to."""

# -- checks of arguments ---------------------------------------------------------------------------


def described(value: object) -> str:
    """Describe a value for a message, e.g. `has shape [4]` or `is list`."""
    if isinstance(value, torch.Tensor):
        return f"has shape {list(value.shape)}"
    return f"is {type(value).__name__}"


def require_alike(num_dims: int | None, remedies: Mapping[str, str], **tensors: object) -> None:
    """Raise BatchError unless all arguments are tensors of the same shape.

    Args:
        num_dims: number of dims of the first one; None: any.
        remedies: name -> remedy if that tensor differs; default: to pass a tensor of that shape.
        tensors: by their names in messages; the first one is the reference.
    """
    reference, *others = tensors
    first = tensors[reference]
    if not isinstance(first, torch.Tensor) or num_dims not in (None, first.dim()):
        remedy = "Pass a tensor [B, S]" if num_dims == 2 else "Pass a tensor"
        raise BatchError.of(reference, described(first), remedy, code="wrong-shape")
    shape = str(list(first.shape))
    require_none(
        (
            Violation(
                name,
                f"{described(value)}, but {reference} has {shape}",
                remedies.get(name, f"Pass a tensor of shape {shape}"),
                code="wrong-shape",
            )
            for name in others
            if not isinstance(value := tensors[name], torch.Tensor) or value.shape != first.shape
        ),
        BatchError,
    )


def required_whole(value: object, key: str, remedy: str, least: int | None = None) -> Violations:
    """Yield a violation unless `value` is a whole number, and at least `least` if that is given."""
    # Python counts True as 1
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        yield Violation(key, f"is {shortened(value)}", remedy, code="not-a-whole-number")
    elif least is not None and value < least:
        yield Violation(key, f"is {shortened(value)}", remedy, code="out-of-range")


def mask_of(batch: object) -> torch.Tensor:
    """Return `mask` of a batch. Raises BatchError if there is none, e.g. for a mask alone."""
    problem = described(batch)
    if isinstance(batch, Mapping):
        mask = batch.get("mask")
        if isinstance(mask, torch.Tensor):
            return mask
        problem = f"is a dict of {shortened(list(batch))}"
    raise BatchError.of(
        "batch",
        problem,
        "Pass the batch with its mask: its other keys separate the sequences of packed rows",
        code="no-mask",
    )


# -- samples ---------------------------------------------------------------------------------------

TokenIds = Sequence[int]


class Drawn(Protocol):
    """Completion as an engine returns it.

    May also have `is_drawn`, a bool for each token: False for tokens that were not sampled, such as
    the replies of an environment; and `routed_experts`, None or as of a `Completion`.
    """

    @property
    def token_ids(self) -> TokenIds: ...

    @property
    def temperature(self) -> float: ...


@dataclass(frozen=True)
class Sample:
    """A prompt and its completion.

    Attributes:
        token_ids: of both.
        prompt_length: number of tokens of the prompt.
        is_drawn: for each token of the completion, whether it was sampled.
        temperature: at which it was sampled.
        routed_experts: of the first tokens, if known.
    """

    token_ids: tuple[int, ...]
    prompt_length: int
    is_drawn: tuple[bool, ...]
    temperature: float
    routed_experts: RoutedExperts | None

    @property
    def length(self) -> int:
        """Number of columns in a row: the last token is only a label."""
        return len(self.token_ids) - 1

    @property
    def mask(self) -> torch.Tensor:
        """Mask [length] fp32, 1 where the label is a token that was sampled."""
        # labels are shifted by one, so the first token of the prompt is not a label
        # 3 tokens p and 2 tokens c have labels p1 p2 c0 c1, of which the last two count.
        is_label_drawn = [False] * (self.prompt_length - 1) + list(self.is_drawn)
        return torch.tensor(is_label_drawn).float()


def samples_of(
    prompts: Sequence[TokenIds],
    completions: Sequence[TokenIds | Drawn],
    seq_length: int,
    pad_token_id: int,
) -> list[Sample]:
    """Return one sample for each completion. Raises BatchError as `build_batch`."""
    violations = list(
        required_whole(seq_length, "seq_length", "Pass the number of tokens of a row", least=1)
    )
    violations += required_whole(
        pad_token_id, "pad_token_id", "Pass any token id, such as 0: padding has no weight"
    )
    listed_prompts = _to_list("prompts", prompts, violations)
    prompt_ids = _all_token_ids("prompts", listed_prompts, violations)
    listed_completions = _to_list("completions", completions, violations)
    completion_ids = _all_token_ids(
        "completions",
        [getattr(completion, "token_ids", completion) for completion in listed_completions],
        violations,
    )
    # values without token ids were left out, so the numbers may differ because of them
    if not violations and len(prompt_ids) != len(completion_ids):
        violations.append(
            Violation(
                "prompts",
                f"there are {len(prompt_ids)}, but {len(completion_ids)} completions",
                "Pass one prompt for each completion: repeat the prompt of a group",
                code="different-lengths",
            )
        )
    require_none(violations, BatchError)
    samples = []
    for prompt, tokens, completion in zip(
        prompt_ids, completion_ids, listed_completions, strict=True
    ):
        is_drawn = tuple(getattr(completion, "is_drawn", (True,) * len(tokens)))
        temperature = float(getattr(completion, "temperature", 1.0))
        experts = getattr(completion, "routed_experts", None)
        samples.append(Sample((*prompt, *tokens), len(prompt), is_drawn, temperature, experts))
    require_none(_unfit(samples, seq_length), BatchError)
    return samples


def _unfit(samples: Sequence[Sample], seq_length: int) -> Violations:
    """Yield the samples without a prompt, and those that are longer than a row."""
    for number, sample in enumerate(samples):
        key = f"prompts[{number}]"
        if sample.prompt_length == 0:
            yield Violation(
                key, "has no tokens", "Leave it out, with its completion", code="empty-prompt"
            )
        elif sample.length > seq_length:
            yield Violation(
                key,
                f"has {sample.length + 1} tokens with its completion, but at most "
                f"{seq_length + 1} fit into seq_length {seq_length}",
                "Raise seq_length, or cut the completion",
                code="sequence-too-long",
            )


def _to_list(key: str, sequences: object, violations: list[Violation]) -> list[Any]:
    """Return the sequences as a list. Adds a violation and returns [] if that is impossible."""
    # a str can be iterated as well, but not as token ids
    if isinstance(sequences, str) or not hasattr(sequences, "__iter__"):
        violations.append(
            Violation(
                key,
                f"is {shortened(sequences, 80)}",
                "Pass a list that contains token ids for each sequence",
                code="not-a-list",
            )
        )
        return []
    return list(sequences)


def _all_token_ids(
    key: str,
    sequences: Sequence[Any],
    violations: list[Violation],
) -> list[tuple[int, ...]]:
    """Return the token ids of each sequence; those that have none are left out.

    Adds one violation for all of these, which shows the first one.
    """
    ids_or_none = [_token_ids(sequence) for sequence in sequences]
    if None in ids_or_none:
        index = ids_or_none.index(None)
        value = sequences[index]
        num_others = ids_or_none.count(None) - 1
        others = f", and {num_others} more" if num_others else ""
        remedy = _token_ids_remedy(value)
        violations.append(
            Violation(
                f"{key}[{index}]",
                f"is not a list of token ids but {shortened(value, 80)}{others}",
                remedy,
                code="not-token-ids",
            )
        )
    return [ids for ids in ids_or_none if ids is not None]


def _token_ids(value: object) -> tuple[int, ...] | None:
    values = value.tolist() if hasattr(value, "tolist") else value  # tensors and arrays
    if isinstance(values, str | bytes | bytearray) or not hasattr(values, "__iter__"):
        return None
    listed = list(values)
    # Python converts bools to 0 and 1: that is a mask, not token ids
    if bool in set(map(type, listed)):
        return None
    try:
        # numpy integers are accepted, 1.0 is not
        return tuple(map(operator.index, listed))
    except TypeError:
        return None


def _token_ids_remedy(value: object) -> str:
    """Return the remedy for a value that was passed instead of token ids."""
    if hasattr(value, "prompt_token_ids"):
        return "Pass its prompt_token_ids"
    if isinstance(value, str):
        return "Pass token ids: tokenizer(text).input_ids, or token_ids of a completion"
    if isinstance(value, Sequence) and value:
        first = value[0]
        if hasattr(first, "token_ids") or hasattr(first, "__iter__"):
            return (
                "Flatten the groups, flat = [member for group in groups for member in group], "
                "and pass prompt_token_ids of each as prompts"
            )
    return "Pass a list of token ids for each sequence"


# -- one sequence a row ----------------------------------------------------------------------------


def build_batch(
    prompts: Sequence[TokenIds],
    completions: Sequence[TokenIds | Drawn],
    seq_length: int,
    pad_token_id: int = 0,
) -> NewBatch:
    """Return rows that consist of a prompt and its completion, padded on the right.

    Args:
        prompts: token ids of B prompts, one per completion.
        completions: B `Completion`s or conversations, which know their temperature; or token ids
            of each, sampled at temperature 1.
        seq_length: S; a sequence may have S + 1 tokens, of which the last is only predicted.
        pad_token_id: token id of padding; any will do.

    Returns:
        `tokens` and `labels` [B, S] int64, where `labels[i, t]` is the token after `tokens[i, t]`;
        `mask` [B, S] fp32, 1 where the label is a token that was sampled: of the completion, or of
        an answer in a conversation; `weights` [B, S], see `mean_weights`; `temperature` [B]
        unless all are 1; and, if completions have any, `routed_experts` [B, S, layers, k] int16,
        -1 for tokens without. If prompts have images, `images` has the
        `ImageRows` of all rows.

    Raises BatchError, a ValueError, which names every value that is not token ids and every
    sequence that does not fit.
    """
    samples = samples_of(prompts, completions, seq_length, pad_token_id)
    return with_images(batch_of(samples, seq_length, pad_token_id), completions)


def batch_of(samples: Sequence[Sample], seq_length: int, pad_token_id: int) -> NewBatch:
    """Return rows of one sample each; see `build_batch`."""
    # one column more than the batch: tokens and labels are the same row, shifted
    rows = torch.full((len(samples), seq_length + 1), pad_token_id, dtype=torch.int64)
    mask = torch.zeros(len(samples), seq_length, dtype=torch.float32)
    for row, row_mask, sample in zip(rows, mask, samples, strict=True):
        row[: len(sample.token_ids)] = torch.tensor(sample.token_ids)
        row_mask[: sample.length] = sample.mask
    batch = {
        # copies, so that a change of the tokens does not change the labels
        "tokens": rows[:, :-1].contiguous(),
        "labels": rows[:, 1:].contiguous(),
        "mask": mask,
        "weights": mean_weights(mask),
    }
    temperature = torch.tensor([sample.temperature for sample in samples])
    if not bool((temperature == 1).all()):
        batch["temperature"] = temperature
    experts = _routed_experts_of(samples, seq_length)
    if experts is not None:
        batch[ROUTED_EXPERTS] = experts
    return batch


def _routed_experts_of(samples: Sequence[Sample], seq_length: int) -> torch.Tensor | None:
    """Return the experts [B, S, layers, k] of each token, -1 without; None if all are without."""
    known = {
        number: sample.routed_experts
        for number, sample in enumerate(samples)
        if sample.routed_experts is not None
    }
    if not known:
        return None
    shapes = {(routed.num_layers, routed.top_k) for routed in known.values()}
    if len(shapes) > 1:
        raise BatchError.of(
            "completions",
            f"have experts {' and '.join(map(str, sorted(shapes)))} (layers, k) of a token",
            "Pass completions of one model",
            code="different-models",
        )
    shape = shapes.pop()
    columns = torch.full((len(samples), seq_length, *shape), -1, dtype=torch.int16)
    for number, routed in known.items():
        # The last token is only a label, so no model computes it.
        numbers = torch.frombuffer(bytearray(routed.numbers), dtype=torch.int16)
        experts = numbers.view(-1, *shape)[: samples[number].length]
        columns[number, : len(experts)] = experts
    return columns


def mean_weights(
    mask: torch.Tensor,
    count: float | None = None,
    rows: float | None = None,
) -> torch.Tensor:
    """Return weights [B, S] for the mean over all tokens of the mask.

    The sum over tokens of weighted values, averaged over rows, is that mean. Micro batches have
    different numbers of tokens; with weights computed from the whole batch, the average of their
    losses is the loss of the batch, however it was split. Weights that a rank computes from its own
    rows alone (`data="local"`) give the mean of the ranks' means, in which a token counts for more
    on a rank with fewer tokens.

    Args:
        mask: [B, S].
        count, rows: sum of the mask and number of rows of all data parallel ranks; both may be
            multiplied by the same number. Default: those of `mask`.

    Raises BatchError if the mask is 0 everywhere.
    """
    total = mask.sum() if count is None else count
    if total == 0:
        raise BatchError.of(
            "mask",
            "is 0 everywhere: there is no token to learn from",
            "Pass completions that have tokens",
            code="mask-is-zero",
        )
    num_rows = mask.shape[0] if rows is None else rows
    # mean over rows of sum(mask * x * rows / total) = sum(mask * x) / total
    return mask * (num_rows / total)
