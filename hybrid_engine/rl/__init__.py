"""Reinforcement learning on one set of devices: GRPO as a loop, and the functions that it is made of.

    train(model, prompts, reward, GrpoConfig(...), out="runs/mine")     loop.py: every step, metrics, resuming

    Grpo.step(n)   rollout_context   vLLM          samples_per_prompt completions of each prompt
                   reward            rank 0        group_advantages                             (losses.py)
                   forward_context   reference     with a KL term alone
                   train_context     the trainer   minibatches, policy_loss                     (losses.py)
    out/           run_files.py: the rows of metrics, and the checkpoint from which the same call goes on

grpo_config.py has the options.

docs/rl.md is the user's page.
"""

from __future__ import annotations

from hybrid_engine.rl.grpo_config import GrpoConfig
from hybrid_engine.rl.loop import Grpo, train

__all__ = ["Grpo", "GrpoConfig", "train"]
