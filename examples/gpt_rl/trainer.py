"""The run: a warm-up on demonstrations, then the loop of the library.

    for row in Trainer(worker, settings, files).run():
        ...                                     # rank 0 reports the row of an iteration

All methods are collective.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from examples.gpt_rl import task
from examples.gpt_rl.settings import RLConfig, Settings
from hybrid_engine import ActorHybridWorker, Completion, Sampling
from hybrid_engine.rl import GrpoConfig, Loop, PpoConfig, losses
from hybrid_engine.rl.run_files import Row, RunFiles

OnProgress = Callable[[str, int, int], None]


class Trainer:
    """A rank of the run.

    Args:
        worker: both engines.
        settings: complete configuration.
        files: files of the run.
        stop_requested: called on every rank at each boundary; the run stops if any rank returns
            True.
        on_progress: called with (description, steps done, total steps).
    """

    def __init__(
        self,
        worker: ActorHybridWorker,
        settings: Settings,
        files: RunFiles,
        stop_requested: Callable[[], bool] = lambda: False,
        on_progress: OnProgress = lambda what, done, total: None,
    ) -> None:
        self.worker = worker
        self.rl = settings.rl
        self.seq_length = settings.engine.actor_config.seq_length
        self.files = files
        self.stop_requested = stop_requested
        self.on_progress = on_progress
        self.train_problems = task.load_problems(self.rl.data / "train.jsonl")
        self.held_out = task.load_problems(self.rl.data / "held_out.jsonl")

    def run(self) -> Iterator[Row]:
        """Yield the row of every iteration; row 0 is the warm-up.

        A stop request ends the run after the current iteration with a checkpoint. A stopped warm-up
        saves nothing.
        """
        warm_up: Row | None = None
        if self.files.progress() is not None:
            self.on_progress("loading checkpoint", 0, 1)
            with self.worker.train_context():
                self.worker.load_checkpoint(self.files.weights(0))
        else:
            warm_up = self._warm_up()
            if warm_up is None:
                return
        loop = Loop(self.worker, self._prompts, _reward, loop_config(self.rl), on_phase=self._begin)
        if warm_up is not None:
            loop.save(self.files, warm_up)
        for row in loop.run(
            self.files, evaluate=self._held_out_accuracy, should_stop=self.stop_requested
        ):
            yield documented(row, self.rl.batch_size)

    def _warm_up(self) -> Row | None:
        """Train on the demonstrations; return the row, or None if a stop was requested."""
        settings = self.rl.warm_up
        generator = random.Random(f"{self.rl.seed}/0/demonstrations")
        started = time.time()
        smoothed = 0.0
        with self.worker.train_context():
            for step in range(settings.max_steps):
                what = "warm-up" if step == 0 else f"warm-up, loss {smoothed:.3f}"
                self.on_progress(what, step, settings.max_steps)
                ramp = min(1.0, (step + 1) / settings.ramp_steps)
                self.worker.set_learning_rate(settings.learning_rate * ramp)
                problems = generator.choices(self.train_problems, k=settings.batch_size)
                batch = task.demonstrations(problems, self.seq_length)
                report = self.worker.update(batch, losses.cross_entropy)
                smoothed = report["loss"] if step == 0 else 0.9 * smoothed + 0.1 * report["loss"]
                if self.worker.job.agreement.total(int(self.stop_requested())):
                    return None
                if smoothed < settings.target_loss:
                    break
        seconds = time.time() - started
        row = {
            "step": 0,
            "kl": 0.0,
            **report,
            "loss": smoothed,
            "weight_version": self.worker.train.version,
        }
        return {**row, "update_seconds": seconds, "seconds": seconds}

    def _prompts(self, iteration: int) -> list[dict[str, Any]]:
        """Return the prompts of an iteration as token ids, with their problems for the reward."""
        generator = random.Random(f"{self.rl.seed}/{iteration}/problems")
        problems = generator.sample(self.train_problems, self.rl.prompts_per_iteration)
        return [{"prompt": task.encode(problem.prompt), "problem": problem} for problem in problems]

    def _begin(self, phase: str, iteration: int) -> None:
        done = iteration if phase == "evaluate" else max(iteration - 1, 0)
        self.on_progress(phase, done, self.rl.iterations)

    def _held_out_accuracy(self, worker: ActorHybridWorker) -> dict[str, float]:
        """Return the share of held-out problems that vLLM answers correctly by greedy decoding."""
        sampling = Sampling(
            temperature=0.0,
            max_tokens=self.rl.max_tokens,
            stop_token_ids=(task.END,),
            logprobs=False,
        )
        prompts = [task.encode(problem.prompt) for problem in self.held_out]
        completions = worker.generate_sequences(prompts, sampling)
        return {"accuracy": task.accuracy(self.held_out, completions)}


def _reward(prompt: Mapping[str, Any], completion: Completion) -> float:
    return task.reward(prompt["problem"], completion.token_ids)


def loop_config(rl: RLConfig) -> GrpoConfig | PpoConfig:
    """Convert `rl_config` to the settings of the library's loop."""
    same_names = {
        "samples_per_prompt",
        "max_tokens",
        "temperature",
        "epochs",
        "minibatches",
        "learning_rate",
    }
    same_names |= {
        "max_staleness",
        "importance_cap",
        "clip_ratio",
        "kl_coefficient",
        "evaluate_every",
        "seed",
    }
    settings = rl.model_dump(include=same_names)
    settings |= {"steps": rl.iterations, "prompts_per_step": rl.prompts_per_iteration}
    settings |= {"stop_token_ids": (task.END,), "save_every": rl.checkpoint_every}
    if rl.algorithm == "grpo":
        return GrpoConfig(**settings)
    settings |= rl.ppo.model_dump(include={"gamma", "lam", "value_clip"})
    settings |= {"critic_learning_rate": rl.ppo.learning_rate, "critic_epochs": rl.ppo.epochs}
    return PpoConfig(**settings, critic_warmup_steps=rl.ppo.value_warm_up)


def documented(row: Row, num_completions: int) -> Row:
    """Rename the columns of the library's loop to those in README.md; missing figures are None."""
    columns = {"iteration": row["step"], "iteration_seconds": row["seconds"]}
    columns |= dict.fromkeys(("reward", "kl", "accuracy", "logprob_diff"))
    columns |= {name: value for name, value in row.items() if name not in ("step", "seconds")}
    columns["reshard_share"] = row["reshard_seconds"] / row["seconds"]
    # The row before the first iteration has no completions, but may have waited for those to come.
    if "response_tokens" in row:
        num_tokens = row["response_tokens"] * num_completions
        columns["tokens_per_second"] = num_tokens / row["generate_seconds"]
    return {**columns, "unix_time": round(time.time(), 3)}
