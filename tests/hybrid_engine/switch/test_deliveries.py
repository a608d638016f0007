"""What is sent again is what was written, or did not stay: against an oracle that remembers every value, many ranks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybrid_engine.planning.plan import Bucket
from hybrid_engine.planning.residency import Residency
from hybrid_engine.records.layout import Buffer, BufferId, Layout, Place, Shard
from hybrid_engine.records.regions import Region
from hybrid_engine.switch.deliveries import Deliveries, Delivery

NUM_TENSORS = 6


@dataclass(frozen=True)
class Job:
    """Ranks by tensor that hold it for training; buckets of tensors, each tensor a group that some ranks have."""

    num_ranks: int
    holders: Sequence[frozenset[int]]
    users: Sequence[frozenset[int]]
    buckets: Sequence[Bucket]
    nbytes: np.ndarray
    limit: int | None
    frozen: frozenset[str]


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    num_ranks = draw(st.integers(1, 3))
    some_ranks = st.frozensets(st.integers(0, num_ranks - 1), min_size=1)
    holders, users = (draw(st.lists(some_ranks, min_size=NUM_TENSORS, max_size=NUM_TENSORS)) for _ in range(2))
    cuts = sorted({0, NUM_TENSORS, *draw(st.sets(st.integers(1, NUM_TENSORS - 1)))})
    buckets = [
        Bucket(index, tuple(f"t{n}" for n in range(start, stop)), (), tuple(f"g{n}" for n in range(start, stop)), 0)
        for index, (start, stop) in enumerate(itertools.pairwise(cuts))
    ]
    sizes = draw(st.lists(st.integers(1, 9), min_size=NUM_TENSORS, max_size=NUM_TENSORS))
    nbytes = np.zeros((len(buckets), num_ranks), dtype=np.int64)
    for bucket in buckets:
        for n in (int(tensor[1:]) for tensor in bucket.tensors):
            nbytes[bucket.index, list(users[n])] += sizes[n]
    limit = draw(st.none() | st.integers(0, 40))
    frozen = frozenset(f"t{n}" for n in draw(st.frozensets(st.integers(0, NUM_TENSORS - 1))))
    return Job(num_ranks, holders, users, buckets, nbytes, limit, frozen)


@dataclass
class Rank:
    """One rank: what it decides with, what its engine holds."""

    deliveries: Deliveries
    writes: dict[str, int]
    live: dict[str, int] = field(default_factory=dict)  # group -> the value that was committed
    kept: frozenset[str] = frozenset()

    def buffers(self) -> dict[str, torch.Tensor]:
        return {name: torch.full((4,), float(count)) for name, count in self.writes.items()}


def rank_of(job: Job, rank: int) -> Rank:
    held = [f"t{n}" for n in range(NUM_TENSORS) if rank in job.holders[n]]
    buffers = {BufferId(rank, name): Buffer(4, "float32") for name in held}
    shards = tuple(Shard(Region(name, (0,), (4,)), Place(BufferId(rank, name), 0, (1,))) for name in held)
    groups = [f"g{n}" for n in range(NUM_TENSORS) if rank in job.users[n]]
    layout = Layout(dict.fromkeys(held, (4,)), buffers, shards)
    deliveries = Deliveries(job.buckets, layout, groups, Residency(job.nbytes, job.limit), job.frozen, rank)
    return Rank(deliveries, dict.fromkeys(held, 0))


EVENTS = st.lists(
    st.tuples(st.sampled_from(["switch", "fail", "tell", "lose"]), st.frozensets(st.integers(0, NUM_TENSORS - 1))),
    min_size=1,
    max_size=12,
)


@given(jobs(), EVENTS)
def test_every_rank_always_has_the_latest_values(job: Job, events: list[tuple[str, frozenset[int]]]) -> None:
    ranks = [rank_of(job, rank) for rank in range(job.num_ranks)]
    values = [0] * NUM_TENSORS
    stale = set(range(NUM_TENSORS))  # tensors written since all had them
    for event, chosen in events:
        for n in chosen if event != "tell" else ():
            values[n] += 1
            stale.add(n)
            for rank in job.holders[n]:
                ranks[rank].writes[f"t{n}"] += 1
        if event == "tell":
            ranks[0].deliveries.forget()
            stale |= {n for n in range(NUM_TENSORS) if 0 in job.holders[n]}
        if event == "lose":
            ranks[-1].live.clear()
        sends = deliver(job, ranks)
        assert len({each.skipped for each in sends}) == 1
        for each, own in zip(sends, ranks, strict=True):
            gone = {extents for released in (each.unread, *each.releases) for extents in released}
            assert gone == own.writes.keys()  # all training memory goes, whatever is skipped
        skipped = sends[0].skipped
        check_least(job, ranks, stale, skipped)
        for bucket in job.buckets:
            for n in map(int, (tensor[1:] for tensor in bucket.tensors)) if bucket.index not in skipped else ():
                for rank in job.users[n]:
                    ranks[rank].live[f"g{n}"] = values[n]
        if event == "fail":
            for rank in ranks:
                rank.live.clear()
                rank.kept = frozenset()
                rank.deliveries.forget()
            stale = set(range(NUM_TENSORS))
            continue
        stale.clear()
        for own, each in zip(ranks, sends, strict=True):
            own.deliveries.note(each)
        for n, value in enumerate(values):
            assert all(ranks[rank].live[f"g{n}"] == value for rank in job.users[n])
        release(job, ranks)


def deliver(job: Job, ranks: Sequence[Rank]) -> list[Delivery]:
    """What the ranks agree on."""
    digests = [rank.deliveries.digests(rank.buffers()) for rank in ranks]
    live = [rank.kept & rank.live.keys() for rank in ranks]
    reasons = [rank.deliveries.reasons(*own) for rank, own in zip(ranks, zip(digests, live, strict=True), strict=True)]
    flags = [any(of_rank) for of_rank in zip(*reasons, strict=True)]
    all_sent = [rank.deliveries._schedule(())[1:] for rank in ranks]
    return [
        rank.deliveries.next(own, flags, releases) for rank, own, releases in zip(ranks, digests, all_sent, strict=True)
    ]


def check_least(job: Job, ranks: Sequence[Rank], stale: set[int], skipped: frozenset[int]) -> None:
    """Nothing is sent without a reason."""
    for bucket in job.buckets:
        numbers = [int(tensor[1:]) for tensor in bucket.tensors]
        is_there = all(f"g{n}" in ranks[rank].kept & ranks[rank].live.keys() for n in numbers for rank in job.users[n])
        assert (bucket.index in skipped) == (is_there and stale.isdisjoint(numbers))


def release(job: Job, ranks: Sequence[Rank]) -> None:
    kept = {rank.deliveries.kept() for rank in ranks}
    assert len(kept) == 1
    (buckets,) = kept
    taken = job.nbytes[sorted(buckets)].sum(axis=0)
    limit = math.inf if job.limit is None else job.limit
    assert (taken <= limit).all()
    for index in {bucket.index for bucket in job.buckets} - buckets:
        assert (taken + job.nbytes[index]).max() > limit  # nothing that would fit is left out
    for number, rank in enumerate(ranks):
        rank.kept = frozenset(rank.deliveries.groups_of(buckets))
        rank.live = {group: value for group, value in rank.live.items() if group in rank.kept}
        assert rank.deliveries.nbytes_of(rank.kept) == taken[number]
