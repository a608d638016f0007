"""What the weights are, known without the product: the trainer's own tensors, copied whenever they are there.

shadow = Shadow(subject)            # in a context in which all is on the device
shadow.read()                       # after everything that may have written
shadow.different(kinds)             # in any later context: names of what has other bits, or no memory
shadow.canonical                    # what the inference side must hold
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from hybrid_engine import HybridEngine
from hybrid_engine.ranks.job import Job
from tests.walk.inference import MemoryInference, Served, scored_batch

Write = Callable[[random.Random], object]
"""Something that a user does; the same on every rank, which draw the same numbers."""

Tensors = dict[str, torch.Tensor]
Kept = tuple[Tensors, Tensors, Tensors | None]


@dataclass
class Subject(ABC):
    """A trainer with an engine around it, and what a user can do with it.

    Attributes:
        writes: to parameters alone, wherever these are on the device.
        steps: which need gradients and optimizer state, too.
        loads: name -> writes known values, given as {name of a parameter: this rank's part}; wherever a user calls it.
        reads: name -> {name of a parameter or of optimizer state: what a user gets to see of it on this rank}.
    """

    engine: HybridEngine[Any]
    job: Job
    inference: MemoryInference | Served
    writes: Mapping[str, Write] = field(default_factory=dict)
    steps: Mapping[str, Write] = field(default_factory=dict)
    loads: Mapping[str, Callable[[Mapping[str, torch.Tensor]], object]] = field(default_factory=dict)
    reads: Mapping[str, Callable[[], Mapping[str, torch.Tensor]]] = field(default_factory=dict)
    exact: bool = True  # False where the inference side has sums, or computes, which rounds otherwise
    saves: bool = True  # whether the trainer has checkpoints of its own

    @abstractmethod
    def parameters(self) -> Mapping[str, torch.Tensor]:
        """This rank's parameters and buffers, as memory."""

    @abstractmethod
    def optimizer_state(self) -> Mapping[str, torch.Tensor]:
        """Moments, step counters, main parameters."""

    @abstractmethod
    def canonical(self) -> dict[str, torch.Tensor]:
        """Whole tensors of a checkpoint, as the inference side is to have them. Collective."""

    @abstractmethod
    def forward(self) -> object:
        """Compute something. Collective."""

    @abstractmethod
    def step(self) -> object:
        """The optimizer's own step. Collective."""

    def expected(self) -> dict[str, torch.Tensor]:
        """What the inference side must have, or compute. Collective."""
        if not isinstance(self.inference, Served):
            return self.canonical()
        train = self.engine.train
        rows = {name: each.chunk(train.dp_size)[train.dp_rank] for name, each in scored_batch().items()}
        return {"log-probabilities": train.gather_over_data_parallel(train.log_probs(rows))[:, :-1]}

    def save(self, path: Path) -> None:
        self.engine.train.save_checkpoint(path)

    def load(self, path: Path) -> None:
        self.engine.train.load_checkpoint(path)


class Shadow:
    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self.parameters: dict[str, torch.Tensor] = {}
        self.optimizer: dict[str, torch.Tensor] = {}
        self.canonical: dict[str, torch.Tensor] | None = None

    def read(self, kinds: Collection[str] = ("param", "optimizer")) -> None:
        """Collective. Raises AssertionError where a tensor has no memory."""
        self.parameters = _copied(self._subject.parameters())
        if "optimizer" in kinds:
            self.optimizer = _copied(self._subject.optimizer_state())
        self.canonical = _copied(self._subject.expected())

    def read_own(self) -> None:
        """As `read`, of this rank alone: what the inference side must have is not known afterwards."""
        self.parameters, self.optimizer = _copied(self._subject.parameters()), _copied(self._subject.optimizer_state())
        self.canonical = None

    def take_up(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Parameters were written where nothing can be gathered."""
        self.parameters, self.canonical = {**self.parameters, **_copied(parameters)}, None

    def different(self, kinds: Collection[str] = ("param", "optimizer")) -> list[str]:
        """What of the trainer's has changed."""
        found = {"param": self._subject.parameters, "optimizer": self._subject.optimizer_state}
        kept = {"param": self.parameters, "optimizer": self.optimizer}
        return [name for kind in kinds for name in differences(kept[kind], found[kind]())]

    def copy(self) -> Kept:
        """All of it; nothing of it is ever written in place."""
        return self.parameters, self.optimizer, self.canonical

    def restore(self, kept: Kept) -> None:
        """What `copy` gave is what there is."""
        self.parameters, self.optimizer, self.canonical = kept


def differences(
    expected: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor], *, exact: bool = True
) -> list[str]:
    """Names of tensors that are not the same, and why."""
    whys = {name: _why(expected.get(name), found.get(name), exact) for name in sorted({*expected, *found})}
    return [f"{name} {why}" for name, why in whys.items() if why]


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether reading it is safe: a storage that was resized to nothing is read at address 0."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    end = (tensor.storage_offset() + last + 1) * tensor.element_size()
    return not tensor.numel() or end <= tensor.untyped_storage().nbytes()


def _why(one: torch.Tensor | None, other: torch.Tensor | None, exact: bool) -> str:
    if one is None or other is None:
        return "is new" if one is None else "is gone"
    if not has_memory(other):
        return "has no memory"
    if one.shape != other.shape or one.dtype != other.dtype:
        return f"is {other.dtype} {tuple(other.shape)}, not {one.dtype} {tuple(one.shape)}"
    if torch.equal(_bits(one), _bits(other)) or (not exact and torch.allclose(one, other, rtol=1e-4, atol=1e-5)):
        return ""
    return "is zero" if not other.any() else "differs"


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _copied(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    if bare := [name for name, tensor in tensors.items() if not has_memory(tensor)]:
        raise AssertionError(f"no memory: {', '.join(bare[:3])} of {len(bare)}")
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}
