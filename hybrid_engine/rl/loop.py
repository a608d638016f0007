"""GRPO and PPO as one loop: `train` runs all steps with metrics and checkpoints; `Loop` is what it is made of, for a
loop of one's own.

    loop = Loop(worker, prompts, reward, config)
    for row in loop.run(files):                     all steps, on from the newest checkpoint: or by hand
        ...
    row = loop.learn(number)                        draw, score, learn
    loop.save(files, row)                           before vLLM's weights come: they would have to leave for it
    row = loop.finish(row, evaluate)                draw with the new weights
    loop.close()                                    where the worker goes on without it

All functions but `close` are collective. Random choices of a step follow from the seed and the step's number alone, so
a run that goes on from a checkpoint does what it would have done without the interruption.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import random
import time
import weakref
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Unpack

import torch

from hybrid_engine.backends.huggingface import require_target, weights_digest
from hybrid_engine.config import HybridConfig, load_config
from hybrid_engine.errors import ArgumentError, ConfigError, Violation, shortened
from hybrid_engine.files.documents import given_path
from hybrid_engine.files.durable import naming
from hybrid_engine.files.model_files import companions_digest
from hybrid_engine.models import table_for
from hybrid_engine.ranks.job import Job
from hybrid_engine.rl import losses
from hybrid_engine.rl.asking import ask_each, is_coroutine_function, number_of, rewards_of
from hybrid_engine.rl.config import GrpoConfig, PpoConfig, free_engine_settings, shared_engine_settings
from hybrid_engine.rl.conversations import Conversation, Environment, converse, no_arguments, prompt_of
from hybrid_engine.rl.critic import Critic
from hybrid_engine.rl.run_files import Events, Progress, Row, RunFiles, defaults_of
from hybrid_engine.switch.report import ReshardReport
from hybrid_engine.trainer.batches import build_batch
from hybrid_engine.trainer.companions import ReferenceModel
from hybrid_engine.trainer.worker import ActorHybridWorker

if TYPE_CHECKING:
    from hybrid_engine.backends.vllm import Completion, Sampling
    from hybrid_engine.backends.vllm.prompts import ChatArguments

Prompts = Sequence[Any] | Callable[[int], Sequence[Any]]
"""All prompts, or (number of a step) -> the prompts of that step."""
Reward = Callable[[Any, Any], float | Awaitable[float]]
"""(prompt, completion) -> what the completion is worth, as `asking.rewards_of` takes it; called on rank 0 alone, which
tells the others; a coroutine function for all completions together. With an environment it is given a `Conversation` in
place of a `Completion`."""
Groups = Sequence[Sequence["Completion | Conversation"]]
"""n of each prompt."""
Evaluate = Callable[[ActorHybridWorker], Mapping[str, float]]
"""Figures for the row of a step; called on all ranks, in the worker's rollout context."""
OnStep = Callable[[Row], None]
OnPhase = Callable[[str, int], None]
"""(generate, reward, score, critic, update, checkpoint or evaluate; number of the step): told as a phase begins."""
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
    **chat: Unpack[ChatArguments],
) -> list[Row]:
    """Train a model by GRPO or PPO, as the type of `config` says, and print a line per step on rank 0.

    Args:
        model: a worker, or what `load_config` makes the configuration of one from, which is built here and shut down.
        prompts, reward, config, environment, chat: as of `Loop`.
        out: directory, shared by all ranks, for metrics.jsonl, TensorBoard's events where that is installed, a
            checkpoint from which the same call goes on, and in the end `model`, a Hugging Face checkpoint.
        evaluate, should_stop: as of `Loop.run`.
        on_step: called with the row of each step, on all ranks.

    Returns the rows of the steps that were taken here. Raises, on all ranks, ConfigError for an `out` that is not this
    run's, or that another job writes, and what `Loop.learn` raises.
    """
    _require_functions(prompts=prompts, evaluate=evaluate, on_step=on_step, should_stop=should_stop)
    with ExitStack() as ends:
        files = None if out is None else RunFiles(given_path(out, "out"))
        if isinstance(model, ActorHybridWorker):
            record = _Record(model.job, config, model.config, files, ends)
        else:
            engines = model if isinstance(model, HybridConfig) else load_config(model)
            job = ends.enter_context(closing(Job.join(engines.generate_config.timeout_seconds)))
            record = _Record(job, config, engines, files, ends)  # before engines are built, which takes minutes
            model = ends.enter_context(ActorHybridWorker(engines, job=job))
        loop = Loop(model, prompts, reward, config, environment=environment, **chat)
        ends.enter_context(closing(loop))
        record.begin()
        rows = []
        for row in loop.run(files, evaluate=evaluate, should_stop=should_stop):
            record.add(row)
            rows.append(row)
            if on_step is not None:
                on_step(row)
        if files is not None and loop.done == config.steps:
            with model.train_context():
                model.save_hf_checkpoint(files.out / "model")
    return rows


class Loop:
    """Steps of GRPO or PPO on one rank.

    Args:
        worker: both engines, with the weights that a KL is to be measured from, and that PPO's critic begins with.
        prompts: texts, chats, or lists of token ids; or mappings that have one of these under "prompt", beside what
            the reward wants to know of it. They come in a new order in each pass over all of them. A function is asked
            for those of each step instead, on every rank: it must give all the same, as often as it is asked.
        reward: given an element of `prompts` and a `Completion`, or the `Conversation` that an environment has made.
        config: the settings; their type is the algorithm.
        on_phase: told what begins, on every rank.
        environment: makes a conversation of several turns of each completion; as of `converse`.
        chat: `tools` and `chat_template_kwargs`, as of `HybridEngine.generate`.

    Raises ConfigError for settings or prompts that do not go with the worker, as prompts behind which `max_tokens` do
    not fit into vLLM or into `actor_config.seq_length`; where prompts are a function, `learn` does.

    Attributes:
        done: number of the last step that was taken or loaded.
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
        **chat: Unpack[ChatArguments],
    ) -> None:
        self.worker, self.reward, self.config, self.done = worker, reward, config, 0
        self.environment, self._chat = environment, chat
        self.prompts = prompts if callable(prompts) else list(prompts)
        others = [*inspect.signature(train).parameters, "on_phase"]
        violations = [*no_arguments(chat, others), *_row_violations(worker, config)]
        if environment is None and config.max_tokens_per_turn is not None:
            key, remedy = f"{config.name}.max_tokens_per_turn", "Pass an environment, or set max_tokens"
            violations.append(Violation(key, "is of conversations, and there is no environment", remedy))
        if violations:
            raise ConfigError(violations)
        if not callable(self.prompts):
            if not self.prompts:
                raise ConfigError([Violation("prompts", "there are none", "Pass a list of prompts")])
            self._require_room(self.prompts)
        self._learning_rate = config.learning_rate or worker.config.actor_config.optimizer.lr
        worker.set_learning_rate(self._learning_rate)  # fails now where the trainer has a schedule of its own
        self.critic = Critic(worker, config) if isinstance(config, PpoConfig) else None
        self.reference: ReferenceModel | None = None
        self._reference_digest: str | None = None
        if config.kl_coefficient:
            with worker.forward_context():
                self.reference = ReferenceModel(worker)
                with worker.job.agreement.phase("adding adapters"):
                    weights = worker.train.weights.merged
                self._reference_digest = weights_digest(weights, worker.job)
        self._loss = losses.policy_loss(
            config.clip_ratio,
            config.kl_coefficient,
            clip_ratio_high=config.clip_ratio_high,
            importance_cap=config.importance_cap,
        )
        self._tally = _Tally(on_phase)
        self._count_switch = worker.on_reshard_end(self._tally.switches.append)
        self._switch = weakref.ref(worker.sharding)  # a worker that was shut down has none

    def close(self) -> None:
        """Count the worker's switches no more, which outlives this loop. Idempotent; not collective."""
        if (switch := self._switch()) is not None:
            switch.remove_hook(self._count_switch)

    def run(
        self,
        files: RunFiles | None = None,
        *,
        evaluate: Evaluate | None = None,
        should_stop: ShouldStop = lambda: False,
    ) -> Iterator[Row]:
        """Take the steps that are left, with checkpoints as `config.save_every` says, and yield the row of each.

        Args:
            files: the run's, already begun; rank 0 must have written a row to `files.metrics` before it asks for the
                next. A step whose row was lost after its checkpoint has it yielded again.
            evaluate: called as `config.evaluate_every` says; what it returns joins the row of the step.
            should_stop: asked on every rank before a step and after its learning; if any says yes, the run ends with a
                checkpoint of the last step.

        Raises ConfigError where the worker began with other weights than those that the run measures its KL from.
        """
        config, is_saved = self.config, True

        def finish(row: Row) -> Row:
            return self.finish(row, evaluate if config.is_due(row["step"], config.evaluate_every) else None)

        if files is not None and (found := self._newest(files)) is not None:
            progress, has_row = found
            self._require_same_reference(files, progress)
            self.load(files, progress.step)
            if not has_row:
                yield finish(progress.row)
            elif evaluate is not None and config.is_due(progress.step, config.evaluate_every):
                with self.worker.rollout_context():  # where that step ended: its switch is none of the next one's
                    pass
        stops = False
        while self.done < config.steps and not (stops or self._must_stop(should_stop)):
            row = self.learn(self.done + 1)
            stops = self._must_stop(should_stop)
            is_saved = files is None or config.is_due(self.done, config.save_every) or stops
            if files is not None and is_saved:
                self.save(files, row)
            yield finish(row)
        if files is not None and not is_saved:
            self.save(files, row)

    def learn(self, number: int) -> Row:
        """Draw, score and learn from the completions of step 1, 2, ...

        Returns a row, the same on all ranks: see docs/rl.md. Raises ArgumentError for a reward that fails or is not a
        finite number, and what the worker's methods raise.
        """
        worker, tally, config = self.worker, self._tally, self.config
        tally.begin(number)
        names, prompts = self._prompts_of(number)
        if callable(self.prompts):
            self._require_room(prompts)
        with worker.rollout_context(), tally.phase("generate"):
            groups = self._draw(names, prompts, self._sampling(number))
        with tally.phase("reward"):
            rewards = self._rewards(names, prompts, groups)
        batch = self._batch(groups)
        if self.reference is not None:
            with self.reference.forward_context(), tally.phase("score"):
                batch["ref_log_probs"] = self.reference.compute_log_probs(batch)
        rate = self._learning_rate * config.learning_rate_share(number)
        worker.set_learning_rate(rate)
        report: dict[str, float] = {}
        if self.critic is not None:
            with tally.phase("critic"):
                generator = self._generator(number, "critic's minibatches")
                report |= self.critic.learn(batch, rewards.flatten(), number, generator)
        elif isinstance(config, GrpoConfig):
            batch["advantages"] = losses.group_advantages(rewards, scale=config.scale_rewards).flatten()
        with worker.train_context():
            with tally.phase("score"):
                batch["old_log_probs"] = worker.compute_log_probs(batch)
            with tally.phase("update"):
                if not isinstance(config, PpoConfig) or number > config.critic_warmup_steps:
                    report |= self._update(batch, number)
        self.done = number
        row = {"step": number, **_figures(batch, groups, rewards), **report}
        row |= {"learning_rate": rate, "weight_version": worker.train.version}
        return {**row, **tally.take(worker)}

    def finish(self, row: Row, evaluate: Evaluate | None = None) -> Row:
        """Evaluate the weights of a step, and complete its row. What happened since `learn` counts for this step.

        Figures whose names are columns of the row are `held_out_NAME`. Raises ArgumentError for what are no figures.
        """
        row, figures = dict(row), dict[str, float]()
        if evaluate is not None:
            with self.worker.rollout_context(), self._tally.phase("evaluate"):
                figures = _evaluated(evaluate(self.worker))
        for name, value in self._tally.take(self.worker).items():
            row[name] = max(row.get(name, 0), value) if name in _HIGHEST else row.get(name, 0) + value
        return row | {f"held_out_{name}" if name in row else name: value for name, value in figures.items()}

    def save(self, files: RunFiles, row: Row) -> None:
        """Write a checkpoint of what is trained, as that of the row's step, from which `run` goes on."""
        step = row["step"]
        with self._tally.phase("checkpoint"), self.worker.train_context():
            self.worker.save_checkpoint(files.weights(step))
            if self.critic is not None:
                self.critic.save(files.critic(step))
            with self.worker.job.agreement.phase("completing the checkpoint"):
                if self.worker.rank == 0:
                    files.complete(Progress(step, row, self._reference_digest))

    def load(self, files: RunFiles, step: int) -> None:
        """Take up the checkpoint of a step."""
        self.done = self._tally.step = step
        with self._tally.phase("checkpoint"):
            with self.worker.train_context():
                self.worker.load_checkpoint(files.weights(step))
            if self.critic is not None:
                self.critic.load(files.critic(step))

    def _newest(self, files: RunFiles) -> tuple[Progress, bool] | None:
        """The newest checkpoint, and whether its row was written: as rank 0 sees the files."""
        agreement, found = self.worker.job.agreement, ""
        with agreement.phase("reading the run"), naming("reading the run in", files.out):
            if self.worker.rank == 0 and (progress := files.progress()) is not None:
                found = json.dumps([asdict(progress), files.metrics.has(progress.step)])
        found = agreement.gather(found, str, "reading the run")[0]
        if not found:
            return None
        progress_values, has_row = json.loads(found)
        return Progress(**progress_values), has_row

    def _require_same_reference(self, files: RunFiles, progress: Progress) -> None:
        """Refuse weights other than those that the run measures its KL from. Older runs did not note which they are."""
        before, now = progress.reference, self._reference_digest
        if before is not None and before != now:
            problem = (
                f"the run in {files.out} measures its KL from weights with digest {before}; the worker's have {now}"
            )
            remedy = "Build a new worker, with the model, seed and weights that the run began with"
            raise ConfigError([Violation("model", problem, remedy)])

    def _must_stop(self, should_stop: ShouldStop) -> bool:
        """Whether any rank says so."""
        return self.worker.job.agreement.total(int(should_stop())) > 0

    def _prompts_of(self, number: int) -> tuple[Sequence[int], list[Any]]:
        """A step's share of the passes over all prompts, with their places there, or what the function gives."""
        count = self.config.prompts_per_step
        if callable(self.prompts):
            prompts = list(self.prompts(number))
            if len(prompts) != count:
                remedy = f"Return {count}, which is prompts_per_step"
                raise ArgumentError([Violation("prompts", f"{len(prompts)} for step {number}", remedy)])
            return range(count), prompts
        size = len(self.prompts)
        shares = [divmod(place, size) for place in range((number - 1) * count, number * count)]
        places = [_order(self.config.seed, size, epoch)[index] for epoch, index in shares]
        return places, [self.prompts[place] for place in places]

    def _require_room(self, prompts: Sequence[Any]) -> None:
        """Refuse prompts behind which `max_tokens` do not fit, in vLLM or in a row that is learned from."""
        from hybrid_engine.backends.vllm.prompts import token_ids_of

        inference, most = self.worker.inference, self.config.max_tokens
        token_ids = token_ids_of([prompt_of(each) for each in prompts], inference.tokenizer, chat=self._chat)
        inference.check_prompts(token_ids, most)
        room = self.worker.config.actor_config.seq_length + 1
        if long := [index for index, each in enumerate(token_ids) if len(each) + most > room]:
            index = max(long, key=lambda index: len(token_ids[index]))
            problem = f"{len(long)} of {len(prompts)} are too long, the longest prompts[{index}]: "
            problem += f"{len(token_ids[index])} tokens and {most} of max_tokens, but seq_length takes {room}"
            remedy = "Raise actor_config.seq_length, lower max_tokens, or leave them out"
            raise ConfigError([Violation("prompts", problem, remedy)])

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
        """Completions, or conversations, of each prompt."""
        if self.environment is not None:
            talk = functools.partial(converse, max_tokens_per_turn=self.config.max_tokens_per_turn, names=names)
            return talk(self.worker, prompts, sampling, self.environment, **self._chat)
        return self.worker.generate_sequences([prompt_of(each) for each in prompts], sampling, **self._chat)

    def _rewards(self, names: Sequence[int], prompts: Sequence[Any], groups: Groups) -> torch.Tensor:
        """Rewards [P, n], by rank 0."""
        job, rewards = self.worker.job, list[float]()
        with job.agreement.phase("reward"):
            if self.worker.rank == 0:
                calls = [
                    (f"prompt {name}, completion {number}", self.reward, (prompt, one))
                    for name, prompt, group in zip(names, prompts, groups, strict=True)
                    for number, one in enumerate(group)
                ]
                values = ask_each("reward", calls, job.timeout_seconds)
                rewards = rewards_of(values, [place for place, *_ in calls])
        return torch.tensor(job.agreement.gather(rewards, list[float], "reward")[0]).view(len(groups), -1)

    def _batch(self, groups: Groups) -> dict[str, torch.Tensor]:
        completions = [one for group in groups for one in group]
        seq_length = self.worker.config.actor_config.seq_length
        batch = build_batch([one.prompt_token_ids for one in completions], completions, seq_length)
        lengths = torch.tensor([len(one.prompt_token_ids) + len(one.token_ids) - 1 for one in completions])
        batch["attention_mask"] = (torch.arange(seq_length) < lengths[:, None]).long()  # so that rows are cut
        batch["sampled_log_probs"] = losses.align_log_probs([one.logprobs for one in completions], batch)
        return batch

    def _update(self, batch: dict[str, torch.Tensor], number: int) -> dict[str, float]:
        """All optimizer steps of a step; the mean of their reports."""
        config, generator = self.config, self._generator(number, "minibatches")
        reports = [
            self.worker.update(part, self._loss)
            for _ in range(config.epochs)
            for part in losses.minibatches(batch, config.minibatches, generator, config.aggregation, config.max_tokens)
        ]
        means = losses.mean_of(reports)
        means.pop("kl", None)  # later steps' is of completions that an older policy drew: see `_figures`
        return means

    def _random(self, number: int, purpose: str) -> random.Random:
        """Random choices of one kind in one step."""
        return random.Random(f"{self.config.seed}/{number}/{purpose}")

    def _generator(self, number: int, purpose: str) -> torch.Generator:
        """The same of torch."""
        return torch.Generator().manual_seed(self._random(number, purpose).getrandbits(30))


def _row_violations(worker: ActorHybridWorker, config: GrpoConfig | PpoConfig) -> Iterator[Violation]:
    """Whether completions can be cut into minibatches and micro batches."""
    limits, critic = worker.train.limits, worker.config.critic_config
    sizes = {"micro_batch_size": limits.micro_batch_size}
    if isinstance(config, PpoConfig) and critic is not None and critic.micro_batch_size is not None:
        sizes["critic_config.micro_batch_size"] = critic.micro_batch_size
    for name, size in sizes.items():
        rows = config.minibatches * size * limits.dp_size
        if config.completions_per_step % rows:
            count = config.completions_per_step
            problem = f"prompts_per_step x samples_per_prompt is {count}, not a multiple of {rows}"
            remedy = f"minibatches x {name} x data parallel ranks: change one of them"
            yield Violation(f"{config.name}.minibatches", problem, remedy)


@functools.lru_cache(maxsize=2)  # a step may begin in one pass and end in the next
def _order(seed: int, size: int, epoch: int) -> list[int]:
    order = list(range(size))
    random.Random(f"{seed}/{epoch}/prompts").shuffle(order)
    return order


def _evaluated(figures: Any) -> dict[str, float]:
    """What `evaluate` has returned."""
    if not isinstance(figures, Mapping):
        problem = f"returned {shortened(figures)}"
        raise ArgumentError([Violation("evaluate", problem, "Return a mapping of names to numbers")])
    found = {}
    for name, value in figures.items():
        try:
            found[str(name)] = number_of(value)
        except Exception as error:  # of the value's own conversion, too
            problem = f"{name} is {shortened(value)}"
            raise ArgumentError([Violation("evaluate", problem, "Return a mapping of names to numbers")]) from error
    return found


def _require_functions(**given: object) -> None:
    """Refuse coroutine functions, which nobody would wait for."""
    remedy = "Make it a function without async; environments and rewards alone are awaited"
    found = [
        Violation(name, "is a coroutine function", remedy) for name, one in given.items() if is_coroutine_function(one)
    ]
    if found:
        raise ConfigError(found)


def _figures(batch: Mapping[str, torch.Tensor], groups: Groups, rewards: torch.Tensor) -> dict[str, float]:
    """Figures of a step's completions, under the policy that drew them."""
    deviations = rewards.std(dim=1, correction=0)
    ends = [one.finish_reason for group in groups for one in group]
    difference = (batch["sampled_log_probs"] - batch["old_log_probs"]).abs()[batch["mask"].bool()]
    row = {
        "reward": rewards.mean().item(),
        "reward_std": deviations.mean().item(),
        "groups_agreeing": (deviations == 0).float().mean().item(),
        "response_tokens": batch["mask"].sum(dim=1).mean().item(),
        "truncated": ends.count("length") / len(ends),
        **_turns(groups),
        "logprob_diff": difference.max().item(),
        "logprob_diff_mean": difference.mean().item(),
    }
    if "ref_log_probs" in batch:
        kl = losses.kl_estimate(batch["old_log_probs"], batch["ref_log_probs"])
        row["kl"] = losses.weighted_mean(kl, batch["weights"]).item()
    return row


def _turns(groups: Groups) -> dict[str, float]:
    """Mean number of answers, where there are conversations."""
    numbers = [len(one.turns) for group in groups for one in group if isinstance(one, Conversation)]
    return {"turns": fmean(numbers)} if numbers else {}


_TOTALS = ("bytes_received", "bytes_least")
_HIGHEST = ("peak_bytes", "rss_bytes")


class _Tally:
    """One rank's seconds, bytes and memory of the step under way."""

    def __init__(self, on_phase: OnPhase) -> None:
        self.switches: list[ReshardReport] = []
        self._on_phase = on_phase
        self.begin(0)

    def begin(self, step: int) -> None:
        """Forget what was; the time until now is nobody's."""
        self.step, self._started, self._seconds = step, time.perf_counter(), dict[str, float]()
        self.switches.clear()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time inside to the seconds of `name`."""
        self._on_phase(name, self.step)
        started, key = time.perf_counter(), f"{name}_seconds"
        yield
        self._seconds[key] = self._seconds.get(key, 0.0) + time.perf_counter() - started

    def take(self, worker: ActorHybridWorker) -> dict[str, float]:
        """What came since this was called last: bytes of all ranks together; seconds and memory of the worst."""
        with open("/proc/self/statm") as file:
            resident_pages = int(file.read().split()[1])
        own: dict[str, float] = {
            "bytes_received": sum(report.bytes_received for report in self.switches),
            "bytes_least": sum(report.bytes_least for report in self.switches),
            "peak_bytes": max((report.peak_bytes for report in self.switches), default=0),
            "rss_bytes": resident_pages * os.sysconf("SC_PAGE_SIZE"),
            "reshard_seconds": sum(report.seconds for report in self.switches),
            **self._seconds,
            "seconds": time.perf_counter() - self._started,
        }
        self.begin(self.step)
        shares = worker.job.agreement.gather(own, dict[str, int | float], "metrics")
        return combined(shares, are_totals=bool(worker.config.generate_config.servers))


def combined(shares: Sequence[Mapping[str, float]], *, are_totals: bool = False) -> dict[str, float]:
    """All ranks' figures as one: bytes moved are totals; seconds and memory are those of the worst rank.

    `are_totals`: each rank counts the bytes of all, as reports of switches with servers do.
    """
    total = max if are_totals else sum
    return {name: (total if name in _TOTALS else max)(share[name] for share in shares) for name in shares[0]}


class _Record:
    """Printed lines and files of a run: rank 0 writes, all ranks call. Ends with `ends`.

    1. made before there are engines: what would end the run later, up to its last export, ends it now
    2. `begin` when the engines are there
    3. `add` for each row
    """

    def __init__(
        self,
        job: Job,
        config: GrpoConfig | PpoConfig,
        engines: HybridConfig,
        files: RunFiles | None,
        ends: ExitStack,
    ) -> None:
        self._agreement = job.agreement
        self._is_writer = job.rank == 0
        self._files = files
        self._ends = ends
        self._events: Events | None = None
        if files is None:
            return
        with self._agreement.phase("reading the run"), naming("preparing the run in", files.out):
            if self._is_writer:
                of_engines = {
                    "model": companions_digest(engines.model),
                    **shared_engine_settings(engines, job.world_size),
                }
                self._settings = config.shared() | of_engines
                defaults = config.defaults() | defaults_of(engines)
                free = free_engine_settings(engines)
                files.check(self._settings, defaults=defaults, unrecorded=of_engines, free=free)
                require_target(files.out / "model", table_for(engines.hf_config()))
                ends.enter_context(files.lock())

    def begin(self) -> None:
        """Clear away what is not continued, once engines are there that can go on."""
        files = self._files
        if files is None:
            return
        with self._agreement.phase("beginning the run"), naming("preparing the run in", files.out):
            if self._is_writer:
                files.begin(self._settings)
                if (progress := files.progress()) is not None:
                    print(f"going on after step {progress.step}, of which {files.out} has a checkpoint", flush=True)
                self._events = Events(files.out)
                self._ends.callback(self._events.close)

    def add(self, row: Row) -> None:
        """Print and write the row of a step."""
        with self._agreement.phase("writing the metrics"):
            if not self._is_writer:
                return
            shown = ("reward", "kl", "loss", "value_loss", "grad_norm", "response_tokens", "turns")
            figures = ", ".join(f"{name} {row[name]:.4g}" for name in shown if name in row)
            print(f"step {row['step']}: {figures}, {row['seconds']:.1f} s", flush=True)
            if self._files is not None:
                self._files.metrics.append(row)
            if self._events is not None:
                self._events.add(row["step"], row)
