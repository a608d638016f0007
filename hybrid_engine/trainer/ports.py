"""Interfaces that `ActorHybridWorker` and the auxiliary models require of a trainer.

They add to the interfaces that a switch requires (hybrid_engine/ports.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch

from hybrid_engine.memory.offload_items import Offloadable
from hybrid_engine.ports import Batch, Data, LossFunction, Trainer
from hybrid_engine.ranks.agreement import Agreement
from hybrid_engine.trainer.batches.batch_checks import BatchLimits, agreed_share
from hybrid_engine.trainer.batches.token_outputs import NO_OUTPUTS, Outputs


class Scorer(Offloadable, Protocol):
    """One rank's part of a model; every data parallel rank scores its share of a batch."""

    @property
    def limits(self) -> BatchLimits:
        """Limits of the batches that it can compute, and this data parallel rank."""

    def gather_over_data_parallel(self, tensor: torch.Tensor) -> torch.Tensor:
        """Join the shares [B, …] of all data parallel ranks along dim 0, in the order of ranks."""

    def scores(self, batch: Batch, outputs: Outputs = NO_OUTPUTS) -> dict[str, torch.Tensor]:
        """Return `log_probs` [B, S] fp32 of every label of this rank's share, and `outputs`.

        Collective.
        """


def score(
    engine: Scorer, batch: Batch, agreement: Agreement, phase: str, data: Data, outputs: Outputs
) -> torch.Tensor | dict[str, torch.Tensor]:
    """Score a batch, each data parallel rank its share. Collective.

    The results of a global batch are joined on every rank. Returns log-probabilities [B, S], or a
    dict that also contains `outputs`, if there are any; on the device of the batch.
    """
    share = agreed_share(batch, engine.limits, agreement, phase, data, outputs)
    with agreement.call(phase):
        results = engine.scores(share, outputs)
        if data == "global" and engine.limits.dp_size > 1:
            results = {
                name: engine.gather_over_data_parallel(value) for name, value in results.items()
            }
    results = {name: value.to(batch["tokens"].device) for name, value in results.items()}
    return results if outputs else results["log_probs"]


class ActorTrainer(Trainer, Scorer, Protocol):
    """Trainer of `ActorHybridWorker`: `MegatronActor` or `FsdpActor`."""

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next step."""

    def set_learning_rate(self, learning_rate: float) -> None:
        """Set the learning rate of every parameter group. Raises StateError if a schedule does."""

    def train_step(
        self, batch: Batch, loss_function: LossFunction, outputs: Outputs = NO_OUTPUTS
    ) -> dict[str, float]:
        """Take one optimizer step on this rank's share of a batch. Collective.

        Args:
            batch: B is a multiple of the micro batch size.
            loss_function: see `batches.LossFunction`.
            outputs: tensors that are added to the loss function's micro batch.

        Returns, on every rank, the reported scalars averaged over micro batches and ranks, with
        `grad_norm`, the `learning_rate` of this step, and `skipped`: 1 if no weight changed.

        Raises, before any weight changes, LossError if the loss function fails or returns no loss,
        and RemoteError with its message on the other ranks.
        """

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits [B, S, vocab_size] fp32 of `tokens` [B, S] on every rank; for checks."""

    def save_checkpoint(self, directory: str | Path, *, check_nan: bool = True) -> None:
        """Write all state that a resumed run needs. Collective.

        `check_nan`: raise WeightError for NaN and Inf.
        """

    def load_checkpoint(self, directory: str | Path) -> None:
        """Load a checkpoint that `save_checkpoint` wrote, on all ranks or on none. Collective."""

    def frozen_copy(self) -> Scorer:
        """Return a copy of the current weights with merged adapters, for scoring. Collective."""
