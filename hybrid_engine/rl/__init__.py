"""Reinforcement learning on one set of devices: GRPO and PPO as one loop, and its functions.

    train(model, prompts, reward, GrpoConfig(...), out="runs/mine")     loop.py

    before the engines are built: everything that would end the run later       run_checks.py

    Loop.learn(n)
      prompts           all ranks   a list, a function or a stream              prompt_source.py
      rollout_context   vLLM        samples_per_prompt completions of each prompt, or
                                    conversations with an environment           conversations.py,
                                                                       conversation_state.py
      tools             rank 0      functions that the model calls              tools.py
      queue             servers     with max_staleness: the next steps, while one is learned
                                                                                group_queue.py
      reward            rank 0      functions and coroutines of the user        rewards.py,
                                                                                user_callbacks.py
      forward_context   reference   its log-probabilities, if there is a KL term
      token_advantages  GRPO                                                    losses.py
      train_context     critic      PPO: values, advantages, value_loss         critic.py
      train_context     trainer     minibatches, policy_loss                    losses.py
                                    several completions in a row          packed_calls.py
    Loop.finish
      rollout_context   vLLM        evaluation
    out/                            metrics, and the checkpoint from which the
                                    same call resumes            run_files.py, run_record.py
      rows of metrics   all ranks   figures, seconds, bytes, memory             step_metrics.py
      completions       rank 0      texts and rewards of logged steps           completion_log.py
      trackers          rank 0      W&B, MLflow, Prometheus, ...                trackers.py
      terminal          rank 0      lines, a table of steps, a bar                  terminal.py
      signals           all ranks   end after a step, with a checkpoint         stop_signals.py

config.py has the options. The type of the configuration, `GrpoConfig` or `PpoConfig`, selects the
algorithm. run_settings.py reads a whole run from a file. docs/rl.md is the user's page.
"""

from __future__ import annotations

from hybrid_engine.rl.config import GrpoConfig, PpoConfig
from hybrid_engine.rl.conversation_state import Conversation
from hybrid_engine.rl.conversations import converse
from hybrid_engine.rl.loop import Loop, train
from hybrid_engine.rl.rewards import BatchReward, HeldOut
from hybrid_engine.rl.tools import ToolEnvironment, by_name

__all__ = [
    "BatchReward",
    "Conversation",
    "GrpoConfig",
    "HeldOut",
    "Loop",
    "PpoConfig",
    "ToolEnvironment",
    "by_name",
    "converse",
    "train",
]
