"""Ctrl-C at random moments of a loop `rollout; train; save_checkpoint` on ranks, and the final save
of a script.

Trials follow each other on the same engine. In each, SIGINT reaches all ranks, which catch
KeyboardInterrupt and save in `train_context`. Two checkpoints are then loaded: the new one, and the
one that was on the disk when the signal came; both must be states that training had. A rollout and
a step follow, as in the next run of a script. If the ranks have lost each other, new processes do
this instead.

python -m tests.walk.interrupted_saves --trainer megatron --ranks 2 --trials 50
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from hybrid_engine.errors import HybridEngineError, LostRankError, StateError
from hybrid_engine.ranks.job import Job
from tests.harness.launch import Ranks
from tests.walk.oracle import Shadow, Subject, differences
from tests.walk.runs import TRAINERS, configured, subject_of, written_model

SETTINGS = {"incremental": "auto", "prefetch": "auto", "bucket_mb": 1, "timeout_seconds": 8.0}
MAX_SAVE_ATTEMPTS = 3


@dataclass
class Trials:
    """Results of trials on one rank.

    Attributes:
        num: number of trials.
        wrong: descriptions of wrong behaviour.
        counts: number of trials by outcome.
        seconds: times from the signal to the end of the script.
        parted: whether the ranks lost each other in the last trial.
    """

    num: int = 0
    wrong: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)
    parted: bool = False


def interrupt(directory: str, trainer: str, num_trials: int, seed: int) -> Trials:
    """Run trials on this rank until all are done or the ranks have lost each other."""
    trials = Trials()
    chance = random.Random(seed)
    path = written_model(Path(directory))
    with ExitStack() as ends:
        config = configured(path, trainer, SETTINGS)
        job = ends.enter_context(closing(Job.join(config.generate_config.timeout_seconds, host="here")))
        subject = subject_of(path, trainer, config, job, ends)
        loop = _Loop(subject, Path(directory), trials)
        if loop.directory.exists():  # New processes resume the run of earlier ones.
            loop.resume()
        for _ in range(num_trials):
            trials.num += 1
            try:
                loop.trial(chance)
            except (LostRankError, StateError) as error:
                if not isinstance(error, LostRankError) and "ranks have parted" not in str(error):
                    raise
                trials.parted = True
                trials.counts["the ranks lost each other"] += 1
                break
    return trials


class _Loop:
    def __init__(self, subject: Subject, directory: Path, trials: Trials) -> None:
        self.subject = subject
        self.engine = subject.engine
        self._trials = trials
        self.directory = directory / "run"
        self._copy = directory / "copy"
        # The last states of training, around the last saves.
        self._states = directory / f"states-{subject.job.rank}.pt"
        self._shadow = Shadow(subject)
        self._signal = _Signal()
        self._group = dist.new_group(backend="gloo")
        self._is_writing = False
        self._seconds_of_iteration = 1.0
        # Delays of the signal after the starts of the next switches, in seconds; 0.0 sends none.
        self._delays: list[float] = []
        self._seconds_of_switches = [0.05, 0.05]
        self._timer: threading.Timer | None = None
        self.engine.on_reshard_start(self._switching)
        with torch.no_grad():
            self._shadow.read()
        self._remember()

    def resume(self) -> None:
        """Continue from the checkpoint on the disk."""
        known = torch.load(self._states, weights_only=True)
        with self.engine.train_context():
            name = "the checkpoint after the ranks had lost each other"
            self._load(self.directory / "checkpoint", name, known, is_step_cut_short=True)
        self._continue()

    def trial(self, chance: random.Random) -> None:
        """Send a signal at a random moment of an iteration, or of a switch, its small part."""
        self._iteration()
        self._trials.counts["iterations"] += 1
        at = time.monotonic()
        try:
            with self._signal.heeded():
                self._plan_signal(chance)
                self._iterate()
            self._trials.counts["interrupts swallowed"] += 1
            return
        except KeyboardInterrupt:
            at = time.monotonic()
        except HybridEngineError as error:  # Another rank was interrupted.
            self._trials.counts[f"notified by {type(error).__name__}"] += 1
            if isinstance(error, LostRankError):
                raise
        finally:
            self._cancel_signal()
            torch.set_grad_enabled(True)
        self._copy_disk()
        was_cut_short = self._is_writing
        self._save_finally()
        self._trials.seconds.append(time.monotonic() - at)
        if self._on_any_rank(was_cut_short):
            raise LostRankError("a step was cut short: the trainer's own collectives no longer match")
        self._next_run()

    def _plan_signal(self, chance: random.Random) -> None:
        if chance.random() < 0.4:
            self._send_after(chance.uniform(0.0, self._seconds_of_iteration))
        else:
            number = chance.randint(0, 1)  # 0: to the rollout, 1: back.
            self._delays = [0.0] * number + [chance.uniform(0.0, 1.1 * self._seconds_of_switches[number])]

    def _cancel_signal(self) -> None:
        # The interrupt of another rank may have ended the trial before this rank's signal.
        self._delays = []
        if self._timer is not None:
            self._timer.cancel()
            self._timer.join()  # Otherwise the signal could still arrive during the next trial.

    def _iterate(self) -> None:
        for _ in range(20):
            started = time.monotonic()
            self._iteration()
            self._seconds_of_iteration = 0.7 * self._seconds_of_iteration + 0.3 * (time.monotonic() - started)

    def _on_any_rank(self, flag: bool) -> bool:
        if self.subject.job.world_size == 1:
            return False
        flags: list[bool] = [False] * self.subject.job.world_size
        try:
            dist.all_gather_object(flags, flag, group=self._group)
        except RuntimeError:  # The other rank has ended.
            return True
        return any(flags)

    def _note_seconds(self, number: int) -> None:
        if (report := self.engine.sharding.last_report) is not None:
            self._seconds_of_switches[number] = report.seconds

    def _switching(self) -> None:
        if self._delays and (seconds := self._delays.pop(0)):
            self._send_after(seconds)

    def _send_after(self, seconds: float) -> None:
        self._timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))
        self._timer.start()

    def _iteration(self) -> None:
        with self.engine.rollout_context(), self._signal.held():
            self._note_seconds(0)
            self._compare_rollout()
        with self.engine.train_context():
            with self._signal.held():
                self._note_seconds(1)
                self._compare("the training state after a rollout")
            self._is_writing = True
            self.subject.steps["step"](random.Random(0))
            with self._signal.held(), torch.no_grad():
                # The other rank may have been interrupted. Ranks agree on that before they gather,
                # because otherwise only gloo's timeout would end the gather.
                self.subject.job.agreement.conclude("gathering the trained weights")
                self._shadow.read()
                self._remember()
                self._is_writing = False
            self.subject.save(self.directory / "checkpoint")

    def _save_finally(self) -> None:
        for attempt in range(MAX_SAVE_ATTEMPTS):
            try:
                with self.engine.train_context():
                    with torch.no_grad():
                        if self._is_writing:  # An update was cut short at an unknown point.
                            self._shadow.read_own()
                            self._remember()
                        else:
                            self._compare("the training state after the signal")
                    self._is_writing = False
                    self.subject.save(self.directory / "checkpoint")
                self._trials.counts[f"saved at attempt {attempt + 1}"] += 1
                return
            except LostRankError:
                raise
            except (HybridEngineError, AssertionError) as error:
                self._trials.counts[f"{type(error).__name__}: {str(error)[:100]}"] += 1
        self._add_wrong("no checkpoint could be saved")

    def _next_run(self) -> None:
        known = torch.load(self._states, weights_only=True)
        with self.engine.train_context():
            if self._copy.exists():
                self._load(self._copy / "checkpoint", "the checkpoint on the disk", known)
            self._load(self.directory / "checkpoint", "the last checkpoint", known[-1:])
        self._continue()

    def _continue(self) -> None:
        num_wrong = len(self._trials.wrong)
        try:
            self._iteration()
        except HybridEngineError as error:
            self._add_wrong(f"the next run: {type(error).__name__}: {error}")
            raise
        self._trials.counts["next run right"] += len(self._trials.wrong) == num_wrong

    def _load(
        self, path: Path, name: str, known: list[dict[str, torch.Tensor]], *, is_step_cut_short: bool = False
    ) -> None:
        self.subject.load(path)
        loaded = {**self.subject.parameters(), **self.subject.optimizer_state()}
        if is_step_cut_short:
            known = [_with_counters_of(loaded, state) for state in known]
        nearest = min((differences(state, loaded) for state in known), key=len)
        self._require_none(nearest, name)
        self._trials.counts["checkpoints compared"] += 1
        with torch.no_grad():
            self._shadow.read()
            self._remember()

    def _remember(self) -> None:
        kept = torch.load(self._states, weights_only=True) if self._states.exists() else []
        torch.save([*kept[-2:], {**self._shadow.parameters, **self._shadow.optimizer}], self._states)

    def _copy_disk(self) -> None:
        if self.subject.job.world_size == 1:  # Other ranks may still be writing.
            shutil.rmtree(self._copy, ignore_errors=True)
            shutil.copytree(self.directory, self._copy, symlinks=True)

    def _compare_rollout(self) -> None:
        assert self._shadow.canonical is not None
        self._require_none(differences(self._shadow.canonical, self.subject.inference.whole()), "a rollout")

    def _compare(self, name: str) -> None:
        self._require_none(self._shadow.different(), name)

    def _require_none(self, wrong: list[str], name: str) -> None:
        if wrong:
            self._add_wrong(f"{name}: {wrong[:2]}, {len(wrong)} in all")

    def _add_wrong(self, text: str) -> None:
        self._trials.wrong.append(f"trial {self._trials.num}: {text}")


def _with_counters_of(loaded: dict[str, torch.Tensor], state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return `state` with Adam's counters of a loaded checkpoint, if they differ by at most one
    step.

    A checkpoint has the counters of any rank; in a step cut short, ranks were at different
    parameters.
    """
    counters = {name: tensor for name, tensor in state.items() if not tensor.dim() and name in loaded}
    return {**state, **{name: loaded[name] for name, tensor in counters.items() if abs(loaded[name] - tensor) <= 1}}


class _Signal:
    """Handler of SIGINT that raises KeyboardInterrupt once in a block, but not during the test's
    own work.

    A signal mask would not help: another thread would receive the signal, and Python would still
    run the handler in the main thread.
    """

    def __init__(self) -> None:
        self._is_heeded = False
        self._is_held = False
        self._came = False
        signal.signal(signal.SIGINT, self._handle)

    def _handle(self, *_: object) -> None:
        if not self._is_heeded:
            return
        if self._is_held:
            self._came = True
        else:
            self._is_heeded = False
            raise KeyboardInterrupt

    @contextmanager
    def heeded(self) -> Iterator[None]:
        """Let the first signal interrupt the block; drop all later signals."""
        self._is_heeded = True
        try:
            yield
        finally:
            self._is_heeded = False

    @contextmanager
    def held(self) -> Iterator[None]:
        """Delay a signal until the end of the test's own work; drop it if that fails."""
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False
            came = self._came
            self._came = False
        if came:
            self._is_heeded = False
            raise KeyboardInterrupt


def run(engines: Ranks, trainer: str, num_ranks: int, num_trials: int, seed: int, seconds: float = 600) -> Trials:
    """Run all trials, on new ranks whenever they have lost each other.

    Returns the results of rank 0 with the findings of all ranks.
    """
    total = Trials()
    deadline = time.monotonic() + seconds
    parted = False
    with tempfile.TemporaryDirectory() as directory:
        while (parted or total.num < num_trials) and time.monotonic() < deadline:
            call = (directory, trainer, num_trials - total.num, seed + total.num)
            by_rank = engines.launch(interrupt, num_ranks, *call, timeout=deadline - time.monotonic() + 60)
            parted = by_rank[0].parted
            total.num += by_rank[0].num
            for rank, trials in enumerate(by_rank):
                total.wrong += [f"rank {rank}: {text}" for text in trials.wrong]
            total.counts += by_rank[0].counts
            total.seconds += by_rank[0].seconds
    return total


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--trainer", default="fsdp2", choices=TRAINERS)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--trials", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    trials = run(Ranks(with_engines=True), options.trainer, options.ranks, options.trials, options.seed)
    print(*trials.wrong, sep="\n")
    slowest = max(trials.seconds, default=0.0)
    print(f"{options}: {trials.num} trials, {len(trials.wrong)} wrong, slowest {slowest:.1f} s, {dict(trials.counts)}")


if __name__ == "__main__":
    main()
