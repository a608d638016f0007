"""Start of a run, on every rank:

    python -m examples.gpt_rl.torchrun --standalone --nproc-per-node 2 --shutdown-timeout 600 \\
        -m examples.gpt_rl.train --config examples/gpt_rl/configs/tp2_to_dp2.yaml --out runs/gpt_rl

`examples.gpt_rl.torchrun` is torchrun, without its traceback where the ranks have said what happened.
`--shutdown-timeout`: seconds that it gives the ranks after Ctrl-C until it kills them; give it more than an iteration
takes, otherwise the run ends without a checkpoint.

This file looks after processes: options, errors, exit codes. The run itself is in trainer.py.
"""

# ruff: noqa: E402 - the launcher may end, and Ctrl-C come, while the other modules are imported
from __future__ import annotations

import os

_LAUNCHER = os.getppid()

import signal

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until there is a StopRequest: no traceback of imports

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, TextIO

import typer

from examples.gpt_rl.loggers import Logger, TensorBoard, WeightsAndBiases, import_wandb
from examples.gpt_rl.output import Output
from examples.gpt_rl.run_lock import take_lock, tell_others, wait_for_lock
from examples.gpt_rl.run_state import Row, RunDirectory
from examples.gpt_rl.settings import Settings, load_settings
from examples.gpt_rl.stopping import StopRequest
from hybrid_engine.errors import ConfigError, Violation
from hybrid_engine.files.durable import write_text
from hybrid_engine.ranks.launching import end_with_parent


def main(
    config: Annotated[Path, typer.Option(help="YAML file; see examples/gpt_rl/configs.")],
    out: Annotated[Path, typer.Option(help="Directory of the run.")] = Path("runs/gpt_rl"),
    iterations: Annotated[int | None, typer.Option(min=1, help="In place of the file's.")] = None,
    resume: Annotated[bool, typer.Option(help="Go on with the run in --out, or start over.")] = True,
    seed: Annotated[int | None, typer.Option(min=0, help="In place of the file's.")] = None,
    wandb: Annotated[str | None, typer.Option(help="Also log to this project of Weights & Biases.")] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="In place of the file's, e.g. rl_config.learning_rate=1e-4."),
    ] = None,
) -> None:
    """Train a small GPT by GRPO or PPO: Megatron or FSDP2 trains, vLLM samples, weights are resharded between them."""
    end_with_parent(_LAUNCHER)
    output = Output(int(os.environ.get("RANK", 0)))
    stop = StopRequest(output)
    try:
        with stop:
            settings = load_settings(config, _world_size(), iterations, seed, overrides or ())
            if wandb is not None and output.rank == 0:
                import_wandb()
            directory = RunDirectory(out)
            lock = claim(directory, settings, resume, output.rank)
            output.log_to(out / f"log-rank{output.rank}.txt")
            if resume and _is_finished(directory, settings):
                output.say(f"The run in {out} is finished: {settings.rl.iterations} iterations are done.")
                output.say("Ask for more with --iterations, or start over with --no-resume.")
            else:
                if resume and output.rank == 0:
                    directory.require_room()
                run(settings, directory, resume, output, stop, wandb)
            sys.stdout.flush()
            sys.stderr.flush()
    except Exception as error:
        output.fail(error, is_being_ended=stop.may_be_the_launchers)
        # Other ranks may wait for this one inside a library; a process that is gone ends their wait.
        os._exit(1)
    if lock is not None:
        lock.close()


def claim(directory: RunDirectory, settings: Settings, resume: bool, rank: int) -> TextIO | None:
    """Return when this job may write in the run's directory; on rank 0 with the lock, to be kept.

    Raises, before anything is written there and before engines are built, unless the directory is empty or a run of
    this configuration that no other job has under way. Only rank 0 looks; if it ends, the others do.
    """
    if rank != 0:
        wait_for_lock()
        return None
    directory.require_ours()
    lock = take_lock(directory.lock_file)
    if resume:
        directory.require_resumable(settings.fingerprint(), settings.fingerprint(exclude_defaults=True))
        directory.recover()
    else:
        directory.require_replaceable()
    tell_others(settings.world_size)
    return lock


def run(
    settings: Settings,
    directory: RunDirectory,
    resume: bool,
    output: Output,
    stop: StopRequest,
    wandb: str | None = None,
) -> None:
    """Build the engines and train until done or asked to stop; `wandb`: a project to log to as well."""
    from examples.gpt_rl.report import Report

    is_first = output.rank == 0
    report = Report(output.console, directory, settings.title()) if is_first else None
    with report or nullcontext():
        from examples.gpt_rl.trainer import Interrupted, Trainer
        from hybrid_engine import ActorHybridWorker

        begins = not resume or directory.progress() is None
        worker = ActorHybridWorker(settings.engine, load_weights=begins)
        if is_first and begins:
            directory.start_over(settings.fingerprint())
        worker.barrier("preparing the run's directory")
        if is_first and settings.engine.critic_config is not None:
            output.say(str(worker.memory_plan()))
        if report:
            report.begin(_rows_so_far(directory), _loggers(settings, directory, wandb))
        stop.begin_to_wait()
        on_progress = [report.show_progress] if report else []
        trainer = Trainer(worker, settings, directory, lambda: stop.is_made, *on_progress)
        try:
            for row in trainer.run():
                if report:
                    report.add(row)
        except Interrupted as interruption:
            output.say(f"{interruption}.")
        if is_first and settings.engine.critic_config is not None:
            write_text(directory.path / "memory.txt", worker.memory_report() + "\n")
        worker.shutdown()
    if report:
        report.finish()
        progress = directory.progress()
        if progress is not None and progress.iteration < settings.rl.iterations:
            output.say(f"Stopped after iteration {progress.iteration}; the same command goes on from there.")


def _loggers(settings: Settings, directory: RunDirectory, wandb: str | None) -> list[Logger]:
    loggers: list[Logger] = [TensorBoard(directory.path)]
    if wandb is not None:
        is_resumed = directory.progress() is not None
        loggers.append(WeightsAndBiases(wandb, directory.path, settings.fingerprint(), is_resumed=is_resumed))
    return loggers


def _world_size() -> int:
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        remedy = (
            "Start with python -m examples.gpt_rl.torchrun --standalone --nproc-per-node N -m examples.gpt_rl.train"
        )
        raise ConfigError([Violation("environment", f"{', '.join(missing)} not set", remedy)])
    return int(os.environ["WORLD_SIZE"])


def _is_finished(directory: RunDirectory, settings: Settings) -> bool:
    """Whether nothing is left to do. Raises ConfigError when the run found is another one."""
    progress = directory.progress()
    if progress is None:
        return False
    directory.require_same(settings.fingerprint(), settings.fingerprint(exclude_defaults=True))
    has_row = any(row["iteration"] == progress.iteration for row in directory.rows())
    return has_row and progress.iteration >= settings.rl.iterations


def _rows_so_far(directory: RunDirectory) -> list[Row]:
    progress = directory.progress()
    return [] if progress is None else [row for row in directory.rows() if row["iteration"] <= progress.iteration]


if __name__ == "__main__":
    typer.run(main)
