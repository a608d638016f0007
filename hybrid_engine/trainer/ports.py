"""Interfaces that `ActorHybridWorker` and the auxiliary models require of a trainer.

They add to the interfaces that a switch requires (hybrid_engine/ports.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, overload

import torch

from hybrid_engine.ports import Batch, Data, LossFunction, Trainer
from hybrid_engine.ranks.agreement import Agreement
from hybrid_engine.trainer.batches.batch_checks import BatchLimits, agreed_share
from hybrid_engine.trainer.batches.token_outputs import NO_OUTPUTS, Outputs, Scores
from hybrid_engine.trainer.data_parallel import DataParallelRanks
from hybrid_engine.trainer.learning_rate import ScheduledOptimizer

Figures = dict[str, float]
"""Name of a figure -> value."""


class Scorer(Protocol):
    """Share of a language model on a rank; each data parallel rank scores its part of a batch."""

    @property
    def model(self) -> Trainer:
        """Weights and state of the model."""

    @property
    def limits(self) -> BatchLimits:
        """Limits of the batches that it can compute, and this data parallel rank."""

    @property
    def data_parallel(self) -> DataParallelRanks:
        """The ranks that share a batch."""

    def scores(self, batch: Batch, outputs: Outputs = NO_OUTPUTS) -> Scores:
        """Return `log_probs` [B, S] fp32 of every label of this rank's share, and `outputs`.

        Collective.
        """

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits [B, S, vocab_size] fp32 of `tokens` [B, S] on every rank; for checks."""


def score(
    engine: Scorer, batch: Batch, agreement: Agreement, phase: str, data: Data, outputs: Outputs
) -> torch.Tensor | Scores:
    """Score a batch, each data parallel rank its share. Collective.

    The results of a global batch are joined on every rank. Returns log-probabilities [B, S], or a
    dict that also contains `outputs`, if there are any; on the device of the batch.
    """
    share = agreed_share(batch, engine.limits, agreement, phase, data, outputs)
    with agreement.call(phase):
        results = engine.scores(share, outputs)
        if data == "global" and engine.data_parallel.size > 1:
            results = {name: engine.data_parallel.gather(value) for name, value in results.items()}
    results = {name: value.to(batch["tokens"].device) for name, value in results.items()}
    return results if outputs else results["log_probs"]


class ScoresBatches(ABC):
    """Model whose log-probabilities a user can ask for: the actor, or a frozen reference."""

    @overload
    def compute_log_probs(self, batch: Batch, *, data: Data = ...) -> torch.Tensor: ...

    @overload
    def compute_log_probs(
        self, batch: Batch, *, data: Data = ..., entropy: bool, top_k: int = ...
    ) -> Scores: ...

    @overload
    def compute_log_probs(self, batch: Batch, *, data: Data = ..., top_k: int) -> Scores: ...

    def compute_log_probs(
        self, batch: Batch, *, data: Data = "global", entropy: bool = False, top_k: int = 0
    ) -> torch.Tensor | Scores:
        """Return the log-probability [B, S] fp32 of every label. Collective.

        `ActorHybridWorker` computes it under the training weights, in train or forward context.
        `ReferenceModel` computes it under the frozen weights, in any state; outside its
        `forward_context` the other models stay on the device.

        Args:
            batch: see `batches.Batch`. All results are computed at its `temperature`.
            data: "global": all ranks pass the same batch and get the whole result; "local": each
                data parallel rank passes its own batch, of the same size on all ranks, and gets the
                result for it.
            entropy: return also `entropy` [B, S] in nats.
            top_k: if not 0, return also `top_log_probs` and `top_token_ids` [B, S, top_k], the most
                likely tokens first.

        Returns a tensor; with `entropy` or `top_k` a dict that contains it as `log_probs`; on the
        device of the batch. Values of padding are 0. Raises BatchError with every violation, and
        RemoteError with its message on the other ranks.
        """
        return self._score(batch, data, Outputs(entropy, top_k))

    @abstractmethod
    def _score(self, batch: Batch, data: Data, outputs: Outputs) -> torch.Tensor | Scores:
        """Call `score` with the engine of this model."""


class TrainableScorer(Scorer, Protocol):
    """Language model that is trained: `TrainEngine` or `FsdpTrainEngine`."""

    @property
    def optimizer(self) -> ScheduledOptimizer:
        """The optimizer and the schedule of its learning rate."""

    def train_step(
        self, batch: Batch, loss_function: LossFunction, outputs: Outputs = NO_OUTPUTS
    ) -> Figures:
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


class Checkpoints(Protocol):
    """Reads and writes the complete training state of a model."""

    def save(self, directory: str | Path, *, check_nan: bool = True) -> None:
        """Write all state that a resumed run needs. Collective.

        `check_nan`: raise WeightError for NaN and Inf.
        """

    def load(self, directory: str | Path) -> None:
        """Load a checkpoint that `save` wrote, on all ranks or on none. Collective."""


@dataclass(frozen=True)
class ActorParts:
    """Parts of an actor that is built from a configuration.

    Attributes:
        engine: steps and scores; `engine.model` has the weights and the state.
        checkpoints: of the training state.
        frozen_copy: copies the current weights, adapters merged, into a model for scoring.
            Collective.
    """

    engine: TrainableScorer
    checkpoints: Checkpoints
    frozen_copy: Callable[[], Scorer]
