"""Expected weights, obtained without the product: copies of the trainer's own tensors.

shadow = Shadow(subject)            # in a context where everything is on the device
shadow.read()                       # after every possible write
shadow.different(kinds)  # in any later context: tensors with other bits or no memory
shadow.canonical                    # tensors that the inference side must hold
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.optim.swa_utils import get_ema_multi_avg_fn

from hybrid_engine import HybridEngine
from hybrid_engine.ports import Batch
from hybrid_engine.ranks.job import Job
from hybrid_engine.ranks.torch_internals import TensorDict
from tests.walk.inference import MemoryInference, Served, scored_batch

Write = Callable[[random.Random], object]
"""An action of a user. It is the same on all ranks, which draw the same random numbers."""

Tensors = TensorDict
Kept = tuple[Tensors, Tensors, Tensors | None]


@dataclass
class Subject(ABC):
    """A trainer in an engine, and the actions of its users.

    Attributes:
        writes: writes to parameters alone, possible when these are on the device.
        steps: writes that also need gradients and optimizer state.
        loads: writes of known values, given as {parameter: this rank's part}; callable at any time.
        reads: functions that return {parameter or optimizer state: the part that users see on this
            rank}.
        exact: False if values of the inference side are computed, and so round differently.
        saves: whether the trainer has checkpoints.
        trainer: `MegatronActor` or `FsdpActor`; None for a model that another loop trains.
    """

    engine: HybridEngine
    job: Job
    inference: MemoryInference | Served
    writes: Mapping[str, Write] = field(default_factory=dict)
    steps: Mapping[str, Write] = field(default_factory=dict)
    loads: Mapping[str, Callable[[Batch], object]] = field(default_factory=dict)
    reads: Mapping[str, Callable[[], Batch]] = field(default_factory=dict)
    exact: bool = True
    saves: bool = True
    trainer: Any = None

    @abstractmethod
    def named(self) -> Batch:
        """Return the parameters as the trainer has them, whole or distributed."""

    def _several(self, chance: random.Random) -> list[torch.Tensor]:
        parameters = list(self.named().values())
        return chance.sample(parameters, chance.choice((2, len(parameters))))

    def _some(self, chance: random.Random) -> torch.Tensor:
        return chance.choice(list(self.named().values()))

    def common_writes(self) -> dict[str, Write]:
        return {
            "p.mul_": lambda chance: self._some(chance).mul_(near_one(chance)),
            "foreach_mul_": lambda chance: torch._foreach_mul_(
                self._several(chance), near_one(chance)
            ),
            "ema multi_avg_fn": self._ema,
        }

    def _ema(self, chance: random.Random) -> None:
        several = self._several(chance)
        get_ema_multi_avg_fn(0.9)(several, [tensor * near_one(chance) for tensor in several], 1)

    @abstractmethod
    def parameters(self) -> Batch:
        """Return this rank's parameters and buffers, without copies."""

    @abstractmethod
    def optimizer_state(self) -> Batch:
        """Return moments, step counters and main parameters."""

    @abstractmethod
    def canonical(self) -> TensorDict:
        """Return the whole canonical tensors that the inference side must hold. Collective."""

    @abstractmethod
    def forward(self) -> object:
        """Compute something. Collective."""

    @abstractmethod
    def step(self) -> object:
        """Step the optimizer. Collective."""

    def expected(self) -> TensorDict:
        """Return the tensors that the inference side must hold or compute. Collective."""
        if not isinstance(self.inference, Served):
            return self.canonical()
        scorer = self.trainer.engine
        ranks = scorer.data_parallel
        rows = {
            name: tensor.chunk(ranks.size)[ranks.rank] for name, tensor in scored_batch().items()
        }
        return {"log-probabilities": ranks.gather(scorer.log_probs(rows))[:, :-1]}

    def save(self, path: Path) -> None:
        self.trainer.checkpoints.save(path)

    def load(self, path: Path) -> None:
        self.trainer.checkpoints.load(path)


def near_one(chance: random.Random) -> float:
    return chance.uniform(0.8, 1.2)


class Shadow:
    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self.parameters: TensorDict = {}
        self.optimizer: TensorDict = {}
        self.canonical: TensorDict | None = None

    def read(self, kinds: Collection[str] = ("param", "optimizer")) -> None:
        """Copy the current tensors. Collective. Raises AssertionError if a tensor has no memory."""
        self.parameters = _copied(self._subject.parameters())
        if "optimizer" in kinds:
            self._subject.engine.train.guard(["optimizer"])  # Direct reads have no hook.
            self.optimizer = _copied(self._subject.optimizer_state())
        self.canonical = _copied(self._subject.expected())

    def take_up(self, parameters: Batch) -> None:
        """Take over parameters written at a time when nothing can be gathered."""
        self.parameters = {**self.parameters, **_copied(parameters)}
        self.canonical = None

    def different(self, kinds: Collection[str] = ("param", "optimizer")) -> list[str]:
        """Return the differences between the trainer's tensors and the copies."""
        if "optimizer" in kinds:
            self._subject.engine.train.guard(["optimizer"])
        readers = {"param": self._subject.parameters, "optimizer": self._subject.optimizer_state}
        kept = {"param": self.parameters, "optimizer": self.optimizer}
        return [name for kind in kinds for name in differences(kept[kind], readers[kind]())]

    def copy(self) -> Kept:
        """Return the state for `restore`, without copies: nothing is written in place."""
        return self.parameters, self.optimizer, self.canonical

    def restore(self, kept: Kept) -> None:
        """Restore a state that `copy` returned."""
        self.parameters, self.optimizer, self.canonical = kept


def differences(expected: Batch, actual: Batch, *, exact: bool = True) -> list[str]:
    """Return the names of tensors that differ, each with the difference."""
    texts = {
        name: _difference(expected.get(name), actual.get(name), exact)
        for name in sorted({*expected, *actual})
    }
    return [f"{name} {text}" for name, text in texts.items() if text]


def has_memory(tensor: torch.Tensor) -> bool:
    """Return whether reading is safe: a read of a storage resized to 0 bytes accesses address 0."""
    last = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    end = (tensor.storage_offset() + last + 1) * tensor.element_size()
    return not tensor.numel() or end <= tensor.untyped_storage().nbytes()


def _difference(expected: torch.Tensor | None, actual: torch.Tensor | None, exact: bool) -> str:
    if expected is None or actual is None:
        return "is new" if expected is None else "is gone"
    if not has_memory(actual):
        return "has no memory"
    if expected.shape != actual.shape or expected.dtype != actual.dtype:
        return (
            f"is {actual.dtype} {tuple(actual.shape)}, not {expected.dtype} {tuple(expected.shape)}"
        )
    is_close = not exact and torch.allclose(expected, actual, rtol=1e-4, atol=1e-5)
    if is_close or torch.equal(_bits(expected), _bits(actual)):
        return ""
    return "is zero" if not actual.any() else "differs"


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _copied(tensors: Batch) -> TensorDict:
    if released := [name for name, tensor in tensors.items() if not has_memory(tensor)]:
        raise AssertionError(
            f"{len(released)} tensors have no memory, such as {', '.join(released[:3])}"
        )
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}
