"""PPO's part of an iteration: the critic, its advantages, its own optimizer steps.

critic = Critic(worker, settings)
critic.begin()                          after the warm-up: it starts as the policy does
row = critic.learn(batch, ...)          between scoring and the policy's update: `advantages` [B, S] in the batch
"""

from __future__ import annotations

import statistics
from pathlib import Path

import torch

from examples.gpt_rl.settings import RLConfig
from hybrid_engine import ActorHybridWorker, ValueModel, generalized_advantages, value_loss
from hybrid_engine.rl.losses import minibatches
from hybrid_engine.rl.run_files import Row
from hybrid_engine.trainer.companions.advantages import explained_variance, whitened

Batch = dict[str, torch.Tensor]


class Critic:
    """One rank's. All methods are collective."""

    def __init__(self, worker: ActorHybridWorker, rl: RLConfig) -> None:
        self.rl = rl
        self.settings = rl.ppo
        self.model = ValueModel(worker, load_weights=False)
        self.loss = value_loss(self.settings.value_clip)

    def begin(self) -> None:
        """Take the policy's weights. In train context of the worker."""
        self.model.copy_actor()

    def learn(self, batch: Batch, generator: torch.Generator) -> Row:
        """Add `advantages` [B, S] to the batch, and let the critic learn from what the samples came to.

        The batch has `rewards` [B], of whole completions. Returns what the critic's optimizer steps reported, and how
        much of the variance of returns the values explained that the advantages were made with.
        """
        mask = batch["mask"]
        with self.model.train_context():
            batch["old_values"] = self.model.values(batch)
            found = generalized_advantages(
                at_last_steps(batch["rewards"], mask), batch["old_values"], mask, self.settings.gamma, self.settings.lam
            )
            batch["returns"] = found.returns
            batch["advantages"] = whitened(found.advantages, mask)
            self.model.set_learning_rate(self.settings.learning_rate)
            reports = [
                self.model.update(minibatch, self.loss)
                for _ in range(self.settings.epochs)
                for minibatch in minibatches(batch, self.rl.minibatches, generator)
            ]
        names = ("value_loss", "value_clip_fraction")
        row: Row = {name: statistics.fmean(report[name] for report in reports) for name in names}
        return {**row, "explained_variance": explained_variance(batch["old_values"], found.returns, mask)}

    def save(self, directory: Path) -> None:
        """Write the critic's part of a checkpoint."""
        with self.model.train_context():
            self.model.save_checkpoint(directory)

    def load(self, directory: Path) -> None:
        """Take up what `save` wrote."""
        with self.model.train_context():
            self.model.load_checkpoint(directory)


def at_last_steps(rewards: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Rewards [B] of whole completions at the last step that `mask` [B, S] has of each; 0 elsewhere."""
    positions = torch.arange(mask.shape[1]).expand_as(mask)
    last = torch.where(mask.bool(), positions, -1).amax(dim=1, keepdim=True)
    return torch.where(positions == last, rewards[:, None], 0.0)
