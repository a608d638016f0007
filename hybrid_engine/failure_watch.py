"""What became of the other ranks, known while this one still waits for them.

Ranks wait for each other inside libraries: in vLLM's collectives, Megatron's, torch's. When one of them fails, the
others wait there for what never comes. So a rank that fails says so in the job's store, and a thread on every rank
looks there:

    rank 1   an exception leaves `inside("generate")`     -> store: "7/failed": rank 1, generate, MemoryError, patience
    rank 0   its thread sees it within a second           -> the log, as ERROR of this module's logger
             its main thread ends its wait, or does not   -> after `patience` the thread ends the process

Ending the process is the last resort, as it is for NCCL's watchdog: a thread that spins in a kernel, or in vLLM's
shared memory on CPU, hears no signal and has no timeout. It happens only while the main thread is inside such work.

A rank that was killed or frozen says nothing. Its neighbour (the rank below) says it: it looks at the process where
both are on one host, and elsewhere at a counter that every rank's thread keeps counting.

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
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from datetime import timedelta

import torch.distributed as dist

from hybrid_engine.hosts import has_ended, host_id, is_stopped

logger = logging.getLogger("hybrid_engine.failures")

_SECONDS_BETWEEN_LOOKS = 0.5
_SECONDS_OF_THE_STORE = 10.0  # longest wait for an answer of the store
_SHORTEST_SILENCE = 20.0  # seconds: a rank on a busy host is not taken for frozen
_SECONDS_AFTER_SILENCE = 10.0  # that others have to come back by themselves when a rank was killed or is frozen
_SECONDS_TO_SPARE = 5.0  # beyond a failure's patience, for timeouts that end at the same time
_GONE = b"gone"


@dataclass(frozen=True)
class Failure:
    """What a rank tells the others, or one says of another.

    Attributes:
        rank: that failed.
        phase: what it was doing.
        text: its error.
        patience: seconds that the others have to come back from what they are doing.
    """

    rank: int
    phase: str
    text: str
    patience: float

    def __str__(self) -> str:
        return f"rank {self.rank}, {self.phase}: {self.text}" if self.phase else f"rank {self.rank} {self.text}"


@dataclass(frozen=True)
class _Place:
    """Where the main thread is; replaced as a whole, so that the other thread sees no half of it.

    Attributes:
        step: agreements so far, and calls (`inside(is_call=True)`) since the last: the same on all ranks that work
            together.
        phase: the innermost work in which it waits for others, "" outside of any.
        since: when it entered or left anything last.
        has_arrived: it waits for the others at the end of the step, and nowhere else.
    """

    step: tuple[int, int] = (0, 0)
    phase: str = ""
    since: float = 0.0
    has_arrived: bool = False


@dataclass
class _Heard:
    """What the thread knows of the present step."""

    step: tuple[int, int] = (-1, 0)
    failures: dict[Failure, float] = field(default_factory=dict)  # when each was first seen


class FailureWatch:
    """One rank's view of the others, for one `Agreement`. Created on all ranks alike."""

    def __init__(self, timeout_seconds: float) -> None:
        """`timeout_seconds`: a rank of another host that counted no further for so long is taken for frozen."""
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._neighbour = (self._rank + 1) % self._world_size
        self._silence = max(timeout_seconds, _SHORTEST_SILENCE)
        self._place, self._heard = _Place(), _Heard()
        self._arrived_at, self._lock = (-1, 0), threading.Lock()
        self._neighbours_beat, self._neighbours_time = b"", time.monotonic()
        self._pids: dict[int, int | None] = {}  # of other ranks; None for those of other hosts
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        if self._world_size > 1:
            self._store = _own_connection(f"hybrid_engine/watch/{next(_numbers)}")
            self._store.set(f"who/{self._rank}", json.dumps({"host": host_id(), "pid": os.getpid()}))
            self._thread = threading.Thread(target=self._watch, name="failure watch", daemon=True)
            self._thread.start()
            atexit.register(self.close)

    def close(self) -> None:
        """Stop watching, and being watched; idempotent."""
        if self._thread is None or self._closing.is_set():
            return
        self._closing.set()
        atexit.unregister(self.close)
        if self._thread is not threading.current_thread():
            self._thread.join()
        self._thread = None
        with _store_may_be_gone():
            self._store.set(f"beat/{self._rank}", _GONE)

    # -- the main thread ----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def inside(self, phase: str, *, is_call: bool = False) -> Iterator[None]:
        """Work in which this rank may wait for others; a call is a step of its own, and does not end in `arrived`."""
        outer = self._place
        agreements, calls = outer.step
        self._place = _Place((agreements, calls + is_call), phase, time.monotonic())
        try:
            yield
        finally:
            self._place = _Place(self._place.step, outer.phase, time.monotonic())

    @contextlib.contextmanager
    def arrived(self, phase: str) -> Iterator[None]:
        """The end of a step, at which all ranks meet; the next step begins after it."""
        outer = self._place
        self._place = _Place(outer.step, phase, time.monotonic(), has_arrived=True)
        try:
            yield
        finally:
            self._place = _Place((outer.step[0] + 1, 0), outer.phase, time.monotonic())

    def tell(self, phase: str, error: BaseException, patience: float) -> None:
        """Let all ranks know that this one failed in the present step. The job's store being gone is only logged."""
        self._say(Failure(self._rank, phase, f"{type(error).__name__}: {error}", patience))

    def failures_of_others(self) -> list[Failure]:
        """Of the present step, read from the store now; none if it is gone."""
        found: list[Failure] = []
        if self._world_size > 1:
            with _store_may_be_gone():
                found = [failure for failure in self._read(self._place.step) if failure.rank != self._rank]
        return found

    def all_arrived(self, patience: float) -> bool:
        """Having told of a failure, wait at most `patience` seconds until all ranks are at the end of the step."""
        if self._world_size == 1:
            return True
        key, deadline = _key(self._place.step, "arrived"), time.monotonic() + patience
        with _store_may_be_gone():
            self._report_arrival(self._place.step)
            while self._store.add(key, 0) < self._world_size:
                if time.monotonic() > deadline:
                    return False
                time.sleep(_SECONDS_BETWEEN_LOOKS / 5)
            return True
        return False

    def ended_ranks(self) -> list[str]:
        """The ranks of this host whose processes have ended or are stopped, each in words. A second at most."""
        deadline = time.monotonic() + 1.0
        found: list[str] = []
        with _store_may_be_gone():
            others = [rank for rank in range(self._world_size) if rank != self._rank]
            pids = {rank: pid for rank in others if (pid := self._pid_here(rank))}
            while not found and time.monotonic() < deadline:  # a connection breaks a little before its process is gone
                found = [f"rank {rank} {state}" for rank, pid in pids.items() if (state := _state_of(pid))]
                time.sleep(_SECONDS_BETWEEN_LOOKS / 5)
        return found

    # -- the store ----------------------------------------------------------------------------------------------------

    def _pid_here(self, rank: int) -> int | None:
        """The process of another rank of this host."""
        if rank not in self._pids and self._store.check([f"who/{rank}"]):
            who = json.loads(self._store.get(f"who/{rank}"))
            self._pids[rank] = who["pid"] if who["host"] == host_id() else None
        return self._pids.get(rank)

    def _say(self, failure: Failure) -> None:
        if self._world_size > 1:
            with _store_may_be_gone():
                self._store.append(_key(self._place.step, "failed"), json.dumps(asdict(failure)) + "\n")

    def _report_arrival(self, step: tuple[int, int]) -> None:
        """Once for each step: main thread and watching thread may both come here."""
        with self._lock:
            if self._arrived_at != step:
                self._store.add(_key(step, "arrived"), 1)
                self._arrived_at = step

    def _read(self, step: tuple[int, int]) -> list[Failure]:
        key = _key(step, "failed")
        if not self._store.check([key]):
            return []
        return [Failure(**json.loads(line)) for line in self._store.get(key).decode().splitlines()]

    # -- the watching thread ------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        beats = itertools.count()
        while not self._closing.wait(_SECONDS_BETWEEN_LOOKS):
            try:
                self._store.set(f"beat/{self._rank}", str(next(beats)))
                self._look_at_neighbour()
                self._look_at_failures()
            except RuntimeError as error:
                if not self._closing.is_set() and self._place.phase:
                    logger.warning(
                        "rank %d no longer watches the others: the job's store is gone: %s", self._rank, error
                    )
                return

    def _look_at_neighbour(self) -> None:
        """Say what a rank that was killed or is frozen cannot say."""
        now, key = time.monotonic(), f"beat/{self._neighbour}"
        beat = self._store.get(key) if self._store.check([key]) else b""
        if beat != self._neighbours_beat or not self._place.phase:
            self._neighbours_beat, self._neighbours_time = beat, now
            return
        if beat == _GONE:
            return
        pid = self._pid_here(self._neighbour)
        state = None if pid is None else _state_of(pid)
        is_silent = now - self._neighbours_time > self._silence
        if is_silent or (pid is not None and has_ended(pid)):
            silence = f"gave no sign for {now - self._neighbours_time:.0f} s"
            failure = Failure(self._neighbour, "", state or silence, _SECONDS_AFTER_SILENCE)
            if not any(known.rank == failure.rank for known in self._heard.failures):
                self._say(failure)

    def _look_at_failures(self) -> None:
        place, now = self._place, time.monotonic()
        if place.step != self._heard.step:
            self._heard = _Heard(place.step)
        heard = self._heard
        for failure in self._read(place.step):
            if failure.rank != self._rank and failure not in heard.failures:
                heard.failures[failure] = now
                self._report(failure, place)
        if not heard.failures:
            return
        if place.has_arrived:
            self._report_arrival(place.step)
        failure, deadline = min(
            ((each, max(seen, place.since) + each.patience) for each, seen in heard.failures.items()),
            key=lambda pair: pair[1],
        )
        if place.phase and not place.has_arrived and place is self._place and now > deadline + _SECONDS_TO_SPARE:
            self._end(failure, place, now - heard.failures[failure])

    def _report(self, failure: Failure, place: _Place) -> None:
        waits = f" (rank {self._rank} is still in: {place.phase})" if place.phase and not place.has_arrived else ""
        logger.error("[Reshard] %s%s", failure, waits)

    def _end(self, failure: Failure, place: _Place, seconds: float) -> None:
        """The main thread waits for a rank that does not come, where no timeout ends it."""
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


def _own_connection(prefix: str) -> dist.Store:
    """The job's store, apart from what others do with it: a wait of theirs does not hold up this one."""
    store = dist.PrefixStore(prefix, dist.distributed_c10d._get_default_store().clone())
    store.set_timeout(timedelta(seconds=_SECONDS_OF_THE_STORE))
    return store


def _key(step: tuple[int, int], what: str) -> str:
    return f"{step[0]}.{step[1]}/{what}"


def _state_of(pid: int) -> str | None:
    if has_ended(pid):
        return f"has ended (process {pid})"
    return f"is stopped (process {pid})" if is_stopped(pid) else None


@contextlib.contextmanager
def _store_may_be_gone() -> Iterator[None]:
    """What is told or asked here is a help; when the process that holds the store has ended, there is none."""
    try:
        yield
    except RuntimeError as error:
        logger.warning("the job's store does not answer: %s", error)


_numbers = itertools.count()
