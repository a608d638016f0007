"""Ranks that diverge inside libraries: the errors they report, and that each ends.

A healthy rank is not ended. There are three ranks, and timeouts are short.

    python -m tests.hybrid_engine.ranks.test_failure_watch SCENARIO  # a rank; it prints errors
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hybrid_engine.errors import LostRankError
from hybrid_engine.ranks import failure_watch
from hybrid_engine.ranks.agreement import Agreement
from hybrid_engine.ranks.failure_watch import Failure, FailureWatch
from hybrid_engine.ranks.groups import state_of
from hybrid_engine.ranks.job import Job
from hybrid_engine.ranks.world import World
from hybrid_engine.tools.launching import run_ranks
from tests.harness.launch import on_ranks
from tests.hybrid_engine.ranks.test_agreement import outcome_of

Scenario = Callable[[int, Agreement], None]
FOR_EVER = 600.0
PATIENCE = SILENCE = 1.5
LONGER_THAN_ALL_PATIENCE = 4.0  # more than patience, silence and the seconds added to them


def main(scenario: str) -> None:
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s", stream=sys.stderr)
    _shorten()
    failure_watch._PATIENCE_MARGIN = 3.0  # for ranks that can end by themselves
    store = _store_of_rank_0() if scenario == "store goes" else None
    arguments = {} if store is None else {"rank": int(os.environ["RANK"]), "world_size": 3}
    dist.init_process_group("gloo", store=store, timeout=timedelta(seconds=FOR_EVER), **arguments)
    rank = dist.get_rank()
    agreement = Job.join(SILENCE if scenario == "stopped" else FOR_EVER).agreement
    print(f"rank {rank}", outcome_of(lambda: CAUSES[scenario][0](rank, agreement)), flush=True)
    os._exit(3)  # without waiting for other ranks


def _shorten() -> None:
    failure_watch._MIN_SILENCE = SILENCE
    failure_watch._SILENCE_PATIENCE = failure_watch._PATIENCE_MARGIN = 0.5


def _store_of_rank_0() -> dist.Store:
    """Create a store inside rank 0, as without torchrun."""
    meeting, rank, _ = next(dist.rendezvous("env://"))
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        meeting.set("port", str(store.port))
        return store
    return dist.TCPStore("127.0.0.1", int(meeting.get("port")), is_master=False)


def fail_on_rank_1(
    how: Callable[[], None], patience: float = PATIENCE
) -> Callable[[int, Agreement], None]:
    """Rank 1 fails; rank 0 waits in a call without timeout, rank 2 in a collective."""

    def scenario(rank: int, agreement: Agreement) -> None:
        with agreement.phase("generate", patience):
            if rank == 1:
                time.sleep(0.5)  # until the others wait
                how()
            if rank == 0:
                time.sleep(FOR_EVER)  # like a library without timeout that ignores signals
            dist.recv(torch.zeros(1), src=1)

    return scenario


def _raise() -> None:
    raise MemoryError("no memory for 3 GB")


def _interrupt() -> None:
    raise KeyboardInterrupt


def after_the_end(rank: int, agreement: Agreement) -> None:
    """Rank 1 fails alone and continues; the others must not meet its next agreement."""
    failure_watch._PATIENCE_MARGIN = 30.0  # late ranks are not stuck, even on a slow machine
    with contextlib.suppress(LostRankError), agreement.phase("generate", 0.5):
        if rank == 1:
            _raise()
        time.sleep(1.5)
    with agreement.phase("save"):
        pass


def interrupted(rank: int, agreement: Agreement) -> None:
    """Ctrl-C in a notebook on all ranks, then the same call again, longer than all patience."""
    try:
        with agreement.phase("generate", PATIENCE):
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        dist.barrier()
    with agreement.phase("generate", PATIENCE):
        time.sleep(LONGER_THAN_ALL_PATIENCE)


def slow_replica(rank: int, agreement: Agreement) -> None:
    """Ranks 0 and 1 are a replica and fail; rank 2 is another, slow replica."""
    with agreement.phase("generate", PATIENCE, waiting=[0, 1] if rank < 2 else [2]):
        if rank < 2:
            _raise()
        time.sleep(LONGER_THAN_ALL_PATIENCE)


def store_error(rank: int, agreement: Agreement) -> None:
    """The store fails to answer rank 1's thread several times."""
    agreement._watch.set_silence(SILENCE)
    if rank == 1:
        agreement._watch._threads_store = _Flaky(agreement._watch._threads_store)
    with agreement.phase("generate", PATIENCE):
        time.sleep(LONGER_THAN_ALL_PATIENCE)


class _Flaky:
    def __init__(self, store: dist.Store) -> None:
        self._store = store
        self._until = time.monotonic() + 1.2

    def __getattr__(self, name: str) -> object:
        if time.monotonic() < self._until:
            raise dist.DistNetworkError("connection reset")
        return getattr(self._store, name)


def paused(rank: int, agreement: Agreement) -> None:
    """Rank 1 is stopped until the others notice, then continues after their patience has ended.

    It sends no beats while they check, like a rank on a host too busy to run its thread. Every step
    waits for an event, none for a time.
    """
    failure_watch._PATIENCE_MARGIN = FOR_EVER
    watch = agreement._watch
    stalled = _Stalled(agreement._watch._threads_store)
    with agreement.phase("generate"):
        if rank == 1:
            watch._threads_store = stalled
            stalled.is_waiting.wait()
            os.kill(os.getpid(), signal.SIGSTOP)
            _wait_until(lambda: watch.num_at("checked") == 2)
            stalled.may_continue.set()
            return
        _wait_until(lambda: 1 in watch._pids)
        pid = watch._pids[1]
        if rank == 0:  # the rank that watches rank 1
            watch.set_silence(SILENCE)
        _wait_until(lambda: [failure for failure in watch._known.failures if failure.rank == 1])
        watch.num_at("noticed", arriving=True)
        _wait_until(lambda: watch.num_at("noticed") == 2)
        os.kill(pid, signal.SIGCONT)
        _wait_until(lambda: not state_of(pid))
        failure_watch._PATIENCE_MARGIN = 0.5
        first = int(_count(watch, rank))
        _wait_until(lambda: int(_count(watch, rank)) > first + 4)
        watch.num_at("checked", arriving=True)


class _Stalled:
    """A store in which this rank's thread waits for `may_continue`."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        self.is_waiting = threading.Event()
        self.may_continue = threading.Event()

    def __getattr__(self, name: str) -> object:
        self.is_waiting.set()
        self.may_continue.wait()
        return getattr(self._store, name)


def _wait_until(condition: Callable[[], object]) -> None:
    while not condition():
        time.sleep(0.05)


def _count(watch: failure_watch.FailureWatch, rank: int) -> str:
    return watch._query(lambda: failure_watch._beat_of(watch._store, rank), "")


def building(rank: int, agreement: Agreement) -> None:
    """A rank may be silent for longer than the timeout while engines are built."""
    agreement.timeout_seconds = SILENCE
    with agreement.building(), agreement.phase("importing"):
        if rank == 1:
            _stop_for(LONGER_THAN_ALL_PATIENCE)


def _stop_for(seconds: float) -> None:
    os.spawnlp(os.P_NOWAIT, "sh", "sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}")
    os.kill(os.getpid(), signal.SIGSTOP)


def nested(rank: int, agreement: Agreement) -> None:
    """Rank 1 fails before an agreement inside the phase; the others reach it."""
    with agreement.phase("building"):
        if rank == 1:
            _raise()
        agreement.gather(rank, int, "layouts")


def not_a_peer(rank: int, agreement: Agreement) -> None:
    """A library's connection error without a known reason is the cause, not a consequence."""
    with agreement.phase("building"):
        if rank == 1:
            raise dist.DistBackendError(
                "NCCL error: creating shared memory segment /dev/shm/nccl-x"
            )


def store_goes(rank: int, agreement: Agreement) -> None:
    with agreement.phase("generate", PATIENCE):
        time.sleep(2.0)  # until the others have seen every rank
        if rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(FOR_EVER)


CAUSES: dict[str, tuple[Scenario, str]] = {
    "raises": (fail_on_rank_1(_raise), "rank 1, generate: MemoryError: no memory for 3 GB"),
    "ctrl-c": (fail_on_rank_1(_interrupt, FOR_EVER), "rank 1, generate: KeyboardInterrupt"),
    "killed": (
        fail_on_rank_1(lambda: os.kill(os.getpid(), signal.SIGKILL)),
        r"rank 1 has ended \(process \d+\)",
    ),
    "stopped": (
        fail_on_rank_1(lambda: os.kill(os.getpid(), signal.SIGSTOP)),
        r"rank 1 is stopped \(process \d+\)",
    ),
    "store goes": (store_goes, r"rank 0 has ended \(process \d+\)"),
}
"""Scenario -> what ranks do, and the cause that they report before they end."""
SECONDS_AT_MOST = 100  # a rank that hangs would wait for minutes


@pytest.mark.ranks
@pytest.mark.parametrize(
    "scenario",
    [
        name if name in ("raises", "ctrl-c") else pytest.param(name, marks=pytest.mark.faults)
        for name in CAUSES
    ],
)
def test_every_rank_reports_the_cause_and_ends(scenario: str) -> None:
    """A rank waits in a call without timeout, another in a collective; the third fails."""
    ended = run_ranks(["-m", __name__, scenario], 3, timeout=SECONDS_AT_MOST)
    _, cause = CAUSES[scenario]
    waiting = 1 if scenario == "store goes" else 0
    assert ended.status is not None, f"a rank was left waiting:\n{ended.output}"
    assert re.search(
        rf"ERROR \[Reshard\] {cause} \(rank {waiting} is still in: generate\)", ended.output
    ), ended.output
    end = (
        rf"CRITICAL \[Reshard\] rank {waiting} ends: after \d+ s it still waits in "
        rf"'generate'.*{cause}"
    )
    assert re.search(end, ended.output), ended.output
    if scenario in ("raises", "killed", "ctrl-c"):  # a group does not notice a stopped member
        assert re.search(rf"rank 2 LostRankError: generate: {cause}", ended.output), ended.output
    if scenario == "raises":
        message = (
            "rank 1 LostRankError: generate: MemoryError: no memory for 3 GB\nThe "
            "other ranks did not come"
        )
        assert message in ended.output
    assert "GLHF" not in ended.output  # part of torch's own error text


@pytest.fixture
def watch(job: None) -> Iterator[FailureWatch]:
    """The watch of rank 0 of 2; rank 1 never starts."""
    with contextlib.closing(FailureWatch(World(dist.HashStore(), 0, 2), 60.0)) as started:
        yield started


def test_no_query_starts_a_thread(watch: FailureWatch, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without memory, Python would wait forever for a new thread to begin."""

    def start(self: threading.Thread) -> None:
        raise AssertionError(f"{self.name} was started")

    monkeypatch.setattr(threading.Thread, "start", start)
    assert [watch.num_at("mark", arriving=True) for _ in range(3)] == [1, 2, 3]
    watch.report("switch", "MemoryError: no memory for 3 GB", 1.0)
    assert watch.failures_of_others() == []


def test_missing_memory_fails_one_query_and_a_lost_store_all(watch: FailureWatch) -> None:
    def fail(error: Exception) -> str:
        raise error

    assert watch._query(lambda: fail(MemoryError()), "otherwise") == "otherwise"
    assert watch._query(lambda: "answer", "otherwise") == "answer"
    assert watch._query(lambda: fail(dist.DistNetworkError("reset")), "otherwise") == "otherwise"
    assert watch._query(lambda: "answer", "otherwise") == "otherwise"


def test_a_store_with_a_removed_file_is_not_queried(job: None, tmp_path: Path) -> None:
    """Trainers remove the file when they end, and each call would then wait for its return."""
    path = tmp_path / "store"
    watch = FailureWatch(World(dist.FileStore(str(path), -1), 0, 2), 60.0)
    path.unlink()
    queries = []
    assert watch._query(lambda: queries.append(0), "otherwise") == "otherwise"
    watch.close()
    assert queries == []
    assert not path.exists()  # a query would create it again


def test_a_rank_that_recovers_during_a_check_leaves_the_watch_intact(
    watch: FailureWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second check would find no cause, and its error would end the watching thread."""
    failure = Failure(1, "", "did not respond for 60 s", -60.0, 1, beat="7")
    checks = iter([False, True])
    ended = []
    monkeypatch.setattr(watch, "_is_forgiven", lambda failure: next(checks))
    monkeypatch.setattr(watch, "_end", lambda cause, *arguments: ended.append(cause))
    with watch.inside("generate"):
        watch._react([failure])
    assert ended == [failure]
    assert list(checks) == [True]


RETURNED = ("returned None",) * 3
OF_MEMORY = "MemoryError: no memory for 3 GB"
PARTED = f"StateError: the ranks have parted, end the job: generate: .*{OF_MEMORY}"


def of_rank_1(cause: str) -> tuple[str, ...]:
    of_another = f"RemoteError: .*rank 1: {cause}"
    return of_another, f"ReshardError: building: {cause}", of_another


SURVIVED: dict[str, tuple[Scenario, tuple[str, ...]]] = {
    "interrupted": (interrupted, RETURNED),
    "store error": (store_error, RETURNED),
    "paused": (paused, RETURNED),
    "building": (building, RETURNED),
    "slow replica": (
        slow_replica,
        (
            *[f"ReshardError: generate: {OF_MEMORY}$"] * 2,
            r"RemoteError: generate failed on 2 rank\(s\)",
        ),
    ),
    "nested": (nested, of_rank_1(OF_MEMORY)),
    "not a peer": (not_a_peer, of_rank_1("DistBackendError: NCCL error: creating shared")),
    # Otherwise different phases of two ranks could meet, and both would succeed.
    "after the end": (after_the_end, (PARTED,) * 3),
}
"""Scenario -> what ranks do, and the start of the outcome on each."""


@on_ranks({3: SURVIVED})
def test_every_rank_survives_and_reports_the_cause(case: str) -> None:
    """A healthy rank is not ended, and a slow replica is not when another fails."""
    scenario, outcomes = SURVIVED[case]
    if not dist.is_initialized():
        dist.init_process_group("gloo", timeout=timedelta(seconds=FOR_EVER))
    _shorten()
    rank = dist.get_rank()
    agreement = Job.join(FOR_EVER).agreement
    outcome = outcome_of(lambda: scenario(rank, agreement))
    agreement.close()
    dist.barrier()
    assert re.match(outcomes[rank], outcome, re.DOTALL), outcome


if __name__ == "__main__":
    main(sys.argv[1])
