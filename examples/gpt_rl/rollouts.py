"""Rollouts as a dataset for the training loop of Megatron: sample i is a completion by vLLM.

    train_iters x global_batch_size samples in order       Megatron's sampler, also after a resume
    sample i = completion i % n of the prompt of group i // n
    every N optimizer steps (--resharding-interval):
        collect(inference)                                 completions, rewards and advantages of
                                                           the next N x global_batch_size samples
        the function that it returns                       log-probs under the reference
    Rollouts[i]                                            sample i as the loss needs it

Megatron's script gets `collect` as --resharding-callback.
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
"""(all samples, model chunks of the policy) -> log-probs [B, S] of the labels on every rank."""


@dataclass(frozen=True)
class RolloutSettings:
    """Settings of rollouts. Raises ConfigError for values that `Sampling` rejects.

    Attributes:
        data: directory with train.jsonl and held_out.jsonl.
        samples_per_prompt: n, the size of a group.
        max_tokens: longest completion, including its end token.
        batch_size: samples per optimizer step; a multiple of n.
        steps: optimizer steps between rollouts.
        seq_length: S.
        seed: seed of the order of prompts and of sampling.
    """

    data: Path
    samples_per_prompt: int
    max_tokens: int
    batch_size: int
    steps: int
    seq_length: int
    seed: int

    def __post_init__(self) -> None:
        _ = self.sampling  # raises before training starts

    @property
    def sampling(self) -> Sampling:
        """Sampling of the training samples."""
        return Sampling(
            n=self.samples_per_prompt, max_tokens=self.max_tokens, stop_token_ids=(task.END,)
        )


class Rollouts(torch.utils.data.Dataset[Batch]):
    """Samples of the next optimizer steps. Later samples do not exist yet.

    Args:
        settings: settings of rollouts.
        num_samples: samples of the whole run.
        num_consumed: samples consumed before the run was resumed; a multiple of the batch size.
        score_reference: None if the loss has no KL term.
        report: called with (steps done, figures) after every rollout, on every rank.
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
        self._first = num_consumed
        self._next = num_consumed
        self._batch: Batch = {}

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> Batch:
        """Return the tensors of a sample. Raises IndexError for a sample that was not drawn yet."""
        self._next = max(self._next, index + 1)
        row = index - self._first
        num_drawn = len(self._batch.get("advantages", ()))
        if not 0 <= row < num_drawn:
            raise IndexError(
                f"sample {index} was not drawn yet; there are {num_drawn} from {self._first} on. "
                "Was no rollout made before the first step, or was a step skipped since?"
            )
        return {name: tensor[row] for name, tensor in self._batch.items()}

    def collect(self, inference: InferenceEngine) -> Callable[[Sequence[Any]], None] | None:
        """Draw the samples of the next steps; return a function to call in training. Collective."""
        settings = self._settings
        # a data parallel rank reads only its share of a step, so round up to whole steps
        self._first = -(-self._next // settings.batch_size) * settings.batch_size
        num_samples = min(settings.steps * settings.batch_size, self._num_samples - self._first)
        first_group = self._first // settings.samples_per_prompt
        num_groups = num_samples // settings.samples_per_prompt
        problems = [self._problem(first_group + group) for group in range(num_groups)]
        prompts = [task.encode(problem.prompt) for problem in problems]
        seed = random.Random(f"{settings.seed} {self._first}").getrandbits(62)
        sampling = replace(settings.sampling, seed=seed)
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
        """Return the problem of a group: each epoch has every problem once, in random order."""
        epoch, position = divmod(group, len(self._problems))
        order = _order(len(self._problems), self._settings.seed, epoch)
        return self._problems[order[position]]

    def _figures(
        self,
        inference: InferenceEngine,
        problems: Sequence[task.Problem],
        groups: Sequence[Sequence[Completion]],
    ) -> dict[str, float]:
        """Return the mean reward of the samples and the greedy accuracy on held-out problems."""
        greedy = Sampling(
            max_tokens=self._settings.max_tokens, temperature=0.0, stop_token_ids=(task.END,)
        )
        prompts = [task.encode(problem.prompt) for problem in self._held_out]
        answers = inference.generate_over_replicas(prompts, greedy)
        figures = {"accuracy": task.accuracy(self._held_out, answers)}
        if groups:
            figures["reward"] = task.rewards(problems, groups).mean().item()
        return figures


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
    """Build a batch of all samples, with a placeholder for `ref_log_probs`."""
    completions = [completion for group in groups for completion in group]
    repeated = [prompt for prompt, group in zip(prompts, groups, strict=True) for _ in group]
    batch = build_batch(repeated, completions, seq_length, task.PADDING)
    del batch["weights"]
    log_probs = losses.align_log_probs([completion.logprobs for completion in completions], batch)
    advantages = losses.group_advantages(task.rewards(problems, groups)).flatten()
    return {
        **batch,
        "old_log_probs": log_probs,
        "ref_log_probs": log_probs,
        "advantages": advantages,
    }


class Demonstrations(torch.utils.data.Dataset[Batch]):
    """Demonstrations of random problems for the warm-up; `data` has the file train.jsonl."""

    def __init__(self, data: Path, num_samples: int, seq_length: int, seed: int) -> None:
        self._problems = task.load_problems(data / "train.jsonl")
        self._num_samples = num_samples
        self._seq_length = seq_length
        self._seed = seed

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> Batch:
        """Return tokens, labels [S] int64; mask [S] fp32."""
        problem = random.Random(f"{self._seed} {index}").choice(self._problems)
        batch = task.demonstrations([problem], self._seq_length)
        return {name: batch[name][0] for name in ("tokens", "labels", "mask")}


_rollouts: Rollouts | None = None


def install(rollouts: Rollouts) -> Rollouts:
    """Set the rollouts that `collect` fills."""
    global _rollouts
    _rollouts = rollouts
    return rollouts


def collect(inference: InferenceEngine) -> Callable[[Sequence[Any]], None] | None:
    """Collect into the installed rollouts; the value of --resharding-callback."""
    if _rollouts is None:
        raise RuntimeError("no rollouts are installed; run examples/gpt_rl/pretrain_gpt_rl.py")
    return _rollouts.collect(inference)
