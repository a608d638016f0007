"""Four ranks that take themselves to be on two hosts meet by way of the first of each."""

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
NUM_WALKED = 5 * agreement.NUM_STEPS
LOST_SECONDS = 60.0  # a rank's end is noticed long before


def joined(rank: int) -> Job:
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
    agreed = joined(rank).agreement
    results["well"] = phase_outcome(agreed, None)
    results["flags"] = agreed.any_of([rank == 3, rank == 1, False], "flags")
    results["told"] = agreed.gather("x" * rank, str)
    for failing in (0, 3):
        results[f"rank {failing} fails"] = phase_outcome(agreed, StateError("not now") if rank == failing else None)
    with agreed.building():
        results["building"] = phase_outcome(agreed, StateError("not built") if rank == 3 else None)
    results["well again"] = phase_outcome(agreed, None)
    results.update(walk_apart(joined(rank), rank))
    results.update(lose_rank_3(joined(rank).agreement, rank))
    dist.destroy_process_group()
    return results


def walk_apart(job: Job, rank: int) -> dict[str, object]:
    """Ranks 0 and 2, which have nothing to do, beside 1 and 3: first all is well, then rank 3 fails in its step 4."""
    started: list[float] = []

    def walk(failing_step: int | None) -> None:
        with job.agreement.phase("fill"):
            own = job.agreement.pace()
            for step in range(NUM_WALKED):
                if rank == 3 and step == failing_step:
                    raise StateError("not now")
                if HOSTS[rank] == "b":
                    time.sleep(0.2 if failing_step else 0.01)
                own.reach(step)
                started.append(time.monotonic())

    walk(None)
    times = started.copy()
    started.clear()
    error = outcome_of(lambda: walk(4))
    job.close()
    return {"times": times, "heard": error, "walked": len(started)}


def lose_rank_3(agreed: Agreement, rank: int) -> dict[str, object]:
    """It is the first of no host: its own notices first, then the other host's."""
    if rank == 3:
        agreed.close()
        return {}
    started = time.monotonic()
    return {"lost": outcome_of(lambda: agreed.conclude("fill")), "seconds": time.monotonic() - started}


@pytest.fixture(scope="module")
def found(ranks: Ranks) -> list[dict[str, object]]:
    return ranks.launch(meet_on_two_hosts, 4, timeout=200)


def test_a_maximum_over_a_host(found: list[dict[str, object]]) -> None:
    assert [own["host"] for own in found] == [[2, 0], [3, -1]] * 2


def test_all_ranks_know_the_same(found: list[dict[str, object]]) -> None:
    for own in found:
        assert own["well"] == own["well again"] == "returned None"
        assert own["flags"] == [True, True, False]
        assert own["told"] == ["", "x", "xx", "xxx"]


def test_all_ranks_raise_when_one_fails(found: list[dict[str, object]]) -> None:
    for rank, own in enumerate(found):
        for name, failing, text in [("rank 0 fails", 0, "not now"), ("rank 3 fails", 3, "not now")]:
            kind = "StateError" if rank == failing else "RemoteError"
            assert own[name].startswith(kind), (rank, own[name])
            assert text in own[name]
        assert "not built" in own["building"]


def test_a_lost_rank_is_noticed_on_all_hosts(found: list[dict[str, object]]) -> None:
    for own in found[:3]:
        assert own["lost"].startswith("LostRankError: fill: "), own["lost"]
        assert own["seconds"] < LOST_SECONDS / 2


def test_a_host_with_less_to_do_is_held_back(found: list[dict[str, object]]) -> None:
    fast, slow = found[0]["times"], found[1]["times"]
    assert len(fast) == len(slow) == NUM_WALKED
    for step in range(2 * agreement.NUM_STEPS, NUM_WALKED, agreement.NUM_STEPS):
        assert fast[step] > slow[step - agreement.NUM_STEPS - 1], step


def test_ranks_of_other_hosts_hear_of_a_failure_on_their_way(found: list[dict[str, object]]) -> None:
    assert found[3]["heard"].startswith("StateError: ")
    for rank in (0, 1):  # rank 2 does nothing that takes time, and stands for no host
        assert found[rank]["heard"].startswith("PeerTransportError: rank 3, fill: StateError: not now")
        assert found[rank]["walked"] < NUM_WALKED


def names_of_groups(monkeypatch: pytest.MonkeyPatch, failing: int) -> list[str]:
    """Under which names rank 0 connects twice; the connection of this number fails."""
    names: list[str] = []

    def connected(world: World, name: str, *_: object) -> None:
        names.append(name)
        if len(names) == failing:
            raise RuntimeError("no connection")

    monkeypatch.setattr(groups, "_connected", connected)
    monkeypatch.setattr(rank_tree.RankTree, "maximum", lambda tree, values: None)
    monkeypatch.setattr(rank_tree, "MOST_TOGETHER", 2)
    shape, world = rank_tree.TreeShape(HOSTS), World(dist.HashStore(), 0, len(HOSTS))
    with contextlib.suppress(RuntimeError):
        rank_tree.RankTree(world, shape, LOST_SECONDS)
    rank_tree.RankTree(world, shape, LOST_SECONDS)
    return names[-2:]


def test_a_connection_that_fails_here_alone_leaves_the_names_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    well, *failed = [names_of_groups(monkeypatch, failing) for failing in (0, 1, 2)]
    assert well == ["tree 1/0/0", "tree 1/1/0"]
    assert failed == [well, well]


class NobodyElse:
    """A watch on a job in which only this host goes on; or whose store is gone."""

    def __init__(self, *, has_store: bool) -> None:
        self.has_store = has_store

    def known_failures(self) -> list[object]:
        return []

    def num_at(self, mark: str, *, arriving: bool = False) -> int | None:
        return 1 if self.has_store else None


@pytest.mark.parametrize("has_store", [True, False])
def test_the_wait_for_a_host_has_an_end(has_store: bool) -> None:
    alone = agreement.Pace(NobodyElse(has_store=has_store), 2, is_first=True, timeout_seconds=0.2)
    for step in range(agreement.NUM_STEPS):
        alone.reach(step)
    if has_store:
        too_few = has_code("hosts-are-missing", "1 of 2", "generate_config.timeout_seconds")
        with pytest.raises(TransportError, check=too_few):
            alone.reach(agreement.NUM_STEPS)
    else:
        alone.reach(agreement.NUM_STEPS)


def test_groups_listen_on_the_interface_that_the_user_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch's own do."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,eth0")
    RankGroup(World(dist.HashStore(), 0, 1), "named", [0], LOST_SECONDS).close()
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    with pytest.raises(RuntimeError, match="nowhere0"):
        RankGroup(World(dist.HashStore(), 0, 1), "unknown", [0], LOST_SECONDS)
    RankGroup(World(dist.HashStore(), 0, 1, address="127.0.0.1"), "at an address", [0], LOST_SECONDS).close()


class Late:
    """A maximum that is there once the wait for it has timed out, before anybody looks again."""

    def __init__(self) -> None:
        self.seconds: list[object] = []

    def wait(self, *seconds: object) -> None:
        self.seconds.append(seconds)
        if seconds:
            raise RuntimeError("Operation timed out!")

    def is_completed(self) -> bool:
        return True


def test_a_maximum_that_comes_late_has_come() -> None:
    group, late = object.__new__(RankGroup), Late()
    group.timeout_seconds, group._maxima = LOST_SECONDS, {0: late}
    group.end_maximum(0)
    assert (len(late.seconds), group._maxima) == (2, {})
