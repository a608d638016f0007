"""Watch over the other ranks, which detects their failures while this rank still waits for them.

Ranks wait for each other inside libraries: in collectives of vLLM, Megatron and torch. If one rank
fails, the others wait there forever. Therefore a failed rank reports to the job's store, and a
thread on every rank reads the store:

    rank 1   an exception leaves `inside("generate")`   -> store: rank 1, generate, error, patience
    rank 0   its thread reads that within a second      -> ERROR of this module's logger
             its main thread returns from its wait, or  -> the thread ends the process, after that
                                                           patience

Ending the process is the last resort, as it is for NCCL's watchdog: a thread that spins in a
kernel, or in vLLM's shared memory on CPU, handles no signal and has no timeout. It happens only if
the rank waits for the failed one, and only while its main thread is in the same work as at the
failure.

A killed rank cannot report. Each rank therefore watches the processes of its own host, which works
even if the store was lost with the process that held it. Other hosts learn of a killed or frozen
rank from the rank below it, its neighbour, because every rank's thread increments a counter in the
store. A rank whose counter moves again is no longer treated as failed.

Applications can add a handler to the logger "hybrid_engine.failures". It receives the first message
about a failure, while other ranks still wait.
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

_POLL_INTERVAL = 0.5
_STORE_TIMEOUT = 10.0  # longest wait for an answer of the store
_NUM_ERRORS_OF_THE_STORE = 5  # consecutive errors after which the store counts as gone
_MIN_SILENCE = 20.0  # seconds: a rank on a busy host must not count as frozen
# Patience of a report about a killed or frozen rank: others may still return by themselves.
_SILENCE_PATIENCE = 10.0
_PATIENCE_MARGIN = 5.0  # added to a failure's patience, for timeouts that end at the same time
_GONE = "gone"

_T = TypeVar("_T")


@dataclass(frozen=True)
class Failure:
    """Failure of a rank, reported by itself or by another rank.

    Attributes:
        rank: the failed rank.
        phase: the work in which it failed; "" if another rank observed the failure.
        text: its error, or its observed state.
        patience: seconds that ranks waiting for it have to return by themselves.
        entry: `_RankPlace.entry` of the reporting rank.
        waiting: ranks that wait for the failed one; None for all.
        beat: last counter of a silent rank, which may count again; None if the failure is final.
    """

    rank: int
    phase: str
    text: str
    patience: float
    entry: int
    waiting: tuple[int, ...] | None = None
    beat: str | None = None

    def __str__(self) -> str:
        if self.phase:
            return f"rank {self.rank}, {self.phase}: {self.text}"
        return f"rank {self.rank} {self.text}"


@dataclass(frozen=True)
class _RankPlace:
    """Position of the main thread; replaced as a whole, so that the watching thread sees one state.

    Attributes:
        step: number of agreements so far, the same on all ranks that work together.
        entry: number of times that it entered work that waits for others, nested work not counted.
            A failure in an earlier entry of the same step was survived: the caller went on.
        phase: innermost such work; "" outside.
        since: time at which it last entered or left such work, `time.monotonic()`.
        has_arrived: it waits for the others at the end of the step, and nowhere else.
    """

    step: int = 0
    entry: int = 0
    phase: str = ""
    since: float = 0.0
    has_arrived: bool = False


@dataclass
class _KnownFailures:
    """Failures of one step that the watching thread has seen, with the time of the first sight."""

    step: int = -1
    failures: dict[Failure, float] = field(default_factory=dict)


class FailureWatch:
    """View of one rank on the others, for one `Agreement`. Created on all ranks in the same order.

    Args:
        world: the ranks.
        timeout_seconds: silence after which a rank counts as frozen; see `set_silence`.
    """

    def __init__(self, world: World, timeout_seconds: float) -> None:
        self._rank = world.rank
        self._world_size = world.size
        self._may_end = world.may_end
        # A ring: each rank is watched by the one below it, rank 0 by the last.
        self._neighbour = (self._rank + 1) % self._world_size
        self.set_silence(timeout_seconds)
        self._place = _RankPlace()
        self._known = _KnownFailures()
        self._pids: dict[int, int] = {}  # of the other ranks of this host
        self._neighbours_beat = ""
        self._neighbours_time = time.monotonic()
        self._looked = time.monotonic()
        self._arrived_at = -1
        self._reported = -1, ""  # step and text of this rank's own failure
        self._closing = threading.Event()
        self._store_is_gone = False
        self._thread: threading.Thread | None = None
        self._queries: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        if self._world_size > 1:
            # Each thread has its own connection: a wait of one would hold up the other.
            name = f"watch/{world.next_number()}"
            self._store = world.own_connection(name)
            self._threads_store = world.own_connection(name)
            for store in (self._store, self._threads_store):
                store.set_timeout(timedelta(seconds=_STORE_TIMEOUT))
            self._pid = os.getpid()
            self._space = process_space()
            if self._space is not None:
                key = f"processes/{self._space}"
                _append(self._store, key, f"{self._rank} {self._pid}")
            self._thread = threading.Thread(target=self._watch, name="failure watch", daemon=True)
            self._thread.start()
            # Started now, because Thread.start never returns if memory is too short for the thread.
            queries = threading.Thread(target=self._run_queries, name="store queries", daemon=True)
            queries.start()
            atexit.register(self.close)

    def set_silence(self, seconds: float) -> None:
        """Treat a rank as frozen after `seconds` without counting, but not before 20 s."""
        self._silence = max(seconds, _MIN_SILENCE)

    def close(self) -> None:
        """Stop watching and being watched; idempotent. Does nothing in a forked child."""
        if self._thread is None or self._closing.is_set() or os.getpid() != self._pid:
            return
        self._closing.set()
        atexit.unregister(self.close)
        self._thread.join(_STORE_TIMEOUT)
        self._query(lambda: self._store.set(f"beat/{self._rank}", _GONE), None)
        self._query(lambda: _append(self._store, "left", str(self._rank)), None)
        self._store_is_gone = True
        self._queries.put(None)

    # -- the main thread ---------------------------------------------------------------------------

    @contextlib.contextmanager
    def inside(self, phase: str) -> Iterator[None]:
        """Mark the block as work in which this rank may wait for others."""
        outer = self._place
        # True adds 1: nested blocks are part of the work around them.
        entry = outer.entry + (not outer.phase)
        self._place = _RankPlace(outer.step, entry, phase, time.monotonic())
        try:
            yield
        finally:
            inner = self._place  # agreements inside the block have advanced its step
            self._place = _RankPlace(inner.step, inner.entry, outer.phase, time.monotonic())

    @contextlib.contextmanager
    def arrived(self, phase: str) -> Iterator[None]:
        """Mark the block as the end of a step, where all ranks meet. The next step follows it."""
        outer = self._place
        self._place = _RankPlace(outer.step, outer.entry, phase, time.monotonic(), has_arrived=True)
        try:
            yield
        finally:
            self._place = _RankPlace(outer.step + 1, outer.entry, outer.phase, time.monotonic())

    def report(
        self,
        phase: str,
        text: str,
        patience: float,
        waiting: Collection[int] | None = None,
    ) -> None:
        """Report to all ranks that this one failed in the present step. See `Failure`."""
        place = self._place
        ranks = None if waiting is None else tuple(waiting)
        self._reported = place.step, text
        failure = Failure(self._rank, phase, text, patience, place.entry, ranks)
        self._query(lambda: self._write(self._store, failure, place.step), None)

    def failures_of_others(self) -> list[Failure]:
        """Read failures of the present step from the store; none if it is gone."""
        place = self._place
        return self._query(lambda: self._read(self._store, place), [])

    def known_failures(self) -> list[Failure]:
        """Return final failures of the present step that the watching thread has seen."""
        known = self._known
        place = self._place
        failures = list(known.failures) if known.step == place.step else []
        return [
            failure for failure in failures if failure.entry >= place.entry and failure.beat is None
        ]

    def ended(self) -> str:
        """Return which ranks are known to have ended, as text; "" if none."""
        return ", ".join(str(failure) for failure in self.known_failures() if not failure.phase)

    def left(self) -> str:
        """Return which ranks have left the job by `close`, as text; "" if none."""
        ranks = self._query(lambda: _lines(self._store, "left"), list[str]())
        others = [rank for rank in ranks if rank != str(self._rank)]
        return ", ".join(f"rank {rank} has left the job" for rank in others)

    def num_at(self, mark: str, *, arriving: bool = False) -> int | None:
        """Return how many ranks have reached a mark of the present step; None without a store.

        If `arriving`, this rank reaches it now and is included.
        """
        key = f"{self._place.step}/{mark}"
        return self._query(lambda: self._store.add(key, int(arriving)), None)

    def have_arrived(self, ranks: Collection[int] | None, patience: float) -> bool:
        """Wait until `ranks` (default: all) are at the end of the step, after a `report`.

        Returns False if they are not within `patience` seconds.
        """
        awaited = set(range(self._world_size) if ranks is None else ranks)
        awaited.discard(self._rank)
        key = f"{self._place.step}/arrived"
        deadline = time.monotonic() + patience
        while awaited and time.monotonic() < deadline:
            lines = self._query(lambda: _lines(self._store, key), list[str]())
            awaited.difference_update(map(int, lines))
            time.sleep(_POLL_INTERVAL / 5 if awaited else 0)
        return not awaited

    def reasons(self) -> list[str]:
        """Return why other ranks do not come, as texts.

        These are the failures that ranks have reported. Without any, they are the ended or stopped
        processes of this host. Waits up to a second for the first reason, because a connection
        breaks a little before its process is gone or has reported.
        """
        deadline = time.monotonic() + 1.0
        while True:
            reasons = list(map(str, self.failures_of_others()))
            if not reasons:
                for rank, pid in self._pids.items():
                    if state := state_of(pid):
                        reasons.append(f"rank {rank} {state}")
            if reasons or self._world_size == 1 or time.monotonic() > deadline:
                return reasons
            time.sleep(_POLL_INTERVAL / 5)

    def _query(self, call: Callable[[], _T], default: _T) -> _T:
        """Return the result of `call` on the store, or `default` if the store does not answer.

        The process that holds the store may have ended or be frozen, and torch's own timeouts do
        not cover every call. The call therefore runs in a thread, and is abandoned after a timeout.
        """
        results: SimpleQueue[_T] = SimpleQueue()

        def run() -> None:
            try:
                _require_file(self._store)
                results.put(call())
            except Exception as error:
                # After another error, such as MemoryError, the store may answer the next time.
                self._store_is_gone |= isinstance(error, RuntimeError)
                logger.info("the job's store does not answer: %s", error)
                results.put(default)

        if self._world_size == 1 or self._store_is_gone:
            return default
        self._queries.put(run)
        try:
            return results.get(timeout=_STORE_TIMEOUT)
        except Empty:
            self._store_is_gone = True
            return default

    def _run_queries(self) -> None:
        for run in iter(self._queries.get, None):
            run()

    # -- the store ---------------------------------------------------------------------------------

    def _write(self, store: dist.Store, failure: Failure, step: int) -> None:
        _append(store, f"{step}/failed", json.dumps(asdict(failure)))

    def _read(self, store: dist.Store, place: _RankPlace) -> list[Failure]:
        """Return the reported failures of other ranks that matter at `place`."""
        failures = []
        for line in _lines(store, f"{place.step}/failed"):
            fields = json.loads(line)
            fields["waiting"] = fields["waiting"] and tuple(fields["waiting"])
            failure = Failure(**fields)
            if failure.rank != self._rank and failure.entry >= place.entry:
                failures.append(failure)
        return failures

    # -- the watching thread -----------------------------------------------------------------------

    def _watch(self) -> None:
        num_errors = 0
        for beat in itertools.count():
            if self._closing.wait(_POLL_INTERVAL):
                return
            store = self._threads_store
            try:
                if num_errors < _NUM_ERRORS_OF_THE_STORE:
                    _require_file(store)
                    store.set(f"beat/{self._rank}", str(beat))
                    self._find_processes(store)
                    self._watch_neighbour(store)
                    failures = self._read(store, self._place)
                    reported = {failure.rank for failure in failures}
                    for failure in self._failures_of_this_host():
                        # A rank that closed its watch first has ended normally.
                        if failure.rank not in reported and _beat_of(store, failure.rank) != _GONE:
                            failures.append(failure)
                    self._react(failures)
                    num_errors = 0
                else:
                    self._react(self._failures_of_this_host())
            except RuntimeError as error:
                num_errors += 1
                if num_errors == _NUM_ERRORS_OF_THE_STORE:
                    logger.log(
                        logging.WARNING if self._place.phase else logging.INFO,
                        "rank %d watches only its own host from now on: the job's store does not "
                        "answer: %s",
                        self._rank,
                        error,
                    )

    def _find_processes(self, store: dist.Store) -> None:
        """Read the process ids of this host's other ranks, until all are known."""
        if self._space is not None and len(self._pids) < self._world_size - 1:
            pids = {}
            for line in _lines(store, f"processes/{self._space}"):
                rank, pid = map(int, line.split())
                if rank != self._rank:
                    pids[rank] = pid
            # Replaced as a whole, because the main thread may iterate over it.
            self._pids = pids

    def _watch_neighbour(self, store: dist.Store) -> None:
        """Report the neighbour if it was killed or is frozen, because it cannot report itself."""
        now = time.monotonic()
        place = self._place
        beat = _beat_of(store, self._neighbour)
        # If this thread got no time itself, the neighbour must not be blamed for it.
        was_away = now - self._looked > 10 * _POLL_INTERVAL
        self._looked = now
        # Outside of work nobody waits, so silence starts to count at the entry.
        if beat != self._neighbours_beat or not place.phase or was_away:
            self._neighbours_beat = beat
            self._neighbours_time = now
            return
        seconds = now - self._neighbours_time
        pid = self._pids.get(self._neighbour)
        has_left = pid is not None and has_ended(pid)
        # A running process of this host is only slow, however long it is silent.
        is_frozen = False
        if seconds > self._silence:
            is_frozen = pid is None or state_of(pid) is not None
        if beat != _GONE and (has_left or is_frozen):
            state = None if pid is None else state_of(pid)
            text = state or f"did not respond for {seconds:.0f} s"
            failure = self._observed(self._neighbour, text, place, None if has_left else beat)
            reported = self._read(store, place)
            if all(report.rank != failure.rank for report in reported):
                self._write(store, failure, place.step)

    def _failures_of_this_host(self) -> list[Failure]:
        """Return the failures that are visible without the store: ended processes."""
        place = self._place
        failures: list[Failure] = []
        if not place.phase:
            return failures
        for rank, pid in self._pids.items():
            if has_ended(pid):
                failures.append(self._observed(rank, f"has ended (process {pid})", place))
        return failures

    def _observed(
        self,
        rank: int,
        text: str,
        place: _RankPlace,
        beat: str | None = None,
    ) -> Failure:
        return Failure(rank, "", text, _SILENCE_PATIENCE, place.entry, beat=beat)

    def _react(self, failures: list[Failure]) -> None:
        """Log new failures, and end the process if it is stuck in waiting for a failed rank."""
        place = self._place
        now = time.monotonic()
        if place.step != self._known.step:
            self._known = _KnownFailures(place.step)
        first_seen = self._known.failures
        for failure in failures:
            if failure in first_seen:
                continue
            is_logged = any(_is_alike(failure, known) for known in first_seen)
            if not is_logged and self._reported != (place.step, failure.text):
                waits = ""
                if self._is_stuck(place):
                    waits = f" (rank {self._rank} is still in: {place.phase})"
                logger.error("[Reshard] %s%s", failure, waits)
            first_seen[failure] = now
        # For a rank that failed, which waits in `have_arrived`. Without failures a step writes
        # nothing here.
        if failures and place.has_arrived and self._arrived_at != place.step:
            _append(self._threads_store, f"{place.step}/arrived", str(self._rank))
            self._arrived_at = place.step
        for failure in failures:
            is_awaited = failure.waiting is None or self._rank in failure.waiting
            # The patience starts again with each work that the main thread enters.
            start = max(first_seen[failure], place.since)
            deadline = start + failure.patience + _PATIENCE_MARGIN
            if not (is_awaited and now > deadline and self._is_stuck(place)):
                continue
            # Each failure is looked at once, because its rank may count again at any time.
            causes = [other for other in failures if not self._is_forgiven(other)]
            if failure in causes:
                # The first failure is the cause. Later ones, such as the end of ranks that waited
                # for it, are consequences.
                cause = min(causes, key=first_seen.__getitem__)
                self._end(cause, place, now - first_seen[cause])

    def _is_stuck(self, place: _RankPlace) -> bool:
        """Return True if the main thread is still at `place`, inside work.

        The end of a step does not count, because it has its own timeout.
        """
        return place is self._place and bool(place.phase) and not place.has_arrived

    def _is_forgiven(self, failure: Failure) -> bool:
        """Return True if a rank that was silent goes on.

        On this host its process runs, even if a busy host gives it no time to count. On another
        host it counts again.
        """
        if failure.beat is None:
            return False
        pid = self._pids.get(failure.rank)
        runs = pid is not None and state_of(pid) is None
        return runs or _beat_of(self._threads_store, failure.rank) != failure.beat

    def _end(self, failure: Failure, place: _RankPlace, seconds: float) -> None:
        """End the process, which has waited for `seconds`, unless the world forbids it."""
        if not self._may_end:
            return
        logger.critical(
            "[Reshard] rank %d ends: after %.0f s it still waits in %r, and only the end of the "
            "process can stop that. Cause: %s",
            self._rank,
            seconds,
            place.phase,
            failure,
        )
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(1)


def _is_alike(failure: Failure, known: Failure) -> bool:
    """Return True if the log line of `known` covers `failure`: many ranks raise the same error."""
    if failure.text != known.text:
        return False
    # An error that a rank raises has a phase, and may be the same on many ranks. An observed state
    # such as "has ended" concerns its rank alone.
    return failure.rank == known.rank or bool(failure.phase)


def _require_file(store: dist.Store) -> None:
    """Raise RuntimeError if the file of a FileStore was removed.

    Otherwise every call would wait for the file to come back.
    """
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    path = getattr(store, "path", "")  # of a FileStore; not in torch's stubs
    if path and not os.path.exists(path):
        raise RuntimeError(f"{path} was removed")


def _append(store: dist.Store, key: str, line: str) -> None:
    store.append(key, f"{line}\n")  # type: ignore[attr-defined]  # not in torch's stubs


def _lines(store: dist.Store, key: str) -> list[str]:
    # Checked first, because `get` waits for a missing key.
    if not store.check([key]):
        return []
    return store.get(key).decode().splitlines()


def _beat_of(store: dist.Store, rank: int) -> str:
    """Return the counter of a rank's watching thread; "" before it has counted."""
    key = f"beat/{rank}"
    return store.get(key).decode() if store.check([key]) else ""
