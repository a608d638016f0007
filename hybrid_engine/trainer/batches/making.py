"""Rows from prompts and completions: one sequence in each (`build_batch`), or several, so that less of it is padding:

packed = pack(prompts, completions, seq_length, multiple_of=dp_size * micro_batch_size)
packed.batch["advantages"] = packed.spread(advantages)              # one value a sequence -> [R, S]
packed.batch["old_log_probs"] = worker.compute_log_probs(packed.batch)
packed.unpack(packed.batch["old_log_probs"])                        # [R, S] -> a tensor for each sequence
"""

from __future__ import annotations

import numbers
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from hybrid_engine.errors import BatchError, Violation, shortened


def described(value: object) -> str:
    """What a value is, e.g. `has shape [4]` or `is list`."""
    return f"has shape {list(value.shape)}" if isinstance(value, torch.Tensor) else f"is {type(value).__name__}"


def require_alike(num_dims: int | None, remedies: Mapping[str, str], **given: object) -> None:
    """Raise BatchError unless all that is given are tensors of the shape that the first one has.

    Args:
        num_dims: of the first one; None: any.
        remedies: name -> what to do where that one differs; default: to pass a tensor of that shape.
        given: by the names of messages.
    """
    reference, *others = given
    first = given[reference]
    if not isinstance(first, torch.Tensor) or num_dims not in (None, first.dim()):
        shape = " [B, S]" if num_dims == 2 else ""
        raise BatchError([Violation(reference, described(first), f"Pass a tensor{shape}")])
    shape = str(list(first.shape))
    found = [
        Violation(
            name,
            f"{described(value)}, but {reference} has {shape}",
            remedies.get(name, f"Pass a tensor of shape {shape}"),
        )
        for name in others
        if not isinstance(value := given[name], torch.Tensor) or value.shape != first.shape
    ]
    if found:
        raise BatchError(found)


def mask_of(batch: object) -> torch.Tensor:
    """Return `mask` of a batch. Raises BatchError for what is no batch with one, as for a mask by itself."""
    mask = batch.get("mask") if isinstance(batch, Mapping) else None
    if isinstance(mask, torch.Tensor):
        return mask
    problem = f"is a dict of {shortened(list(batch))}" if isinstance(batch, Mapping) else described(batch)
    remedy = "Pass the batch that has the mask: its other keys tell the sequences of packed rows apart"
    raise BatchError([Violation("batch", problem, remedy)])


TokenIds = Sequence[int]


class Drawn(Protocol):
    """A completion as engines return it; with `is_drawn`, a bool for each token, some were given and not drawn."""

    @property
    def token_ids(self) -> TokenIds: ...

    @property
    def temperature(self) -> float: ...


def build_batch(
    prompts: Sequence[TokenIds], completions: Sequence[TokenIds | Drawn], seq_length: int, pad_token_id: int = 0
) -> dict[str, torch.Tensor]:
    """Rows of a prompt and its completion, padded on the right.

    Args:
        prompts: token ids of B prompts, one per completion.
        completions: B `Completion`s or conversations, which know their temperature, or token ids of each, drawn at 1.
        seq_length: S; a sequence may have S + 1 tokens, of which the last is only predicted.
        pad_token_id: fills rows up; any token id will do.

    Returns `tokens` and `labels` [B, S] int64, where `labels[i, t]` is the token after `tokens[i, t]`; `mask` [B, S]
    fp32, 1 where the label is a token that was drawn: of the completion, or of an answer in a conversation; `weights`
    [B, S], see `mean_weights`; and `temperature` [B] where one is not 1. Raises BatchError, which is a ValueError,
    naming everything that is not token ids, and every sequence that does not fit.
    """
    samples = samples_of(prompts, completions, seq_length, pad_token_id)
    rows = torch.full((len(samples), seq_length + 1), pad_token_id, dtype=torch.int64)
    mask = torch.zeros(len(samples), seq_length, dtype=torch.float32)
    for row, row_mask, sample in zip(rows, mask, samples, strict=True):
        row[: len(sample.token_ids)] = torch.tensor(sample.token_ids)
        row_mask[: sample.length] = sample.mask
    return {
        "tokens": rows[:, :-1].contiguous(),
        "labels": rows[:, 1:].contiguous(),
        "mask": mask,
        "weights": mean_weights(mask),
        **_unless_one(torch.tensor([sample.temperature for sample in samples])),
    }


@dataclass(frozen=True)
class Sample:
    """A prompt and its completion."""

    token_ids: tuple[int, ...]
    prompt_length: int
    is_drawn: tuple[bool, ...]
    temperature: float

    @property
    def length(self) -> int:
        """Columns of a row that it takes: the last token is only predicted."""
        return len(self.token_ids) - 1

    @property
    def mask(self) -> torch.Tensor:
        """[length] fp32, 1 where the label is a token that was drawn."""
        return torch.tensor([False] * (self.prompt_length - 1) + list(self.is_drawn)).float()


def samples_of(
    prompts: Sequence[TokenIds], completions: Sequence[TokenIds | Drawn], seq_length: int, pad_token_id: int
) -> list[Sample]:
    """One sample for each completion. Raises BatchError as `build_batch`."""
    found = [
        *required_whole(seq_length, "seq_length", "Pass the number of tokens of a row", least=1),
        *required_whole(pad_token_id, "pad_token_id", "Pass any token id, as 0: what fills rows up has no weight"),
    ]
    starts = _all_token_ids("prompts", _listed("prompts", prompts, found), found)
    drawn = _listed("completions", completions, found)
    ends = _all_token_ids("completions", [getattr(one, "token_ids", one) for one in drawn], found)
    if not found and len(starts) != len(ends):
        problem = f"{len(starts)} of them and {len(ends)} completions"
        remedy = "Pass one prompt for each completion: the prompt of a group as often as the group has completions"
        found.append(Violation("prompts", problem, remedy))
    if found:
        raise BatchError(found)
    samples = [
        Sample(
            (*start, *end),
            len(start),
            tuple(getattr(one, "is_drawn", (True,) * len(end))),
            float(getattr(one, "temperature", 1.0)),
        )
        for start, end, one in zip(starts, ends, drawn, strict=True)
    ]
    for number, sample in enumerate(samples):
        if sample.prompt_length == 0:
            found.append(Violation(f"prompts[{number}]", "has no tokens", "Leave it out, with its completion"))
        elif sample.length > seq_length:
            problem = f"with its completion has {sample.length + 1} tokens, but seq_length {seq_length} takes"
            remedy = "Raise seq_length, or cut the completion"
            found.append(Violation(f"prompts[{number}]", f"{problem} {seq_length + 1}", remedy))
    if found:
        raise BatchError(found)
    return samples


def required_whole(value: object, key: str, remedy: str, least: int | None = None) -> Iterator[Violation]:
    """What is wrong with a value that is to be a whole number."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or (least is not None and value < least):
        yield Violation(key, f"is {shortened(value)}", remedy)


def _listed(key: str, given: object, found: list[Violation]) -> list[Any]:
    """Sequences in a list; what is no list joins `found`."""
    if isinstance(given, str) or not hasattr(given, "__iter__"):
        found.append(Violation(key, f"is {shortened(given, 80)}", "Pass a list with token ids for each"))
        return []
    return list(given)


def _all_token_ids(key: str, listed: Sequence[Any], found: list[Violation]) -> list[tuple[int, ...]]:
    """Token ids of each, without those that have none: the first of these joins `found`."""
    read = [_token_ids(each) for each in listed]
    if None in read:
        first = read.index(None)
        others = f", and {count} more" if (count := read.count(None) - 1) else ""
        problem = f"is not a list of token ids but {shortened(listed[first], 80)}{others}"
        found.append(Violation(f"{key}[{first}]", problem, _remedy_for(listed[first])))
    return [each for each in read if each is not None]


def _token_ids(value: object) -> tuple[int, ...] | None:
    values = value.tolist() if hasattr(value, "tolist") else value  # of tensors and arrays
    if isinstance(values, str | bytes | bytearray) or not hasattr(values, "__iter__"):
        return None
    listed = list(values)
    if bool in set(map(type, listed)):  # Python counts it as 0 or 1
        return None
    try:
        return tuple(map(operator.index, listed))
    except TypeError:
        return None


def _remedy_for(value: object) -> str:
    """What to do about something that should be token ids."""
    if hasattr(value, "prompt_token_ids"):
        return "Pass its prompt_token_ids"
    if isinstance(value, str):
        return "Pass token ids: tokenizer(text).input_ids, or token_ids of what was generated"
    if isinstance(value, Sequence) and value and (hasattr(value[0], "token_ids") or hasattr(value[0], "__iter__")):
        flat = "flat = [one for group in groups for one in group]"
        return f"Flatten the groups, {flat}, and pass prompt_token_ids of each as prompts"
    return "Pass a list of token ids for each sequence"


def mean_weights(mask: torch.Tensor, count: float | None = None, rows: float | None = None) -> torch.Tensor:
    """Weights [B, S] with which summing over tokens and averaging over rows is the mean over all of the mask.

    Micro batches hold different numbers of tokens; with weights made from the whole batch, the average of their losses
    is the loss of the batch, however it was split. Of a rank's own rows (`data="local"`) weights made from these alone
    give the mean of the ranks' means, in which a token counts for more on a rank with fewer.

    Args:
        mask: [B, S].
        count, rows: sum of the mask and number of rows of all data parallel ranks; both may be multiplied by the same
            number. Default: those of `mask`.

    Raises BatchError if no token counts.
    """
    total = mask.sum() if count is None else count
    if total == 0:
        problem = "is 0 everywhere: no token to learn from"
        raise BatchError([Violation("mask", problem, "Pass completions that have tokens")])
    return mask * ((mask.shape[0] if rows is None else rows) / total)


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
        batch: `tokens`, `labels`, `sequence_ids` (the number of the sequence from 1, 0 for padding), `mask`, `weights`
            and, where one is not 1, `temperature`, all [R, S]; as those of `build_batch`.
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
    completions: Sequence[TokenIds | Drawn],
    seq_length: int,
    *,
    multiple_of: int = 1,
    pad_token_id: int = 0,
) -> PackedRows:
    """Put prompts and their completions side by side into rows of `seq_length` tokens, long ones first (first fit).

    Args:
        prompts: token ids of N prompts.
        completions: N completions; both as in `build_batch`.
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
    temperature = torch.ones_like(mask)
    for number, (sample, place) in enumerate(zip(samples, places, strict=True), start=1):
        token_ids = torch.tensor(sample.token_ids)
        tokens[place.row, place.columns], labels[place.row, place.columns] = token_ids[:-1], token_ids[1:]
        sequence_ids[place.row, place.columns] = number
        mask[place.row, place.columns], temperature[place.row, place.columns] = sample.mask, sample.temperature
    batch = {"tokens": tokens, "labels": labels, "sequence_ids": sequence_ids, "mask": mask}
    batch |= {"weights": mean_weights(mask), **_unless_one(temperature)}
    return PackedRows(batch, tuple(places))


def _unless_one(temperature: torch.Tensor) -> dict[str, torch.Tensor]:
    return {} if bool((temperature == 1).all()) else {"temperature": temperature}


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
