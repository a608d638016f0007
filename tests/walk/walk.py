"""The random walk. Every rank draws the same numbers, and so goes the same way.

A step is a visit to a context, or a call outside of any. What the trainer has is known to a `Shadow` that is read after
everything that may write; what the inference side has is compared with it in every rollout, and the trainer's own
tensors in every other context. A call is right, or it is refused with one of the product's errors and changes nothing;
where a fault was put into it, it may fail (`Attempts`).
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hybrid_engine.errors import HybridEngineError, LostRankError
from hybrid_engine.switch.states import State
from tests.walk.inference import Served
from tests.walk.interruptions import Cancelled, Interruption, Points, no_new_threads
from tests.walk.oracle import Kept, Shadow, Subject, differences

ERRORS: tuple[Callable[[], BaseException], ...] = (
    *(KeyboardInterrupt, lambda: SystemExit(143), lambda: Cancelled("by ray")),
    *(lambda: MemoryError("injected"), lambda: OSError(28, "injected"), lambda: RuntimeError("injected")),
)
MOST_REFUSED = 6  # visits one after the other, without a fault in them, until the engine counts as stuck


class Wrong(Exception):
    """What should not be. Ends the walk."""


class Parted(Exception):
    """The ranks have lost each other: nothing more can be asked of this job."""


@dataclass
class Findings:
    """Of one walk, on one rank.

    Attributes:
        wrong: what ended it too early; empty when all was right.
        history: what was done, the last last.
        counts: steps, switches, faults, refusals and what was compared.
        refused: what was refused, by call.
        interrupted: where exceptions came.
        parted: whether the ranks lost each other after a fault.
    """

    seed: int
    settings: str
    wrong: str = ""
    history: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    interrupted: Counter[str] = field(default_factory=Counter)
    parted: bool = False


class Attempts:
    """See the module.

    Args:
        subject: what is walked over.
        points: where exceptions can come.
        found: what comes of it.
        journal: gets the history, too: a read of released memory ends the process.
    """

    def __init__(self, subject: Subject, points: Points, found: Findings, journal: Path) -> None:
        self.subject, self.found = subject, found
        self.chance = random.Random(found.seed)
        self._points = points
        self._num_refused = 0
        self._journal = journal.open("w")
        self._note(f"seed {found.seed}, {found.settings}")
        self._group = dist.new_group(backend="gloo")

    def close(self) -> None:
        dist.destroy_process_group(self._group)
        self._journal.close()

    def _fault(self, what: str, faulty: bool) -> Interruption | None:
        """What is to go wrong on this rank. Others may be spared an error, and never a signal."""
        number, make = self.chance.getrandbits(32), self.chance.choice(ERRORS)
        hit = self.chance.randrange(self.subject.job.world_size)
        if not faulty or not self._points.known(what):
            return None
        if isinstance(make(), Exception) and hit != self.subject.job.rank:
            return None
        return self._points.interruption(what, random.Random(number + self.subject.job.rank), make)

    def _tried(self, what: str, call: Callable[[], object], fault: Interruption | None) -> bool:
        """Whether a call succeeded, on all ranks. It may fail by a fault, on any rank, or be refused."""
        has_gradients, records = torch.is_grad_enabled(), self.chance.random() < 0.05
        text = ""
        try:
            if fault is not None:
                fault.run(call)
            elif records or not self._points.known(what):
                self._points.record(what, call)
            else:
                call()
        except Wrong:
            raise
        except BaseException as error:
            text = "parted" if isinstance(error, LostRankError) else said(error)
            if not isinstance(error, HybridEngineError) and (fault is None or fault.where is None):
                text = f"raw: {text}"
        torch.set_grad_enabled(has_gradients)  # what was interrupted may be torch's own context
        return self._agreed(what, text, None if fault is None else fault.where, fault)

    def _agreed(self, what: str, text: str, where: str | None, fault: Interruption | None) -> bool:
        """Bring together how a call ended on each rank."""
        everyone = self._gathered((text, where))
        places = [place for _, place in everyone if place is not None]
        self.found.interrupted.update(places)
        self.found.counts["faults"] += len(places)
        for words, place in everyone:
            if place is not None:
                error = "another rank's" if fault is None else fault.name
                self._note(f"  {error} at {place}: {words[:90] or 'swallowed'}")
        texts = [words for words, _ in everyone if words]
        if any(words == "parted" or "ranks have parted" in words for words in texts):
            raise Parted
        if (raw := next((words for words in texts if words.startswith("raw: ")), None)) and not places:
            raise Wrong(f"{what}: {raw}")
        if not texts:
            self._num_refused = 0
        elif not places:
            self._refused(what, texts[0])
        return not texts

    @contextmanager
    def _its(self, what: str) -> Iterator[None]:
        try:
            yield
        except AssertionError as error:
            raise Wrong(f"{what}: {error}") from error

    def _refused(self, name: str, error: object) -> None:
        self.found.refused[f"{name}: {type(error).__name__ if isinstance(error, Exception) else str(error)[:60]}"] += 1
        self._note(f"  refused: {str(error)[:120]}")
        if "->" in name:
            self._num_refused += 1
            if self._num_refused >= MOST_REFUSED:
                raise Wrong(f"stuck: {error}")

    def _gathered(self, value: Any) -> list[Any]:
        if self.subject.job.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.subject.job.world_size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def _note(self, text: str) -> None:
        """Also in a file: a read of released memory ends the process."""
        self.found.history.append(text)
        self._journal.write(f"{text}\n")
        self._journal.flush()


def said(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error)[:300]}"


KINDS = {State.TRAIN: ("param", "optimizer"), State.FORWARD: ("param",)}
TOUR = [State(name) for name in ("infer", "train", "forward", "infer", "idle", "infer", "forward", "train")] + [
    *(State.IDLE, State.FORWARD, State.IDLE, State.TRAIN)
]
ELSEWHERE = (State.INFER, State.FORWARD, State.IDLE)


class Walk(Attempts):
    """See the module.

    Args:
        subject: what is walked over.
        points: where exceptions can come; none are known yet.
        seed: of all choices.
        path: for checkpoints; the same on all ranks.
        faults: how likely an exception is in a visit.
    """

    def __init__(
        self, subject: Subject, points: Points, seed: int, path: Path, *, faults: float, settings: str = ""
    ) -> None:
        journal = Path(f"{path}-rank{subject.job.rank}.txt")
        super().__init__(subject, points, Findings(seed, settings), journal)
        self.engine, self._path, self._faults = subject.engine, path, faults
        self._checkpoint: Kept | None = None
        themes = sorted(subject.writes)
        self._writes = self.chance.sample(themes, 4)  # few, or each would hide what another one misses
        self._steps = self.chance.sample(sorted(subject.steps), 2)
        calls = sorted(self._calls_outside())
        self._calls = self.chance.sample(calls, 2) if self.chance.random() < 0.5 else []
        self._writes_in_forward = self.chance.random() < 0.4
        can_be_spoilt = isinstance(subject.inference, Served)
        is_verified = self.engine.config.generate_config.verify == "full" and can_be_spoilt
        self._in_rollouts = [
            *("prefetch", "near end", "near end, no threads"),
            *(["refused"] if self.chance.random() < 0.3 else []),
            *(["call"] if self._calls else []),
            *(["spoil"] if is_verified else []),
        ]
        self._shadow = Shadow(subject)
        with torch.no_grad():
            self._shadow.read()

    def plans(self) -> list[str]:
        """Names for `follow`: every call in every state."""
        writes = sorted([*self.subject.writes, *self.subject.loads])
        return [
            *(f"infer: {name}" for name in ("near end, no threads", "refused", "near end", "prefetch")),
            *(f"{state}: {name}" for state in KINDS for name in writes),
            *(f"train: {name}" for name in sorted(self.subject.steps)),
            *(f"{state}, outside: {name}" for state in ELSEWHERE for name in sorted(self._calls_outside())),
        ]

    def run(self, num_steps: int) -> Findings:
        return self._walked(lambda: self._wander(num_steps))

    def follow(self, plans: Sequence[str]) -> Findings:
        """Take each of these calls after a rollout and a step, and see whether all is right."""
        return self._walked(lambda: [self._go(plan) for plan in plans])

    def _wander(self, num_steps: int) -> None:
        if self.chance.random() < 0.7:
            self._tour()
        for _ in range(num_steps):
            self.found.counts["steps"] += 1
            self._step()
        self._visit(State.INFER)
        self._visit(State.TRAIN)

    def _go(self, plan: str) -> None:
        self._note(f"plan {plan}")
        self.found.counts["plans"] += 1
        where, _, name = plan.partition(": ")
        state, is_outside = State(where.removesuffix(", outside")), where.endswith("outside")
        first = "moments" if "threads" in name else "step"  # without state: no copy may have been made before
        self._visit(State.INFER)
        self._visit(State.TRAIN, lambda: self._train(first))
        self._visit(State.INFER)
        if is_outside:
            self._visit(state)
            self._outside(name)
        elif state is State.INFER:
            self._visit(state, lambda: self._in_rollout(name))
        elif name in self.subject.steps:
            self._visit(state, lambda: self._train(name))
        else:
            self._visit(state, lambda: self._do(f"{name} in {state}", lambda: self._write(name), state))
        self._visit(State.INFER)
        self._visit(State.TRAIN, lambda: self._train("step"), lambda: self._do("p.mul_", self._multiply, State.TRAIN))
        self._visit(State.INFER)
        self._visit(State.FORWARD)

    def _multiply(self) -> None:
        self._write("p.mul_")

    def _train(self, name: str) -> None:
        self._do(name, lambda: self._step_or_checkpoint(name), State.TRAIN)

    def _walked(self, walk: Callable[[], object]) -> Findings:
        try:
            walk()
        except Wrong as wrong:
            self.found.wrong = str(wrong)
        except Parted:
            self.found.parted = True
        finally:
            self.close()
        return self.found

    def _tour(self) -> None:
        """Go every way once, and learn where an exception can come."""
        for target in TOUR:
            what = f"{self.engine.sharding.state}->{target}"
            self._points.record(what, lambda to=target: self.engine.sharding.enter(to))
            self._look(target)

    # -- steps ---------------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        if self._calls and self.chance.random() < 0.2:
            self._outside(self.chance.choice(self._calls))
            return
        target = self.chance.choices((State.INFER, State.TRAIN, State.FORWARD, State.IDLE), (5, 5, 2, 1))[0]
        actions = [lambda: self._act(target)] * self.chance.randint(0, 2)
        self._visit(target, *actions, faulty=self.chance.random() < self._faults)

    def _visit(self, target: State, *actions: Callable[[], None], faulty: bool = False) -> None:
        """Enter a context, look, do something, leave."""
        what = f"{self.engine.sharding.state.value}->{target.value}"
        self._note(what)
        context = self.engine.sharding.entered(target)
        entered = self._tried(what, context.__enter__, self._fault(what, faulty))
        if not entered:
            return
        self.found.counts["switches"] += 1
        leave: BaseException | None = None
        self._look(target)
        for action in actions:
            action()
        if self.chance.random() < 0.1:
            leave = self.chance.choice((KeyboardInterrupt(), ValueError("in the user's loop")))
        try:
            context.__exit__(type(leave) if leave else None, leave, None)
        except BaseException as error:
            if error is not leave:
                raise Wrong(f"leaving {target.value}: {said(error)}") from error

    def _act(self, state: State) -> None:
        if state is State.INFER:
            self._in_rollout(self.chance.choice(self._in_rollouts))
        elif state is State.TRAIN and self.chance.random() < 0.6:
            name = self.chance.choice([*self._steps, *(["save", "load"] if self.subject.saves else [])])
            self._do(f"{name}", lambda: self._step_or_checkpoint(name), state)
        elif state is State.TRAIN or (state is State.FORWARD and self._writes_in_forward):
            name = self.chance.choice([*self._writes, *sorted(self.subject.loads)])
            self._do(f"{name} in {state.value}", lambda: self._write(name), state)

    def _do(self, what: str, call: Callable[[], object], state: State) -> None:
        """A write where all it needs is on the device: it may be refused, and else it is read back."""
        self._note(what)
        faulty = self.subject.job.world_size == 1 and self.chance.random() < self._faults / 2
        self._tried(what, call, self._fault(what, faulty))
        with torch.no_grad(), self._its("reading back"):
            self._shadow.read(KINDS[state])

    @torch.no_grad()
    def _write(self, name: str) -> None:
        if name in self.subject.loads:
            self.subject.loads[name](self._known())
        else:
            self.subject.writes[name](self.chance)

    def _step_or_checkpoint(self, name: str) -> None:
        if name == "save":
            self.subject.save(self._path)
            self._checkpoint = self._shadow.copy()
        elif name == "load":
            if self._checkpoint is not None:
                self.subject.load(self._path)
                expected, self._checkpoint = self._checkpoint, None
                self._shadow.restore(expected)
                self._compare("loading a checkpoint", KINDS[State.TRAIN])
        else:
            self.subject.steps[name](self.chance)

    def _known(self) -> dict[str, torch.Tensor]:
        names = self.chance.sample(sorted(self._shadow.parameters), 3)
        factor = self.chance.uniform(0.8, 1.2)
        return {name: self._shadow.parameters[name] * factor for name in names}

    # -- in rollouts and outside ---------------------------------------------------------------------------------------

    def _in_rollout(self, chosen: str) -> None:
        if chosen == "call":
            self._outside(self.chance.choice(self._calls))
        elif chosen == "refused":
            for name, call in {"forward": self.subject.forward, "step": self.subject.step}.items():
                self._must_refuse(name, call)
        elif chosen == "spoil":
            self._spoil()
        elif self.engine.config.generate_config.prefetch == "auto":
            self._note(chosen)
            if chosen == "prefetch":
                self._tried(chosen, self.engine.prefetch, self._fault(chosen, self.chance.random() < self._faults))
            elif chosen == "near end":
                fault = self._fault(chosen, self.chance.random() < self._faults)
                self._tried(chosen, self.engine.sharding.near_end, fault)
            else:
                with no_new_threads():
                    self.engine.sharding.near_end()

    def _spoil(self) -> None:
        """A live weight changes where `verify: full` must see it at the next switch, or send it again."""
        inference = self.subject.inference
        assert isinstance(inference, Served)
        self._note("spoiling a live weight")
        inference.spoil()
        self.found.counts["spoilt"] += 1
        for target in (State.TRAIN, State.INFER):
            try:
                self.engine.sharding.enter(target)
            except HybridEngineError as error:
                self._refused(f"spoilt, to {target}", error)
        if self.engine.sharding.state is State.INFER:
            self._look(State.INFER)

    def _calls_outside(self) -> dict[str, Callable[[], None]]:
        """What a user calls between contexts, at the end of a script, or by mistake in a rollout."""
        calls: dict[str, Callable[[], None]] = {
            **({"save_checkpoint": self._save_outside} if self.subject.saves else {}),
        }
        calls |= {name: lambda name=name: self._read_outside(name) for name in self.subject.reads}
        calls |= {name: lambda name=name: self._load_outside(name) for name in self.subject.loads}
        return calls

    def _outside(self, name: str) -> None:
        self._note(f"{name} outside, in {self.engine.sharding.state.value}")
        with torch.no_grad():
            self._calls_outside()[name]()

    def _save_outside(self) -> None:
        if self._accepted("save_checkpoint", lambda: self.subject.save(self._path)):
            self._checkpoint = self._shadow.copy()

    def _read_outside(self, name: str) -> None:
        seen: dict[str, Any] = {}
        if self._accepted(name, lambda: seen.update(self.subject.reads[name]())):
            kept = {**self._shadow.parameters, **self._shadow.optimizer}
            wrong = differences({key: kept[key] for key in seen.keys() & kept.keys()}, seen)
            self._require(not wrong, f"{name} in {self.engine.sharding.state.value}: {_few(wrong)}")

    def _load_outside(self, name: str) -> None:
        """What is loaded counts from now on, wherever the weights are."""
        known = self._known()
        if self._accepted(name, lambda: self.subject.loads[name](known)):
            self._shadow.take_up(known)

    def _accepted(self, name: str, call: Callable[[], object]) -> bool:
        """Whether a call was not refused; on all ranks alike."""
        try:
            call()
        except HybridEngineError as error:
            self._refused(name, error)
            return False
        except Exception as error:
            raise Wrong(f"{name} in {self.engine.sharding.state.value}: {said(error)}") from error
        return True

    def _must_refuse(self, name: str, call: Callable[[], object]) -> None:
        self._note(f"{name} in a rollout")
        if not self.engine.config.generate_config.offload_train_param:
            return
        if self._accepted(name, call):
            raise Wrong(f"{name} in a rollout is not refused")

    # -- what is compared ----------------------------------------------------------------------------------------------

    def _look(self, state: State) -> None:
        if state is State.INFER:
            if self._shadow.canonical is None:  # written where the oracle could not gather
                return
            live = self.subject.inference.whole()
            wrong = differences(self._shadow.canonical, live, exact=self.subject.exact)
            self.found.counts["rollouts compared"] += 1
            report = self.engine.sharding.last_report
            self.found.counts["bytes skipped"] += 0 if report is None else report.bytes_skipped
            self._require(not wrong, f"stale or wrong in a rollout: {_few(wrong)}")
        elif state in KINDS:
            self._compare(f"in {state.value}", KINDS[state])
            if self._shadow.canonical is None:
                self._shadow.read(KINDS[state])

    def _compare(self, where: str, kinds: tuple[str, ...]) -> None:
        self.found.counts["training states compared"] += 1
        wrong = self._shadow.different(kinds)
        self._require(not wrong, f"lost {where}: {_few(wrong)}")

    def _require(self, condition: bool, text: str) -> None:
        """Raise on every rank where it is not so on any."""
        texts = self._gathered("" if condition else text)
        if first := next((f"rank {rank}: {each}" for rank, each in enumerate(texts) if each), None):
            raise Wrong(first)


def _few(names: list[str]) -> str:
    return f"{', '.join(names[:3])} ({len(names)} in all)"
