"""The random walk. All ranks draw the same random numbers and therefore take the same path.

A step is a visit to a context, or a call outside of contexts. A `Shadow` copies the trainer's
tensors after every possible write. Every rollout compares the inference side with it; every other
context compares the trainer's own tensors. A call is right, or it is refused with an error of the
product and changes nothing. A call with an injected fault may fail (`Attempts`).
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
from hybrid_engine.ranks.torch_internals import TensorDict
from hybrid_engine.switch.states import State
from tests.walk.inference import Served
from tests.walk.interruptions import Cancelled, Interruption, Points
from tests.walk.oracle import Kept, Shadow, Subject, differences

ERRORS: tuple[Callable[[], BaseException], ...] = (
    KeyboardInterrupt,
    lambda: SystemExit(143),
    lambda: Cancelled("by ray"),
    lambda: MemoryError("injected"),
    lambda: OSError(28, "injected"),
    lambda: RuntimeError("injected"),
)
# Consecutive refused visits without a fault after which the engine counts as stuck.
MAX_REFUSED = 6


class Wrong(Exception):
    """Wrong behaviour; ends the walk."""


class Parted(Exception):
    """The ranks have lost each other, so that this job cannot continue."""


@dataclass
class Findings:
    """Findings of a walk on one rank.

    Attributes:
        wrong: wrong behaviour that ended the walk; empty if there was none.
        history: actions in their order.
        counts: numbers of steps, switches, faults and comparisons.
        refused: numbers of refusals, by call and error.
        interrupted: numbers of injected exceptions, by place.
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
    """Calls with injected faults, and their permitted outcomes.

    Args:
        subject: trainer and engine of the walk.
        points: calls at which exceptions can be raised.
        findings: receives the findings.
        journal: file for the history, because a read of released memory kills the process.
    """

    def __init__(self, subject: Subject, points: Points, findings: Findings, journal: Path) -> None:
        self.subject = subject
        self.findings = findings
        self.chance = random.Random(findings.seed)
        self._points = points
        self._num_refused = 0
        self._journal = journal.open("w")
        self._note(f"seed {findings.seed}, {findings.settings}")
        self._group = dist.new_group(backend="gloo")

    def close(self) -> None:
        dist.destroy_process_group(self._group)
        self._journal.close()

    def _fault(self, action: str, faulty: bool) -> Interruption | None:
        """Draw the fault of this rank. A signal hits all ranks, an error only one."""
        number = self.chance.getrandbits(32)
        make = self.chance.choice(ERRORS)
        hit = self.chance.randrange(self.subject.job.world_size)
        if not faulty or not self._points.known(action):
            return None
        if isinstance(make(), Exception) and hit != self.subject.job.rank:
            return None
        return self._points.interruption(
            action, random.Random(number + self.subject.job.rank), make
        )

    def _tried(self, action: str, call: Callable[[], object], fault: Interruption | None) -> bool:
        """Return whether a call succeeded on all ranks. It may be refused, or fail by a fault."""
        has_gradients = torch.is_grad_enabled()
        records = self.chance.random() < 0.05
        text = ""
        try:
            if fault is not None:
                fault.run(call)
            elif records or not self._points.known(action):
                self._points.record(action, call)
            else:
                call()
        except Wrong:
            raise
        except BaseException as error:
            text = "parted" if isinstance(error, LostRankError) else describe(error)
            if not isinstance(error, HybridEngineError) and (fault is None or fault.where is None):
                text = f"raw: {text}"
        torch.set_grad_enabled(
            has_gradients
        )  # An interrupted context of torch may leave it changed.
        return self._agreed(action, text, None if fault is None else fault.where, fault)

    def _agreed(
        self, action: str, text: str, where: str | None, fault: Interruption | None
    ) -> bool:
        """Combine the outcomes of a call on all ranks."""
        outcomes = self._gathered((text, where))
        places = [place for _, place in outcomes if place is not None]
        self.findings.interrupted.update(places)
        self.findings.counts["faults"] += len(places)
        for rank_text, place in outcomes:
            if place is not None:
                error = "another rank's" if fault is None else fault.name
                self._note(f"  {error} at {place}: {rank_text[:90] or 'swallowed'}")
        texts = [rank_text for rank_text, _ in outcomes if rank_text]
        if any(rank_text == "parted" or "ranks have parted" in rank_text for rank_text in texts):
            raise Parted
        raw = [rank_text for rank_text in texts if rank_text.startswith("raw: ")]
        if raw and not places:
            raise Wrong(f"{action}: {raw[0]}")
        if not texts:
            self._num_refused = 0
        elif not places:
            self._refused(action, texts[0])
        return not texts

    @contextmanager
    def _assertions_as_wrong(self, action: str) -> Iterator[None]:
        try:
            yield
        except AssertionError as error:
            raise Wrong(f"{action}: {error}") from error

    def _refused(self, name: str, error: object) -> None:
        self.findings.refused[
            f"{name}: {type(error).__name__ if isinstance(error, Exception) else str(error)[:60]}"
        ] += 1
        self._note(f"  refused: {str(error)[:120]}")
        if "->" in name:
            self._num_refused += 1
            if self._num_refused >= MAX_REFUSED:
                raise Wrong(f"{MAX_REFUSED} refused switches in a row: {error}")

    def _gathered(self, value: Any) -> list[Any]:
        if self.subject.job.world_size == 1:
            return [value]
        values = [None] * self.subject.job.world_size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def _note(self, text: str) -> None:
        self.findings.history.append(text)
        self._journal.write(f"{text}\n")
        self._journal.flush()


def describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error)[:300]}"


KINDS = {State.TRAIN: ("param", "optimizer"), State.FORWARD: ("param",)}
TOUR = [
    State(name)
    for name in ("infer", "train", "forward", "infer", "idle", "infer", "forward", "train")
] + [State.IDLE, State.FORWARD, State.IDLE, State.TRAIN]
OTHER_STATES = (State.INFER, State.FORWARD, State.IDLE)


class Walk(Attempts):
    """A random walk, or a list of planned calls.

    Args:
        subject: trainer and engine of the walk.
        points: calls at which exceptions can be raised; still empty.
        seed: seed of all choices.
        path: directory for checkpoints, the same on all ranks.
        faults: probability of an exception in a visit.
    """

    def __init__(
        self,
        subject: Subject,
        points: Points,
        seed: int,
        path: Path,
        *,
        faults: float,
        settings: str = "",
    ) -> None:
        journal = Path(f"{path}-rank{subject.job.rank}.txt")
        super().__init__(subject, points, Findings(seed, settings), journal)
        self.engine = subject.engine
        self._path = path
        self._faults = faults
        self._checkpoint: Kept | None = None
        # Only four kinds: a kind of write that is detected would hide one that is missed.
        self._writes = self.chance.sample(sorted(subject.writes), 4)
        self._steps = self.chance.sample(sorted(subject.steps), 2)
        calls = sorted(self._calls_outside())
        self._calls = self.chance.sample(calls, 2) if self.chance.random() < 0.5 else []
        self._writes_in_forward = self.chance.random() < 0.4
        can_be_spoilt = isinstance(subject.inference, Served)
        is_verified = self.engine.config.generate_config.verify == "full" and can_be_spoilt
        self._in_rollouts = [
            "nothing",
            *(["refused"] if self.chance.random() < 0.3 else []),
            *(["call"] if self._calls else []),
            *(["spoil"] if is_verified else []),
        ]
        self._shadow = Shadow(subject)
        with torch.no_grad():
            self._shadow.read()

    def plans(self) -> list[str]:
        """Return the plans for `follow`: every call in every state."""
        writes = sorted([*self.subject.writes, *self.subject.loads])
        return [
            "infer: refused",
            *(f"{state}: {name}" for state in KINDS for name in writes),
            *(f"train: {name}" for name in sorted(self.subject.steps)),
            *(
                f"{state}, outside: {name}"
                for state in OTHER_STATES
                for name in sorted(self._calls_outside())
            ),
        ]

    def run(self, num_steps: int) -> Findings:
        return self._walked(lambda: self._wander(num_steps))

    def follow(self, plans: Sequence[str]) -> Findings:
        """Make each of these calls after a rollout and a step, and check everything."""
        return self._walked(lambda: [self._run_plan(plan) for plan in plans])

    def _wander(self, num_steps: int) -> None:
        if self.chance.random() < 0.7:
            self._tour()
        for _ in range(num_steps):
            self.findings.counts["steps"] += 1
            self._step()
        self._visit(State.INFER)
        self._visit(State.TRAIN)

    def _run_plan(self, plan: str) -> None:
        self._note(f"plan {plan}")
        self.findings.counts["plans"] += 1
        where, _, name = plan.partition(": ")
        state = State(where.removesuffix(", outside"))
        is_outside = where.endswith("outside")
        self._visit(State.INFER)
        self._visit(State.TRAIN, lambda: self._train("step"))
        self._visit(State.INFER)
        if is_outside:
            self._visit(state)
            self._outside(name)
        elif state is State.INFER:
            self._visit(state, lambda: self._in_rollout(name))
        elif name in self.subject.steps:
            self._visit(state, lambda: self._train(name))
        else:
            self._visit(
                state, lambda: self._do(f"{name} in {state}", lambda: self._write(name), state)
            )
        self._visit(State.INFER)
        self._visit(
            State.TRAIN,
            lambda: self._train("step"),
            lambda: self._do("p.mul_", self._multiply, State.TRAIN),
        )
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
            self.findings.wrong = str(wrong)
        except Parted:
            self.findings.parted = True
        finally:
            self.close()
        return self.findings

    def _tour(self) -> None:
        """Make every switch once, and record its calls."""
        for target in TOUR:
            action = f"{self.engine.sharding.state}->{target}"
            self._points.record(action, lambda to=target: self.engine.sharding.enter(to))
            self._check(target)

    # -- steps
    # ----------------------------------------------------------------------------------------------

    def _step(self) -> None:
        if self._calls and self.chance.random() < 0.2:
            self._outside(self.chance.choice(self._calls))
            return
        target = self.chance.choices(
            (State.INFER, State.TRAIN, State.FORWARD, State.IDLE), (5, 5, 2, 1)
        )[0]
        actions = [lambda: self._act(target)] * self.chance.randint(0, 2)
        self._visit(target, *actions, faulty=self.chance.random() < self._faults)

    def _visit(self, target: State, *actions: Callable[[], None], faulty: bool = False) -> None:
        """Enter a context, check it, run the actions and leave it."""
        switch = f"{self.engine.sharding.state.value}->{target.value}"
        self._note(switch)
        context = self.engine.sharding.entered(target)
        if not self._tried(switch, context.__enter__, self._fault(switch, faulty)):
            return
        self.findings.counts["switches"] += 1
        leave = None
        self._check(target)
        for action in actions:
            action()
        if self.chance.random() < 0.1:
            leave = self.chance.choice((KeyboardInterrupt(), ValueError("in the user's loop")))
        try:
            context.__exit__(type(leave) if leave else None, leave, None)
        except BaseException as error:
            if error is not leave:
                raise Wrong(f"leaving {target.value}: {describe(error)}") from error

    def _act(self, state: State) -> None:
        if state is State.INFER:
            self._in_rollout(self.chance.choice(self._in_rollouts))
        elif state is State.TRAIN and self.chance.random() < 0.6:
            name = self.chance.choice(
                [*self._steps, *(["save", "load"] if self.subject.saves else [])]
            )
            self._do(name, lambda: self._step_or_checkpoint(name), state)
        elif state is State.TRAIN or (state is State.FORWARD and self._writes_in_forward):
            name = self.chance.choice([*self._writes, *sorted(self.subject.loads)])
            self._do(f"{name} in {state.value}", lambda: self._write(name), state)

    def _do(self, action: str, call: Callable[[], object], state: State) -> None:
        """Write in a state where everything needed is on the device, then read the result back."""
        self._note(action)
        faulty = self.subject.job.world_size == 1 and self.chance.random() < self._faults / 2
        self._tried(action, call, self._fault(action, faulty))
        with torch.no_grad(), self._assertions_as_wrong("reading back"):
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
                self._shadow.restore(self._checkpoint)
                self._checkpoint = None
                self._compare("loading a checkpoint", KINDS[State.TRAIN])
        else:
            self.subject.steps[name](self.chance)

    def _known(self) -> TensorDict:
        names = self.chance.sample(sorted(self._shadow.parameters), 3)
        factor = self.chance.uniform(0.8, 1.2)
        return {name: self._shadow.parameters[name] * factor for name in names}

    # -- in rollouts and outside
    # ---------------------------------------------------------------------------------------

    def _in_rollout(self, action: str) -> None:
        if action == "call":
            self._outside(self.chance.choice(self._calls))
        elif action == "refused":
            for name, call in {"forward": self.subject.forward, "step": self.subject.step}.items():
                self._must_refuse(name, call)
        elif action == "spoil":
            self._spoil()

    def _spoil(self) -> None:
        """Corrupt a live weight, which `verify: full` must detect or overwrite at the next
        switch."""
        inference = self.subject.inference
        assert isinstance(inference, Served)
        self._note("spoiling a live weight")
        inference.spoil()
        self.findings.counts["spoilt"] += 1
        for target in (State.TRAIN, State.INFER):
            try:
                self.engine.sharding.enter(target)
            except HybridEngineError as error:
                self._refused(f"spoilt, to {target}", error)
        if self.engine.sharding.state is State.INFER:
            self._check(State.INFER)

    def _calls_outside(self) -> dict[str, Callable[[], None]]:
        """Return the calls of users between contexts, at the end of a script, or in a rollout."""
        calls = {
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
        read = {}
        if self._accepted(name, lambda: read.update(self.subject.reads[name]())):
            kept = {**self._shadow.parameters, **self._shadow.optimizer}
            wrong = differences({key: kept[key] for key in read.keys() & kept.keys()}, read)
            self._require(not wrong, f"{name} in {self.engine.sharding.state.value}: {_few(wrong)}")

    def _load_outside(self, name: str) -> None:
        """Load weights, which are the expected ones from now on in any state."""
        known = self._known()
        if self._accepted(name, lambda: self.subject.loads[name](known)):
            self._shadow.take_up(known)

    def _accepted(self, name: str, call: Callable[[], object]) -> bool:
        """Return whether a call was accepted; the same on all ranks."""
        try:
            call()
        except HybridEngineError as error:
            self._refused(name, error)
            return False
        except Exception as error:
            raise Wrong(
                f"{name} in {self.engine.sharding.state.value}: {describe(error)}"
            ) from error
        return True

    def _must_refuse(self, name: str, call: Callable[[], object]) -> None:
        self._note(f"{name} in a rollout")
        if self.engine.config.generate_config.offload_train_param is not True:
            return
        if self._accepted(name, call):
            raise Wrong(f"{name} in a rollout is not refused")

    # -- comparisons
    # ----------------------------------------------------------------------------------------------

    def _check(self, state: State) -> None:
        if state is State.INFER:
            if self._shadow.canonical is None:  # The oracle could not gather after the last write.
                return
            live = self.subject.inference.whole()
            wrong = differences(self._shadow.canonical, live, exact=self.subject.exact)
            self.findings.counts["rollouts compared"] += 1
            report = self.engine.sharding.last_report
            self.findings.counts["bytes skipped"] += 0 if report is None else report.bytes_skipped
            self._require(not wrong, f"stale or wrong in a rollout: {_few(wrong)}")
        elif state in KINDS:
            self._compare(f"in {state.value}", KINDS[state])
            if self._shadow.canonical is None:
                self._shadow.read(KINDS[state])

    def _compare(self, where: str, kinds: tuple[str, ...]) -> None:
        self.findings.counts["training states compared"] += 1
        wrong = self._shadow.different(kinds)
        self._require(not wrong, f"lost {where}: {_few(wrong)}")

    def _require(self, condition: bool, text: str) -> None:
        """Raise `Wrong` on all ranks if `condition` is false on any."""
        for rank, rank_text in enumerate(self._gathered("" if condition else text)):
            if rank_text:
                raise Wrong(f"rank {rank}: {rank_text}")


def _few(names: list[str]) -> str:
    return f"{', '.join(names[:3])} ({len(names)} in all)"
