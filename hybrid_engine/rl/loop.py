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

import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import torch

from hybrid_engine.config import HybridConfig
from hybrid_engine.errors import (
    ArgumentError,
    ConfigError,
    HybridEngineError,
    first_of,
    require_none,
)
from hybrid_engine.files.documents import given_path
from hybrid_engine.files.durable import naming
from hybrid_engine.ports import Batch, Figures
from hybrid_engine.ranks.job import Job
from hybrid_engine.ranks.torch_internals import torch_defaults, torch_modes_kept
from hybrid_engine.ranks.uncaught import ignore_known_warnings
from hybrid_engine.rl import losses
from hybrid_engine.rl.completion_log import ScoredCompletion, samples_of
from hybrid_engine.rl.config import GrpoConfig, PpoConfig
from hybrid_engine.rl.conversation_state import Environment
from hybrid_engine.rl.critic import Critic, at_last_tokens
from hybrid_engine.rl.group_queue import GroupQueue, randomness
from hybrid_engine.rl.packed_calls import PackedCalls
from hybrid_engine.rl.prompt_source import are_listed, listed, source_of
from hybrid_engine.rl.rewards import RewardFunctions, Rewards, Scores
from hybrid_engine.rl.run_checks import (
    RunArguments,
    RunLimits,
    argument_violations,
    engines_of,
    limit_violations,
    require_runnable,
    train_violations,
)
from hybrid_engine.rl.run_files import Progress, Row, RunFiles
from hybrid_engine.rl.run_record import RunRecord
from hybrid_engine.rl.step_metrics import (
    Groups,
    OnPhase,
    StepMeter,
    add_measurements,
    completion_figures,
    evaluation_figures,
    require_exact,
    without_columns,
)
from hybrid_engine.rl.stop_signals import StopSignals
from hybrid_engine.rl.user_callbacks import calling, naming_failure, printing_once
from hybrid_engine.trainer.batches import build_batch, mean_weights
from hybrid_engine.trainer.batches.batch_building import NewBatch
from hybrid_engine.trainer.reference_and_critic import ReferenceModel
from hybrid_engine.trainer.worker import ActorHybridWorker

if TYPE_CHECKING:
    from hybrid_engine.backends.vllm.prompts import ChatArguments

Prompts = Iterable[Any] | Callable[[int], Sequence[Any]]
"""All prompts, or (number of a step) -> the prompts of that step; see prompt_source.py."""
Evaluate = Callable[[ActorHybridWorker], Mapping[str, float]]
"""Figures for the row of a step; called on all ranks, in the worker's rollout context. Only rank 0
prints."""
Advantages = Callable[[torch.Tensor, Groups], torch.Tensor]
"""(rewards [P, n], the P groups of n completions or conversations) -> advantages [P, n] or [B, S].

Called on every rank, with the same arguments; it must return the same on all. Of [B, S], column
len(prompt_token_ids) - 1 + i has token i of a completion.
"""
OnStep = Callable[[Row], None]
OnLearned = Callable[[int, Sequence[ScoredCompletion]], None]
ShouldStop = Callable[[], bool]


def train(
    model: ActorHybridWorker | HybridConfig | torch.nn.Module | Mapping[str, Any] | str | Path,
    prompts: Prompts,
    reward: Rewards,
    config: GrpoConfig | PpoConfig,
    *,
    out: str | Path | None = None,
    evaluate: Evaluate | None = None,
    on_step: OnStep | None = None,
    should_stop: ShouldStop = lambda: False,
    environment: Environment | None = None,
    loss: losses.PolicyLoss | None = None,
    advantages: Advantages | None = None,
    trackers: Sequence[str] = ("tensorboard",),
    changed: Collection[str] = (),
    **chat: Unpack[ChatArguments],
) -> list[Row]:
    """Train a model by GRPO or PPO, by the type of `config`; rank 0 prints a line per step.

    Args:
        model: a worker, or the configuration of a worker in any form that `load_config` accepts,
            or a model of transformers, also in place of the directory in a mapping; see
            `assembly.settings_of`. A worker that is built here is also shut down here.
        prompts, reward, config, environment, loss, advantages, chat: as of `Loop`.
        out: directory, shared by all ranks, for metrics.jsonl, completions, TensorBoard's events
            (if it is installed), a checkpoint from which the same call resumes, and finally
            `model`, a Hugging Face checkpoint, and `adapter`, of PEFT, if adapters were trained.
        evaluate, should_stop: as of `Loop.run`.
        on_step: called with the row of each step, on rank 0: it cannot use the worker, whose
            methods are collective.
        trackers: names of what records the rows, in addition to metrics.jsonl; see trackers.py.
        changed: names of settings that may have other values than in the steps so far, such as
            "learning_rate"; docs/rl.md lists them.

    Ctrl-C, and SIGTERM and SIGUSR1, with which Slurm announces the end of a job, end the run after
    the present step, with a checkpoint.

    Returns the rows of the steps that this call ran.

    Raises, on all ranks and before the engines are built, ConfigError with every argument and
    setting that would end the run later, if `out` has another run, or if another job writes to it;
    later the errors of `Loop.learn`.
    """
    # Before the checks, which may import Megatron.
    ignore_known_warnings()
    if are_listed(prompts):
        prompts = listed(prompts)
    arguments = RunArguments.of(
        prompts,
        reward,
        config,
        chat,
        evaluate=evaluate,
        on_step=on_step,
        should_stop=should_stop,
        environment=environment,
        loss=loss,
        advantages=advantages,
    )
    config = arguments.config
    with ExitStack() as ends:
        files = None
        if out is not None:
            files = RunFiles(
                given_path(out, "out"),
                num_kept=config.keep_checkpoints,
                best=config.keep_best,
                is_lowest_best=config.best == "lowest",
            )
        if isinstance(model, ActorHybridWorker):
            require_none(train_violations(arguments))
            record = RunRecord(model.job, config, model.config, files, ends, trackers, changed)
        else:
            engines, module = engines_of(model, arguments, ends)
            job = ends.enter_context(closing(Job.join(engines.generate_config.timeout_seconds)))
            # Check the run before the engines are built, which takes minutes.
            require_runnable(engines, arguments, job, None if files is None else files.out)
            record = RunRecord(job, config, engines, files, ends, trackers, changed)
            model = ends.enter_context(ActorHybridWorker(engines, module=module, job=job))
        signals = ends.enter_context(StopSignals(model.job.agreement.is_broken))

        def must_stop() -> bool:
            # Called on every rank, because it may be collective.
            is_asked = should_stop()
            return signals.came or is_asked

        loop = Loop(
            model,
            prompts,
            reward,
            config,
            on_phase=record.begins,
            environment=environment,
            loss=loss,
            advantages=advantages,
            **chat,
        )
        ends.enter_context(closing(loop))
        record.begin()
        ends.enter_context(loop.saving(files))
        rows = []
        # `run` continues when the next row is requested, so a row is recorded before the next step
        # begins.
        for row in loop.run(files, evaluate=evaluate, should_stop=must_stop, on_learned=record.log):
            record.add(row)
            rows.append(row)
            if on_step is not None:
                with calling(model.job.agreement, "on_step", f"step {row['step']}"):
                    if model.job.rank == 0:
                        on_step(row)
        # Not after `should_stop`: then the run has no final model yet.
        if files is not None and loop.done == config.steps:
            with model.train_context():
                model.save_hf_checkpoint(files.out / "model")
                if model.has_adapters:
                    model.save_adapters(files.out / "adapter")
                elif model.config.actor_config.lora is not None:
                    record.say("no adapter, because it has no form of PEFT's; model has it merged")
        record.end(loop.done)
    return rows


class Loop:
    """Steps of GRPO or PPO on one rank.

    Args:
        worker: both engines. A KL term is measured from the present weights, and PPO's critic is
            initialized from them.
        prompts: texts, chats or lists of token ids, or mappings that have one of these under
            "prompt" and further values for the reward. Each pass over all prompts has a new order.
            If it is a function, it is called for the prompts of each step, on every rank; it must
            return the same prompts on all ranks, and for every call with the same step. If it is a
            stream with `state_dict` and `load_state_dict`, each rank reads its own, with the same
            elements in the same order; its place is saved in checkpoints.
        reward: a function of an element of `prompts` and a `Completion`, or with an environment, a
            `Conversation`; or several, by name or in a list. See rewards.py.
        config: the settings; their type selects the algorithm.
        on_phase: called as a phase begins, on every rank.
        environment: makes each completion a conversation of several turns; as of `converse`.
        loss: loss of the policy, in place of the one by the settings.
        advantages: advantages of GRPO, in place of those by the settings.
        chat: `tools` and `chat_template_kwargs`, as of `HybridEngine.generate`.

    Raises ConfigError for settings or prompts that do not fit the worker, for example prompts that
    leave no room for `max_tokens` in vLLM or in `actor_config.seq_length`. If `prompts` is a
    function or a stream, `learn` raises the error.

    Attributes:
        done: number of the last step that was run or loaded.
        queue: completions of the next steps.
        samples: completions of the last step that was run.
    """

    def __init__(
        self,
        worker: ActorHybridWorker,
        prompts: Prompts,
        reward: Rewards,
        config: GrpoConfig | PpoConfig,
        *,
        on_phase: OnPhase = lambda phase, step: None,
        environment: Environment | None = None,
        loss: losses.PolicyLoss | None = None,
        advantages: Advantages | None = None,
        **chat: Unpack[ChatArguments],
    ) -> None:
        self.worker = worker
        if are_listed(prompts):
            prompts = list(prompts)
        self.done = 0
        self.samples: list[ScoredCompletion] = []
        # Row of the last step that was learned, until its checkpoint is written.
        self._unsaved: Row | None = None
        self._saved_at = time.monotonic()
        arguments = RunArguments.of(
            prompts,
            reward,
            config,
            chat,
            environment=environment,
            loss=loss,
            advantages=advantages,
        )
        self.config = arguments.config
        limits = RunLimits.of_worker(worker)
        require_none([*argument_violations(arguments), *limit_violations(arguments, limits)])
        config = self.config
        source = source_of(prompts, config.prompts_per_step, config.seed, config.max_staleness)
        self.queue = GroupQueue(worker, arguments, limits, source)
        self._rewards = RewardFunctions(reward, config)
        self._calls = PackedCalls(worker.actor.engine.limits, config.pack)
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
                self._reference_digest = worker.weights_digest()
        self._loss = loss or config.policy_loss()
        self._advantages = advantages
        self._meter = StepMeter(on_phase)
        self._count_switch = worker.on_reshard_end(self._meter.count)
        # Weak: once the worker is shut down there is no switch left to remove the hook from.
        self._switch = weakref.ref(worker.sharding)

    def close(self) -> None:
        """Remove the hook from the worker, which outlives this loop, and stop drawing ahead.

        Idempotent; not collective.
        """
        self.queue.close()
        switch = self._switch()
        if switch is not None:
            switch.remove_hook(self._count_switch)

    def run(
        self,
        files: RunFiles | None = None,
        *,
        evaluate: Evaluate | None = None,
        should_stop: ShouldStop = lambda: False,
        on_learned: OnLearned = lambda step, samples: None,
    ) -> Iterator[Row]:
        """Run the remaining steps, saving every `config.save_every` steps; yield the row of each.

        A step is also saved `config.save_minutes` after the last one, or if the next one fails.

        Args:
            files: files of the run, after `RunFiles.begin`. Rank 0 must append a row to
                `files.metrics` before it requests the next one. If the row of a step was lost
                after its checkpoint, it is yielded again.
            evaluate: called every `config.evaluate_every` steps; its figures are added to the row.
            should_stop: called on every rank before each step and after it was learned. If it
                returns True on any rank, the run ends with a checkpoint of the last step.
            on_learned: called with `samples`, which no checkpoint has, before a step is saved.

        Raises ConfigError if the run measures its KL from weights other than those with which the
        worker began.
        """
        config = self.config

        def finished(row: Row) -> Row:
            is_due = config.is_due(row["step"], config.evaluate_every)
            row = self.finish(row, evaluate if is_due else None)
            # Figures of `evaluate` are in the rows of its own steps alone:
            # others may lack the column.
            if (is_due or evaluate is None) and config.keep_best not in (None, *row):
                problem = f"there is no column {config.keep_best!r}"
                remedy = f"Use one of {first_of(sorted(row), 60)}"
                key = f"{config.name}.keep_best"
                with self.worker.job.agreement.phase("reading keep_best"):
                    raise ConfigError.of(key, problem, remedy, code="unknown-column")
            return row

        newest = None if files is None else self._newest(files)
        if files is not None and newest is not None:
            progress, has_row = newest
            files.require_reference(progress, self._reference_digest)
            self.load(files, progress.step)
            # Killed between checkpoint and row: export and evaluation of that step are repeated.
            if not has_row:
                if self._exports_step():
                    self.export(files)
                yield finished(progress.row)
            elif evaluate is not None and config.is_due(progress.step, config.evaluate_every):
                # The uninterrupted run ended this step with an evaluation. Repeat its switch, so
                # that the bytes of that switch are not counted in the next step.
                with self.worker.rollout_context():
                    pass
        if evaluate is not None and config.evaluate_first and newest is None:
            yield self.finish({"step": 0}, evaluate)
        must_stop = False
        while self.done < config.steps and not (must_stop or self._flags(should_stop)[0]):
            with self.saving(files):
                self._unsaved = row = self.learn(self.done + 1)
                on_learned(self.done, self.samples)
                # Checked before saving, so that a stopped run always has one of its last step.
                must_stop, is_late = self._flags(should_stop)
                is_due = config.is_due(self.done, config.save_every)
                if files is not None and (is_due or must_stop or is_late):
                    self.save(files, row)
                # Before `finished`, which moves the training state away.
                if files is not None and self._exports_step():
                    self.export(files)
                row = finished(row)
            yield row
        # `should_stop` ended the loop before a step, so the last step may have no checkpoint yet.
        if files is not None and self._unsaved is not None:
            self.save(files, self._unsaved)

    @contextmanager
    def saving(self, files: RunFiles | None) -> Iterator[None]:
        """Save the last learned step if the block fails on all ranks.

        A rank that fails alone cannot save, because all ranks write a checkpoint.

        Raises ArgumentError in place of SystemExit, with which a run would look finished.
        """
        try:
            with naming_failure("train", f"step {self.done + 1}", SystemExit):
                yield
        except HybridEngineError as error:
            row, self._unsaved = self._unsaved, None
            if files is not None and row is not None and error.cause_on_rank_0 is not None:
                self.save(files, row)
            raise

    @torch_modes_kept()
    def learn(self, number: int) -> Row:
        """Draw, score and learn from the completions of step `number`; the first step is 1.

        Returns a row, the same on all ranks; docs/rl.md describes its columns.

        Raises ArgumentError for a reward that fails or is not a finite number, and the errors of
        the worker's methods.
        """
        worker, config, meter = self.worker, self.config, self._meter
        meter.begin(number)
        names, prompts = self.queue.prompts_of(number)
        version = worker.train.version
        with worker.rollout_context():
            waited = self.queue.begin(number)
            prompts, groups, scores = self._draw_and_score(number, names, prompts)
        rewards = scores.totals
        batch = self._batch(groups, rewards)
        if self.reference is not None:
            with self.reference.forward_context(), meter.phase("score"):
                compute = self.reference.compute_log_probs
                batch["ref_log_probs"] = self._calls.score(compute, batch)
        penalties = self._kl_penalties(batch)
        learning_rate = self._learning_rate * config.learning_rate_factor(number)
        worker.set_learning_rate(learning_rate)
        report: Figures = {}
        # Critic and actor take turns on the device, so the critic's optimizer steps are complete
        # before the actor's training state comes back.
        if self.critic is not None:
            with meter.phase("critic"):
                self._unsaved = None  # from here on, the state is not that of the step before
                generator = self._generator(number, "critic's minibatches")
                of_tokens = at_last_tokens(rewards.flatten(), batch["mask"]) - penalties
                report |= self.critic.learn(batch, of_tokens, number, generator)
        elif isinstance(config, GrpoConfig):
            batch["advantages"] = self._advantages_of(config, rewards, penalties, batch, groups)
        self.samples = samples_of(prompts, groups, scores, batch, version)
        with worker.train_context():
            with meter.phase("score"):
                outputs = self._calls.score(worker.compute_log_probs, batch, entropy=True)
                batch["old_log_probs"] = outputs["log_probs"]
                if worker.config.generate_config.check_compute == "exact":
                    require_exact(batch, worker.job.device)
            with meter.phase("update"):
                self._unsaved = None
                # At first the critic's values are arbitrary, and so are the advantages.
                if not isinstance(config, PpoConfig) or number > config.critic_warmup_steps:
                    report |= self._update(batch, number)
        self.done = number
        self.queue.learned(number)
        figures = completion_figures(batch, groups, scores) | self.queue.figures(groups)
        if config.max_staleness:
            meter.add("generation_wait", waited)
        return {
            "step": number,
            **figures,
            "entropy": losses.weighted_mean(outputs["entropy"], mean_weights(batch["mask"])).item(),
            **without_columns(report, figures),
            "learning_rate": learning_rate,
            "weight_version": worker.train.version,
            **meter.take(worker),
        }

    @torch_modes_kept()
    def finish(self, row: Row, evaluate: Evaluate | None = None) -> Row:
        """Evaluate the weights of a step, and return its complete row.

        Seconds, bytes and memory since `learn` are added to the row. A figure whose name is a
        column of the row becomes `held_out_NAME`.

        Raises ArgumentError if `evaluate` does not return a mapping of names to numbers.
        """
        row = dict(row)
        figures: Figures = {}
        if evaluate is not None:
            with (
                self.worker.rollout_context(),
                self._meter.phase("evaluate"),
                calling(self.worker.job.agreement, "evaluate", f"step {self.done}"),
                printing_once(self.worker.job.rank),
            ):
                figures = evaluation_figures(evaluate(self.worker))
        add_measurements(row, self._meter.take(self.worker))
        named = {f"held_out_{name}" if name in row else name: figures[name] for name in figures}
        return row | named

    def save(self, files: RunFiles, row: Row) -> None:
        """Write a checkpoint of the step of `row`, from which `run` resumes."""
        step = row["step"]
        if self.config.max_staleness:
            with self._meter.phase("generate"):
                self.queue.wait()
        with self._meter.phase("checkpoint"), self.worker.train_context():
            self.worker.save_checkpoint(files.weights(step))
            if self.critic is not None:
                self.critic.save(files.critic(step))
            # Last: a checkpoint counts once it is completed.
            with self.worker.job.agreement.phase("completing the checkpoint"):
                if self.worker.rank == 0:
                    self.queue.save(files.checkpoint(step), step)
                    files.complete(Progress(row, self._reference_digest))
        self._unsaved = None
        self._saved_at = time.monotonic()

    def _exports_step(self) -> bool:
        every = self.config.export_every
        return every > 0 and self.done % every == 0

    def export(self, files: RunFiles) -> None:
        """Write the present weights as a Hugging Face checkpoint of the last step."""
        with self._meter.phase("checkpoint"), self.worker.train_context():
            self.worker.save_hf_checkpoint(files.export(self.done))

    def load(self, files: RunFiles, step: int) -> None:
        """Load the checkpoint of a step."""
        self.done = step
        self._meter.step = step
        with self._meter.phase("checkpoint"):
            with self.worker.train_context():
                self.worker.load_checkpoint(files.weights(step))
            if self.critic is not None:
                self.critic.load(files.critic(step))
            self.queue.load(files.checkpoint(step), step)

    def _newest(self, files: RunFiles) -> tuple[Progress, bool] | None:
        """Return the newest checkpoint and whether its row was written, as rank 0 reads them."""
        agreement = self.worker.job.agreement
        local: tuple[Progress, bool] | None = None
        with agreement.phase("reading the run"), naming("reading the run in", files.out):
            progress = files.progress() if self.worker.rank == 0 else None
            if progress is not None:
                local = progress, files.metrics.has(progress.step)
        # Rank 0 decides: on a shared file system ranks can see different states of a directory.
        kind = tuple[Progress, bool] | None
        return agreement.gather(local, kind, "reading the run")[0]

    def _flags(self, should_stop: ShouldStop) -> list[bool]:
        """Return whether `should_stop` is True, and a checkpoint late, on any rank. Collective."""
        agreement = self.worker.job.agreement
        with calling(agreement, "should_stop", f"step {self.done}"):
            must_stop = bool(should_stop())
        # 0 minutes: no such checkpoints.
        is_late = 0 < self.config.save_minutes <= (time.monotonic() - self._saved_at) / 60
        return agreement.any_of([must_stop, is_late], "ending the step")

    def _draw_and_score(
        self, number: int, names: Sequence[int], prompts: Sequence[Any]
    ) -> tuple[list[Any], Groups, Scores]:
        """Draw the completions of each prompt and compute their rewards; return the prompts, too.

        GRPO learns nothing from groups whose rewards agree. `redraws` times they are drawn again,
        for other prompts of a list that has more.
        """
        names, prompts = list(names), list(prompts)
        with self._meter.phase("generate"):
            groups = list(self.queue.take(number))
        with self._meter.phase("reward"):
            scores = self._rewards.compute(self.worker.job, names, prompts, groups)
        redraws = self.config.redraws if isinstance(self.config, GrpoConfig) else 0
        others = self.queue.others(number, redraws * len(prompts))
        for draw in range(1, redraws + 1):
            agreeing = scores.agreeing.nonzero().flatten().tolist()
            if not agreeing:
                break
            for index in agreeing:
                # Without another prompt the same one is drawn again, with
                # another draw of the random numbers.
                names[index], prompts[index] = next(others, (names[index], prompts[index]))
            chosen = [names[index] for index in agreeing], [prompts[index] for index in agreeing]
            with self._meter.phase("generate"):
                again = self.queue.draw(*chosen, self.queue.sampling(number, draw))
            with self._meter.phase("reward"):
                part = self._rewards.compute(self.worker.job, *chosen, again)
            for index, group in zip(agreeing, again, strict=True):
                groups[index] = group
            scores = scores.replaced(agreeing, part)
        return prompts, groups, scores

    def _kl_penalties(self, batch: Batch) -> torch.Tensor:
        """Return what the KL to the reference takes from the reward of each token, [B, S]."""
        mask = batch["mask"]
        if self.config.kl_place == "loss" or "ref_log_probs" not in batch:
            return torch.zeros_like(mask)
        estimator = self.config.kl_estimator
        kl = losses.kl_estimate(batch["sampled_log_probs"], batch["ref_log_probs"], estimator)
        return self.config.kl_coefficient * kl * mask

    def _advantages_of(
        self,
        config: GrpoConfig,
        rewards: torch.Tensor,
        penalties: torch.Tensor,
        batch: Batch,
        groups: Groups,
    ) -> torch.Tensor:
        """Return the advantages of tokens [B, S].

        Raises ArgumentError if a function of the caller returns another shape or no finite numbers.
        """
        mask = batch["mask"]
        if self._advantages is None:
            return losses.token_advantages(
                rewards, penalties, mask, baseline=config.baseline, scale=config.scale_rewards
            )
        totals = rewards - penalties.sum(dim=1).view_as(rewards)
        with calling(self.worker.job.agreement, "advantages", f"step {self.done + 1}"):
            advantages = torch.as_tensor(self._advantages(totals, groups), dtype=torch.float32)
        problem = f"shape {tuple(advantages.shape)}, rewards have {tuple(rewards.shape)}"
        if advantages.shape in (rewards.shape, mask.shape):
            # Nothing is learned from completions that are left out, whatever their advantage is.
            is_learned = mask.bool() & ~rewards.isnan().reshape(-1, 1)
            advantages = advantages.reshape(len(mask), -1).where(is_learned, 0.0)
            problem = "" if advantages.isfinite().all() else "not all of them are finite numbers"
        if problem:
            raise ArgumentError.of(
                "advantages",
                problem,
                "Return a finite number for each reward, or for each token of the batch [B, S]",
                code="wrong-advantages",
            )
        return advantages

    @torch_defaults()
    def _batch(self, groups: Groups, rewards: torch.Tensor) -> NewBatch:
        """Return a batch with one row per completion, B = P * n rows.

        `rewards`: [P, n], NaN for completions from which nothing is learned.
        """
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
        is_learned = ~rewards.flatten().isnan()
        if self.config.mask_truncated:
            reasons = [completion.finish_reason for completion in completions]
            is_learned &= torch.tensor([reason != "length" for reason in reasons])
        if not is_learned.all():
            batch["learned_mask"] = batch["mask"] * is_learned[:, None]
        return batch

    def _update(self, batch: Batch, number: int) -> Figures:
        """Take all optimizer steps of a step; return the mean of their reports."""
        config = self.config
        if config.clips_to_sampler:
            is_drawn = batch["mask"].bool()
            log_probs = batch["sampled_log_probs"].where(is_drawn, batch["old_log_probs"])
            batch = {**batch, "old_log_probs": log_probs}
        generator = self._generator(number, "minibatches")
        outputs: Any = {"entropy": True} if config.entropy_coefficient else {}
        cut = partial(
            losses.minibatches,
            batch,
            config.minibatches,
            generator,
            config.aggregation,
            config.max_tokens,
        )
        means = self._calls.learn(self.worker.update, cut, config.epochs, self._loss, **outputs)
        # The completions were drawn by the policy before the first optimizer step, so this mean
        # does not estimate a KL. `completion_figures` has the KL.
        means.pop("kl", None)
        return means

    def _generator(self, number: int, purpose: str) -> torch.Generator:
        """Return torch's random numbers of a step for one purpose."""
        return torch.Generator().manual_seed(
            randomness(self.config.seed, number, purpose).getrandbits(30)
        )
