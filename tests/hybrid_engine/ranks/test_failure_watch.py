"""Ranks that diverge inside libraries: the errors they report, and that each ends.

A healthy rank is not ended.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch.distributed as dist

from hybrid_engine.ranks.failure_watch import Failure, FailureWatch
from hybrid_engine.ranks.world import World
from hybrid_engine.tools.launching import run_ranks
from tests.harness.launch import on_ranks
from tests.hybrid_engine.ranks import watch_ranks

CAUSES = {
    "raises": r"rank 1, generate: MemoryError: no memory for 3 GB",
    "ctrl-c": r"rank 1, generate: KeyboardInterrupt",
    "killed": r"rank 1 has ended \(process \d+\)",
    "stopped": r"rank 1 is stopped \(process \d+\)",
    "store goes": r"rank 0 has ended \(process \d+\)",
}
SECONDS_AT_MOST = 100  # a rank that hangs would wait for minutes


@pytest.mark.ranks
@pytest.mark.parametrize(
    "scenario",
    [name if name in ("raises", "ctrl-c") else pytest.param(name, marks=pytest.mark.faults) for name in CAUSES],
)
def test_every_rank_reports_the_cause_and_ends(scenario: str) -> None:
    """A rank waits in a call without timeout, another in a collective; the third fails."""
    ended = run_ranks(["-m", "tests.hybrid_engine.ranks.watch_ranks", scenario], 3, timeout=SECONDS_AT_MOST)
    cause = CAUSES[scenario]
    waiting = 1 if scenario == "store goes" else 0
    assert ended.status is not None, f"a rank was left waiting:\n{ended.output}"
    assert re.search(rf"ERROR \[Reshard\] {cause} \(rank {waiting} is still in: generate\)", ended.output), ended.output
    end = rf"CRITICAL \[Reshard\] rank {waiting} ends: after \d+ s it still waits in 'generate'.*{cause}"
    assert re.search(end, ended.output), ended.output
    if scenario in ("raises", "killed", "ctrl-c"):  # a group does not notice a stopped member
        assert re.search(rf"rank 2 LostRankError: generate: {cause}", ended.output), ended.output
    if scenario == "raises":
        message = "rank 1 LostRankError: generate: MemoryError: no memory for 3 GB\nThe other ranks did not come"
        assert message in ended.output
    assert "GLHF" not in ended.output  # part of torch's own error text


@pytest.fixture
def watch(job: None) -> Iterator[FailureWatch]:
    """The watch of rank 0 of 2; rank 1 never starts."""
    with closing(FailureWatch(World(dist.HashStore(), 0, 2), 60.0)) as failure_watch:
        yield failure_watch


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


# Scenario -> start of the outcome on each rank.
SURVIVED: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("interrupted", "store error", "paused", "building"), RETURNED),
    "slow replica": (*[f"ReshardError: generate: {OF_MEMORY}$"] * 2, r"RemoteError: generate failed on 2 rank\(s\)"),
    "nested": of_rank_1(OF_MEMORY),
    "not a peer": of_rank_1("DistBackendError: NCCL error: creating shared"),
    # Otherwise different phases of two ranks could meet, and both would succeed.
    "after the end": (PARTED,) * 3,
}


@on_ranks({3: SURVIVED})
def test_every_rank_survives_and_reports_the_cause(case: str) -> None:
    """A healthy rank is not ended, and a slow replica is not when another fails."""
    outcome = watch_ranks.survive(case)
    assert re.match(SURVIVED[case][dist.get_rank()], outcome, re.DOTALL), outcome
