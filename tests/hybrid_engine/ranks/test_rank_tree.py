"""Who meets whom, against what each rank would have heard; and the tree of real ranks."""

from __future__ import annotations

import itertools
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
from hybrid_engine.ranks.rank_tree import MOST_TOGETHER, RankTree, TreeShape
from hybrid_engine.ranks.world import World
from tests.harness.launch import Ranks


@given(st.lists(st.sampled_from("abcdef"), min_size=1, max_size=200), st.data())
def test_each_rank_hears_all_others_once(hosts: list[str], data: st.DataObject) -> None:
    num_ranks, shape = len(hosts), TreeShape(hosts)
    sizes = data.draw(st.lists(st.integers(0, 9), min_size=num_ranks, max_size=num_ranks))
    assert sorted(shape.order) == list(range(num_ranks))
    known, received = [{rank} for rank in range(num_ranks)], [0] * num_ranks
    for meeting in shape.groups:  # up
        assert len(meeting.ranks) <= MOST_TOGETHER
        first = meeting.ranks[0]
        for rank, span in zip(meeting.ranks, meeting.spans, strict=True):
            assert known[rank] == {shape.order[position] for position in span}
            if rank != first:
                assert known[first].isdisjoint(known[rank])
                received[first] += sum(sizes[each] for each in known[rank])
                known[first] |= known[rank]
    assert len(known[shape.order[0]]) == num_ranks
    told = {shape.order[0]}
    for meeting in reversed(shape.groups):  # and down
        assert meeting.ranks[0] in told
        for rank in meeting.ranks[1:]:
            assert rank not in told
            received[rank] += sum(sizes)
        told.update(meeting.ranks)
    assert told == set(range(num_ranks))
    assert received == [shape.received_nbytes(rank, sizes) for rank in range(num_ranks)]


@pytest.mark.parametrize(
    ("num_ranks", "most", "usual"), [(8, 7, 7), (64, 14, 7), (512, 21, 7), (2048, 24, 7), (4096, 28, 7)]
)
def test_connections_hardly_grow_with_ranks(num_ranks: int, most: int, usual: int) -> None:
    shape = TreeShape([str(rank // 8) for rank in range(num_ranks)])
    counts = [sum(len(each.ranks) - 1 for each in shape.of_rank(rank)) for rank in range(num_ranks)]
    assert max(counts) == most
    assert sorted(counts)[num_ranks // 2] == usual


def test_few_ranks_are_one_group_wherever_they_are() -> None:
    assert [each.ranks for each in TreeShape("abababab").groups] == [tuple(range(8))]


@given(st.integers(1, 30).flatmap(lambda n: st.lists(st.tuples(*[st.integers(0, n - 1)] * 2)).map(lambda p: (n, p))))
def test_parts_are_those_that_meet_by_way_of_others(case: tuple[int, list[tuple[int, int]]]) -> None:
    num_ranks, pairs = case
    meets, reached = [0] * num_ranks, [{rank} for rank in range(num_ranks)]
    for one, other in pairs:
        meets[one] |= 1 << other
        meets[other] |= 1 << one
    for _ in range(num_ranks):
        for one, other in pairs:
            reached[one] |= reached[other]
            reached[other] |= reached[one]
    assert sorted(connected_parts(meets)) == sorted({tuple(sorted(each)): sorted(each) for each in reached}.values())


def meet() -> tuple[list[int], list[bytes], list[bytes]]:
    """Three levels of four ranks: two hosts of which each has parts of two."""
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_tree, "MOST_TOGETHER", 2)
        patch.setattr(rank_tree, "_PART", 1000)
        tree = RankTree(World.of_default_group(), TreeShape("aaaba"), 60.0)
        values = torch.tensor([rank, -rank])
        tree.maximum(values)
        sizes = [1500, 0, 999, 0, 2001]
        told = tree.gather(bytes([rank]) * sizes[rank], sizes)
        nothing = tree.gather(b"", [0] * 5)
    tree.close()
    dist.destroy_process_group()
    return values.tolist(), list(map(bytes, told)), list(map(bytes, nothing))


@pytest.mark.ranks
def test_real_ranks(ranks: Ranks) -> None:
    sizes = [1500, 0, 999, 0, 2001]
    told = [bytes([rank]) * nbytes for rank, nbytes in enumerate(sizes)]
    assert list(itertools.chain(ranks.launch(meet, 5, timeout=100))) == [([4, 0], told, [b""] * 5)] * 5


def join_with_a_past() -> list[tuple[str, ...]]:
    """Rank 0 had a job in another default group; then both join twice in one, and in a world of their own."""
    store, rank, size = next(dist.rendezvous("env://"))
    if rank == 0:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        Job.join(60).close()
        dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.PrefixStore("both", store), rank=rank, world_size=size)
    world, seen = World(dist.PrefixStore("own", store), rank, size), []
    for number, place in enumerate([None, None, world, world]):
        job = Job.join(60, host=f"{number} {rank}", world=place)
        seen.append(job.hosts)
        job.close()
    dist.destroy_process_group()
    return seen


@pytest.mark.ranks
def test_ranks_of_different_histories_join_again_and_again(ranks: Ranks) -> None:
    hosts = [(f"{number} 0", f"{number} 1") for number in range(4)]
    assert ranks.launch(join_with_a_past, 2, timeout=60) == [hosts] * 2


def lose_a_rank_while_connecting() -> tuple[str, float]:
    """Rank 2, the first of its host, cannot connect: the others hear why, those beyond other ranks too."""
    rank, maximum = int(os.environ["RANK"]), RankTree.maximum
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_tree, "MOST_TOGETHER", 2)
        job = Job.join(60, host="aabb"[rank])

        def fail(tree: RankTree, values: torch.Tensor) -> None:
            if rank == 2:
                raise OSError("too many open files")
            maximum(tree, values)

        patch.setattr(RankTree, "maximum", fail)
        started = time.monotonic()
        with pytest.raises(LostRankError) as caught, job.agreement.building():
            pass
    seconds = time.monotonic() - started
    job.close()
    return str(caught.value), seconds


@pytest.mark.ranks
def test_a_rank_that_cannot_connect_is_heard_by_all(ranks: Ranks) -> None:
    for text, seconds in ranks.launch(lose_a_rank_while_connecting, 4, timeout=200):
        assert "too many open files" in text
        assert seconds < 30
