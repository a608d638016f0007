"""Printed lines and files of a run, with what is refused before its engines are built."""

from __future__ import annotations

from contextlib import ExitStack

from hybrid_engine.backends.huggingface import require_target
from hybrid_engine.config import HybridConfig
from hybrid_engine.files.durable import naming
from hybrid_engine.files.model_files import companions_digest
from hybrid_engine.models import table_for
from hybrid_engine.ranks.job import Job
from hybrid_engine.rl.config import (
    GrpoConfig,
    PpoConfig,
    free_engine_settings,
    shared_engine_settings,
)
from hybrid_engine.rl.run_files import Events, Row, RunFiles, defaults_of


class RunRecord:
    """Printed lines and files of a run. All ranks call it, rank 0 writes.

    1. The constructor, before the engines are built, refuses everything that would fail later, up
       to the last export.
    2. `begin`, after the engines are built.
    3. `add`, for each row.

    It is closed with `ends`.
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
            if not self._is_writer:
                return
            # The digest in place of the path: a model that was moved is still the same model.
            engine_settings = {
                "model": companions_digest(engines.model),
                **shared_engine_settings(engines, job.world_size),
            }
            self._settings = config.shared() | engine_settings
            defaults = config.defaults() | defaults_of(engines)
            free = free_engine_settings(engines)
            # Runs of older versions did not record the engines' settings.
            files.check(self._settings, defaults=defaults, unrecorded=engine_settings, free=free)
            require_target(files.out / "model", table_for(engines.hf_config()))
            ends.enter_context(files.lock())

    def begin(self) -> None:
        """Remove rows and checkpoints that are not continued.

        Called only when the engines are built, so that a call that cannot run removes nothing.
        """
        files = self._files
        if files is None:
            return
        with self._agreement.phase("beginning the run"), naming("preparing the run in", files.out):
            if not self._is_writer:
                return
            files.begin(self._settings)
            progress = files.progress()
            if progress is not None:
                print(
                    f"resuming after step {progress.step}, from the checkpoint in {files.out}",
                    flush=True,
                )
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
