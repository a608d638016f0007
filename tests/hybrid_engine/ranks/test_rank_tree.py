"""Meetings of the rank tree, compared with a simulation; and trees of real ranks."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from hybrid_engine.errors import LostRankError
from hybrid_engine.ranks import rank_tree
from hybrid_engine.ranks.groups import connected_parts
from hybrid_engine.ranks.job import Job
from hybrid_engine.ranks.rank_tree import MAX_TOGETHER, RankTree, TreeShape
from hybrid_engine.ranks.world import World
from tests.harness.launch import on_ranks


@given(st.lists(st.sampled_from("abcdef"), min_size=1, max_size=200), st.data())
def test_each_rank_receives_all_others_once(hosts: list[str], data: st.DataObject) -> None:
    num_ranks = len(hosts)
    shape = TreeShape(hosts)
    sizes = data.draw(st.lists(st.integers(0, 9), min_size=num_ranks, max_size=num_ranks))
    assert sorted(shape.order) == list(range(num_ranks))
    known = [{rank} for rank in range(num_ranks)]
    received = [0] * num_ranks
    for meeting in shape.groups:  # towards the root
        assert len(meeting.ranks) <= MAX_TOGETHER
        first = meeting.ranks[0]
        for rank, span in zip(meeting.ranks, meeting.spans, strict=True):
            assert known[rank] == {shape.order[position] for position in span}
            if rank != first:
                assert known[first].isdisjoint(known[rank])
                received[first] += sum(sizes[source] for source in known[rank])
                known[first] |= known[rank]
    assert len(known[shape.order[0]]) == num_ranks
    informed = {shape.order[0]}
    for meeting in reversed(shape.groups):  # back to the leaves
        assert meeting.ranks[0] in informed
        for rank in meeting.ranks[1:]:
            assert rank not in informed
            received[rank] += sum(sizes)
        informed.update(meeting.ranks)
    assert informed == set(range(num_ranks))
    assert received == [shape.received_nbytes(rank, sizes) for rank in range(num_ranks)]


@pytest.mark.parametrize(
    ("num_ranks", "most", "usual"),
    [(8, 7, 7), (64, 14, 7), (512, 21, 7), (2048, 24, 7), (4096, 28, 7)],
)
def test_connections_hardly_grow_with_ranks(num_ranks: int, most: int, usual: int) -> None:
    shape = TreeShape([str(rank // 8) for rank in range(num_ranks)])
    counts = [
        sum(len(meeting.ranks) - 1 for meeting in shape.of_rank(rank)) for rank in range(num_ranks)
    ]
    assert max(counts) == most
    assert sorted(counts)[num_ranks // 2] == usual


def test_few_ranks_are_one_group_on_any_hosts() -> None:
    assert [meeting.ranks for meeting in TreeShape("abababab").groups] == [tuple(range(8))]


@given(
    st.integers(1, 30).flatmap(
        lambda n: st.lists(st.tuples(*[st.integers(0, n - 1)] * 2)).map(lambda p: (n, p))
    )
)
def test_parts_are_connected_components(case: tuple[int, list[tuple[int, int]]]) -> None:
    num_ranks, pairs = case
    meets = [0] * num_ranks
    reached = [{rank} for rank in range(num_ranks)]
    for first, second in pairs:
        meets[first] |= 1 << second
        meets[second] |= 1 << first
    for _ in range(num_ranks):  # long enough for any path
        for first, second in pairs:
            reached[first] |= reached[second]
            reached[second] |= reached[first]
    assert sorted(connected_parts(meets)) == sorted(
        {tuple(sorted(part)): sorted(part) for part in reached}.values()
    )


@on_ranks(5)
def test_a_tree_of_real_ranks() -> None:
    """Five ranks on two hosts with groups of two: a tree of three levels."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    sizes = [1500, 0, 999, 0, 2001]
    messages = [bytes([rank]) * nbytes for rank, nbytes in enumerate(sizes)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_tree, "MAX_TOGETHER", 2)
        patch.setattr(rank_tree, "_PART", 1000)  # messages are sent in parts of this size
        tree = RankTree(World.of_default_group(), TreeShape("aaaba"), 60.0)
        values = torch.tensor([rank, -rank])
        tree.maximum(values)
        assert values.tolist() == [4, 0]
        assert list(map(bytes, tree.gather(messages[rank], sizes))) == messages
        assert (
            list(map(bytes, tree.gather(b"", [0] * 5))) == [b""] * 5
        )  # no rank has anything to send
    tree.close()


@on_ranks(2)
def test_ranks_with_different_histories_can_join() -> None:
    """Join twice in the default group and twice in a world; rank 0 had a job before."""
    store, rank, size = next(dist.rendezvous("env://"))
    if rank == 0:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        Job.join(60).close()
        dist.destroy_process_group()
    dist.init_process_group(
        "gloo", store=dist.PrefixStore("both", store), rank=rank, world_size=size
    )
    world = World(dist.PrefixStore("own", store), rank, size)
    for number, job_world in enumerate([None, None, world, world]):
        job = Job.join(60, host=f"{number} {rank}", world=job_world)
        assert job.hosts == (f"{number} 0", f"{number} 1")
        job.close()


@on_ranks(4)
def test_a_failure_to_connect_is_raised_on_all_ranks() -> None:
    """Rank 2, the first of its host, cannot connect; all others get the reason."""
    rank = int(os.environ["RANK"])
    maximum = RankTree.maximum
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_tree, "MAX_TOGETHER", 2)
        job = Job.join(60, host="aabb"[rank])

        def fail(tree: RankTree, values: torch.Tensor) -> None:
            if rank == 2:
                raise OSError("too many open files")
            maximum(tree, values)

        patch.setattr(RankTree, "maximum", fail)
        started = time.monotonic()
        with pytest.raises(LostRankError, match="too many open files"), job.agreement.building():
            pass
    assert time.monotonic() - started < 30
    job.close()
