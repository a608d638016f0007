"""What the worker and companions ask of whoever trains for them, beside what a switch asks (hybrid_engine/ports.py)."""

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
    """One rank's share of a model; every data parallel rank scores its part of a batch."""

    @property
    def limits(self) -> BatchLimits:
        """What of a batch can be computed, and which data parallel rank this is."""

    def gather_over_data_parallel(self, tensor: torch.Tensor) -> torch.Tensor:
        """Join the shares [B, …] of all data parallel ranks along dim 0, in order of rank."""

    def scores(self, batch: Batch, outputs: Outputs = NO_OUTPUTS) -> dict[str, torch.Tensor]:
        """`log_probs` [B, S] fp32 of every label of this rank's part, and what `outputs` asks for. Collective."""


def score(
    engine: Scorer, batch: Batch, agreement: Agreement, phase: str, data: Data, outputs: Outputs
) -> torch.Tensor | dict[str, torch.Tensor]:
    """Score a batch: each data parallel rank its share; of a global one the results are joined on every rank."""
    share = agreed_share(batch, engine.limits, agreement, phase, data, outputs)
    with agreement.call(phase):
        found = engine.scores(share, outputs)
        if data == "global" and engine.limits.dp_size > 1:
            found = {name: engine.gather_over_data_parallel(value) for name, value in found.items()}
    found = {name: value.to(batch["tokens"].device) for name, value in found.items()}
    return found if outputs else found["log_probs"]


class ActorTrainer(Trainer, Scorer, Protocol):
    """Whoever trains for `ActorHybridWorker`, with `GlobalBatches`: `MegatronActor`, `FsdpActor`."""

    @property
    def learning_rate(self) -> float:
        """Of the next step."""

    def set_learning_rate(self, learning_rate: float) -> None:
        """Set the learning rate of every parameter group. Raises StateError where a schedule does that."""

    def train_step(self, batch: Batch, loss_function: LossFunction, outputs: Outputs = NO_OUTPUTS) -> dict[str, float]:
        """One optimizer step on this rank's share of a batch. Collective.

        Args:
            batch: B is a multiple of the micro batch size.
            loss_function: see `batches.LossFunction`.
            outputs: what it finds in its micro batch beside what is in `batch`.

        Returns the scalars averaged over micro batches and ranks, on every rank, with `grad_norm`, the `learning_rate`
        of this step, and `skipped`: 1 where no weight changed. Raises, with no weight changed, LossError for a loss
        function that fails or returns no loss, and RemoteError with its text on the ranks that are not at fault.
        """

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits [B, S, vocab_size] fp32 of `tokens` [B, S], on every rank; for checks."""

    def save_checkpoint(self, directory: str | Path, *, check_nan: bool = True) -> None:
        """Write all that a resumed run needs. Collective. `check_nan`: WeightError for NaN and Inf."""

    def load_checkpoint(self, directory: str | Path) -> None:
        """Load what `save_checkpoint` wrote, on all ranks or on none. Collective."""

    def frozen_copy(self) -> Scorer:
        """A copy of the present weights, adapters added, that is only read. Collective."""


class GlobalBatches:
    """Scoring and steps of an `ActorTrainer` on batches that all ranks pass: each data parallel rank computes its part,
    and every rank gets the whole result."""

    def compute_log_probs(
        self: ActorTrainer, batch: Batch, agreement: Agreement, *, data: Data, entropy: bool, top_k: int
    ) -> torch.Tensor | dict[str, torch.Tensor]:
        """`HybridEngine.compute_log_probs`, where parameters are on the device."""
        return score(self, batch, agreement, "scoring", data, Outputs(entropy, top_k))

    def update(
        self: ActorTrainer,
        batch: Batch,
        loss_function: LossFunction,
        agreement: Agreement,
        *,
        data: Data,
        entropy: bool,
        top_k: int,
    ) -> dict[str, float]:
        """`HybridEngine.update`, in `train_context`."""
        call, outputs, rate = "training step", Outputs(entropy, top_k), self.learning_rate
        share = agreed_share(batch, self.limits, agreement, call, data, outputs, learning_rate=rate)
        with agreement.call(call):
            return self.train_step(share, loss_function, outputs)
