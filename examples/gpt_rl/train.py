"""Start of a run, on every rank:

    python -m torch.distributed.run --standalone --nproc-per-node 2 -m examples.gpt_rl.train \\
        --config examples/gpt_rl/configs/tp2_to_dp2.yaml --out runs/gpt_rl

This file looks after processes: options, output, signals, errors, exit codes. The run itself is in trainer.py.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from examples.gpt_rl.run_state import RunDirectory
from examples.gpt_rl.settings import Settings, load_settings
from hybrid_engine.errors import ConfigError, HybridEngineError, RemoteError, Violation

_SECONDS_FOR_OTHERS = 20  # to say what went wrong, before a rank that only heard of it does


def main(
    config: Annotated[Path, typer.Option(help="YAML file; see examples/gpt_rl/configs.")],
    out: Annotated[Path, typer.Option(help="Directory of the run.")] = Path("runs/gpt_rl"),
    iterations: Annotated[int | None, typer.Option(min=1, help="In place of the file's.")] = None,
    resume: Annotated[bool, typer.Option(help="Go on with the run in --out, or start over.")] = True,
    seed: Annotated[int | None, typer.Option(min=0, help="In place of the file's.")] = None,
) -> None:
    """Train a small GPT by GRPO: Megatron trains, vLLM samples, weights are resharded between them."""
    rank = int(os.environ.get("RANK", 0))
    directory = RunDirectory(out)
    with Output(rank, out) as output:
        try:
            settings = load_settings(config, _world_size(), iterations, seed)
            if resume and _is_finished(directory, settings):
                output.say(f"The run in {out} is finished: {settings.rl.iterations} iterations are done.")
                output.say("Ask for more with --iterations, or start over with --no-resume.")
                return
            run(settings, directory, resume, output)
        except Exception as error:
            output.fail(error)
            # Other ranks may wait for this one inside a library; a process that is gone ends their wait.
            os._exit(1)


def run(settings: Settings, directory: RunDirectory, resume: bool, output: Output) -> None:
    """Build the engines and train until done or asked to stop."""
    from examples.gpt_rl.report import Report

    is_first = output.rank == 0
    report = Report(output.console, directory, settings.rl.iterations) if is_first else None
    with report or nullcontext():
        from examples.gpt_rl.trainer import Interrupted, Trainer
        from hybrid_engine import ActorHybridWorker

        worker = ActorHybridWorker(settings.engine)
        if is_first and (not resume or directory.progress() is None):
            directory.start_over(settings.fingerprint())
        worker.sharding.agreement.settle("preparing the run's directory", None)
        if report:
            report.begin(_rows_so_far(directory))
        with stop_on_signals(output) as stop_requested:
            trainer = Trainer(worker, settings, directory, stop_requested, *([report.show_progress] if report else []))
            try:
                for row in trainer.run():
                    if report:
                        report.add(row)
            except Interrupted as interruption:
                output.say(f"{interruption}.")
        worker.shutdown()
    if report:
        report.finish()
        progress = directory.progress()
        if progress is not None and progress.iteration < settings.rl.iterations:
            output.say(f"Stopped after iteration {progress.iteration}; the same command goes on from there.")


class Output:
    """Keeps the terminal for what this program says; all else goes to OUT/log-rank<r>.txt.

    What libraries print, from C++ too, is caught by putting the log file in the place of descriptors 1 and 2.
    """

    def __init__(self, rank: int, directory: Path) -> None:
        self.rank = rank
        self.log_file = directory / f"log-rank{rank}.txt"
        directory.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Output:
        sys.stdout.flush()
        sys.stderr.flush()
        self._terminal = os.fdopen(os.dup(1), "w", buffering=1)
        log = os.open(self.log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for descriptor in (1, 2):
            os.dup2(log, descriptor)
        os.close(log)
        self.console = Console(file=self._terminal)
        # torch renames collectives that megatron-core calls in every step
        warnings.filterwarnings("ignore", category=FutureWarning, message=r"`torch\.distributed\.\w+` is deprecated")
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        for name in ("hybrid_engine", "megatron_patches", "examples"):
            logging.getLogger(name).addHandler(handler)
            logging.getLogger(name).setLevel(logging.INFO)
        return self

    def __exit__(self, *exception: object) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        self._terminal.flush()

    def say(self, text: str) -> None:
        """A line for the user, from rank 0."""
        if self.rank == 0:
            self.console.print(text, highlight=False, soft_wrap=True, markup=False)

    def fail(self, error: Exception) -> None:
        """Say what went wrong here; the traceback goes to the log.

        Where another rank says it (a wrong configuration is the same on all, a RemoteError is about a peer), wait for
        that: the launcher ends all ranks as soon as one has failed.
        """
        traceback.print_exception(error, file=sys.stderr)
        sys.stderr.flush()
        if isinstance(error, RemoteError) or (isinstance(error, ConfigError) and self.rank != 0):
            time.sleep(_SECONDS_FOR_OTHERS)
        name = "" if isinstance(error, HybridEngineError) else f"{type(error).__name__}: "
        text = f"rank {self.rank}: {name}{error}\nrank {self.rank}: more in {self.log_file} and the logs beside it"
        self.console.print(text, style="red", highlight=False, soft_wrap=True, markup=False)


@contextmanager
def stop_on_signals(output: Output) -> Iterator[Callable[[], bool]]:
    """Inside, SIGINT and SIGTERM only set a flag; gives a function that reads it."""
    received: list[int] = []

    def note(number: int, frame: object) -> None:
        if not received:
            output.say("Stopping after this iteration, with a checkpoint ...")
        received.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(received)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _world_size() -> int:
    if "WORLD_SIZE" not in os.environ:
        remedy = "Start with python -m torch.distributed.run --standalone --nproc-per-node N -m examples.gpt_rl.train"
        raise ConfigError([Violation("environment", "WORLD_SIZE is not set", remedy)])
    return int(os.environ["WORLD_SIZE"])


def _is_finished(directory: RunDirectory, settings: Settings) -> bool:
    """Whether nothing is left to do. Raises ConfigError when the run found is another one."""
    progress = directory.progress()
    if progress is None:
        return False
    directory.require_same(settings.fingerprint())
    has_row = any(row["iteration"] == progress.iteration for row in directory.rows())
    return has_row and progress.iteration >= settings.rl.iterations


def _rows_so_far(directory: RunDirectory) -> list[dict]:
    progress = directory.progress()
    return [] if progress is None else [row for row in directory.rows() if row["iteration"] <= progress.iteration]


if __name__ == "__main__":
    typer.run(main)
