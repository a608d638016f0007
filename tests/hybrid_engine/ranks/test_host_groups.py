"""Four ranks on two simulated hosts communicate through the first rank of each host."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest
import torch.distributed as dist

from hybrid_engine.errors import (
    HybridEngineError,
    LostRankError,
    PeerTransportError,
    StateError,
    TransportError,
)
from hybrid_engine.ranks import agreement, groups, rank_tree
from hybrid_engine.ranks.groups import RankGroup
from hybrid_engine.ranks.job import Job
from hybrid_engine.ranks.world import World
from tests.harness.errors import failing, refused
from tests.harness.launch import of_all_ranks, on_ranks
from tests.hybrid_engine.ranks.test_agreement import fail_in_phase

HOSTS = "abab"
NUM_WALKED = 5 * agreement.NUM_STEPS  # a host may be NUM_STEPS ahead
LOST_SECONDS = 60.0  # the end of a rank is noticed long before


def join_job(rank: int) -> Job:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_tree, "MAX_TOGETHER", 2)
        return Job.join(LOST_SECONDS, host=HOSTS[rank])


@contextmanager
def joined() -> Iterator[Job]:
    """Join a job of four ranks on two hosts."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    with closing(join_job(dist.get_rank())) as job:
        yield job
        dist.barrier()


@on_ranks(4)
def test_all_ranks_raise_when_one_fails() -> None:
    with joined() as job:
        fail_in_phase(job.agreement, None)
        for at_fault in (0, 3):
            with failing(StateError, "", "not now", on=at_fault):
                fail_in_phase(
                    job.agreement, StateError("not now") if job.rank == at_fault else None
                )
        with job.agreement.building(), failing(StateError, "", "not built", on=3):
            fail_in_phase(job.agreement, StateError("not built") if job.rank == 3 else None)
        fail_in_phase(job.agreement, None)


def walk(
    job: Job, work_seconds: float, started: list[float], failing_step: int | None = None
) -> None:
    """Add when each step began. Only ranks 1 and 3 have work; rank 3 fails in `failing_step`."""
    with job.agreement.phase("fill"):
        pace = job.agreement.pace()
        for step in range(NUM_WALKED):
            if job.rank == 3 and step == failing_step:
                raise StateError("not now")
            if HOSTS[job.rank] == "b":
                time.sleep(work_seconds)
            pace.reach(step)
            started.append(time.monotonic())


@on_ranks(4)
def test_a_host_without_work_waits_for_the_others() -> None:
    with joined() as job:
        started = []
        walk(job, 0.01, started)
        fast, slow, *_ = of_all_ranks(started)
        assert len(fast) == len(slow) == NUM_WALKED
        for step in range(2 * agreement.NUM_STEPS, NUM_WALKED, agreement.NUM_STEPS):
            assert fast[step] > slow[step - agreement.NUM_STEPS - 1], step


@on_ranks(4)
def test_ranks_of_other_hosts_notice_a_failure_between_steps() -> None:
    with joined() as job:
        kinds = (PeerTransportError, PeerTransportError, HybridEngineError, StateError)
        # Rank 2 has no work, and is first of no host.
        text = (
            ""
            if job.rank == 2
            else "not now"
            if job.rank == 3
            else "rank 3, fill: StateError: not now"
        )
        started = []
        with pytest.raises(kinds[job.rank], match=text):
            walk(job, 0.2, started, failing_step=4)
        assert job.rank == 2 or len(started) < NUM_WALKED


@on_ranks(4)
def test_a_lost_rank_is_noticed_on_all_hosts() -> None:
    """Rank 3 is first of no host: its own host notices first, then the other."""
    with joined() as job:
        if job.rank == 3:
            job.agreement.close()
            return
        started = time.monotonic()
        with pytest.raises(LostRankError, match=r"^fill: "):
            job.agreement.conclude("fill")
        assert time.monotonic() - started < LOST_SECONDS / 2


def group_names(monkeypatch: pytest.MonkeyPatch, failing: int) -> list[str]:
    """Return rank 0's group names after a first attempt with connection `failing` failing."""
    names = []

    def connect(world: World, name: str, *_: object) -> None:
        names.append(name)
        if len(names) == failing:
            raise RuntimeError("no connection")

    monkeypatch.setattr(groups, "_connected", connect)
    monkeypatch.setattr(rank_tree.RankTree, "maximum", lambda tree, values: None)
    monkeypatch.setattr(rank_tree, "MAX_TOGETHER", 2)
    shape = rank_tree.TreeShape(HOSTS)
    world = World(dist.HashStore(), 0, len(HOSTS))
    with contextlib.suppress(RuntimeError):
        rank_tree.RankTree(world, shape, LOST_SECONDS)
    rank_tree.RankTree(world, shape, LOST_SECONDS)
    return names[-2:]


def test_a_local_connection_failure_does_not_change_group_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    well, *failed = [group_names(monkeypatch, failing) for failing in (0, 1, 2)]
    assert well == ["tree 1/0/0", "tree 1/1/0"]
    assert failed == [well, well]


class UnreachedWatch:
    """A watch that no other host reaches, or one without a store."""

    def __init__(self, *, has_store: bool) -> None:
        self.has_store = has_store

    def known_failures(self) -> list[object]:
        return []

    def num_at(self, mark: str, *, arriving: bool = False) -> int | None:
        return 1 if self.has_store else None


@pytest.mark.parametrize("has_store", [True, False])
def test_waiting_for_a_host_times_out(has_store: bool) -> None:
    alone = agreement.Pace(
        UnreachedWatch(has_store=has_store), 2, is_first=True, timeout_seconds=0.2
    )
    for step in range(agreement.NUM_STEPS):
        alone.reach(step)
    if has_store:
        with refused(
            TransportError, "hosts-are-missing", "1 of 2", "generate_config.timeout_seconds"
        ):
            alone.reach(agreement.NUM_STEPS)
    else:
        alone.reach(agreement.NUM_STEPS)


def test_groups_listen_on_the_configured_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's groups do the same."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,eth0")
    RankGroup(World(dist.HashStore(), 0, 1), "named", [0], LOST_SECONDS).close()
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    with pytest.raises(RuntimeError, match="nowhere0"):
        RankGroup(World(dist.HashStore(), 0, 1), "unknown", [0], LOST_SECONDS)
    RankGroup(
        World(dist.HashStore(), 0, 1, address="127.0.0.1"), "at an address", [0], LOST_SECONDS
    ).close()


class Late:
    """A maximum that completes between the timeout of its wait and the next check."""

    def __init__(self) -> None:
        self.seconds: list[object] = []

    def wait(self, *seconds: object) -> None:
        self.seconds.append(seconds)
        if seconds:
            raise RuntimeError("Operation timed out!")

    def is_completed(self) -> bool:
        return True


def test_a_maximum_that_completes_late_counts() -> None:
    group = object.__new__(RankGroup)
    late = Late()
    group.timeout_seconds = LOST_SECONDS
    group._maxima = {0: late}
    group.end_maximum(0)
    assert (len(late.seconds), group._maxima) == (2, {})
