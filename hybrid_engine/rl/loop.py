"""GRPO and PPO as one loop: `train` runs all steps with metrics and checkpoints, `Loop` its parts.

    loop = Loop(worker, prompts, reward, config)
    for row in loop.run(files):                     all steps, resuming from the newest checkpoint
        ...
    loop.close()                                    if the worker is used further without the loop

or step by step:

    row = loop.learn(number)                        draw, score, learn
    loop.save(files, row)                           before `finish`: to save, training state is
                                                    needed on the device, and `finish` switches
    row = loop.finish(row, evaluate)                evaluate with the new weights

All functions except `close` are collective. The random choices of a step depend only on the seed
and the number of the step, so a run that resumes from a checkpoint repeats an uninterrupted run.
"""

from __future__ import annotations

import functools
import inspect
import json
import random
import weakref
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import torch

from hybrid_engine.backends.huggingface import weights_digest
from hybrid_engine.config import HybridConfig, load_config
from hybrid_engine.errors import ArgumentError, ConfigError, Violation
from hybrid_engine.files.documents import given_path
from hybrid_engine.files.durable import naming
from hybrid_engine.ports import Batch
from hybrid_engine.ranks.job import Job
from hybrid_engine.rl import losses
from hybrid_engine.rl.config import (
    GrpoConfig,
    PpoConfig,
)
from hybrid_engine.rl.conversations import Environment, converse, prompt_of, unknown_arguments
from hybrid_engine.rl.critic import Critic
from hybrid_engine.rl.run_files import Progress, Row, RunFiles
from hybrid_engine.rl.run_record import RunRecord
from hybrid_engine.rl.step_metrics import (
    Groups,
    OnPhase,
    StepMeter,
    add_measurements,
    completion_figures,
    evaluation_figures,
)
from hybrid_engine.rl.user_callbacks import is_coroutine_function, rewards_of, run_callbacks
from hybrid_engine.trainer.batches import build_batch
from hybrid_engine.trainer.reference_and_critic import ReferenceModel
from hybrid_engine.trainer.worker import ActorHybridWorker

if TYPE_CHECKING:
    from hybrid_engine.backends.vllm import Sampling
    from hybrid_engine.backends.vllm.prompts import ChatArguments

Prompts = Sequence[Any] | Callable[[int], Sequence[Any]]
"""All prompts, or (number of a step) -> the prompts of that step."""
Reward = Callable[[Any, Any], float | Awaitable[float]]
"""(prompt, completion) -> reward, a number as `user_callbacks.rewards_of` accepts it.

Called on rank 0 only, which sends the rewards to the other ranks. The calls of a coroutine function
run concurrently. With an environment the second argument is a `Conversation`.
"""
Evaluate = Callable[[ActorHybridWorker], Mapping[str, float]]
"""Figures for the row of a step; called on all ranks, in the worker's rollout context."""
PolicyLoss = Callable[[Batch, torch.Tensor], losses.Loss]
"""(micro batch, log_probs [b, S] with gradient) -> (scalar loss, figures).

It reads the columns that `losses.policy_loss` reads. `losses.weighted_mean(values, micro_batch["weights"])`
is the mean that `aggregation` names, independent of micro batches and ranks.
"""
Advantages = Callable[[torch.Tensor, Groups], torch.Tensor]
"""(rewards [P, n], the P groups of n completions or conversations) -> advantages [P, n].

Called on every rank, with the same arguments; it must return the same on all.
"""
OnStep = Callable[[Row], None]
ShouldStop = Callable[[], bool]


def train(
    model: ActorHybridWorker | HybridConfig | Mapping[str, Any] | str | Path,
    prompts: Prompts,
    reward: Reward,
    config: GrpoConfig | PpoConfig,
    *,
    out: str | Path | None = None,
    evaluate: Evaluate | None = None,
    on_step: OnStep | None = None,
    should_stop: ShouldStop = lambda: False,
    environment: Environment | None = None,
    loss: PolicyLoss | None = None,
    advantages: Advantages | None = None,
    **chat: Unpack[ChatArguments],
) -> list[Row]:
    """Train a model by GRPO or PPO, by the type of `config`; rank 0 prints a line per step.

    Args:
        model: a worker, or the configuration of a worker in any form that `load_config` accepts.
            A worker that is built here is also shut down here.
        prompts, reward, config, environment, loss, advantages, chat: as of `Loop`.
        out: directory, shared by all ranks, for metrics.jsonl, TensorBoard's events (if it is
            installed), a checkpoint from which the same call resumes, and finally `model`, a
            Hugging Face checkpoint.
        evaluate, should_stop: as of `Loop.run`.
        on_step: called with the row of each step, on all ranks.

    Returns the rows of the steps that this call ran.

    Raises, on all ranks, ConfigError if `out` has another run or another job writes to it, and the
    errors of `Loop` and `Loop.learn`.
    """
    _reject_coroutine_functions(
        prompts=prompts,
        evaluate=evaluate,
        on_step=on_step,
        should_stop=should_stop,
        loss=loss,
        advantages=advantages,
    )
    with ExitStack() as ends:
        files = None if out is None else RunFiles(given_path(out, "out"))
        if isinstance(model, ActorHybridWorker):
            record = RunRecord(model.job, config, model.config, files, ends)
        else:
            engines = model if isinstance(model, HybridConfig) else load_config(model)
            job = ends.enter_context(closing(Job.join(engines.generate_config.timeout_seconds)))
            # Check the run before the engines are built, which takes minutes.
            record = RunRecord(job, config, engines, files, ends)
            model = ends.enter_context(ActorHybridWorker(engines, job=job))
        loop = Loop(
            model,
            prompts,
            reward,
            config,
            environment=environment,
            loss=loss,
            advantages=advantages,
            **chat,
        )
        ends.enter_context(closing(loop))
        record.begin()
        rows = []
        # `run` continues when the next row is requested, so a row is recorded before the next step
        # begins.
        for row in loop.run(files, evaluate=evaluate, should_stop=should_stop):
            record.add(row)
            rows.append(row)
            if on_step is not None:
                on_step(row)
        # Not after `should_stop`: then the run has no final model yet.
        if files is not None and loop.done == config.steps:
            with model.train_context():
                model.save_hf_checkpoint(files.out / "model")
    return rows


class Loop:
    """Steps of GRPO or PPO on one rank.

    Args:
        worker: both engines. A KL term is measured from the present weights, and PPO's critic is
            initialized from them.
        prompts: texts, chats or lists of token ids, or mappings that have one of these under
            "prompt" and further values for the reward. Each pass over all prompts has a new order.
            If it is a function, it is called for the prompts of each step, on every rank; it must
            return the same prompts on all ranks, and for every call with the same step.
        reward: called with an element of `prompts` and a `Completion`, or with an environment, a
            `Conversation`.
        config: the settings; their type selects the algorithm.
        on_phase: called as a phase begins, on every rank.
        environment: makes each completion a conversation of several turns; as of `converse`.
        loss: loss of the policy, in place of the one by the settings.
        advantages: advantages of GRPO, in place of those by the settings.
        chat: `tools` and `chat_template_kwargs`, as of `HybridEngine.generate`.

    Raises ConfigError for settings or prompts that do not fit the worker, for example prompts that
    leave no room for `max_tokens` in vLLM or in `actor_config.seq_length`. If `prompts` is a
    function, `learn` raises the error.

    Attributes:
        done: number of the last step that was run or loaded.
    """

    def __init__(
        self,
        worker: ActorHybridWorker,
        prompts: Prompts,
        reward: Reward,
        config: GrpoConfig | PpoConfig,
        *,
        on_phase: OnPhase = lambda phase, step: None,
        environment: Environment | None = None,
        loss: PolicyLoss | None = None,
        advantages: Advantages | None = None,
        **chat: Unpack[ChatArguments],
    ) -> None:
        self.worker = worker
        self.prompts = prompts if callable(prompts) else list(prompts)
        self.reward = reward
        self.config = config
        self.environment = environment
        self.done = 0
        self._chat = chat
        known_arguments = [*inspect.signature(train).parameters, "on_phase"]
        violations = [*unknown_arguments(chat, known_arguments)]
        violations += _size_violations(worker, config)
        if environment is None and config.max_tokens_per_turn is not None:
            key = f"{config.name}.max_tokens_per_turn"
            problem = f"is {config.max_tokens_per_turn}, but there is no `environment`"
            remedy = "Pass an environment, or set max_tokens"
            violations.append(Violation(key, problem, remedy, code="needs-environment"))
        if advantages is not None and isinstance(config, PpoConfig):
            problem = "are a function, but PPO's come from its critic"
            remedy = "Use GrpoConfig, or leave them out"
            violations.append(Violation("advantages", problem, remedy, code="conflicting-keys"))
        if violations:
            raise ConfigError(violations)
        if not callable(self.prompts):
            if not self.prompts:
                problem, remedy = "the list is empty", "Pass a list of prompts"
                raise ConfigError([Violation("prompts", problem, remedy, code="no-prompts")])
            self._require_room(self.prompts)
        self._learning_rate = config.learning_rate or worker.config.actor_config.optimizer.lr
        # Fails now, not in the first step, if the trainer has its own schedule.
        worker.set_learning_rate(self._learning_rate)
        self.critic = Critic(worker, config) if isinstance(config, PpoConfig) else None
        self.reference: ReferenceModel | None = None
        self._reference_digest: str | None = None
        if config.kl_coefficient:
            # The reference is a copy of the weights before the first step. The digest goes into
            # each checkpoint, because a resumed run must measure its KL from the same weights.
            with worker.forward_context():
                self.reference = ReferenceModel(worker)
                with worker.job.agreement.phase("adding adapters"):
                    weights = worker.train.weights.merged
                self._reference_digest = weights_digest(weights, worker.job)
        self._loss = loss or config.policy_loss()
        self._advantages = advantages
        self._meter = StepMeter(on_phase)
        self._count_switch = worker.on_reshard_end(self._meter.switches.append)
        # Weak: once the worker is shut down there is no switch left to remove the hook from.
        self._switch = weakref.ref(worker.sharding)

    def close(self) -> None:
        """Remove the hook from the worker, which outlives this loop. Idempotent; not collective."""
        switch = self._switch()
        if switch is not None:
            switch.remove_hook(self._count_switch)

    def run(
        self,
        files: RunFiles | None = None,
        *,
        evaluate: Evaluate | None = None,
        should_stop: ShouldStop = lambda: False,
    ) -> Iterator[Row]:
        """Run the remaining steps, saving every `config.save_every` steps; yield the row of each.

        Args:
            files: files of the run, after `RunFiles.begin`. Rank 0 must append a row to
                `files.metrics` before it requests the next one. If the row of a step was lost
                after its checkpoint, it is yielded again.
            evaluate: called every `config.evaluate_every` steps; its figures are added to the row.
            should_stop: called on every rank before each step and after it was learned. If it
                returns True on any rank, the run ends with a checkpoint of the last step.

        Raises ConfigError if the run measures its KL from weights other than those with which the
        worker began.
        """
        config = self.config

        def finished(row: Row) -> Row:
            is_due = config.is_due(row["step"], config.evaluate_every)
            return self.finish(row, evaluate if is_due else None)

        is_saved = True
        newest = None if files is None else self._newest(files)
        if files is not None and newest is not None:
            progress, has_row = newest
            self._require_same_reference(files, progress)
            self.load(files, progress.step)
            # Killed between checkpoint and row: the evaluation of that step is repeated.
            if not has_row:
                yield finished(progress.row)
            elif evaluate is not None and config.is_due(progress.step, config.evaluate_every):
                # The uninterrupted run ended this step with an evaluation. Repeat its switch, so
                # that the bytes of that switch are not counted in the next step.
                with self.worker.rollout_context():
                    pass
        must_stop = False
        while self.done < config.steps and not (must_stop or self._must_stop(should_stop)):
            row = self.learn(self.done + 1)
            # Checked before saving, so that a stopped run always has one of its last step.
            must_stop = self._must_stop(should_stop)
            is_saved = files is None or config.is_due(self.done, config.save_every) or must_stop
            if files is not None and is_saved:
                self.save(files, row)
            yield finished(row)
        # `should_stop` ended the loop before a step, so the last step may have no checkpoint yet.
        if files is not None and not is_saved:
            self.save(files, row)

    def learn(self, number: int) -> Row:
        """Draw, score and learn from the completions of step `number`; the first step is 1.

        Returns a row, the same on all ranks; docs/rl.md describes its columns.

        Raises ArgumentError for a reward that fails or is not a finite number, and the errors of
        the worker's methods.
        """
        worker, config, meter = self.worker, self.config, self._meter
        meter.begin(number)
        names, prompts = self._prompts_of(number)
        if callable(self.prompts):
            self._require_room(prompts)
        with worker.rollout_context(), meter.phase("generate"):
            groups = self._draw(names, prompts, self._sampling(number))
        with meter.phase("reward"):
            rewards = self._rewards(names, prompts, groups)
        batch = self._batch(groups)
        if self.reference is not None:
            with self.reference.forward_context(), meter.phase("score"):
                batch["ref_log_probs"] = self.reference.compute_log_probs(batch)
        learning_rate = self._learning_rate * config.learning_rate_share(number)
        worker.set_learning_rate(learning_rate)
        report: dict[str, float] = {}
        # Critic and actor take turns on the device, so the critic's optimizer steps are complete
        # before the actor's training state comes back.
        if self.critic is not None:
            with meter.phase("critic"):
                generator = self._generator(number, "critic's minibatches")
                report |= self.critic.learn(batch, rewards.flatten(), number, generator)
        elif isinstance(config, GrpoConfig):
            batch["advantages"] = self._advantages_of(config, rewards, groups).flatten()
        with worker.train_context():
            with meter.phase("score"):
                batch["old_log_probs"] = worker.compute_log_probs(batch)
            with meter.phase("update"):
                # At first the critic's values are arbitrary, and so are the advantages.
                if not isinstance(config, PpoConfig) or number > config.critic_warmup_steps:
                    report |= self._update(batch, number)
        self.done = number
        return {
            "step": number,
            **completion_figures(batch, groups, rewards),
            **report,
            "learning_rate": learning_rate,
            "weight_version": worker.train.version,
            **meter.take(worker),
        }

    def finish(self, row: Row, evaluate: Evaluate | None = None) -> Row:
        """Evaluate the weights of a step, and return its complete row.

        Seconds, bytes and memory since `learn` are added to the row. A figure whose name is a
        column of the row becomes `held_out_NAME`.

        Raises ArgumentError if `evaluate` does not return a mapping of names to numbers.
        """
        row = dict(row)
        figures: dict[str, float] = {}
        if evaluate is not None:
            with self.worker.rollout_context(), self._meter.phase("evaluate"):
                figures = evaluation_figures(evaluate(self.worker))
        add_measurements(row, self._meter.take(self.worker))
        named = {f"held_out_{name}" if name in row else name: figures[name] for name in figures}
        return row | named

    def save(self, files: RunFiles, row: Row) -> None:
        """Write a checkpoint of the step of `row`, from which `run` resumes."""
        step = row["step"]
        with self._meter.phase("checkpoint"), self.worker.train_context():
            self.worker.save_checkpoint(files.weights(step))
            if self.critic is not None:
                self.critic.save(files.critic(step))
            # Last: a checkpoint counts once it is completed.
            with self.worker.job.agreement.phase("completing the checkpoint"):
                if self.worker.rank == 0:
                    files.complete(Progress(step, row, self._reference_digest))

    def load(self, files: RunFiles, step: int) -> None:
        """Load the checkpoint of a step."""
        self.done = step
        self._meter.step = step
        with self._meter.phase("checkpoint"):
            with self.worker.train_context():
                self.worker.load_checkpoint(files.weights(step))
            if self.critic is not None:
                self.critic.load(files.critic(step))

    def _newest(self, files: RunFiles) -> tuple[Progress, bool] | None:
        """Return the newest checkpoint and whether its row was written, as rank 0 reads them."""
        agreement = self.worker.job.agreement
        local = ""
        with agreement.phase("reading the run"), naming("reading the run in", files.out):
            if self.worker.rank == 0:
                progress = files.progress()
                if progress is not None:
                    has_row = files.metrics.has(progress.step)
                    local = json.dumps([asdict(progress), has_row])
        # Rank 0 decides: on a shared file system ranks can see different states of a directory.
        text = agreement.gather(local, str, "reading the run")[0]
        if not text:
            return None
        values, has_row = json.loads(text)
        return Progress(**values), has_row

    def _require_same_reference(self, files: RunFiles, progress: Progress) -> None:
        """Raise ConfigError if the run measures its KL from other weights than the worker's.

        Runs of older versions have no digest of these weights and are accepted.
        """
        before, now = progress.reference, self._reference_digest
        if before is not None and before != now:
            problem = (
                f"the run in {files.out} measures its KL from weights with digest {before}; the "
                f"worker's have {now}"
            )
            remedy = "Build a new worker, with the model, seed and weights that the run began with"
            raise ConfigError([Violation("model", problem, remedy, code="different-reference")])

    def _must_stop(self, should_stop: ShouldStop) -> bool:
        """Return whether `should_stop` is True on any rank. Collective."""
        return self.worker.job.agreement.total(int(should_stop())) > 0

    def _prompts_of(self, number: int) -> tuple[Sequence[int], list[Any]]:
        """Return the prompts of a step and their indices, which name them in messages."""
        count = self.config.prompts_per_step
        if callable(self.prompts):
            prompts = list(self.prompts(number))
            if len(prompts) != count:
                problem = f"{len(prompts)} for step {number}"
                remedy = f"Return {count}, which is prompts_per_step"
                raise ArgumentError([Violation("prompts", problem, remedy, code="wrong-length")])
            return range(count), prompts
        # Positions in the sequence of all passes over the prompts; a step may span two passes.
        size = len(self.prompts)
        indices = []
        for position in range((number - 1) * count, number * count):
            epoch, offset = divmod(position, size)
            indices.append(_order(self.config.seed, size, epoch)[offset])
        return indices, [self.prompts[index] for index in indices]

    def _require_room(self, prompts: Sequence[Any]) -> None:
        """Raise ConfigError for prompts that leave no room for `max_tokens`, in vLLM or a row."""
        from hybrid_engine.backends.vllm.prompts import token_ids_of

        inference = self.worker.inference
        max_tokens = self.config.max_tokens
        plain_prompts = [prompt_of(prompt) for prompt in prompts]
        token_ids = token_ids_of(plain_prompts, inference.tokenizer, chat=self._chat)
        inference.check_prompts(token_ids, max_tokens)
        # Labels are shifted by one token, so a row of seq_length has room for one more token.
        limit = self.worker.config.actor_config.seq_length + 1
        lengths = [len(ids) for ids in token_ids]
        too_long = [index for index, length in enumerate(lengths) if length + max_tokens > limit]
        if too_long:
            longest = max(too_long, key=lengths.__getitem__)
            problem = (
                f"{len(too_long)} of {len(prompts)} are too long, the longest is prompts[{longest}]"
                f": {lengths[longest]} tokens and {max_tokens} of max_tokens, but seq_length has "
                f"room for {limit}"
            )
            remedy = "Raise actor_config.seq_length, lower max_tokens, or leave them out"
            raise ConfigError([Violation("prompts", problem, remedy, code="prompts-too-long")])

    def _sampling(self, number: int) -> Sampling:
        from hybrid_engine.backends.vllm import Sampling

        return Sampling(
            n=self.config.samples_per_prompt,
            temperature=self.config.temperature,
            max_tokens=self.config.max_tokens,
            stop_token_ids=self.config.stop_token_ids,
            stop=self.config.stop,
            seed=self._random(number, "samples").getrandbits(62),
        )

    def _draw(self, names: Sequence[int], prompts: Sequence[Any], sampling: Sampling) -> Groups:
        """Draw the completions, or hold the conversations, of each prompt."""
        if self.environment is None:
            plain_prompts = [prompt_of(prompt) for prompt in prompts]
            return self.worker.generate_sequences(plain_prompts, sampling, **self._chat)
        return converse(
            self.worker,
            prompts,
            sampling,
            self.environment,
            max_tokens_per_turn=self.config.max_tokens_per_turn,
            names=names,
            **self._chat,
        )

    def _rewards(
        self, names: Sequence[int], prompts: Sequence[Any], groups: Groups
    ) -> torch.Tensor:
        """Compute the rewards [P, n] on rank 0, and send them to all ranks."""
        job = self.worker.job
        local: list[float] = []
        with job.agreement.phase("reward"):
            if self.worker.rank == 0:
                calls = [
                    (f"prompt {name}, completion {number}", self.reward, (prompt, completion))
                    for name, prompt, group in zip(names, prompts, groups, strict=True)
                    for number, completion in enumerate(group)
                ]
                values = run_callbacks("reward", calls, job.timeout_seconds)
                local = rewards_of(values, [place for place, *_ in calls])
        rewards = job.agreement.gather(local, list[float], "reward")[0]
        return torch.tensor(rewards).view(len(groups), -1)

    def _advantages_of(
        self, config: GrpoConfig, rewards: torch.Tensor, groups: Groups
    ) -> torch.Tensor:
        """Return the advantages [P, n] of completions.

        Raises ArgumentError if a function of the caller returns another shape or no finite numbers.
        """
        if self._advantages is None:
            return losses.group_advantages(
                rewards, baseline=config.baseline, scale=config.scale_rewards
            )
        advantages = torch.as_tensor(self._advantages(rewards, groups), dtype=torch.float32)
        if advantages.shape != rewards.shape or not bool(advantages.isfinite().all()):
            problem = f"shape {tuple(advantages.shape)}, rewards have {tuple(rewards.shape)}"
            if advantages.shape == rewards.shape:
                problem = "not all of them are finite numbers"
            remedy = "Return a finite number for each reward"
            raise ArgumentError([Violation("advantages", problem, remedy, code="wrong-advantages")])
        return advantages

    def _batch(self, groups: Groups) -> dict[str, torch.Tensor]:
        """Return a batch with one row per completion, B = P * n rows."""
        completions = [completion for group in groups for completion in group]
        prompts = [completion.prompt_token_ids for completion in completions]
        seq_length = self.worker.config.actor_config.seq_length
        batch = build_batch(prompts, completions, seq_length)
        lengths = torch.tensor(
            [
                len(prompt) + len(completion.token_ids) - 1
                for prompt, completion in zip(prompts, completions, strict=True)
            ]
        )
        # With it the trainer cuts the padding of rows off.
        batch["attention_mask"] = (torch.arange(seq_length) < lengths[:, None]).long()
        logprobs = [completion.logprobs for completion in completions]
        batch["sampled_log_probs"] = losses.align_log_probs(logprobs, batch)
        if self.config.mask_truncated:
            is_whole = torch.tensor([sample.finish_reason != "length" for sample in completions])
            batch["learned_mask"] = batch["mask"] * is_whole[:, None]
        return batch

    def _update(self, batch: dict[str, torch.Tensor], number: int) -> dict[str, float]:
        """Take all optimizer steps of a step; return the mean of their reports."""
        config = self.config
        generator = self._generator(number, "minibatches")
        reports = []
        for _ in range(config.epochs):
            parts = losses.minibatches(
                batch, config.minibatches, generator, config.aggregation, config.max_tokens
            )
            reports += [self.worker.update(part, self._loss) for part in parts]
        means = losses.mean_of(reports)
        # The completions were drawn by the policy before the first optimizer step, so this mean
        # does not estimate a KL. `completion_figures` has the KL.
        means.pop("kl", None)
        return means

    def _random(self, number: int, purpose: str) -> random.Random:
        """Return the random numbers of a step for one purpose."""
        # Seeded per purpose, so that a new random choice does not change the existing ones. The
        # seed is a string, which Random hashes alike in every process.
        return random.Random(f"{self.config.seed}/{number}/{purpose}")

    def _generator(self, number: int, purpose: str) -> torch.Generator:
        """Return torch's random numbers of a step for one purpose."""
        return torch.Generator().manual_seed(self._random(number, purpose).getrandbits(30))


def _size_violations(
    worker: ActorHybridWorker, config: GrpoConfig | PpoConfig
) -> Iterator[Violation]:
    """Report sizes by which completions cannot be cut into minibatches and micro batches."""
    limits = worker.train.limits
    critic = worker.config.critic_config
    sizes = {"micro_batch_size": limits.micro_batch_size}
    if isinstance(config, PpoConfig) and critic is not None and critic.micro_batch_size is not None:
        sizes["critic_config.micro_batch_size"] = critic.micro_batch_size
    count = config.completions_per_step
    for name, size in sizes.items():
        factor = config.minibatches * size * limits.dp_size
        if count % factor:
            key = f"{config.name}.minibatches"
            problem = (
                f"prompts_per_step x samples_per_prompt is {count}, not a multiple of {factor}"
            )
            remedy = f"minibatches x {name} x data parallel ranks: change one of them"
            yield Violation(key, problem, remedy, code="not-divisible")


@functools.lru_cache(maxsize=2)  # a step may begin in one pass and end in the next
def _order(seed: int, size: int, epoch: int) -> list[int]:
    """Return the order of the prompts in a pass over all of them."""
    order = list(range(size))
    random.Random(f"{seed}/{epoch}/prompts").shuffle(order)
    return order


def _reject_coroutine_functions(**functions: object) -> None:
    """Raise ConfigError for callbacks that are coroutine functions but are not awaited."""
    remedy = "Make it a function without async; only environments and rewards are awaited"
    violations = [
        Violation(name, "is a coroutine function", remedy, code="coroutine-function")
        for name, function in functions.items()
        if is_coroutine_function(function)
    ]
    if violations:
        raise ConfigError(violations)
