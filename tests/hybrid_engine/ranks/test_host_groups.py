"""Four ranks on two simulated hosts communicate through the first rank of each host."""

from __future__ import annotations

import contextlib
import time

import pytest
import torch
import torch.distributed as dist

from hybrid_engine.errors import StateError, TransportError
from hybrid_engine.ranks import agreement, groups, rank_tree
from hybrid_engine.ranks.agreement import Agreement
from hybrid_engine.ranks.groups import RankGroup
from hybrid_engine.ranks.job import Job
from hybrid_engine.ranks.world import World
from tests.harness.errors import has_code
from tests.harness.launch import Ranks
from tests.hybrid_engine.ranks.test_agreement import outcome_of, phase_outcome

HOSTS = "abab"
NUM_WALKED = 5 * agreement.NUM_STEPS  # a host may be NUM_STEPS ahead
LOST_SECONDS = 60.0  # the end of a rank is noticed long before


def join_job(rank: int) -> Job:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_tree, "MOST_TOGETHER", 2)
        return Job.join(LOST_SECONDS, host=HOSTS[rank])


def meet_on_two_hosts() -> dict[str, object]:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    values = torch.tensor([rank, -rank])
    mates = [mate for mate, host in enumerate(HOSTS) if host == HOSTS[rank]]
    group = RankGroup(World.of_default_group(), HOSTS[rank], mates, LOST_SECONDS)
    group.end_maximum(group.begin_maximum(values))
    group.close()
    results: dict[str, object] = {"host": values.tolist()}
    agreed = join_job(rank).agreement
    results["well"] = phase_outcome(agreed, None)
    results["flags"] = agreed.any_of([rank == 3, rank == 1, False], "flags")
    results["gathered"] = agreed.gather("x" * rank, str)
    for failing in (0, 3):
        results[f"rank {failing} fails"] = phase_outcome(agreed, StateError("not now") if rank == failing else None)
    with agreed.building():
        results["building"] = phase_outcome(agreed, StateError("not built") if rank == 3 else None)
    results["well again"] = phase_outcome(agreed, None)
    results.update(walk_at_different_paces(join_job(rank), rank))
    results.update(lose_rank_3(join_job(rank).agreement, rank))
    dist.destroy_process_group()
    return results


def walk_at_different_paces(job: Job, rank: int) -> dict[str, object]:
    """Only ranks 1 and 3 have work: all succeed, then rank 3 fails in its step 4."""
    started: list[float] = []

    def walk(failing_step: int | None) -> None:
        with job.agreement.phase("fill"):
            pace = job.agreement.pace()
            for step in range(NUM_WALKED):
                if rank == 3 and step == failing_step:
                    raise StateError("not now")
                if HOSTS[rank] == "b":
                    time.sleep(0.2 if failing_step else 0.01)  # the work of a step
                pace.reach(step)
                started.append(time.monotonic())

    walk(None)
    times = started.copy()
    started.clear()
    error = outcome_of(lambda: walk(4))
    job.close()
    return {"times": times, "error": error, "walked": len(started)}


def lose_rank_3(agreed: Agreement, rank: int) -> dict[str, object]:
    """Rank 3 is first of no host: its own host notices first, then the other."""
    if rank == 3:
        agreed.close()
        return {}
    started = time.monotonic()
    return {"lost": outcome_of(lambda: agreed.conclude("fill")), "seconds": time.monotonic() - started}


@pytest.fixture(scope="module")
def results(ranks: Ranks) -> list[dict[str, object]]:
    return ranks.launch(meet_on_two_hosts, 4, timeout=200)


def test_a_maximum_over_a_host(results: list[dict[str, object]]) -> None:
    assert [rank["host"] for rank in results] == [[2, 0], [3, -1]] * 2


def test_all_ranks_get_the_same_results(results: list[dict[str, object]]) -> None:
    for rank in results:
        assert rank["well"] == rank["well again"] == "returned None"
        assert rank["flags"] == [True, True, False]
        assert rank["gathered"] == ["", "x", "xx", "xxx"]


def test_all_ranks_raise_when_one_fails(results: list[dict[str, object]]) -> None:
    for rank, outcomes in enumerate(results):
        for name, failing, text in [("rank 0 fails", 0, "not now"), ("rank 3 fails", 3, "not now")]:
            kind = "StateError" if rank == failing else "RemoteError"
            assert outcomes[name].startswith(kind), (rank, outcomes[name])
            assert text in outcomes[name]
        assert "not built" in outcomes["building"]


def test_a_lost_rank_is_noticed_on_all_hosts(results: list[dict[str, object]]) -> None:
    for rank in results[:3]:
        assert rank["lost"].startswith("LostRankError: fill: "), rank["lost"]
        assert rank["seconds"] < LOST_SECONDS / 2


def test_a_host_without_work_waits_for_the_others(results: list[dict[str, object]]) -> None:
    fast = results[0]["times"]
    slow = results[1]["times"]
    assert len(fast) == len(slow) == NUM_WALKED
    for step in range(2 * agreement.NUM_STEPS, NUM_WALKED, agreement.NUM_STEPS):
        assert fast[step] > slow[step - agreement.NUM_STEPS - 1], step


def test_ranks_of_other_hosts_notice_a_failure_between_steps(results: list[dict[str, object]]) -> None:
    assert results[3]["error"].startswith("StateError: ")
    for rank in (0, 1):  # rank 2 has no work, and is first of no host
        assert results[rank]["error"].startswith("PeerTransportError: rank 3, fill: StateError: not now")
        assert results[rank]["walked"] < NUM_WALKED


def group_names(monkeypatch: pytest.MonkeyPatch, failing: int) -> list[str]:
    """Return rank 0's group names after a first attempt with connection `failing` failing."""
    names: list[str] = []

    def connect(world: World, name: str, *_: object) -> None:
        names.append(name)
        if len(names) == failing:
            raise RuntimeError("no connection")

    monkeypatch.setattr(groups, "_connected", connect)
    monkeypatch.setattr(rank_tree.RankTree, "maximum", lambda tree, values: None)
    monkeypatch.setattr(rank_tree, "MOST_TOGETHER", 2)
    shape = rank_tree.TreeShape(HOSTS)
    world = World(dist.HashStore(), 0, len(HOSTS))
    with contextlib.suppress(RuntimeError):
        rank_tree.RankTree(world, shape, LOST_SECONDS)
    rank_tree.RankTree(world, shape, LOST_SECONDS)
    return names[-2:]


def test_a_local_connection_failure_does_not_change_group_names(monkeypatch: pytest.MonkeyPatch) -> None:
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
    alone = agreement.Pace(UnreachedWatch(has_store=has_store), 2, is_first=True, timeout_seconds=0.2)
    for step in range(agreement.NUM_STEPS):
        alone.reach(step)
    if has_store:
        too_few = has_code("hosts-are-missing", "1 of 2", "generate_config.timeout_seconds")
        with pytest.raises(TransportError, check=too_few):
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
    RankGroup(World(dist.HashStore(), 0, 1, address="127.0.0.1"), "at an address", [0], LOST_SECONDS).close()


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
