"""PPO's part of a step: the critic, the advantages from its values, and its optimizer steps."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from hybrid_engine.errors import require_none
from hybrid_engine.ports import Figures
from hybrid_engine.rl import losses
from hybrid_engine.rl.config import PpoConfig
from hybrid_engine.rl.packed_calls import PackedCalls, packing_violations
from hybrid_engine.trainer.batches.batch_building import NewBatch
from hybrid_engine.trainer.reference_and_critic import (
    ValueModel,
    explained_variance,
    generalized_advantages,
    value_loss,
)
from hybrid_engine.trainer.reference_and_critic.advantages import whitened
from hybrid_engine.trainer.worker import ActorHybridWorker


class Critic:
    """Critic of one rank. All methods are collective.

    It is initialized from `critic_config.model` if there is one, otherwise from the present weights
    of the policy.

    Args:
        worker: worker of the actor, in any state.
        config: the settings.

    Raises ConfigError without a `critic_config`, or if rows are to be packed and its model cannot
    compute them; StateError if it has its own schedule of learning rates.
    """

    def __init__(self, worker: ActorHybridWorker, config: PpoConfig) -> None:
        settings = worker.config.critic_config
        has_own_model = settings is not None and settings.model is not None
        self.config = config
        self.model = ValueModel(worker, load_weights=has_own_model)
        self._learning_rate = (
            config.critic_learning_rate or self.model.engine.optimizer.learning_rate
        )
        # Fails now, not in the first step, if the critic has its own schedule.
        self.model.set_learning_rate(self._learning_rate)
        self._loss = value_loss(config.value_clip)
        limits = self.model.engine.limits
        require_none(packing_violations(config, limits.no_packing))
        self._calls = PackedCalls(limits, config.pack)
        # Only the head is new: the body is the policy's.
        if not has_own_model:
            with worker.forward_context():
                self.model.copy_actor()

    def learn(
        self,
        batch: NewBatch,
        rewards: torch.Tensor,
        step: int,
        generator: torch.Generator,
    ) -> Figures:
        """Add `advantages` [B, S] to the batch, and train the critic on the rewards [B, S].

        Also adds `old_values` and `returns`, [B, S].

        Returns the means of value_loss and value_clip_fraction over the optimizer steps, and
        explained_variance, the share of the variance of returns that the values explained before
        these steps.
        """
        config = self.config
        mask = batch["mask"]
        with self.model.train_context():
            values = self._calls.score(self.model.values, batch)
            batch["old_values"] = values
            estimate = generalized_advantages(rewards, values, batch, config.gamma, config.lam)
            # The actor's advantages are normalized. The critic's targets must keep their scale.
            batch["advantages"] = whitened(estimate.advantages, mask)
            batch["returns"] = estimate.returns
            self.model.set_learning_rate(self._learning_rate * config.learning_rate_factor(step))
            cut = partial(losses.minibatches, batch, config.minibatches, generator)
            means = self._calls.learn(self.model.update, cut, config.critic_epochs, self._loss)
        return {
            "value_loss": means["value_loss"],
            "value_clip_fraction": means["value_clip_fraction"],
            "explained_variance": explained_variance(values, estimate.returns, mask),
        }

    def save(self, directory: Path) -> None:
        """Write the critic's part of a checkpoint."""
        with self.model.train_context():
            self.model.save_checkpoint(directory)

    def load(self, directory: Path) -> None:
        """Load the critic's part of a checkpoint."""
        with self.model.train_context():
            self.model.load_checkpoint(directory)


def at_last_tokens(rewards: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Put the rewards [B] of completions at their last tokens.

    Returns [B, S], with the reward where `mask` [B, S] has the last 1 of a row, and 0 elsewhere.
    """
    positions = torch.arange(mask.shape[1]).expand_as(mask)
    # A row without response tokens has -1 here, which equals no position.
    last = torch.where(mask.bool(), positions, -1).amax(dim=1, keepdim=True)
    return torch.where(positions == last, rewards[:, None], 0.0)
