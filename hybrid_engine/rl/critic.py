"""PPO's part of a step: the critic, the advantages that its values give, its own optimizer steps."""

from __future__ import annotations

from pathlib import Path

import torch

from hybrid_engine.rl import losses
from hybrid_engine.rl.config import PpoConfig
from hybrid_engine.trainer.companions import ValueModel, explained_variance, generalized_advantages, value_loss
from hybrid_engine.trainer.companions.advantages import whitened
from hybrid_engine.trainer.worker import ActorHybridWorker

Batch = dict[str, torch.Tensor]


class Critic:
    """The critic of one rank, with the policy's present weights unless `critic_config` names a model of its own.

    All methods are collective.

    Args:
        worker: of the actor, in any state.
        config: the settings.

    Raises ConfigError without a `critic_config`, and StateError where that has a schedule of learning rates, or
    `device_budget_gib` no room for both models' parameters.
    """

    def __init__(self, worker: ActorHybridWorker, config: PpoConfig) -> None:
        settings = worker.config.critic_config
        has_own_model = settings is not None and settings.model is not None
        self.config = config
        self.model = ValueModel(worker, load_weights=has_own_model)
        self._learning_rate = config.critic_learning_rate or self.model.engine.learning_rate
        self.model.set_learning_rate(self._learning_rate)
        self._loss = value_loss(config.value_clip)
        if not has_own_model:
            with worker.forward_context():
                self.model.copy_actor()

    def learn(self, batch: Batch, rewards: torch.Tensor, step: int, generator: torch.Generator) -> dict[str, float]:
        """Add `advantages` [B, S] to the batch, and learn from what its completions came to: rewards [B].

        Returns means of what the optimizer steps reported, and the share of the variance of returns that the values
        explained before them.
        """
        config, mask = self.config, batch["mask"]
        with self.model.train_context():
            batch["old_values"] = values = self.model.values(batch)
            found = generalized_advantages(at_last_tokens(rewards, mask), values, batch, config.gamma, config.lam)
            batch["advantages"], batch["returns"] = whitened(found.advantages, mask), found.returns
            self.model.set_learning_rate(self._learning_rate * config.learning_rate_share(step))
            reports = [
                self.model.update(part, self._loss)
                for _ in range(config.critic_epochs)
                for part in losses.minibatches(batch, config.minibatches, generator)
            ]
        means = losses.mean_of(reports)
        row = {name: means[name] for name in ("value_loss", "value_clip_fraction")}
        return {**row, "explained_variance": explained_variance(values, found.returns, mask)}

    def save(self, directory: Path) -> None:
        """Write the critic's part of a checkpoint."""
        with self.model.train_context():
            self.model.save_checkpoint(directory)

    def load(self, directory: Path) -> None:
        """Take up what `save` wrote."""
        with self.model.train_context():
            self.model.load_checkpoint(directory)


def at_last_tokens(rewards: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Rewards [B] of whole completions, [B, S]: where `mask` [B, S] has its last 1 of a row; 0 elsewhere."""
    positions = torch.arange(mask.shape[1]).expand_as(mask)
    last = torch.where(mask.bool(), positions, -1).amax(dim=1, keepdim=True)
    return torch.where(positions == last, rewards[:, None], 0.0)
