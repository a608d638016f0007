"""What differs between two engines that should hold the same model, and why, decided by the bytes.

    cold      loaded the checkpoint                            the truth
    before    held other weights, and has computed with them   -- a reload of the same checkpoint -->  after

Elements in which `before` and `cold` agree depend on no weight (padding, tables of cosines); what the others are
afterwards tells whether they were reloaded, left as they were, or spoilt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import torch


class Cause(Enum):
    """Why a tensor differs from that of a cold load."""

    STALE = "not reloaded: still the former weights'"
    UNDERIVED = "derived and not derived again: still of the former weights"
    UNTIED = "a tie is broken: cold, it lies in another tensor's memory"
    PADDING = "right, but for elements that depend on no weight: not initialised"
    LOST = "depends on no weight, was right before, and was not restored"
    UNPACKED = "the right values in another order: not packed again"
    CORRUPT = "neither the right value nor the former one"
    FORM = "missing, additional, or of another shape or dtype"
    UNTRACKED = "all tensors that can be seen are equal, but not what is computed"


@dataclass(frozen=True)
class Snapshot:
    """What an engine holds and computes, as `backends.vllm.stock.observe` wrote it.

    Attributes:
        tensors: by path, on the host; with several ranks, paths begin with the rank's file.
        places: path -> equal for paths that are the same memory.
        logprobs: [tokens, vocabulary] float32.
        unseen: paths of what cannot be read.
    """

    tensors: Mapping[str, torch.Tensor]
    places: Mapping[str, str]
    logprobs: torch.Tensor
    unseen: Sequence[str] = ()

    @classmethod
    def read(cls, directory: Path) -> Snapshot:
        """Read that of all ranks."""
        files = sorted(directory.glob("rank*.pt"))
        ranks = {f"{file.stem} " if len(files) > 1 else "": torch.load(file) for file in files}
        return cls(
            {rank + path: tensor for rank, each in ranks.items() for path, tensor in each["tensors"].items()},
            {rank + path: rank + place for rank, each in ranks.items() for path, place in each["places"].items()},
            torch.load(directory / "logprobs.pt"),
            [rank + path for rank, each in ranks.items() for path in each["unseen"]],
        )


@dataclass(frozen=True)
class Difference:
    """One tensor that is not the cold load's, or the computation.

    Attributes:
        max_abs: largest difference of an element; infinite where one is not finite, or where the form differs.
        share: the part of its elements that differ in any bit.
    """

    name: str
    cause: Cause
    max_abs: float
    share: float


@dataclass(frozen=True)
class Finding:
    """The result of one way to bring weights into an engine.

    Attributes:
        status: "equal", "differs", "failed" or "not run".
        reason: of the last two.
        num_tensors: compared.
        logprobs: largest difference of a log-probability; 0.0 where all are equal bit by bit.
        unseen: what cannot be read; a difference there shows in what is computed only.
    """

    way: str
    status: str
    reason: str = ""
    num_tensors: int = 0
    logprobs: float = 0.0
    differences: Sequence[Difference] = ()
    unseen: Sequence[str] = ()


def compare(way: str, cold: Snapshot, before: Snapshot, after: Snapshot) -> Finding:
    """Compare bit by bit what an engine holds and computes with what a cold one does."""
    found, seen = [], set[tuple[str, str]]()
    neighbours = [_neighbours(each.places) for each in (cold, before, after)]
    paths = sorted(cold.tensors.keys() | after.tensors.keys(), key=lambda path: ("._parameters." not in path, path))
    for path in paths:
        place = (cold.places.get(path, path), after.places.get(path, path))
        if place not in seen:
            seen.add(place)
            at_load, then, now = (each.get(path, set()) for each in neighbours)
            trio = [each.tensors.get(path) for each in (cold, before, after)]
            found.append(difference_of_tensor(path, *trio, is_untied=not at_load & then <= now))
    differences = [each for each in found if each is not None]
    logprobs, share = _distance(cold.logprobs, after.logprobs)
    if share and not differences:
        differences = [Difference("log-probabilities", Cause.UNTRACKED, logprobs, share)]
    return Finding(way, "differs" if differences else "equal", "", len(seen), logprobs, differences, after.unseen)


def difference_of_tensor(
    path: str,
    cold: torch.Tensor | None,
    before: torch.Tensor | None,
    after: torch.Tensor | None,
    *,
    is_untied: bool = False,
) -> Difference | None:
    """How and why one tensor differs from that of a cold load; None where no bit does."""
    name = path.replace("._parameters.", ".").replace("._buffers.", ".").removeprefix(".")
    if cold is None or after is None or _form(cold) != _form(after):
        return Difference(name, Cause.FORM, float("inf"), 1.0)
    wrong = _unequal(cold, after)
    if not wrong.any():
        return None
    cause = Cause.CORRUPT
    if is_untied:
        cause = Cause.UNTIED
    elif before is not None and _form(before) == _form(cold):
        weighty, changed = _unequal(cold, before), _unequal(before, after)
        if not (wrong & weighty).any():
            cause = Cause.PADDING if weighty.any() else Cause.LOST
        elif not (wrong & changed).any():
            cause = Cause.STALE if "._parameters." in path else Cause.UNDERIVED
    if cause is Cause.CORRUPT and torch.equal(*(_bits(each).sort().values for each in (cold, after))):
        cause = Cause.UNPACKED
    return Difference(name, cause, *_distance(cold, after))


def _neighbours(places: Mapping[str, str]) -> dict[str, set[str]]:
    """Path -> all paths that are the same memory."""
    by_place: dict[str, set[str]] = {}
    for path, place in places.items():
        by_place.setdefault(place, set()).add(path)
    return {path: by_place[place] for path, place in places.items()}


def _form(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype]:
    return tensor.shape, tensor.dtype


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Each element as an integer, [elements]."""
    return tensor.reshape(-1).view(_INTEGERS[tensor.element_size()])


def _unequal(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Flags [elements] of those that differ in any bit."""
    return _bits(one) != _bits(other)


def _distance(one: torch.Tensor, other: torch.Tensor) -> tuple[float, float]:
    """The largest difference of two elements, infinite where one is not finite; and the share that differs."""
    wrong = _unequal(one, other)
    gaps = (one.reshape(-1)[wrong].double() - other.reshape(-1)[wrong].double()).abs()
    return gaps.nan_to_num(float("inf")).max().item() if wrong.any() else 0.0, wrong.double().mean().item()
