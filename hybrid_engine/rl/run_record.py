"""Printed lines and files of a run, with what is refused before its engines are built."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import ExitStack
from datetime import timedelta

from hybrid_engine.assembly import megatron_lora
from hybrid_engine.backends.huggingface import require_target
from hybrid_engine.config import HybridConfig
from hybrid_engine.errors import require_none
from hybrid_engine.files.durable import naming
from hybrid_engine.files.model_files import companions_digest
from hybrid_engine.ranks.job import Job
from hybrid_engine.rl.completion_log import CompletionLog, ScoredCompletion, samples_table
from hybrid_engine.rl.config import (
    GrpoConfig,
    PpoConfig,
    shared_engine_settings,
)
from hybrid_engine.rl.run_files import Row, RunFiles
from hybrid_engine.rl.terminal import Column, SteadyConsole, Terminal
from hybrid_engine.rl.trackers import SafeTracker, forget_run, opened, tracker_violations

_COLUMNS = (
    Column("step", "step", "", 8),
    Column("reward", "reward", ".4g", 8),
    Column("length", "response_tokens", ".1f", 7),
    Column("logp diff", "logprob_diff", ".1e", 9),
    Column("switch s", "reshard_seconds", ".2f", 8),
    Column("seconds", "seconds", ".1f", 7),
    Column("left", "left", "", 8),
)
_NOT_PRINTED = {
    *(column.name for column in _COLUMNS),
    "reward_std",
    "groups_agreeing",
    "truncated",
    "entropy",
    "loss",
    "grad_norm",
    "logprob_diff_mean",
    "logprob_equal",
    "clip_fraction",
    "policy_loss",
    "importance",
    "skipped",
    "learning_rate",
    "weight_version",
    "value_clip_fraction",
    "explained_variance",
}
"""Figures that do not follow the columns, as seconds and bytes; those of `evaluate` do."""


class RunRecord:
    """Printed lines and files of a run. All ranks call it, rank 0 writes.

    1. The constructor, before the engines are built, refuses everything that would fail later, up
       to the last export.
    2. `begin`, after the engines are built.
    3. `log`, after each step was learned, and `add`, for its row.

    It is closed with `ends`.
    """

    def __init__(
        self,
        job: Job,
        config: GrpoConfig | PpoConfig,
        engines: HybridConfig,
        files: RunFiles | None,
        ends: ExitStack,
        trackers: Sequence[str],
        changed: Collection[str] = (),
    ) -> None:
        self._agreement = job.agreement
        self._is_writer = job.rank == 0
        self._config = config
        self._files = files
        self._trackers: list[SafeTracker] = []
        self._grad_norms: list[float] = []
        self._ends = ends
        self._terminal = Terminal(_COLUMNS, None if self._is_writer else SteadyConsole(quiet=True))
        with self._agreement.phase("checking the trackers"):
            if self._is_writer:
                require_none(tracker_violations(trackers, None if files is None else files.out))
        if files is None:
            return
        with self._agreement.phase("reading the run"), naming("preparing the run in", files.out):
            if not self._is_writer:
                return
            # The digest in place of the path: a model that was moved is still the same model.
            engine_settings = {
                "model": companions_digest(engines.model),
                **shared_engine_settings(engines, job.world_size),
            }
            self._settings = config.shared() | engine_settings
            default_engines = HybridConfig(model=engines.model)
            defaults = type(config)().shared() | shared_engine_settings(default_engines, 1)
            free = config.changeable(changed)
            files.check(self._settings, defaults=defaults, free=free)
            require_target(files.out / "model", engines.table())
            if megatron_lora(engines.actor_config, engines.table()) is not None:
                require_target(files.out / "adapter", None)
            ends.enter_context(files.lock())
            if files.progress() is None:
                forget_run(files.out)
            # Before the engines are built: a log-in may be missing.
            for name in trackers:
                tracker = opened(name, files.out, self._settings)
                self._trackers.append(tracker)
                ends.push(tracker.close)

    def begin(self) -> None:
        """Remove rows and checkpoints that are not continued.

        Called only when the engines are built, so that a call that cannot run removes nothing.
        """
        self._ends.enter_context(self._terminal)
        files = self._files
        if files is None:
            return
        with self._agreement.phase("beginning the run"), naming("preparing the run in", files.out):
            if not self._is_writer:
                return
            files.begin(self._settings)
            config = self._config
            progress = files.progress()
            done = 0 if progress is None else progress.step
            CompletionLog(files.out).cut_after(done)
            if done:
                self.say(f"resuming after step {done}, from the checkpoint in {files.out}")
            by_clock = f"in {config.save_minutes:g} minutes, or " if config.save_minutes else ""
            next_step = min(done + config.save_every - done % config.save_every, config.steps)
            if done < config.steps:
                which = "next" if done else "first"
                next_save = f"{by_clock}after step {next_step}"
                self.say(f"run in {files.out}, {which} checkpoint {next_save}")

    def say(self, text: str) -> None:
        """Print a line on rank 0."""
        self._terminal.print(text)

    def begins(self, phase: str, step: int) -> None:
        """Show the phase of a step."""
        total = self._config.steps
        self._terminal.begins(f"step {step}/{total}: {phase}", max(step - 1, 0), total)

    def end(self, done: int) -> None:
        """Print how the run ended, after its last step `done`."""
        if self._grad_norms and not any(self._grad_norms):
            # Equal rewards of a group give no advantage.
            self.say("no step had a gradient: docs/errors.md, The reward is flat")
        if self._files is None:
            return
        out = self._files.out
        text = f"{done} steps; the model is in {out}/model, the figures in {out}/metrics.jsonl"
        if done < self._config.steps:
            text = f"stopped after step {done} of {self._config.steps}; the same call goes on"
        self.say(text)

    def log(self, step: int, samples: Sequence[ScoredCompletion]) -> None:
        """Write the completions of a step, and print some, if the step is to be logged."""
        with self._agreement.phase("writing completions"):
            every = self._config.log_completions_every
            if self._is_writer and every and (step == 1 or step % every == 0):
                most = self._config.show_completions
                if most:
                    table = samples_table(samples, self._config.prompts_per_step, most)
                    self._terminal.print(table)
                if self._files is not None:
                    CompletionLog(self._files.out).write(step, samples)

    def add(self, row: Row) -> None:
        """Print and write the row of a step."""
        with self._agreement.phase("writing the metrics"):
            if not self._is_writer:
                return
            step = row["step"]
            more = "".join(
                f"  {name} {value:.4g}"
                for name, value in row.items()
                if name not in _NOT_PRINTED
                and not name.endswith(("seconds", "bytes"))
                and not name.startswith("bytes")
            )
            num_left = self._config.steps - step
            shown = {**row, "step": f"{step}/{self._config.steps}"}
            # Step 0 is an evaluation.
            if step and num_left:
                now_and_then = row.get("evaluate_seconds", 0.0) + row.get("checkpoint_seconds", 0.0)
                left = round(num_left * (row["seconds"] - now_and_then))
                shown["left"] = str(timedelta(seconds=left))
            self._terminal.add(shown, more)
            self._grad_norms += [row["grad_norm"]] if "grad_norm" in row else []
            if self._files is not None:
                self._files.metrics.append(row)
            for tracker in self._trackers:
                tracker.add(step, row)
