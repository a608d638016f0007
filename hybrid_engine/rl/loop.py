"""GRPO as a loop: `train` runs all steps with metrics and checkpoints, `Grpo.step` is one of them for a loop of one's
own.

    grpo = Grpo(worker, prompts, reward, config)
    for number in range(1, config.steps + 1):
        row = grpo.step(number)

All functions are collective. Random choices of a step follow from the seed and the step's number alone, so a run that
goes on from a checkpoint does what it would have done without the interruption.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hybrid_engine.config import HybridConfig, load_config
from hybrid_engine.errors import ArgumentError, ConfigError, Violation, shortened
from hybrid_engine.files.durable import naming
from hybrid_engine.rl import losses
from hybrid_engine.rl.grpo_config import GrpoConfig
from hybrid_engine.rl.run_files import Row, RunFiles
from hybrid_engine.switch.report import ReshardReport
from hybrid_engine.trainer.batches import build_batch
from hybrid_engine.trainer.companions import ReferenceModel
from hybrid_engine.trainer.worker import ActorHybridWorker

if TYPE_CHECKING:
    from hybrid_engine.backends.vllm import Completion, Sampling

Reward = Callable[[Any, "Completion"], float]
"""(prompt, completion) -> what the completion is worth; called on rank 0 alone, which tells the others."""
Evaluate = Callable[[ActorHybridWorker], Mapping[str, float]]
"""Figures for the row of a step; called on all ranks, in the worker's rollout context."""
OnStep = Callable[[Row], None]


def train(
    model: ActorHybridWorker | HybridConfig | Mapping[str, Any] | str | Path,
    prompts: Sequence[Any],
    reward: Reward,
    config: GrpoConfig,
    *,
    out: str | Path | None = None,
    evaluate: Evaluate | None = None,
    on_step: OnStep | None = None,
) -> list[Row]:
    """Train a model by GRPO, and print a line per step on rank 0.

    Args:
        model: a worker, or what `load_config` makes the configuration of one from, which is built here and shut down.
        prompts, reward, config: as of `Grpo`.
        out: directory, shared by all ranks, for metrics.jsonl, TensorBoard's events where that is installed, a
            checkpoint from which the same call goes on, and in the end `model`, a Hugging Face checkpoint.
        evaluate: called as `config.evaluate_every` says; what it returns joins the row of the step.
        on_step: called with the row of each step, on all ranks.

    Returns the rows of the steps that were taken here. Raises, on all ranks, ConfigError for an `out` that is not this
    run's, and what `Grpo.step` raises.
    """
    with ExitStack() as ends:
        if not isinstance(model, ActorHybridWorker):
            engines = model if isinstance(model, HybridConfig) else load_config(model)
            model = ends.enter_context(ActorHybridWorker(engines))
        grpo = Grpo(model, prompts, reward, config)
        record = ends.enter_context(closing(_Record(model, config, None if out is None else RunFiles(Path(out)))))
        rows = []
        for number in range(record.begin() + 1, config.steps + 1):
            row = grpo.step(number, evaluate if config.is_due(number, config.evaluate_every) else None)
            record.add(row)
            rows.append(row)
            if on_step is not None:
                on_step(row)
            if config.is_due(number, config.save_every):
                record.save(number)
        record.end()
    return rows


class Grpo:
    """Steps of GRPO on one rank.

    Args:
        worker: both engines, with the weights that a KL is to be measured from; in train or forward state.
        prompts: texts, chats, or lists of token ids; or mappings that have one of these under "prompt", beside what
            the reward wants to know of it.
        reward: given an element of `prompts` and a `Completion`.
        config: the settings.

    Raises ConfigError for settings or prompts that do not go with the worker.
    """

    def __init__(self, worker: ActorHybridWorker, prompts: Sequence[Any], reward: Reward, config: GrpoConfig) -> None:
        self.worker, self.prompts, self.reward, self.config = worker, list(prompts), reward, config
        limits = worker.train.limits
        rows = config.minibatches * limits.micro_batch_size * limits.dp_size
        if config.completions_per_step % rows:
            problem = (
                f"prompts_per_step x samples_per_prompt is {config.completions_per_step}, not a multiple of {rows}"
            )
            remedy = "minibatches x micro_batch_size x data parallel ranks: change one of them"
            raise ConfigError([Violation("GrpoConfig.minibatches", problem, remedy)])
        if not self.prompts:
            raise ConfigError([Violation("prompts", "there are none", "Pass a list of prompts")])
        self._learning_rate = config.learning_rate or worker.config.actor_config.optimizer.lr
        worker.set_learning_rate(self._learning_rate)  # fails now where the trainer has a schedule of its own
        self.reference: ReferenceModel | None = None
        if config.kl_coefficient:
            with worker.forward_context():
                self.reference = ReferenceModel(worker)
        self._loss = losses.policy_loss(
            config.clip_ratio,
            config.kl_coefficient,
            clip_ratio_high=config.clip_ratio_high,
            importance_cap=config.importance_cap,
        )
        self._tally = _Tally()
        worker.on_reshard_end(self._tally.switches.append)

    def step(self, number: int, evaluate: Evaluate | None = None) -> Row:
        """Draw, score and learn from the completions of step 1, 2, ...; then evaluate.

        Returns a row, the same on all ranks: see docs/rl.md. Raises ArgumentError for a reward that fails or is not a
        finite number, BatchError for completions that do not fit into `actor_config.seq_length`, and what the worker's
        methods raise.
        """
        worker, tally = self.worker, self._tally
        tally.begin()
        prompts = self._prompts_of(number)
        with worker.rollout_context(), tally.phase("generate"):
            asked = [one["prompt"] if isinstance(one, Mapping) else one for one in prompts]
            groups = worker.generate_sequences(asked, self._sampling(number))
        with tally.phase("reward"):
            rewards = self._rewards(prompts, groups)
        batch = self._batch(groups, rewards)
        if self.reference is not None:
            with self.reference.forward_context(), tally.phase("reference"):
                batch["ref_log_probs"] = self.reference.compute_log_probs(batch)
        with worker.train_context(), tally.phase("update"):
            batch["old_log_probs"] = worker.compute_log_probs(batch)
            report = self._update(batch, number)
        row = {"step": number, **_figures(batch, groups, rewards), **report}
        if evaluate is not None:
            with worker.rollout_context(), tally.phase("evaluate"):
                row |= {name: float(value) for name, value in evaluate(worker).items()}
        return {**row, **tally.end(worker)}

    def _prompts_of(self, number: int) -> list[Any]:
        """A step's share of the passes over all prompts."""
        count, size = self.config.prompts_per_step, len(self.prompts)
        places = [divmod(place, size) for place in range((number - 1) * count, number * count)]
        return [self.prompts[_order(self.config.seed, size, epoch)[index]] for epoch, index in places]

    def _sampling(self, number: int) -> Sampling:
        from hybrid_engine.backends.vllm import Sampling

        return Sampling(
            n=self.config.samples_per_prompt,
            temperature=self.config.temperature,
            max_tokens=self.config.max_tokens,
            stop_token_ids=self.config.stop_token_ids,
            stop=self.config.stop,
            seed=random.Random(f"{self.config.seed}/{number}/completions").getrandbits(62),
        )

    def _rewards(self, prompts: Sequence[Any], groups: Sequence[Sequence[Completion]]) -> torch.Tensor:
        """Rewards [P, n], by rank 0."""
        agreement, rewards = self.worker.job.agreement, list[float]()
        with agreement.phase("reward"):
            if self.worker.rank == 0:
                rewards = [
                    _reward_of(self.reward, prompt, one, f"prompt {index}, completion {number}")
                    for index, (prompt, group) in enumerate(zip(prompts, groups, strict=True))
                    for number, one in enumerate(group)
                ]
        return torch.tensor(agreement.gather(rewards, list[float], "reward")[0]).view(len(groups), -1)

    def _batch(self, groups: Sequence[Sequence[Completion]], rewards: torch.Tensor) -> dict[str, torch.Tensor]:
        completions = [one for group in groups for one in group]
        seq_length = self.worker.config.actor_config.seq_length
        batch = build_batch([one.prompt_token_ids for one in completions], completions, seq_length)
        lengths = torch.tensor([len(one.prompt_token_ids) + len(one.token_ids) - 1 for one in completions])
        batch["attention_mask"] = (torch.arange(seq_length) < lengths[:, None]).long()  # so that rows are cut
        batch["advantages"] = losses.group_advantages(rewards, scale=self.config.scale_rewards).flatten()
        batch["sampled_log_probs"] = losses.align_log_probs([one.logprobs for one in completions], batch["mask"])
        return batch

    def _update(self, batch: dict[str, torch.Tensor], number: int) -> dict[str, float]:
        """All optimizer steps of a step; the mean of their reports."""
        config, reports = self.config, list[dict[str, float]]()
        seed = random.Random(f"{config.seed}/{number}/minibatches").getrandbits(62)
        generator = torch.Generator().manual_seed(seed)
        rate = self._learning_rate * config.learning_rate_share(number)
        self.worker.set_learning_rate(rate)
        for _ in range(config.epochs):
            parts = losses.minibatches(batch, config.minibatches, generator, config.aggregation, config.max_tokens)
            reports += [self.worker.update(part, self._loss) for part in parts]
        means = {name: sum(report[name] for report in reports) / len(reports) for name in reports[0]}
        return {**means, "learning_rate": rate}


@functools.lru_cache(maxsize=2)  # a step may begin in one pass and end in the next
def _order(seed: int, size: int, epoch: int) -> list[int]:
    order = list(range(size))
    random.Random(f"{seed}/{epoch}/prompts").shuffle(order)
    return order


def _reward_of(reward: Reward, prompt: Any, completion: Completion, place: str) -> float:
    try:
        value = reward(prompt, completion)
        if math.isfinite(number := float(value)):
            return number
        problem = f"is {shortened(value)} for {place}"
    except Exception as error:
        violation = Violation("reward", f"{type(error).__name__} for {place}: {error}", "Return a number for each")
        raise ArgumentError([violation]) from error
    raise ArgumentError([Violation("reward", problem, "Return a finite number")])


def _figures(
    batch: Mapping[str, torch.Tensor], groups: Sequence[Sequence[Completion]], rewards: torch.Tensor
) -> dict[str, float]:
    """Figures of a step's completions."""
    deviations = rewards.std(dim=1, correction=0)
    ends = [one.finish_reason for group in groups for one in group]
    difference = (batch["sampled_log_probs"] - batch["old_log_probs"]).abs()[batch["mask"].bool()]
    return {
        "reward": rewards.mean().item(),
        "reward_std": deviations.mean().item(),
        "groups_agreeing": (deviations == 0).float().mean().item(),
        "response_tokens": batch["mask"].sum(dim=1).mean().item(),
        "truncated": ends.count("length") / len(ends),
        "sampled_difference": difference.mean().item(),
    }


class _Tally:
    """One rank's seconds and bytes of the step under way."""

    def __init__(self) -> None:
        self.switches: list[ReshardReport] = []
        self.begin()

    def begin(self) -> None:
        self._started, self._seconds = time.perf_counter(), dict[str, float]()
        self.switches.clear()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._seconds[f"{name}_seconds"] = time.perf_counter() - started

    def end(self, worker: ActorHybridWorker) -> dict[str, float]:
        """Bytes of all ranks together; seconds of the slowest."""
        own: dict[str, float] = {
            "bytes_received": sum(report.bytes_received for report in self.switches),
            "reshard_seconds": sum(report.seconds for report in self.switches),
            **self._seconds,
            "seconds": time.perf_counter() - self._started,
        }
        shares = worker.job.agreement.gather(own, dict[str, int | float], "metrics")
        total = max if worker.config.generate_config.servers else sum  # reports with servers are of all ranks
        return {name: (total if name == "bytes_received" else max)(share[name] for share in shares) for name in own}


class _Record:
    """Printed lines, files and checkpoints of a run: rank 0 writes, all ranks call."""

    def __init__(self, worker: ActorHybridWorker, config: GrpoConfig, files: RunFiles | None) -> None:
        self._worker, self._config, self._files = worker, config, files
        self._agreement, self._is_writer = worker.job.agreement, worker.rank == 0
        self._events: Any = None

    def close(self) -> None:
        """End TensorBoard's file."""
        if self._events is not None:
            self._events.close()

    def begin(self) -> int:
        """Restore the checkpoint, if there is one; return its step, or 0."""
        if self._files is None:
            return 0
        step = 0
        with self._agreement.phase("reading the run"), naming("preparing the run in", self._files.out):
            if self._is_writer:
                step = self._files.begin(self._config.shared())
                if importlib.util.find_spec("tensorboard"):
                    from torch.utils.tensorboard import SummaryWriter

                    self._events = SummaryWriter(str(self._files.out), purge_step=step + 1)
        step = self._agreement.gather(step, int, "reading the run")[0]
        if step:
            with self._worker.train_context():
                self._worker.load_checkpoint(self._files.checkpoint(step))
        return step

    def add(self, row: Row) -> None:
        """Print and write the row of a step."""
        with self._agreement.phase("writing the metrics"):
            if not self._is_writer:
                return
            shown = ("reward", "kl", "loss", "grad_norm", "response_tokens")
            figures = ", ".join(f"{name} {row[name]:.4g}" for name in shown if name in row)
            print(f"step {row['step']}: {figures}, {row['seconds']:.1f} s", flush=True)
            if self._files is not None:
                with naming("writing", self._files.metrics.path):
                    self._files.metrics.append(row)
            if self._events is not None:
                for name, value in row.items():
                    self._events.add_scalar(name, value, row["step"])
                self._events.flush()

    def save(self, step: int) -> None:
        """Write a checkpoint in place of the one before."""
        if self._files is None:
            return
        with self._worker.train_context():
            self._worker.save_checkpoint(self._files.checkpoint(step))
        with self._agreement.phase("completing the checkpoint"):
            if self._is_writer:
                self._files.complete(step, self._config.shared())

    def end(self) -> None:
        """Write the trained model for others to load."""
        if self._files is not None:
            with self._worker.train_context():
                self._worker.save_hf_checkpoint(self._files.out / "model")
