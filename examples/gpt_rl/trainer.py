"""The run itself: warm up, then generate, score, update, evaluate, again and again.

    for row in Trainer(worker, settings, directory).run():
        ...                                     # rank 0 reports the row of the iteration that has just ended

Every random choice of iteration i follows from the seed and i alone, so that a run resumed from a checkpoint does what
it would have done without the interruption. All methods are collective.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from examples.gpt_rl import task
from examples.gpt_rl.ppo import Critic
from examples.gpt_rl.run_state import Progress, RunDirectory
from examples.gpt_rl.settings import Settings
from hybrid_engine import ActorHybridWorker, Completion, ReferenceModel, ReshardReport, Sampling, build_batch
from hybrid_engine.rl import losses
from hybrid_engine.rl.run_files import Row

OnProgress = Callable[[str, int, int], None]


class Trainer:
    """One rank of a run.

    Args:
        worker: both engines.
        settings: the whole configuration.
        directory: where the run's files are.
        stop_requested: asked on every rank at each boundary; the run stops when any rank says yes.
        on_progress: told what is going on as (what, done, of how many).
    """

    def __init__(
        self,
        worker: ActorHybridWorker,
        settings: Settings,
        directory: RunDirectory,
        stop_requested: Callable[[], bool] = lambda: False,
        on_progress: OnProgress = lambda what, done, total: None,
    ) -> None:
        self.worker = worker
        self.rl = settings.rl
        self.seq_length = settings.engine.actor_config.seq_length
        self.directory = directory
        self.stop_requested = stop_requested
        self.on_progress = on_progress
        self.train_problems = task.load_problems(self.rl.data / "train.jsonl")
        self.held_out = task.load_problems(self.rl.data / "held_out.jsonl")
        self.policy_loss = losses.policy_loss(self.rl.clip_ratio, self.rl.kl_coefficient)
        self.critic = Critic(worker, settings.rl) if settings.rl.algorithm == "ppo" else None
        self.tally = Tally()
        worker.on_reshard_end(lambda report: self.tally.switches.append(report))

    def run(self) -> Iterator[Row]:
        """Yield the row of every iteration that ends here, row 0 being the warm-up.

        Ends when all iterations are done, or after the iteration in which a stop was requested, with a checkpoint;
        nothing is kept of a warm-up that is stopped.
        """
        before = self.directory.progress()
        progress = self._warm_up() if before is None else self._resume(before)
        if progress is None:
            return
        if not any(row["iteration"] == progress.iteration for row in self.directory.rows()):
            yield self._finish(progress)
        while progress.iteration < self.rl.iterations and not self._is_stopped():
            progress = self._iterate(progress.iteration + 1)
            yield self._finish(progress)

    # -- warm-up and resume -------------------------------------------------------------------------------------------

    def _warm_up(self) -> Progress | None:
        """Supervised steps on the demonstrations, a checkpoint, and the reference that it is."""
        self.tally = Tally()
        settings, generator = self.rl.warm_up, self._generator(0, "demonstrations")
        smoothed = 0.0
        with self.worker.train_context(), self.tally.phase("update"):
            for step in range(settings.max_steps):
                what = "warm-up" if step == 0 else f"warm-up, loss {smoothed:.3f}"
                self.on_progress(what, step, settings.max_steps)
                ramp = min(1.0, (step + 1) / settings.ramp_steps)
                self.worker.set_learning_rate(settings.learning_rate * ramp)
                problems = generator.choices(self.train_problems, k=settings.batch_size)
                report = self.worker.update(task.demonstrations(problems, self.seq_length), losses.cross_entropy)
                smoothed = report["loss"] if step == 0 else 0.9 * smoothed + 0.1 * report["loss"]
                if self._is_stopped():
                    return None
                if smoothed < settings.target_loss:
                    break
        row: Row = {"iteration": 0, "reward": None, "kl": 0.0, "logprob_diff": None}
        row["learning_rate"] = settings.learning_rate * ramp
        progress = Progress(0, self._with_update(row, {**report, "loss": smoothed}))
        if self.critic is not None:
            with self.worker.train_context():
                self.critic.begin()
        self._save(progress)
        self._freeze_reference()
        return progress

    def _resume(self, progress: Progress) -> Progress:
        """Restore the reference, then the actor."""
        self.tally = Tally()
        self.on_progress("loading checkpoint", 0, 1)
        with self.worker.train_context():
            self.worker.load_checkpoint(self.directory.weights(0))
        self._freeze_reference()
        with self.worker.train_context():
            self.worker.load_checkpoint(self.directory.weights(progress.iteration))
        if self.critic is not None:
            self.critic.load(self.directory.critic(progress.iteration))
        with self.worker.rollout_context():  # where every iteration ends
            pass
        return progress

    def _freeze_reference(self) -> None:
        """Without gradients and optimizer state on the device, so there is room for it wherever training fits."""
        with self.worker.forward_context():
            self.reference = ReferenceModel(self.worker)

    # -- one iteration ------------------------------------------------------------------------------------------------

    def _iterate(self, iteration: int) -> Progress:
        """Everything up to the checkpoint; `_finish` does the rest."""
        self.tally = Tally()
        self.on_progress("generate", iteration - 1, self.rl.iterations)
        problems = self._generator(iteration, "problems").sample(self.train_problems, self.rl.prompts_per_iteration)
        with self.worker.rollout_context(), self.tally.phase("generate"):
            groups = self._generate(problems, iteration)
        self.on_progress("score", iteration - 1, self.rl.iterations)
        with self.worker.forward_context(), self.tally.phase("score"):
            batch, row = self._score(problems, groups)
            if self.critic is None:
                row |= self._compare(batch)
        if self.critic is not None:
            with self.reference.forward_context(), self.tally.phase("score"):
                row |= self._compare(batch)
            self.on_progress("critic", iteration - 1, self.rl.iterations)
            with self.tally.phase("critic"):
                row |= self.critic.learn(batch, self._minibatch_generator(iteration, "critic's minibatches"))
        self.on_progress("update", iteration - 1, self.rl.iterations)
        with self.worker.train_context():
            with self.tally.phase("update"):
                is_warming_up = self.critic is not None and iteration <= self.rl.ppo.value_warm_up
                report = {} if is_warming_up else self._update(batch, iteration)
            row = {"iteration": iteration, **row, "learning_rate": self.rl.learning_rate}
            progress = Progress(iteration, self._with_update(row, report))
            is_due = iteration % self.rl.checkpoint_every == 0 or iteration == self.rl.iterations
            if self._is_stopped() or is_due:
                self._save(progress)
        return progress

    def _generate(self, problems: Sequence[task.Problem], iteration: int) -> list[list[Completion]]:
        """A group of samples for each problem."""
        sampling = Sampling(
            n=self.rl.samples_per_prompt,
            temperature=self.rl.temperature,
            max_tokens=self.rl.max_tokens,
            stop_token_ids=(task.END,),
            seed=self._generator(iteration, "samples").getrandbits(62),
        )
        return self.worker.generate_sequences([task.encode(problem.prompt) for problem in problems], sampling)

    def _score(
        self, problems: Sequence[task.Problem], groups: Sequence[Sequence[Completion]]
    ) -> tuple[dict[str, torch.Tensor], Row]:
        """The batch to learn from: rewards, as advantages but with a critic, and log-probabilities by the trainer."""
        rewards = task.rewards(problems, groups)
        prompts = [task.encode(problem.prompt) for problem in problems for _ in range(self.rl.samples_per_prompt)]
        completions = [completion for group in groups for completion in group]
        batch = build_batch(prompts, completions, self.seq_length, task.PADDING)
        if self.critic is None:
            batch["advantages"] = losses.group_advantages(rewards).flatten()
        else:
            batch["rewards"] = rewards.flatten()
        batch["old_log_probs"] = self.worker.compute_log_probs(batch)
        sampled = losses.align_log_probs([completion.logprobs for completion in completions], batch["mask"])
        difference = (sampled - batch["old_log_probs"]).abs()[batch["mask"].bool()]
        row = {
            "reward": rewards.mean().item(),
            "kl": None,  # see `_compare`
            "logprob_diff": difference.max().item(),
            "logprob_diff_mean": difference.mean().item(),
            "response_tokens": batch["mask"].sum(dim=1).mean().item(),
            "tokens_per_second": batch["mask"].sum().item() / self.tally.seconds["generate"],
        }
        return batch, row

    def _compare(self, batch: dict[str, torch.Tensor]) -> Row:
        """Add the reference's log-probabilities to the batch; the KL to it."""
        batch["ref_log_probs"] = self.reference.compute_log_probs(batch)
        kl = losses.kl_estimate(batch["old_log_probs"], batch["ref_log_probs"])
        return {"kl": losses.weighted_mean(kl, batch["weights"]).item()}

    def _update(self, batch: dict[str, torch.Tensor], iteration: int) -> dict[str, float]:
        """All optimizer steps of an iteration; the mean of their reports."""
        generator = self._minibatch_generator(iteration, "minibatches")
        self.worker.set_learning_rate(self.rl.learning_rate)
        reports = [
            self.worker.update(minibatch, self.policy_loss)
            for _ in range(self.rl.epochs)
            for minibatch in losses.minibatches(batch, self.rl.minibatches, generator)
        ]
        return {name: statistics.fmean(report[name] for report in reports) for name in reports[0]}

    def _finish(self, progress: Progress) -> Row:
        """Bring the new weights to vLLM, measure, and complete the row."""
        iteration, row = progress.iteration, dict(progress.row)
        with self.worker.rollout_context():
            is_due = iteration % self.rl.evaluate_every == 0 or iteration == self.rl.iterations
            self.on_progress("evaluate", iteration, self.rl.iterations)
            with self.tally.phase("evaluate"):
                row["accuracy"] = self._held_out_accuracy() if is_due else None
        shares = self.worker.job.agreement.gather(self.tally.share(), dict[str, int | float], "tally")
        are_totals = bool(self.worker.config.generate_config.servers)
        row.update(combine(shares, time.perf_counter() - self.tally.started, are_totals=are_totals))
        row.update({f"{name}_seconds": seconds for name, seconds in self.tally.seconds.items()})
        row["unix_time"] = round(time.time(), 3)
        return row

    def _held_out_accuracy(self) -> float:
        """Share of held-out problems that greedy decoding by vLLM gets right."""
        sampling = Sampling(temperature=0.0, max_tokens=self.rl.max_tokens, stop_token_ids=(task.END,), logprobs=False)
        prompts = [task.encode(problem.prompt) for problem in self.held_out]
        return task.accuracy(self.held_out, self.worker.generate_sequences(prompts, sampling))

    # -- helpers ------------------------------------------------------------------------------------------------------

    def _with_update(self, row: Row, report: dict[str, float]) -> Row:
        """A row with what the optimizer steps reported; the KL of the row is that before the update."""
        added = {name: value for name, value in report.items() if name != "kl"}
        return {**row, **added, "weight_version": self.worker.train.version}

    def _save(self, progress: Progress) -> None:
        """Checkpoint the actor. In the train context."""
        with self.worker.train_context(), self.tally.phase("checkpoint"):
            self.worker.save_checkpoint(self.directory.weights(progress.iteration))
            if self.critic is not None:
                self.critic.save(self.directory.critic(progress.iteration))
            if self.worker.rank == 0:
                self.directory.complete_checkpoint(progress)

    def _is_stopped(self) -> bool:
        """Whether any rank was asked to stop."""
        return self.worker.job.agreement.total(int(self.stop_requested())) > 0

    def _generator(self, iteration: int, purpose: str) -> random.Random:
        """Random choices of one kind in one iteration."""
        return random.Random(f"{self.rl.seed}/{iteration}/{purpose}")

    def _minibatch_generator(self, iteration: int, purpose: str) -> torch.Generator:
        """Torch's, for `minibatches`."""
        return torch.Generator().manual_seed(self._generator(iteration, purpose).getrandbits(30))


class Tally:
    """One rank's record of the iteration under way: seconds by phase, switches, memory."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.seconds: dict[str, float] = {}
        self.switches: list[ReshardReport] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time inside to the seconds of `name`."""
        started = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started

    def share(self) -> dict[str, float]:
        """This rank's numbers, to be combined with `combine`."""
        with open("/proc/self/statm") as file:
            resident_pages = int(file.read().split()[1])
        return {
            "reshard_seconds": sum(report.seconds for report in self.switches),
            "bytes_received": sum(report.bytes_received for report in self.switches),
            "bytes_least": sum(report.bytes_least for report in self.switches),
            "peak_bytes": max((report.peak_bytes for report in self.switches), default=0),
            "rss_bytes": resident_pages * os.sysconf("SC_PAGE_SIZE"),
        }


def combine(
    shares: Sequence[dict[str, float]], iteration_seconds: float, *, are_totals: bool = False
) -> dict[str, Any]:
    """All ranks' shares as one: bytes moved are totals; seconds and memory are those of the worst rank.

    `are_totals`: each rank counts the bytes of all, as reports of switches with servers do.
    """
    row: dict[str, Any] = {
        name: max(share[name] for share in shares) for name in ("reshard_seconds", "peak_bytes", "rss_bytes")
    }
    total = max if are_totals else sum
    row.update({name: total(share[name] for share in shares) for name in ("bytes_received", "bytes_least")})
    row["iteration_seconds"] = iteration_seconds
    row["reshard_share"] = row["reshard_seconds"] / iteration_seconds
    return row
