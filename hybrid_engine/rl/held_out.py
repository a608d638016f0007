"""Evaluation on prompts that are held out: the mean reward, and pass@k."""

from __future__ import annotations

from collections.abc import Sequence
from math import comb
from typing import TYPE_CHECKING, Any

from hybrid_engine.ports import Figures
from hybrid_engine.rl.config import LoopConfig
from hybrid_engine.rl.conversation_state import prompt_of
from hybrid_engine.rl.rewards import RewardFunctions, Rewards

if TYPE_CHECKING:
    from hybrid_engine.trainer.worker import ActorHybridWorker


class HeldOut:
    """An `evaluate` of `train`: draws completions of the same prompts each time.

        train(model, prompts, reward, config, evaluate=HeldOut(others, reward, config, samples=4))

    Figures: `held_out_reward`, the mean, and held_out_pass_K for K = 1, 2, 4, ... `samples`: the
    chance that one of K completions passes, without bias (arXiv:2107.03374).

    Args:
        prompts: as of `train`, in a list.
        reward: as of `train`.
        config: its max_tokens, stops, temperature and seed.
        samples: completions of each prompt. With 1 it is the most probable one.
        passing_reward: least reward of a completion that passes.
    """

    def __init__(
        self,
        prompts: Sequence[Any],
        reward: Rewards,
        config: LoopConfig,
        *,
        samples: int = 1,
        passing_reward: float = 1.0,
    ) -> None:
        self._prompts = prompts
        self._rewards = RewardFunctions(reward, config)
        self._config = config
        self._samples = samples
        self._passing_reward = passing_reward

    def __call__(self, worker: ActorHybridWorker) -> Figures:
        """Return the figures of the present weights. Collective, in the rollout context."""
        from hybrid_engine.backends.vllm import Sampling

        config = self._config
        sampling = Sampling(
            n=self._samples,
            temperature=config.temperature if self._samples > 1 else 0.0,
            max_tokens=config.max_tokens,
            stop_token_ids=config.stop_token_ids,
            stop=config.stop,
            seed=config.seed,
        )
        groups = worker.generate_sequences([*map(prompt_of, self._prompts)], sampling)
        numbers = range(len(self._prompts))
        totals = self._rewards.compute(worker.job, numbers, self._prompts, groups).totals
        num_passing = (totals >= self._passing_reward).sum(1).tolist()
        figures: Figures = {"held_out_reward": totals.nanmean().item()}
        k = 1
        while k <= self._samples:
            chances = [pass_at(k, self._samples, passing) for passing in num_passing]
            figures[f"held_out_pass_{k}"] = sum(chances) / len(chances)
            k *= 2
        return figures


def pass_at(k: int, num_samples: int, num_passing: int) -> float:
    """Return the chance that one of `k` of the samples passes, drawn without replacement."""
    return 1 - comb(num_samples - num_passing, k) / comb(num_samples, k)
