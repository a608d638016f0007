"""Differences between two engines that should hold the same model, with causes, by bytes.

    cold      engine that loaded the checkpoint                           the truth
    before    engine that held other weights and has computed with them
    after     the same engine after a reload of the checkpoint

Elements in which `before` and `cold` agree depend on no weight (padding, tables of cosines). The
values of all other elements in `after` show whether they were reloaded, left unchanged or
corrupted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import torch

from hybrid_engine.ranks.torch_internals import TensorDict


class Cause(Enum):
    """Cause of a tensor's difference from a cold load."""

    STALE = "not reloaded: still holds the former weights"
    UNDERIVED = "derived from weights and not derived again: still of the former weights"
    UNTIED = "a tie is broken: after a cold load it shares another tensor's memory"
    PADDING = "correct except for elements that depend on no weight: not initialised"
    LOST = "depends on no weight, was correct before, and was not restored"
    UNPACKED = "the correct values in another order: not packed again"
    CORRUPT = "neither the correct value nor the former one"
    FORM = "missing, additional, or of another shape or dtype"
    UNTRACKED = "all visible tensors are equal, but the computation is not"


@dataclass(frozen=True)
class EngineSnapshot:
    """State and computation of an engine, as `backends.vllm.stock.observe` wrote them.

    Attributes:
        tensors: path -> tensor on the host. With several ranks, paths begin with the rank's file.
        places: path -> memory location; equal for paths that share memory.
        logprobs: [tokens, vocabulary] float32.
        unseen: paths of objects that cannot be read.
    """

    tensors: Mapping[str, torch.Tensor]
    places: Mapping[str, str]
    logprobs: torch.Tensor
    unseen: Sequence[str] = ()

    @classmethod
    def read(cls, directory: Path) -> EngineSnapshot:
        """Read the snapshot of all ranks."""
        files = sorted(directory.glob("rank*.pt"))
        tensors: TensorDict = {}
        places: dict[str, str] = {}
        unseen: list[str] = []
        for file in files:
            prefix = f"{file.stem} " if len(files) > 1 else ""
            rank = torch.load(file)
            tensors |= {prefix + path: tensor for path, tensor in rank["tensors"].items()}
            places |= {prefix + path: prefix + place for path, place in rank["places"].items()}
            unseen += [prefix + path for path in rank["unseen"]]
        return cls(tensors, places, torch.load(directory / "logprobs.pt"), unseen)


@dataclass(frozen=True)
class StateDifference:
    """Difference of one tensor, or of the computation, from a cold load.

    Attributes:
        name: name of the tensor.
        cause: cause of the difference.
        max_abs: largest difference of an element; infinite if an element is not finite or the form
            differs.
        share: fraction of the elements that differ in any bit.
    """

    name: str
    cause: Cause
    max_abs: float
    share: float


@dataclass(frozen=True)
class Finding:
    """Result of one way to load weights into an engine.

    Attributes:
        way: key of `certify.WAYS`.
        status: "equal", "differs", "failed" or "not run".
        reason: reason for "failed" or "not run".
        num_tensors: number of compared tensors.
        logprobs: largest difference of a log-probability; 0.0 if all are bitwise equal.
        differences: all differences.
        unseen: paths that cannot be read; differences there show only in the computation.
    """

    way: str
    status: str
    reason: str = ""
    num_tensors: int = 0
    logprobs: float = 0.0
    differences: Sequence[StateDifference] = ()
    unseen: Sequence[str] = ()


def compare(
    way: str,
    cold: EngineSnapshot,
    before: EngineSnapshot,
    after: EngineSnapshot,
) -> Finding:
    """Compare state and computation of an engine bit by bit with those of a cold engine."""
    aliases_cold = _aliases(cold.places)
    aliases_before = _aliases(before.places)
    aliases_after = _aliases(after.places)
    paths = cold.tensors.keys() | after.tensors.keys()
    # Parameters first: memory with several paths is reported under the name of its parameter.
    in_order = sorted(paths, key=lambda path: ("._parameters." not in path, path))
    compared = set[tuple[str, str]]()
    differences = []
    for path in in_order:
        place = (cold.places.get(path, path), after.places.get(path, path))
        if place in compared:
            continue
        compared.add(place)
        # Ties of a cold engine that this one had before the weights were loaded.
        ties = aliases_cold.get(path, set()) & aliases_before.get(path, set())
        difference = difference_of_tensor(
            path,
            cold.tensors.get(path),
            before.tensors.get(path),
            after.tensors.get(path),
            is_untied=not ties <= aliases_after.get(path, set()),
        )
        if difference is not None:
            differences.append(difference)
    logprobs, share = _distance(cold.logprobs, after.logprobs)
    # The cause is in what cannot be read, such as copies within a kernel's own memory.
    if share and not differences:
        differences = [StateDifference("log-probabilities", Cause.UNTRACKED, logprobs, share)]
    status = "differs" if differences else "equal"
    return Finding(way, status, "", len(compared), logprobs, differences, after.unseen)


def difference_of_tensor(
    path: str,
    cold: torch.Tensor | None,
    before: torch.Tensor | None,
    after: torch.Tensor | None,
    *,
    is_untied: bool = False,
) -> StateDifference | None:
    """Return the difference of one tensor from a cold load; None if it is bitwise equal."""
    name = path.replace("._parameters.", ".").replace("._buffers.", ".").removeprefix(".")
    if cold is None or after is None or _form(cold) != _form(after):
        return StateDifference(name, Cause.FORM, float("inf"), 1.0)
    wrong = _unequal(cold, after)
    if not wrong.any():
        return None
    cause = Cause.CORRUPT
    if is_untied:
        cause = Cause.UNTIED
    elif before is not None and _form(before) == _form(cold):
        # Of two sets of weights: elements that are equal in both depend on neither.
        depends_on_weights = _unequal(cold, before)
        changed = _unequal(before, after)
        if not (wrong & depends_on_weights).any():
            # If nothing in the tensor does, all of it was right before, and the reload has lost it.
            cause = Cause.PADDING if depends_on_weights.any() else Cause.LOST
        elif not (wrong & changed).any():
            cause = Cause.STALE if "._parameters." in path else Cause.UNDERIVED
    if cause is Cause.CORRUPT:
        # Kernels read weights in an order of their own, into which a loader must bring them.
        sorted_cold = _bits(cold).sort().values
        sorted_after = _bits(after).sort().values
        if torch.equal(sorted_cold, sorted_after):
            cause = Cause.UNPACKED
    return StateDifference(name, cause, *_distance(cold, after))


def _aliases(places: Mapping[str, str]) -> dict[str, set[str]]:
    """Return path -> all paths that share its memory."""
    by_place: dict[str, set[str]] = {}
    for path, place in places.items():
        by_place.setdefault(place, set()).add(path)
    return {path: by_place[place] for path, place in places.items()}


def _form(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype]:
    return tensor.shape, tensor.dtype


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements as integers of the same bits, [elements]."""
    return tensor.reshape(-1).view(_INTEGERS[tensor.element_size()])


def _unequal(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return flags [elements] of the elements that differ in any bit."""
    return _bits(left) != _bits(right)


def _distance(left: torch.Tensor, right: torch.Tensor) -> tuple[float, float]:
    """Return the largest difference of two elements and the fraction of elements that differ.

    The difference is infinite if an element is not finite.
    """
    wrong = _unequal(left, right)
    share = wrong.double().mean().item()
    if not wrong.any():
        return 0.0, share
    # NaN where one of the two is.
    gaps = (left.reshape(-1)[wrong].double() - right.reshape(-1)[wrong].double()).abs()
    return gaps.nan_to_num(float("inf"), float("inf")).max().item(), share
