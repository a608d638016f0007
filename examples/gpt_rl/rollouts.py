"""Rollouts as the dataset of Megatron's own training loop: sample i of the run is a completion that vLLM drew.

    train_iters x global_batch_size samples, in order         Megatron's sampler, its resume included
    sample i = completion i % n of the prompt of group i // n
                                                    ┌─ collect(inference): completions, rewards, advantages
    every N optimizer steps (--resharding-interval) ┤       of the next N x global_batch_size samples
                                                    └─ the returned function: log-probs under the reference
    Rollouts[i]                                     what the loss reads of sample i

`collect` is given to Megatron's script as --resharding-callback.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from examples.gpt_rl import task
from hybrid_engine import Completion, Sampling, build_batch
from hybrid_engine.rl import losses

if TYPE_CHECKING:
    from hybrid_engine.backends.vllm import InferenceEngine

Batch = dict[str, torch.Tensor]
ScoreReference = Callable[[Batch, Sequence[Any]], torch.Tensor]
"""(all samples, the policy's model chunks) -> log-probabilities [B, S] of the labels, the same on every rank."""


@dataclass(frozen=True)
class RolloutSettings:
    """How rollouts are drawn. Raises ConfigError for what `Sampling` refuses, before anything is trained.

    Attributes:
        data: directory with train.jsonl and held_out.jsonl.
        samples_per_prompt: n, the size of a group.
        max_tokens: of a completion, its end token included.
        batch_size: samples of an optimizer step; a multiple of n.
        steps: optimizer steps from one rollout to the next.
        seq_length: S.
        seed: of the order of prompts and of the samples.
    """

    data: Path
    samples_per_prompt: int
    max_tokens: int
    batch_size: int
    steps: int
    seq_length: int
    seed: int

    def __post_init__(self) -> None:
        _ = self.sampling

    @property
    def sampling(self) -> Sampling:
        """Of the samples."""
        return Sampling(n=self.samples_per_prompt, max_tokens=self.max_tokens, stop_token_ids=(task.END,))


class Rollouts(torch.utils.data.Dataset[Batch]):
    """The samples that the next optimizer steps learn from; those of steps to come are not there yet.

    Args:
        settings: see there.
        num_samples: of the whole run.
        num_consumed: samples that the run learnt from before it was resumed, all of whole steps.
        score_reference: None where the loss has no KL term.
        report: told (steps so far, figures) of every rollout, on every rank.
    """

    def __init__(
        self,
        settings: RolloutSettings,
        num_samples: int,
        num_consumed: int,
        score_reference: ScoreReference | None,
        report: Callable[[int, dict[str, float]], None],
    ) -> None:
        self._settings = settings
        self._num_samples = num_samples
        self._score_reference = score_reference
        self._report = report
        self._problems = task.load_problems(settings.data / "train.jsonl")
        self._held_out = task.load_problems(settings.data / "held_out.jsonl")
        self._first = self._next = num_consumed
        self._batch: Batch = {}

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> Batch:
        """tokens, labels [S] int64; mask, old_log_probs, ref_log_probs [S] fp32; advantages [].

        Raises IndexError for a sample of a step that is not drawn yet.
        """
        self._next = max(self._next, index + 1)
        row = index - self._first
        if not 0 <= row < len(self._batch.get("advantages", ())):
            raise IndexError(
                f"sample {index} was not drawn yet; there are {len(self._batch.get('advantages', ()))} from "
                f"{self._first} on. Was no rollout made before the first step, or was a step skipped since?"
            )
        return {name: tensor[row] for name, tensor in self._batch.items()}

    def collect(self, inference: InferenceEngine) -> Callable[[Sequence[Any]], None] | None:
        """Draw and judge the samples of the next steps. Collective. Returns what is left to do in training."""
        settings = self._settings
        self._first = -(-self._next // settings.batch_size) * settings.batch_size
        num_samples = min(settings.steps * settings.batch_size, self._num_samples - self._first)
        first_group = self._first // settings.samples_per_prompt
        problems = [self._problem(first_group + group) for group in range(num_samples // settings.samples_per_prompt)]
        prompts = [task.encode(problem.prompt) for problem in problems]
        sampling = replace(settings.sampling, seed=random.Random(f"{settings.seed} {self._first}").getrandbits(62))
        groups = inference.generate_over_replicas(prompts, sampling) if prompts else []
        self._batch = _batch(prompts, groups, problems, settings.seq_length) if prompts else {}
        self._report(self._first // settings.batch_size, self._figures(inference, problems, groups))
        if self._score_reference is None or not self._batch:
            return None
        score = self._score_reference

        def add_reference(policy: Sequence[Any]) -> None:
            self._batch["ref_log_probs"] = score(self._batch, policy)

        return add_reference

    def _problem(self, group: int) -> task.Problem:
        """Every problem once before any comes again, in an order that the seed gives."""
        epoch, place = divmod(group, len(self._problems))
        return self._problems[_order(len(self._problems), self._settings.seed, epoch)[place]]

    def _figures(
        self, inference: InferenceEngine, problems: Sequence[task.Problem], groups: Sequence[Sequence[Completion]]
    ) -> dict[str, float]:
        """Mean reward of the samples, and the share of held-out problems answered rightly, greedily."""
        greedy = Sampling(max_tokens=self._settings.max_tokens, temperature=0.0, stop_token_ids=(task.END,))
        prompts = [task.encode(problem.prompt) for problem in self._held_out]
        answers = inference.generate_over_replicas(prompts, greedy)
        figures = {"accuracy": task.accuracy(self._held_out, answers)}
        return figures | ({"reward": task.rewards(problems, groups).mean().item()} if groups else {})


@functools.cache
def _order(num_problems: int, seed: int, epoch: int) -> list[int]:
    order = list(range(num_problems))
    random.Random(f"{seed} {epoch}").shuffle(order)
    return order


def _batch(
    prompts: Sequence[Sequence[int]],
    groups: Sequence[Sequence[Completion]],
    problems: Sequence[task.Problem],
    seq_length: int,
) -> Batch:
    """All samples, group after group; the reference's log-probs are those of the samples until it has scored."""
    pairs = [(prompt, completion) for prompt, group in zip(prompts, groups, strict=True) for completion in group]
    batch = build_batch(
        [prompt for prompt, _ in pairs], [completion for _, completion in pairs], seq_length, task.PADDING
    )
    del batch["weights"]
    old_log_probs = losses.align_log_probs([completion.logprobs for _, completion in pairs], batch)
    advantages = losses.group_advantages(task.rewards(problems, groups)).flatten()
    return {**batch, "old_log_probs": old_log_probs, "ref_log_probs": old_log_probs, "advantages": advantages}


class Demonstrations(torch.utils.data.Dataset[Batch]):
    """Samples to imitate, for the warm-up: sample i is one of the problems, in an order that the seed gives.

    Args:
        data: directory with train.jsonl.
        num_samples: of the whole run.
        seq_length: S.
        seed: of the order.
    """

    def __init__(self, data: Path, num_samples: int, seq_length: int, seed: int) -> None:
        self._problems = task.load_problems(data / "train.jsonl")
        self._num_samples, self._seq_length, self._seed = num_samples, seq_length, seed

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> Batch:
        """tokens, labels [S] int64; mask [S] fp32."""
        problem = random.Random(f"{self._seed} {index}").choice(self._problems)
        batch = task.demonstrations([problem], self._seq_length)
        return {name: batch[name][0] for name in ("tokens", "labels", "mask")}


_rollouts: Rollouts | None = None


def install(rollouts: Rollouts) -> Rollouts:
    """Make these the rollouts that `collect` fills."""
    global _rollouts
    _rollouts = rollouts
    return rollouts


def collect(inference: InferenceEngine) -> Callable[[Sequence[Any]], None] | None:
    """For --resharding-callback. Raises RuntimeError when no rollouts were installed."""
    if _rollouts is None:
        raise RuntimeError("no rollouts are installed; run examples/gpt_rl/pretrain_gpt_rl.py")
    return _rollouts.collect(inference)
