"""PPO's arithmetic against examples worked out by hand."""

from __future__ import annotations

import torch

from examples.gpt_rl.ppo import at_last_steps


def test_a_reward_belongs_to_the_last_step() -> None:
    mask = torch.tensor([[0.0, 1.0, 1.0, 0.0], [1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 1.0]])
    rewards = at_last_steps(torch.tensor([1.0, 2.0, 3.0]), mask)
    assert rewards.tolist() == [[0.0, 0.0, 1.0, 0.0], [2.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 3.0]]
