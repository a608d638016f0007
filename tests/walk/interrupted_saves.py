"""Ctrl-C at random moments of a loop `rollout; train; save_checkpoint`, and the save with which scripts end. On ranks.

A trial begins where the one before ended: SIGINT comes to all ranks, each catches KeyboardInterrupt and saves in
`train_context`. Then two checkpoints are loaded: the one just saved, and what was on the disk as the signal came; each
must be a state that training had. A rollout and a step follow: the next run. Where the ranks have lost each other, the
next run is one of new processes.

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
MOST_ATTEMPTS = 3  # of the last save


@dataclass
class Trials:
    """What came of some trials, on one rank.

    Attributes:
        num: of trials.
        wrong: what should not be.
        counts: how they ended.
        seconds: from the signal to the end of the script.
        parted: whether the ranks lost each other in the last one.
    """

    num: int = 0
    wrong: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)
    parted: bool = False


def interrupt(directory: str, trainer: str, num_trials: int, seed: int) -> Trials:
    """A rank function: trials, until all are done or the ranks have lost each other."""
    trials, chance = Trials(), random.Random(seed)
    path = written_model(Path(directory))
    with ExitStack() as ends:
        config = configured(path, trainer, SETTINGS)
        job = ends.enter_context(closing(Job.join(config.generate_config.timeout_seconds, host="here")))
        subject = subject_of(path, trainer, config, job, ends)
        loop = _Loop(subject, Path(directory), trials)
        if loop.place.exists():  # the next run, of new processes
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
        self.subject, self.engine, self._trials = subject, subject.engine, trials
        self.place, self._copy = directory / "run", directory / "copy"
        self._states = directory / f"states-{subject.job.rank}.pt"  # which training had, around the last saves
        self._shadow = Shadow(subject)
        self._signal = _Signal()
        self._group = dist.new_group(backend="gloo")
        self._is_writing = False
        self._seconds = 1.0  # of an iteration
        self._switches: list[float] = []  # seconds after the beginnings of the next switches, for a signal; 0.0: none
        self._seconds_of_switches = [0.05, 0.05]
        self._timer: threading.Timer | None = None
        self.engine.on_reshard_start(self._switching)
        with torch.no_grad():
            self._shadow.read()
        self._remember()

    def resume(self) -> None:
        """Take up what is on the disk."""
        known = torch.load(self._states, weights_only=True)
        with self.engine.train_context():
            what = "the checkpoint after the ranks had lost each other"
            self._load(self.place / "checkpoint", what, known, is_step_cut_short=True)
        self._go_on()

    def trial(self, chance: random.Random) -> None:
        """One signal, at any moment of an iteration, or of a switch, which is a small part of one."""
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
        except HybridEngineError as error:  # of a rank that was interrupted
            self._trials.counts[f"heard of it by {type(error).__name__}"] += 1
            if isinstance(error, LostRankError):
                raise
        finally:
            self._call_off_signal()
            torch.set_grad_enabled(True)
        self._keep_what_is_on_the_disk()
        was_cut_short = self._is_writing
        self._save_at_last()
        self._trials.seconds.append(time.monotonic() - at)
        if self._on_any_rank(was_cut_short):
            raise LostRankError("a step was cut short: the trainer's own collectives no longer match")
        self._next_run()

    def _plan_signal(self, chance: random.Random) -> None:
        if chance.random() < 0.4:
            self._send_after(chance.uniform(0.0, self._seconds))
        else:
            number = chance.randint(0, 1)  # to the rollout, or back
            self._switches = [0.0] * number + [chance.uniform(0.0, 1.1 * self._seconds_of_switches[number])]

    def _call_off_signal(self) -> None:
        """A rank that heard of another's interrupt may not have had its own signal, nor begun the switch it was for."""
        self._switches = []
        if self._timer is not None:
            self._timer.cancel()
            self._timer.join()  # it may be about to send the signal, which the next trial would take for its own

    def _iterate(self) -> None:
        for _ in range(20):
            started = time.monotonic()
            self._iteration()
            self._seconds = 0.7 * self._seconds + 0.3 * (time.monotonic() - started)

    def _on_any_rank(self, flag: bool) -> bool:
        if self.subject.job.world_size == 1:
            return False
        flags: list[bool] = [False] * self.subject.job.world_size
        try:
            dist.all_gather_object(flags, flag, group=self._group)
        except RuntimeError:  # the other rank has gone
            return True
        return any(flags)

    def _note_seconds(self, number: int) -> None:
        if (report := self.engine.sharding.last_report) is not None:
            self._seconds_of_switches[number] = report.seconds

    def _switching(self) -> None:
        if self._switches and (seconds := self._switches.pop(0)):
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
                # the other rank may have been interrupted on its way here: all hear of that before they gather,
                # which nothing would end but gloo's timeout, with an error that no user of the product gets
                self.subject.job.agreement.conclude("gathering what training wrote")
                self._shadow.read()
                self._remember()
                self._is_writing = False
            self.subject.save(self.place / "checkpoint")

    def _save_at_last(self) -> None:
        for attempt in range(MOST_ATTEMPTS):
            try:
                with self.engine.train_context():
                    with torch.no_grad():
                        if self._is_writing:  # an update was cut short, anywhere
                            self._shadow.read_own()
                            self._remember()
                        else:
                            self._compare("the training state after the signal")
                    self._is_writing = False
                    self.subject.save(self.place / "checkpoint")
                self._trials.counts[f"saved at attempt {attempt + 1}"] += 1
                return
            except LostRankError:
                raise
            except (HybridEngineError, AssertionError) as error:
                self._trials.counts[f"{type(error).__name__}: {str(error)[:100]}"] += 1
        self._wrong("no checkpoint could be saved")

    def _next_run(self) -> None:
        known = torch.load(self._states, weights_only=True)
        with self.engine.train_context():
            if self._copy.exists():
                self._load(self._copy / "checkpoint", "the checkpoint on the disk", known)
            self._load(self.place / "checkpoint", "the last checkpoint", known[-1:])
        self._go_on()

    def _go_on(self) -> None:
        num_wrong = len(self._trials.wrong)
        try:
            self._iteration()
        except HybridEngineError as error:
            self._wrong(f"the next run: {type(error).__name__}: {error}")
            raise
        self._trials.counts["next run right"] += len(self._trials.wrong) == num_wrong

    def _load(
        self, path: Path, what: str, known: list[dict[str, torch.Tensor]], *, is_step_cut_short: bool = False
    ) -> None:
        self.subject.load(path)
        found = {**self.subject.parameters(), **self.subject.optimizer_state()}
        if is_step_cut_short:
            known = [_with_counters_of(found, each) for each in known]
        nearest = min((differences(each, found) for each in known), key=len)
        if nearest:
            self._wrong(f"{what}: {nearest[:2]}, {len(nearest)} in all")
        self._trials.counts["checkpoints compared"] += 1
        with torch.no_grad():
            self._shadow.read()
            self._remember()

    def _remember(self) -> None:
        kept = torch.load(self._states, weights_only=True) if self._states.exists() else []
        torch.save([*kept[-2:], {**self._shadow.parameters, **self._shadow.optimizer}], self._states)

    def _keep_what_is_on_the_disk(self) -> None:
        if self.subject.job.world_size == 1:  # others may still be writing
            shutil.rmtree(self._copy, ignore_errors=True)
            shutil.copytree(self.place, self._copy, symlinks=True)

    def _compare_rollout(self) -> None:
        assert self._shadow.canonical is not None
        if wrong := differences(self._shadow.canonical, self.subject.inference.whole()):
            self._wrong(f"a rollout: {wrong[:2]}, {len(wrong)} in all")

    def _compare(self, what: str) -> None:
        if wrong := self._shadow.different():
            self._wrong(f"{what}: {wrong[:2]}, {len(wrong)} in all")

    def _wrong(self, text: str) -> None:
        self._trials.wrong.append(f"trial {self._trials.num}: {text}")


def _with_counters_of(found: dict[str, torch.Tensor], state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The state as a checkpoint may have it whose ranks were at different parameters as a step was cut short.

    Adam's counters are on all ranks and once in the checkpoint, from any rank: each may be one step away.
    """
    counters = {name: tensor for name, tensor in state.items() if not tensor.dim() and name in found}
    return {**state, **{name: found[name] for name, tensor in counters.items() if abs(found[name] - tensor) <= 1}}


class _Signal:
    """What SIGINT does: KeyboardInterrupt once in a block, but for the test's own work there, which it waits for.

    A mask would not do: another thread would take the signal, and Python's main thread hear of it all the same.
    """

    def __init__(self) -> None:
        self._is_heeded, self._is_held, self._came = False, False, False
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
        """A block that a signal interrupts; what comes after it, or after the first signal, is dropped."""
        self._is_heeded = True
        try:
            yield
        finally:
            self._is_heeded = False

    @contextmanager
    def held(self) -> Iterator[None]:
        """Work of the test in the block. Where it fails, its error ends the loop, and a signal that came is dropped."""
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False
            came, self._came = self._came, False
        if came:
            self._is_heeded = False
            raise KeyboardInterrupt


def run(engines: Ranks, trainer: str, num_ranks: int, num_trials: int, seed: int, seconds: float = 600) -> Trials:
    """All trials, on new ranks whenever they have lost each other; of rank 0, with what any rank found wrong."""
    total, ends = Trials(), time.monotonic() + seconds
    parted = False
    with tempfile.TemporaryDirectory() as directory:
        while (parted or total.num < num_trials) and time.monotonic() < ends:
            call = (directory, trainer, num_trials - total.num, seed + total.num)
            by_rank = engines.launch(interrupt, num_ranks, *call, timeout=ends - time.monotonic() + 60)
            parted = by_rank[0].parted
            total.num += by_rank[0].num
            total.wrong += [f"rank {rank}: {each}" for rank, of in enumerate(by_rank) for each in of.wrong]
            total.counts += by_rank[0].counts
            total.seconds += by_rank[0].seconds
    return total


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--trainer", default="fsdp2", choices=TRAINERS)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--trials", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    trials = run(Ranks(with_engines=True), given.trainer, given.ranks, given.trials, given.seed)
    print(*trials.wrong, sep="\n")
    slowest = max(trials.seconds, default=0.0)
    print(f"{given}: {trials.num} trials, {len(trials.wrong)} wrong, slowest {slowest:.1f} s, {dict(trials.counts)}")


if __name__ == "__main__":
    main()
