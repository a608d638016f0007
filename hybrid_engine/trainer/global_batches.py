"""Batches that all ranks pass: each data parallel rank computes its share, and every rank gets the whole result."""

from __future__ import annotations

import torch

from hybrid_engine.ports import Batch, Data, LossFunction
from hybrid_engine.ranks.agreement import Agreement
from hybrid_engine.trainer.batches.same_batches import agreed_share
from hybrid_engine.trainer.batches.token_outputs import Outputs
from hybrid_engine.trainer.ports import ActorTrainer, Scorer


class GlobalBatches:
    """What `HybridEngine.update` and `compute_log_probs` come to, for an `ActorTrainer`; args as there."""

    def compute_log_probs(
        self: Scorer, batch: Batch, agreement: Agreement, *, data: Data, entropy: bool, top_k: int
    ) -> torch.Tensor | dict[str, torch.Tensor]:
        """Score a batch. Collective."""
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
        """One optimizer step. Collective."""
        call, outputs, rate = "training step", Outputs(entropy, top_k), self.learning_rate
        share = agreed_share(batch, self.limits, agreement, call, data, outputs, learning_rate=rate)
        with agreement.call(call):
            return self.train_step(share, loss_function, outputs)


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
