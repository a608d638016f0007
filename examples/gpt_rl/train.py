"""Entry point of a run on every rank.

    hybrid-engine run --nproc-per-node 2 \\
        -m examples.gpt_rl.train --config examples/gpt_rl/configs/tp2_to_dp2.yaml --out runs/gpt_rl

After Ctrl-C, ranks have `--shutdown-timeout` seconds (600). Make that longer than an iteration,
otherwise the run ends without a checkpoint.

This file handles options, logs, signals and exit codes; trainer.py has the run.
"""

# ruff: noqa: E402 - signals and the exit of the launcher must be handled during the slow imports
from __future__ import annotations

import os
import signal

_LAUNCHER = os.getppid()
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback during imports

import argparse
import ctypes
import logging
import sys
import time
import traceback
import warnings
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TextIO

from rich.console import Console

from examples.gpt_rl.settings import Settings, load_settings
from hybrid_engine.errors import ConfigError, HybridEngineError, RemoteError, Violation
from hybrid_engine.rl.run_files import Lock, RunFiles

_PR_SET_PDEATHSIG = 1
_SECONDS_FOR_OTHERS = 20  # time for the failed rank to report first


def main() -> None:
    """Train a small GPT by GRPO or PPO with Megatron or FSDP2, and sample from it with vLLM."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument(
        "--config", type=Path, required=True, help="YAML file; see examples/gpt_rl/configs"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/gpt_rl"), help="directory of the run"
    )
    parser.add_argument(
        "--no-resume", dest="resume", action="store_false", help="restart the run in --out"
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="KEY=VALUE", help="e.g. rl_config.learning_rate=1e-4"
    )
    options = parser.parse_args()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # also if the launcher is killed
    if os.getppid() != _LAUNCHER:  # it ended before prctl
        os.kill(os.getpid(), signal.SIGKILL)
    rank = int(os.environ.get("RANK", 0))
    terminal = os.fdopen(os.dup(1), "w", buffering=1)
    try:
        settings = load_settings(options.config, _world_size(), options.overrides)
        files = run_files(options.out)
        files.check(settings.fingerprint(), options.resume)
        options.out.mkdir(parents=True, exist_ok=True)
        # The file that marks a run comes before the logs, whichever rank is first.
        lock = Lock(options.out / "lock")
        lock.close()
        if rank == 0:
            lock = files.lock()
        _log_to(options.out / f"log-rank{rank}.txt", terminal)
        run(settings, files, options.resume, Console(file=terminal, quiet=rank != 0))
        lock.close()
    except Exception as error:
        _fail(error, rank, terminal)
        os._exit(1)  # unlike exit, this cannot hang; ranks that wait for this one fail


def run_files(out: Path) -> RunFiles:
    """Return the files of a run. Checkpoint 0, after the warm-up, is kept as the reference."""
    return RunFiles(out, "iteration", num_kept=2)


def run(settings: Settings, files: RunFiles, resume: bool, console: Console) -> None:
    """Build the engines and train to the end or until a signal. Only rank 0 prints."""
    from examples.gpt_rl.report import Report
    from examples.gpt_rl.trainer import Trainer
    from hybrid_engine import ActorHybridWorker

    before = files.progress() if resume else None
    if (
        before is not None
        and before.step >= settings.rl.iterations
        and files.metrics.has(before.step)
    ):
        text = (
            f"The run is finished: {before.step} iterations are done. "
            "Increase the number, or use --no-resume."
        )
        _print(console, text)
        return
    report: AbstractContextManager[Report | None] = nullcontext()
    if not console.quiet:
        report = Report(console, files, settings.title())
    with report as shown:
        worker = ActorHybridWorker(settings.engine, load_weights=before is None)
        if shown is not None:  # rank 0
            files.begin(settings.fingerprint(), resume)
            shown.begin()
        worker.barrier("preparing the run's directory")
        on_progress = [shown.show_progress] if shown is not None else []
        trainer = Trainer(worker, settings, files, StopRequest(console).is_made, *on_progress)
        for row in trainer.run():
            if shown is not None:
                shown.add(row)
        worker.shutdown()
    if shown is not None:
        shown.finish()
    after = files.progress()
    if after is None:
        _print(console, "Stopped in the warm-up; nothing was saved.")
    elif after.step < settings.rl.iterations:
        _print(console, f"Stopped after iteration {after.step}; the same command resumes the run.")


class StopRequest:
    """Records SIGINT and SIGTERM; a second SIGINT ends the process at once.

    The launcher forwards its signals to each rank, and sends SIGTERM to the other ranks if one has
    failed.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._is_made = False
        signal.signal(signal.SIGTERM, self._note)
        signal.signal(signal.SIGINT, self._note)

    def is_made(self) -> bool:
        """Return True after a signal."""
        return self._is_made

    def _note(self, number: int, _frame: object) -> None:
        self._is_made = True
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            _print(
                self._console,
                "Stopping after this iteration, with a checkpoint; once more to end at once ...",
            )


def _world_size() -> int:
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in names if name not in os.environ]
    if missing:
        remedy = "Start it by hybrid-engine run --nproc-per-node N"
        raise ConfigError([Violation("environment", f"{', '.join(missing)} not set", remedy)])
    return int(os.environ["WORLD_SIZE"])


def _log_to(path: Path, terminal: TextIO) -> None:
    """Redirect stdout and stderr, including output from C++, to this file."""
    with path.open("a") as log:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(log.fileno(), stream.fileno())
    # megatron-core calls deprecated collectives in every step
    message = r"`torch\.distributed\.\w+` is deprecated"
    warnings.filterwarnings("ignore", category=FutureWarning, message=message)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    for name in ("hybrid_engine", "megatron_patches", "examples"):
        logging.getLogger(name).addHandler(handler)
        logging.getLogger(name).setLevel(logging.INFO)
    # failures of other ranks go to the terminal at once; this rank may hang inside a library
    failures = logging.StreamHandler(terminal)
    failures.setLevel(logging.ERROR)
    failures.setFormatter(logging.Formatter(f"rank {os.environ['RANK']}: %(message)s"))
    logging.getLogger("hybrid_engine.failures").addHandler(failures)


def _fail(error: Exception, rank: int, terminal: TextIO) -> None:
    """Print the error. If another rank reports it, wait, since the first exit ends all ranks."""
    if isinstance(error, RemoteError) or (isinstance(error, ConfigError) and rank != 0):
        time.sleep(_SECONDS_FOR_OTHERS)
    name = "" if isinstance(error, HybridEngineError) else f"{type(error).__name__}: "
    for line in (f"{name}{error}", *getattr(error, "__notes__", [])):
        print(f"rank {rank}: {line}", file=terminal)
    if os.fstat(1).st_ino != os.fstat(terminal.fileno()).st_ino:  # stderr is the log
        traceback.print_exception(error, file=sys.stderr)


def _print(console: Console, text: str) -> None:
    console.print(text, highlight=False, soft_wrap=True, markup=False)


if __name__ == "__main__":
    main()
