"""Calls that may fail: by a fault that was put there, by a refusal, or because something is wrong. Base of `Walk`."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hybrid_engine.errors import HybridEngineError, LostRankError
from tests.walk.interruptions import Cancelled, Interruption, Points
from tests.walk.oracle import Subject

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
        """After the last call."""
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
    """One line."""
    return f"{type(error).__name__}: {str(error)[:300]}"
