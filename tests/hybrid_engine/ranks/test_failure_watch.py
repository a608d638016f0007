"""Ranks that part ways inside libraries: what each says, and that each ends; and those that only nearly do."""

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
from tests.harness.launch import Ranks
from tests.hybrid_engine.ranks import watch_ranks

CAUSES = {
    "raises": r"rank 1, generate: MemoryError: no memory for 3 GB",
    "ctrl-c": r"rank 1, generate: KeyboardInterrupt",
    "killed": r"rank 1 has ended \(process \d+\)",
    "stopped": r"rank 1 is stopped \(process \d+\)",
    "store goes": r"rank 0 has ended \(process \d+\)",
}
SECONDS_AT_MOST = 100  # a rank that is left waiting waits for minutes


@pytest.mark.ranks
@pytest.mark.parametrize(
    "scenario",
    [name if name in ("raises", "ctrl-c") else pytest.param(name, marks=pytest.mark.faults) for name in CAUSES],
)
def test_every_rank_says_the_cause_and_ends(scenario: str) -> None:
    """One rank waits in a call that has no timeout, another in a collective, the third fails."""
    ended = run_ranks(["-m", "tests.hybrid_engine.ranks.watch_ranks", scenario], 3, timeout=SECONDS_AT_MOST)
    cause, waiting = CAUSES[scenario], 1 if scenario == "store goes" else 0
    assert ended.status is not None, f"a rank was left waiting:\n{ended.output}"
    assert re.search(rf"ERROR \[Reshard\] {cause} \(rank {waiting} is still in: generate\)", ended.output), ended.output
    end = rf"CRITICAL \[Reshard\] rank {waiting} ends: after \d+ s it still waits in 'generate'.*{cause}"
    assert re.search(end, ended.output), ended.output
    if scenario in ("raises", "killed", "ctrl-c"):  # nothing tells a group that a member is stopped
        assert re.search(rf"rank 2 LostRankError: generate: {cause}", ended.output), ended.output
    if scenario == "raises":
        own = "rank 1 LostRankError: generate: MemoryError: no memory for 3 GB\nThe other ranks did not come"
        assert own in ended.output
    assert "GLHF" not in ended.output


@pytest.fixture
def watch(job: None) -> Iterator[FailureWatch]:
    """Of rank 0 of 2, whose peer never comes."""
    with closing(FailureWatch(World(dist.HashStore(), 0, 2), 60.0)) as made:
        yield made


def test_no_question_starts_a_thread(watch: FailureWatch, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python waits without end for a thread that finds no memory to begin."""

    def start(self: threading.Thread) -> None:
        raise AssertionError(f"{self.name} was started")

    monkeypatch.setattr(threading.Thread, "start", start)
    assert [watch.num_at("mark", arriving=True) for _ in range(3)] == [1, 2, 3]
    watch.report("switch", "MemoryError: no memory for 3 GB", 1.0)
    assert watch.failures_of_others() == []


def test_want_of_memory_costs_one_answer_and_a_lost_store_all(watch: FailureWatch) -> None:
    def fail(error: Exception) -> str:
        raise error

    assert watch._query(lambda: fail(MemoryError()), "otherwise") == "otherwise"
    assert watch._query(lambda: "answer", "otherwise") == "answer"
    assert watch._query(lambda: fail(dist.DistNetworkError("reset")), "otherwise") == "otherwise"
    assert watch._query(lambda: "answer", "otherwise") == "otherwise"


def test_nothing_is_asked_of_a_store_whose_file_was_removed(job: None, tmp_path: Path) -> None:
    """Trainers remove it when they end, and each call would then wait for the file to come back."""
    path = tmp_path / "store"
    watch = FailureWatch(World(dist.FileStore(str(path), -1), 0, 2), 60.0)
    path.unlink()
    asked: list[int] = []
    assert watch._query(lambda: asked.append(0), "otherwise") == "otherwise"
    watch.close()
    assert asked == []
    assert not path.exists()


def test_a_rank_that_counts_again_while_it_is_looked_at_leaves_the_watch_intact(
    watch: FailureWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second look would find no cause, and its error would end the watching thread."""
    failure = Failure(1, "", "did not respond for 60 s", -60.0, 1, beat="7")
    looks = iter([False, True])
    ended = []
    monkeypatch.setattr(watch, "_is_forgiven", lambda failure: next(looks))
    monkeypatch.setattr(watch, "_end", lambda cause, *arguments: ended.append(cause))
    with watch.inside("generate"):
        watch._react([failure])
    assert ended == [failure]
    assert list(looks) == [True]


@pytest.fixture(scope="module")
def outcomes(ranks: Ranks) -> list[dict[str, str]]:
    return ranks.launch(watch_ranks.all_survived, 3, timeout=SECONDS_AT_MOST)


@pytest.mark.parametrize("scenario", ["interrupted", "store error", "paused", "paused elsewhere", "building"])
def test_no_healthy_rank_is_ended(outcomes: list[dict[str, str]], scenario: str) -> None:
    assert [each[scenario] for each in outcomes] == ["returned None"] * 3


def test_a_replica_that_takes_its_time_is_not_ended_for_another_that_failed(outcomes: list[dict[str, str]]) -> None:
    by_rank = [each["slow replica"] for each in outcomes]
    assert by_rank[0] == by_rank[1] == "ReshardError: generate: MemoryError: no memory for 3 GB"
    assert by_rank[2].startswith("RemoteError: generate failed on 2 rank(s)")


@pytest.mark.parametrize(
    ("scenario", "cause"),
    [("nested", "MemoryError: no memory for 3 GB"), ("not a peer", "DistBackendError: NCCL error: creating shared")],
)
def test_the_cause_is_everywhere(outcomes: list[dict[str, str]], scenario: str, cause: str) -> None:
    by_rank = [each[scenario] for each in outcomes]
    assert by_rank[1].startswith(f"ReshardError: building: {cause}")
    assert all(each.startswith("RemoteError: ") and f"rank 1: {cause}" in each for each in (by_rank[0], by_rank[2]))


def test_there_is_no_agreement_after_the_ranks_have_parted(outcomes: list[dict[str, str]]) -> None:
    """Or a later phase of one rank would meet the failed one of another, and both would call it a success."""
    for each in outcomes:
        assert each["after the end"].startswith("StateError: the ranks have parted, end the job: generate: ")
        assert "MemoryError: no memory for 3 GB" in each["after the end"]
