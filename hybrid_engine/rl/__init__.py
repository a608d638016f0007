"""Reinforcement learning on one set of devices: GRPO and PPO as one loop, and the functions that it is made of.

    train(model, prompts, reward, GrpoConfig(...), out="runs/mine")     loop.py: every step, metrics, resuming

    Loop.learn(n)  rollout_context   vLLM          samples_per_prompt completions of each prompt, or conversations with
                                                   an environment                                 (conversations.py)
                   reward            rank 0        as environments are: functions, or coroutines      (asking.py)
                   forward_context   reference     with a KL term alone
                   group_advantages  GRPO                                                        (losses.py)
                   train_context     critic        PPO: values, advantages, value_loss           (critic.py)
                   train_context     the trainer   minibatches, policy_loss                      (losses.py)
    Loop.finish    rollout_context   vLLM          the evaluation
    out/           run_files.py: the rows of metrics, and the checkpoint from which the same call goes on

config.py has the options: `GrpoConfig` or `PpoConfig`, whose type is the algorithm.

docs/rl.md is the user's page.
"""

from __future__ import annotations

from hybrid_engine.rl.config import GrpoConfig, PpoConfig
from hybrid_engine.rl.conversations import Conversation, converse
from hybrid_engine.rl.loop import Loop, train

__all__ = ["Conversation", "GrpoConfig", "Loop", "PpoConfig", "converse", "train"]
