"""What the worker and companions ask of whoever trains for them, beside what a switch asks (hybrid_engine/ports.py)."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import torch

from hybrid_engine.memory.offload_items import OffloadItem
from hybrid_engine.ports import Batch, LossFunction, Trainer
from hybrid_engine.trainer.batches.batch_checks import BatchLimits
from hybrid_engine.trainer.batches.token_outputs import NO_OUTPUTS, Outputs


class DataParallelModel(Protocol):
    """One rank's share of a model; every data parallel rank works on its part of a batch."""

    @property
    def limits(self) -> BatchLimits:
        """What of a batch can be computed, and which data parallel rank this is."""
        ...

    def gather_over_data_parallel(self, tensor: torch.Tensor) -> torch.Tensor:
        """Join the shares [B, …] of all data parallel ranks along dim 0, in order of rank."""
        ...

    def offload_items(self) -> Iterable[OffloadItem]:
        """Everything that can leave the device."""
        ...


class Scorer(DataParallelModel, Protocol):
    """One that gives log-probabilities."""

    def scores(self, batch: Batch, outputs: Outputs = NO_OUTPUTS) -> dict[str, torch.Tensor]:
        """`log_probs` [B, S] fp32 of every label of this rank's part, and what `outputs` asks for. Collective."""
        ...


class ActorTrainer(Trainer, Scorer, Protocol):
    """Whoever trains for `ActorHybridWorker`: trainer/megatron/actor.py, trainer/fsdp/actor.py."""

    @property
    def learning_rate(self) -> float:
        """Of the next step."""

    def set_learning_rate(self, learning_rate: float) -> None:
        """Set the learning rate of every parameter group. Raises StateError where a schedule does that."""

    def train_step(self, batch: Batch, loss_function: LossFunction, outputs: Outputs = NO_OUTPUTS) -> dict[str, float]:
        """One optimizer step on this rank's share of a batch; the report, averaged over micro batches and ranks.

        Raises, with no weight changed, LossError for a loss function that fails or returns no loss, and RemoteError
        with its text on the ranks that are not at fault.
        """
        ...

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits [B, S, vocab_size] fp32 of `tokens` [B, S], on every rank; for checks."""
        ...

    def save_checkpoint(self, directory: str | Path, *, check_nan: bool = True) -> None:
        """Write all that a resumed run needs. Collective. `check_nan`: WeightError for NaN and Inf."""
        ...

    def load_checkpoint(self, directory: str | Path) -> None:
        """Load what `save_checkpoint` wrote, on all ranks or on none. Collective."""
        ...

    def frozen_copy(self) -> Scorer:
        """A copy of the present weights, adapters added, that is only read. Collective."""
        ...
