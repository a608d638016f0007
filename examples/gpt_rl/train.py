"""Start of a run, on every rank:

    python -m examples.gpt_rl.torchrun --standalone --nproc-per-node 2 --shutdown-timeout 600 \\
        -m examples.gpt_rl.train --config examples/gpt_rl/configs/tp2_to_dp2.yaml --out runs/gpt_rl

`--shutdown-timeout`: seconds that torchrun gives the ranks after Ctrl-C until it kills them; give it more than an
iteration takes, otherwise the run ends without a checkpoint.

This file looks after processes: options, logs, signals, exit codes. The run itself is in trainer.py.
"""

# ruff: noqa: E402 - Ctrl-C may come, and the launcher end, while the other modules are imported
from __future__ import annotations

import os
import signal

_LAUNCHER = os.getppid()
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until the run asks whether to stop: no traceback of imports

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
from hybrid_engine.rl.config import free_engine_settings
from hybrid_engine.rl.run_files import RunFiles

_PR_SET_PDEATHSIG = 1
_SECONDS_FOR_OTHERS = 20  # to say what went wrong, before a rank that only heard of it does


def main() -> None:
    """Train a small GPT by GRPO or PPO: Megatron or FSDP2 trains, vLLM samples, weights are resharded between them."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--config", type=Path, required=True, help="YAML file; see examples/gpt_rl/configs")
    parser.add_argument("--out", type=Path, default=Path("runs/gpt_rl"), help="directory of the run")
    parser.add_argument("--no-resume", dest="resume", action="store_false", help="start the run in --out over")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="e.g. rl_config.learning_rate=1e-4")
    options = parser.parse_args()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # a launcher that is killed itself ends no rank
    if os.getppid() != _LAUNCHER:
        os.kill(os.getpid(), signal.SIGKILL)
    rank = int(os.environ.get("RANK", 0))
    terminal = os.fdopen(os.dup(1), "w", buffering=1)
    try:
        settings = load_settings(options.config, _world_size(), options.overrides)
        files = run_files(options.out)
        free = free_engine_settings(settings.engine)
        files.check(settings.fingerprint(), options.resume, settings.defaults(), free=free)
        lock = files.lock() if rank == 0 else None
        options.out.mkdir(parents=True, exist_ok=True)
        _log_to(options.out / f"log-rank{rank}.txt", terminal)
        run(settings, files, options.resume, Console(file=terminal, quiet=rank != 0))
        if lock is not None:
            lock.close()
    except Exception as error:
        _fail(error, rank, terminal)
        os._exit(1)  # other ranks may wait for this one inside a library; a process that is gone ends their wait


def run_files(out: Path) -> RunFiles:
    """The files of a run. Checkpoint 0, after the warm-up, is also the reference, so it stays."""
    return RunFiles(out, "iteration", num_kept=2, others=["reward.png"])


def run(settings: Settings, files: RunFiles, resume: bool, console: Console) -> None:
    """Build the engines and train until done or asked to stop. Only rank 0's console shows anything."""
    from examples.gpt_rl.report import Report
    from examples.gpt_rl.trainer import Trainer
    from hybrid_engine import ActorHybridWorker

    before = files.progress() if resume else None
    if before is not None and before.step >= settings.rl.iterations and files.metrics.has(before.step):
        _say(console, f"The run is finished: {before.step} iterations are done. Ask for more, or --no-resume.")
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
        _say(console, "Stopped in the warm-up, of which nothing is kept.")
    elif after.step < settings.rl.iterations:
        _say(console, f"Stopped after iteration {after.step}; the same command goes on from there.")


class StopRequest:
    """Notes SIGINT and SIGTERM for the run to ask between its steps; a second SIGINT ends the process at once.

    torchrun sends each rank the signal that it gets itself, and SIGTERM to the other ranks when one has failed.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._is_made = False
        signal.signal(signal.SIGTERM, self._note)
        signal.signal(signal.SIGINT, self._note)

    def is_made(self) -> bool:
        """Whether a signal has come."""
        return self._is_made

    def _note(self, number: int, _frame: object) -> None:
        self._is_made = True
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            _say(self._console, "Stopping after this iteration, with a checkpoint; once more to end at once ...")


def _world_size() -> int:
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        remedy = "Start it by python -m examples.gpt_rl.torchrun --standalone --nproc-per-node N"
        raise ConfigError([Violation("environment", f"{', '.join(missing)} not set", remedy)])
    return int(os.environ["WORLD_SIZE"])


def _log_to(path: Path, terminal: TextIO) -> None:
    """Append what libraries print from now on to this file, from C++ too: the terminal is for the run's own lines."""
    with path.open("a") as log:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(log.fileno(), stream.fileno())
    # torch renames collectives that megatron-core calls in every step
    warnings.filterwarnings("ignore", category=FutureWarning, message=r"`torch\.distributed\.\w+` is deprecated")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    for name in ("hybrid_engine", "megatron_patches", "examples"):
        logging.getLogger(name).addHandler(handler)
        logging.getLogger(name).setLevel(logging.INFO)
    # what became of other ranks, at once: this one may wait for them inside a library, and say nothing more
    heard = logging.StreamHandler(terminal)
    heard.setLevel(logging.ERROR)
    heard.setFormatter(logging.Formatter(f"rank {os.environ['RANK']}: %(message)s"))
    logging.getLogger("hybrid_engine.failures").addHandler(heard)


def _fail(error: Exception, rank: int, terminal: TextIO) -> None:
    """Say what went wrong; where another rank says it, wait for that: torchrun ends all as soon as one has failed."""
    if isinstance(error, RemoteError) or (isinstance(error, ConfigError) and rank != 0):
        time.sleep(_SECONDS_FOR_OTHERS)
    name = "" if isinstance(error, HybridEngineError) else f"{type(error).__name__}: "
    for line in (f"{name}{error}", *getattr(error, "__notes__", [])):
        print(f"rank {rank}: {line}", file=terminal)
    if os.fstat(1).st_ino != os.fstat(terminal.fileno()).st_ino:  # there is a log
        traceback.print_exception(error, file=sys.stderr)


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False, soft_wrap=True, markup=False)


if __name__ == "__main__":
    main()
