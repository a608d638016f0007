"""Watches the other ranks, so that their failures are known while this one still waits for them.

Ranks wait for each other inside libraries: in vLLM's collectives, Megatron's, torch's. When one of them fails, the
others wait there for what never comes. So a rank that fails says so in the job's store, and a thread on every rank
looks there:

    rank 1   an exception leaves `inside("generate")`     -> store: rank 1, generate, MemoryError, patience
    rank 0   its thread sees it within a second           -> the log, as ERROR of this module's logger
             its main thread ends its wait, or does not   -> after `patience` the thread ends the process

Ending the process is the last resort, as it is for NCCL's watchdog: a thread that spins in a kernel, or in vLLM's
shared memory on CPU, hears no signal and has no timeout. It happens only while the main thread is inside the work in
which it heard of the failure, and only to a rank that waits for the one that failed.

A rank that was killed says nothing: each rank looks at the processes of its host, also where there is no store any
more, whose holder may be the one that ended. To other hosts its neighbour (the rank below) says it, and that a rank is
frozen: every rank's thread keeps counting. A rank whose counter moves again is no longer treated as failed.

Whoever shows the user something adds a handler to the logger "hybrid_engine.failures": what is said there, while other
ranks still wait, is the first that is known of a failure.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import TypeVar

import torch.distributed as dist

from hybrid_engine.ranks.groups import has_ended, process_space, state_of
from hybrid_engine.ranks.world import World

logger = logging.getLogger("hybrid_engine.failures")

_SECONDS_BETWEEN_LOOKS = 0.5
_SECONDS_OF_THE_STORE = 10.0  # longest wait for an answer of the store
_NUM_ERRORS_OF_THE_STORE = 5  # one after the other, and it counts as gone
_SHORTEST_SILENCE = 20.0  # seconds: a rank on a busy host is not taken for frozen
_SECONDS_AFTER_SILENCE = 10.0  # that others have to come back by themselves when a rank was killed or is frozen
_SECONDS_TO_SPARE = 5.0  # beyond a failure's patience, for timeouts that end at the same time
_GONE = "gone"

_T = TypeVar("_T")


@dataclass(frozen=True)
class Failure:
    """Failure that a rank reports of itself or of another.

    Attributes:
        rank: that failed.
        phase: what it was doing.
        text: its error.
        patience: seconds that those who wait for it have to come back from what they are doing.
        entry: `_Place.entry` of who tells.
        waiting: the ranks that wait for it; None for all.
        beat: the last count of a rank that counts no further, and may again.
    """

    rank: int
    phase: str
    text: str
    patience: float
    entry: int
    waiting: tuple[int, ...] | None = None
    beat: str | None = None

    def __str__(self) -> str:
        return f"rank {self.rank}, {self.phase}: {self.text}" if self.phase else f"rank {self.rank} {self.text}"


@dataclass(frozen=True)
class _Place:
    """Where the main thread is; replaced as a whole, so that the other thread sees no half of it.

    Attributes:
        step: agreements so far, the same on all ranks that work together.
        entry: how often it entered work in which it waits for others, from outside of any. What failed in an earlier
            entry of the same step was survived: the caller went on.
        phase: the innermost such work, "" outside of any.
        since: when it entered or left anything last.
        has_arrived: it waits for the others at the end of the step, and nowhere else.
    """

    step: int = 0
    entry: int = 0
    phase: str = ""
    since: float = 0.0
    has_arrived: bool = False


@dataclass
class _Heard:
    """Failures of the present step, as the thread knows them."""

    step: int = -1
    failures: dict[Failure, float] = field(default_factory=dict)  # when each was first seen


class FailureWatch:
    """One rank's view of the others, for one `Agreement`. Created on all ranks alike."""

    def __init__(self, world: World, timeout_seconds: float) -> None:
        """`timeout_seconds`: see `set_silence`."""
        self._rank, self._world_size, self._may_end = world.rank, world.size, world.may_end
        self._neighbour = (self._rank + 1) % self._world_size
        self.set_silence(timeout_seconds)
        self._place, self._heard = _Place(), _Heard()
        self._pids: dict[int, int] = {}  # of the other ranks of this host
        self._neighbours_beat, self._neighbours_time, self._looked = "", time.monotonic(), time.monotonic()
        self._arrived_at = -1
        self._told = -1, ""  # step and text of this rank's own failure
        self._closing, self._store_is_gone = threading.Event(), False
        self._thread: threading.Thread | None = None
        self._questions: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        if self._world_size > 1:
            name = f"watch/{world.next_number()}"
            self._store, self._threads_store = world.own_connection(name), world.own_connection(name)
            for store in (self._store, self._threads_store):
                store.set_timeout(timedelta(seconds=_SECONDS_OF_THE_STORE))
            self._pid = os.getpid()
            self._space = process_space()
            if self._space is not None:
                _append(self._store, f"processes/{self._space}", f"{self._rank} {self._pid}")
            self._thread = threading.Thread(target=self._watch, name="failure watch", daemon=True)
            self._thread.start()
            # made now: starting a thread waits without end where memory is too short for it to begin
            threading.Thread(target=self._answer, name="questions to the store", daemon=True).start()
            atexit.register(self.close)

    def set_silence(self, seconds: float) -> None:
        """A rank that counted no further for so long is taken for frozen; not sooner than after 20 s."""
        self._silence = max(seconds, _SHORTEST_SILENCE)

    def close(self) -> None:
        """Stop watching, and being watched; idempotent. Not by a child that was forked from this process."""
        if self._thread is None or self._closing.is_set() or os.getpid() != self._pid:
            return
        self._closing.set()
        atexit.unregister(self.close)
        self._thread.join(_SECONDS_OF_THE_STORE)
        self._ask(lambda: self._store.set(_beat(self._rank), _GONE), None)
        self._ask(lambda: _append(self._store, "left", str(self._rank)), None)
        self._store_is_gone = True
        self._questions.put(None)

    # -- the main thread ----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def inside(self, phase: str) -> Iterator[None]:
        """Work in which this rank may wait for others."""
        outer = self._place
        self._place = _Place(outer.step, outer.entry + (not outer.phase), phase, time.monotonic())
        try:
            yield
        finally:
            self._place = _Place(self._place.step, self._place.entry, outer.phase, time.monotonic())

    @contextlib.contextmanager
    def arrived(self, phase: str) -> Iterator[None]:
        """The end of a step, at which all ranks meet; the next step begins after it."""
        outer = self._place
        self._place = _Place(outer.step, outer.entry, phase, time.monotonic(), has_arrived=True)
        try:
            yield
        finally:
            self._place = _Place(outer.step + 1, outer.entry, outer.phase, time.monotonic())

    def tell(self, phase: str, text: str, patience: float, waiting: Collection[int] | None = None) -> None:
        """Let all ranks know that this one failed in the present step."""
        place, ranks = self._place, None if waiting is None else tuple(waiting)
        self._told = place.step, text
        failure = Failure(self._rank, phase, text, patience, place.entry, ranks)
        self._ask(lambda: self._say(self._store, failure, place.step), None)

    def failures_of_others(self) -> list[Failure]:
        """Read failures of the present step from the store; none if it is gone."""
        place = self._place
        return self._ask(lambda: self._read(self._store, place), [])

    def heard(self) -> list[Failure]:
        """Failures of the present step that the thread knows, but for those of ranks that may count again."""
        heard, place = self._heard, self._place
        failures = list(heard.failures) if heard.step == place.step else []
        return [failure for failure in failures if failure.entry >= place.entry and failure.beat is None]

    def ended(self) -> str:
        """Which ranks are known to have ended, in words."""
        return ", ".join(str(failure) for failure in self.heard() if not failure.phase)

    def left(self) -> str:
        """Which ranks have ended their part in the job, in words."""
        gone = self._ask(lambda: _lines(self._store, "left"), list[str]())
        return ", ".join(f"rank {rank} has left the job" for rank in gone if rank != str(self._rank))

    def num_at(self, mark: str, *, arriving: bool = False) -> int | None:
        """How many ranks are at a mark of the present step, with this one if it is `arriving`; None without a store."""
        key = f"{self._place.step}/{mark}"
        return self._ask(lambda: self._store.add(key, int(arriving)), None)

    def have_arrived(self, ranks: Collection[int] | None, patience: float) -> bool:
        """Having told of a failure, wait at most `patience` seconds until these ranks (default: all) are at the end of
        the step."""
        awaited = set(range(self._world_size) if ranks is None else ranks) - {self._rank}
        step, deadline = self._place.step, time.monotonic() + patience
        while awaited and time.monotonic() < deadline:
            awaited -= set(map(int, self._ask(lambda: _lines(self._store, f"{step}/arrived"), list[str]())))
            time.sleep(_SECONDS_BETWEEN_LOOKS / 5 if awaited else 0)
        return not awaited

    def reasons(self) -> list[str]:
        """Why others do not come, in words: failures that they told, else processes of this host that have ended or are
        stopped. Takes a second if none: a connection breaks a little before its process is gone, or says why."""
        deadline = time.monotonic() + 1.0
        while True:
            found = list(map(str, self.failures_of_others()))
            found = found or [f"rank {rank} {state}" for rank, pid in self._pids.items() if (state := state_of(pid))]
            if found or self._world_size == 1 or time.monotonic() > deadline:
                return found
            time.sleep(_SECONDS_BETWEEN_LOOKS / 5)

    def _ask(self, call: Callable[[], _T], otherwise: _T) -> _T:
        """Ask the store. It is a help: when the process that holds it has ended or is frozen there is none,
        and torch's own timeouts do not cover every call."""
        answers: SimpleQueue[_T] = SimpleQueue()

        def ask() -> None:
            try:
                _require_file(self._store)
                answers.put(call())
            except Exception as error:
                self._store_is_gone |= isinstance(error, RuntimeError)  # short of memory, it may answer the next time
                logger.info("the job's store does not answer: %s", error)
                answers.put(otherwise)

        if self._world_size == 1 or self._store_is_gone:
            return otherwise
        self._questions.put(ask)
        try:
            return answers.get(timeout=_SECONDS_OF_THE_STORE)
        except Empty:
            self._store_is_gone = True
            return otherwise

    def _answer(self) -> None:
        for ask in iter(self._questions.get, None):
            ask()

    # -- the store ----------------------------------------------------------------------------------------------------

    def _say(self, store: dist.Store, failure: Failure, step: int) -> None:
        _append(store, f"{step}/failed", json.dumps(asdict(failure)))

    def _read(self, store: dist.Store, place: _Place) -> list[Failure]:
        """Read the failures of other ranks that count where this one is."""
        lines = map(json.loads, _lines(store, f"{place.step}/failed"))
        told = [Failure(**{**line, "waiting": line["waiting"] and tuple(line["waiting"])}) for line in lines]
        return [failure for failure in told if failure.rank != self._rank and failure.entry >= place.entry]

    # -- the watching thread ------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        num_errors = 0
        for beat in itertools.count():
            if self._closing.wait(_SECONDS_BETWEEN_LOOKS):
                return
            store = self._threads_store
            try:
                if num_errors < _NUM_ERRORS_OF_THE_STORE:
                    _require_file(store)
                    store.set(_beat(self._rank), str(beat))
                    self._find_processes(store)
                    self._look_at_neighbour(store)
                    told = self._read(store, self._place)
                    known = {failure.rank for failure in told}
                    seen = [failure for failure in self._failures_of_this_host() if failure.rank not in known]
                    self._look_at_failures(told + [each for each in seen if _beat_of(store, each.rank) != _GONE])
                    num_errors = 0
                else:
                    self._look_at_failures(self._failures_of_this_host())
            except RuntimeError as error:
                num_errors += 1
                if num_errors == _NUM_ERRORS_OF_THE_STORE:
                    level = logging.WARNING if self._place.phase else logging.INFO
                    logger.log(level, "rank %d sees its own host only: no store answers: %s", self._rank, error)

    def _find_processes(self, store: dist.Store) -> None:
        if self._space is not None and len(self._pids) < self._world_size - 1:
            pairs = (line.split() for line in _lines(store, f"processes/{self._space}"))
            self._pids = {int(rank): int(pid) for rank, pid in pairs if int(rank) != self._rank}

    def _look_at_neighbour(self, store: dist.Store) -> None:
        """Say what a rank that was killed or is frozen cannot say."""
        now, place, beat = time.monotonic(), self._place, _beat_of(store, self._neighbour)
        was_away, self._looked = now - self._looked > 10 * _SECONDS_BETWEEN_LOOKS, now
        if beat != self._neighbours_beat or not place.phase or was_away:
            self._neighbours_beat, self._neighbours_time = beat, now
            return
        pid = self._pids.get(self._neighbour)
        has_left = pid is not None and has_ended(pid)
        is_silent = now - self._neighbours_time > self._silence and (pid is None or state_of(pid) is not None)
        if beat != _GONE and (has_left or is_silent):
            silence = f"did not respond for {now - self._neighbours_time:.0f} s"
            text = silence if pid is None else state_of(pid) or silence
            failure = self._seen(self._neighbour, text, place, None if has_left else beat)
            if not any(told.rank == failure.rank for told in self._read(store, place)):
                self._say(store, failure, place.step)

    def _failures_of_this_host(self) -> list[Failure]:
        """Failures that can be seen without the store."""
        place = self._place
        ended = [(rank, pid) for rank, pid in self._pids.items() if place.phase and has_ended(pid)]
        return [self._seen(rank, f"has ended (process {pid})", place) for rank, pid in ended]

    def _seen(self, rank: int, text: str, place: _Place, beat: str | None = None) -> Failure:
        return Failure(rank, "", text, _SECONDS_AFTER_SILENCE, place.entry, beat=beat)

    def _look_at_failures(self, failures: list[Failure]) -> None:
        place, now = self._place, time.monotonic()
        if place.step != self._heard.step:
            self._heard = _Heard(place.step)
        seen = self._heard.failures
        for failure in failures:
            if failure not in seen:
                if not any(_is_alike(failure, known) for known in seen) and self._told != (place.step, failure.text):
                    self._report(failure, place)
                seen[failure] = now
        if failures and place.has_arrived:
            self._report_arrival(place.step)
        for failure in failures:
            is_awaited = failure.waiting is None or self._rank in failure.waiting
            deadline = max(seen[failure], place.since) + failure.patience + _SECONDS_TO_SPARE
            if is_awaited and now > deadline and self._is_stuck(place) and not self._is_forgiven(failure):
                # what follows from the first, as the end of those who waited for it, is no cause
                cause = min((each for each in failures if not self._is_forgiven(each)), key=seen.__getitem__)
                self._end(cause, place, now - seen[cause])

    def _report_arrival(self, step: int) -> None:
        if self._arrived_at != step:
            _append(self._threads_store, f"{step}/arrived", str(self._rank))
            self._arrived_at = step

    def _is_stuck(self, place: _Place) -> bool:
        """Whether the main thread is still where it was, inside work; the end of a step has a timeout of its own."""
        return place is self._place and bool(place.phase) and not place.has_arrived

    def _is_forgiven(self, failure: Failure) -> bool:
        """Whether a rank that was silent goes on: its process runs, however little time a busy host gives it to count;
        of another host, it counts again."""
        if failure.beat is None:
            return False
        pid = self._pids.get(failure.rank)
        runs = pid is not None and state_of(pid) is None
        return runs or _beat_of(self._threads_store, failure.rank) != failure.beat

    def _report(self, failure: Failure, place: _Place) -> None:
        waits = f" (rank {self._rank} is still in: {place.phase})" if self._is_stuck(place) else ""
        logger.error("[Reshard] %s%s", failure, waits)

    def _end(self, failure: Failure, place: _Place, seconds: float) -> None:
        """The main thread waits for a rank that does not come, where no timeout ends it; or where one will."""
        if not self._may_end:
            return
        logger.critical(
            "[Reshard] rank %d ends: after %.0f s it still waits in %r, and nothing but the end of the process stops "
            "that. The cause: %s",
            self._rank,
            seconds,
            place.phase,
            failure,
        )
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(1)


def _is_alike(failure: Failure, known: Failure) -> bool:
    """Whether a failure needs no line in the log beside another: many ranks raise one error."""
    return failure.text == known.text and (failure.rank == known.rank or bool(failure.phase))


def _require_file(store: dist.Store) -> None:
    """Raise RuntimeError where the file of a FileStore was removed: each of its calls would wait for another one."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    path = getattr(store, "path", "")  # of a FileStore; not in torch's stubs
    if path and not os.path.exists(path):
        raise RuntimeError(f"{path} was removed")


def _append(store: dist.Store, key: str, line: str) -> None:
    store.append(key, f"{line}\n")  # type: ignore[attr-defined]  # not in torch's stubs


def _lines(store: dist.Store, key: str) -> list[str]:
    return store.get(key).decode().splitlines() if store.check([key]) else []


def _beat(rank: int) -> str:
    return f"beat/{rank}"


def _beat_of(store: dist.Store, rank: int) -> str:
    """How far a rank's thread has counted; a store waits for a key that is not there."""
    return store.get(_beat(rank)).decode() if store.check([_beat(rank)]) else ""
