"""Incremental switches with fakes of both engines on one rank."""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybrid_engine.errors import OffloadError, ReshardError
from hybrid_engine.planning.buckets import Residency
from hybrid_engine.planning.plan import Bucket
from hybrid_engine.records.layout import Buffer, BufferId, Layout, Place, Shard
from hybrid_engine.records.regions import Region
from hybrid_engine.switch.incremental import Incremental, Selection
from hybrid_engine.switch.report import ReshardReport
from tests.hybrid_engine.switch.fakes import FORWARD, IDLE, INFER, NEEDED, SHAPES, TRAIN, Rig

NBYTES = {name: 4 * rows * columns for name, (rows, columns) in SHAPES.items()}
BOTH = set(SHAPES)


def rig_with(megabytes: int = 1, *frozen: str, **settings: object) -> Rig:
    """Build a rig; "first" takes 1 MiB, "second" an eighth of that."""
    rig = Rig(build=False, elastic=True, incremental="auto", incremental_mb=megabytes, **settings)
    rig.training.frozen = frozen
    rig.build()
    return rig


def sent_groups(rig: Rig) -> set[str]:
    """Return the groups filled since the last call."""
    return {call.removeprefix("commit ") for call in rig.script.take() if call.startswith("commit")}


def switch(rig: Rig, *, step: bool = True) -> ReshardReport:
    """Switch from INFER to TRAIN and back, with or without an optimizer step."""
    rig.manager.enter(TRAIN)
    if step:
        rig.training.step()
    rig.script.take()
    report = rig.manager.enter(INFER)
    assert report is not None
    rig.assert_is(INFER)
    return report


@pytest.mark.parametrize("frozen", SHAPES)
def test_frozen_weights_are_sent_once(job: None, frozen: str) -> None:
    rig = rig_with(1, frozen)
    rig.training.step()
    first = rig.manager.enter(INFER)
    assert sent_groups(rig) == BOTH
    (trained,) = BOTH - {frozen}
    for _ in range(3):
        report = switch(rig)
        assert sent_groups(rig) == {trained}
        assert (report.bytes_own, report.bytes_skipped) == (NBYTES[trained], NBYTES[frozen])
    assert (first.bytes_own, first.bytes_skipped, first.bytes_kept) == (sum(NBYTES.values()), 0, 0)


def test_unchanged_weights_within_the_bound_are_not_sent(job: None) -> None:
    rig = rig_with(2)
    rig.manager.enter(INFER)
    report = switch(rig, step=False)
    assert sent_groups(rig) == set()
    assert (report.bytes_own, report.bytes_skipped) == (0, sum(NBYTES.values()))
    assert {"compare", "fill"} <= report.seconds_by_phase.keys()
    rig.manager.enter(FORWARD)
    rig.assert_is(FORWARD, kept=BOTH)
    rig.manager.enter(INFER)
    rig.assert_is(INFER)
    assert sent_groups(rig) == set()
    switch(rig)
    assert sent_groups(rig) == BOTH


def test_unchanged_weights_are_not_onloaded_from_idle(job: None) -> None:
    rig = rig_with(2)
    rig.manager.enter(INFER)
    rig.manager.enter(IDLE)
    rig.assert_is(IDLE, kept=BOTH)
    rig.script.take()
    rig.manager.enter(INFER)
    rig.assert_is(INFER)
    assert {"onload param", "prepare", "check"}.isdisjoint(rig.script.take())
    rig.manager.enter(TRAIN)
    rig.assert_is(TRAIN, kept=BOTH)


@pytest.mark.parametrize(("megabytes", "kept"), [(0, set()), (1, {"first"}), (2, BOTH)])
def test_kept_weights_stay_within_the_bound(job: None, megabytes: int, kept: set[str]) -> None:
    rig = rig_with(megabytes)
    rig.manager.enter(INFER)
    report = rig.manager.enter(TRAIN)
    rig.assert_is(TRAIN, kept=kept)
    assert report.bytes_kept == rig.inference.resident_nbytes() == sum(NBYTES[name] for name in kept)
    assert report.bytes_kept <= megabytes * 1024**2
    rig.script.take()
    rig.manager.enter(INFER)
    rig.assert_is(INFER)
    assert sent_groups(rig) == BOTH - kept


def test_stale_weights_are_released_before_new_ones_are_allocated(job: None) -> None:
    rig = rig_with(2)
    rig.manager.enter(INFER)
    rig.manager.enter(TRAIN)
    rig.training.step()
    rig.script.take()
    rig.manager.enter(INFER)
    calls = rig.script.take()
    assert calls.index("release") < calls.index("allocate first")


def test_kept_weights_raise_the_peak(job: None) -> None:
    """The difference is at most the bound."""
    peaks = {}
    for megabytes in (0, 1):
        rig = rig_with(megabytes, "first", offload_train_grad=False, offload_train_optimizer=False)
        rig.manager.enter(INFER)
        peaks[megabytes] = switch(rig).peak_bytes
        rig.close()
    assert peaks[1] - peaks[0] <= 1024**2


WRITES = {
    "data": lambda flat: flat.data.mul_(2),
    "foreach": lambda flat: torch._foreach_mul_([flat], 2),
    "view": lambda flat: flat.view(torch.int32)[:1].add_(1),
    "numpy-like": lambda flat: torch.frombuffer(memory_of(flat), dtype=torch.uint8)[:1].add_(1),
}


def memory_of(flat: torch.Tensor) -> ctypes.Array[ctypes.c_char]:
    return (ctypes.c_char * flat.nbytes).from_address(flat.data_ptr())


@pytest.mark.parametrize("written", WRITES)
def test_any_write_is_detected(job: None, written: str) -> None:
    rig = rig_with(2)
    rig.manager.enter(INFER)
    rig.manager.enter(TRAIN)
    WRITES[written](rig.training.param)
    rig.training.remember_parameters()
    rig.script.take()
    rig.manager.enter(INFER)
    assert sent_groups(rig) == (BOTH if written in ("data", "foreach") else {"first"})
    switch(rig, step=False)
    assert sent_groups(rig) == set()


FAILURES = ["prepare", "check", "allocate second", "commit second", "offload param", "reset"]


@pytest.mark.parametrize("call", FAILURES)
def test_after_a_failure_nothing_counts_as_delivered(job: None, call: str) -> None:
    rig = rig_with(2, "first")
    rig.manager.enter(INFER)
    rig.manager.enter(TRAIN)
    rig.training.step()
    rig.script.arm(call, OSError("odd") if call != "offload param" else OffloadError("stuck"))
    with pytest.raises((ReshardError, OffloadError)):
        rig.manager.enter(INFER)
    rig.assert_is(TRAIN)
    rig.script.take()
    rig.manager.enter(INFER)
    rig.assert_is(INFER)
    assert sent_groups(rig) == BOTH
    switch(rig)
    assert sent_groups(rig) == {"second"}


def test_a_release_that_fails_keeps_nothing(job: None) -> None:
    rig = rig_with(2)
    rig.manager.enter(INFER)
    rig.script.arm("release", OffloadError("stuck"))
    with pytest.raises(OffloadError):
        rig.manager.enter(TRAIN)
    rig.assert_is(IDLE)
    rig.manager.enter(INFER)
    rig.assert_is(INFER)
    assert sent_groups(rig) == BOTH


@pytest.mark.parametrize("megabytes", [0, 1, 2])
def test_every_switch_with_and_without_steps(job: None, megabytes: int) -> None:
    rig = rig_with(megabytes, "second")
    for number, target in enumerate([INFER, *itertools.chain(*itertools.permutations(NEEDED, 2))]):
        rig.manager.enter(target)
        assert rig.manager.state is target
        if target is INFER:
            rig.assert_is(INFER)
        if target is TRAIN and number % 3:
            rig.training.step()
        assert rig.inference.resident_nbytes() <= megabytes * 1024**2 or target is INFER


NUM_TENSORS = 6


@dataclass(frozen=True)
class Job:
    """A random job.

    holders: training ranks of each tensor.
    users: ranks that have the tensor's group; each tensor is a group.
    """

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
    """A rank with its decisions and the weights its engine holds."""

    incremental: Incremental
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
    incremental = Incremental(job.buckets, layout, groups, Residency(job.nbytes, rank, job.limit), job.frozen)
    return Rank(incremental, dict.fromkeys(held, 0))


EVENTS = st.lists(
    st.tuples(st.sampled_from(["switch", "fail", "forget", "lose"]), st.frozensets(st.integers(0, NUM_TENSORS - 1))),
    min_size=1,
    max_size=12,
)


@given(jobs(), EVENTS)
def test_every_rank_always_has_the_latest_values(job: Job, events: list[tuple[str, frozenset[int]]]) -> None:
    ranks = [rank_of(job, rank) for rank in range(job.num_ranks)]
    values = [0] * NUM_TENSORS
    stale = set(range(NUM_TENSORS))  # tensors changed since every rank had their values
    for event, chosen in events:
        for n in chosen if event != "forget" else ():
            values[n] += 1
            stale.add(n)
            for rank in job.holders[n]:
                ranks[rank].writes[f"t{n}"] += 1
        if event == "forget":
            ranks[0].incremental.forget()
            stale |= {n for n in range(NUM_TENSORS) if 0 in job.holders[n]}
        if event == "lose":
            ranks[-1].live.clear()
        sends = deliver(job, ranks)
        assert len({selection.skipped for selection in sends}) == 1
        for selection, rank in zip(sends, ranks, strict=True):
            extents = {extent for part in (selection.unread, *selection.releases) for extent in part}
            assert extents == rank.writes.keys()  # skipped buckets are released too
        skipped = sends[0].skipped
        assert_only_needed_buckets_are_sent(job, ranks, stale, skipped)
        for bucket in job.buckets:
            for n in map(int, (tensor[1:] for tensor in bucket.tensors)) if bucket.index not in skipped else ():
                for rank in job.users[n]:
                    ranks[rank].live[f"g{n}"] = values[n]
        if event == "fail":
            for rank in ranks:
                rank.live.clear()
                rank.kept = frozenset()
                rank.incremental.forget()
            stale = set(range(NUM_TENSORS))
            continue
        stale.clear()
        for rank, selection in zip(ranks, sends, strict=True):
            rank.incremental.note(selection)
        for n, value in enumerate(values):
            assert all(ranks[rank].live[f"g{n}"] == value for rank in job.users[n])
        release(job, ranks)


def deliver(job: Job, ranks: Sequence[Rank]) -> list[Selection]:
    """Make every rank's selection from the reasons that the ranks exchange."""
    digests = [rank.incremental.digests(rank.buffers()) for rank in ranks]
    live = [rank.kept & rank.live.keys() for rank in ranks]
    reasons = [
        rank.incremental.reasons(digest, groups) for rank, digest, groups in zip(ranks, digests, live, strict=True)
    ]
    flags = [any(rank_reasons) for rank_reasons in zip(*reasons, strict=True)]
    all_sent = [rank.incremental._schedule(())[1:] for rank in ranks]
    return [
        rank.incremental.next(digest, flags, releases)
        for rank, digest, releases in zip(ranks, digests, all_sent, strict=True)
    ]


def assert_only_needed_buckets_are_sent(
    job: Job, ranks: Sequence[Rank], stale: set[int], skipped: frozenset[int]
) -> None:
    """Assert that exactly the buckets with a reason are sent."""
    for bucket in job.buckets:
        numbers = [int(tensor[1:]) for tensor in bucket.tensors]
        is_there = all(f"g{n}" in ranks[rank].kept & ranks[rank].live.keys() for n in numbers for rank in job.users[n])
        assert (bucket.index in skipped) == (is_there and stale.isdisjoint(numbers))


def release(job: Job, ranks: Sequence[Rank]) -> None:
    kept = {rank.incremental.kept() for rank in ranks}
    assert len(kept) == 1
    (buckets,) = kept
    taken = job.nbytes[sorted(buckets)].sum(axis=0)
    limit = math.inf if job.limit is None else job.limit
    assert (taken <= limit).all()
    for index in {bucket.index for bucket in job.buckets} - buckets:
        assert (taken + job.nbytes[index]).max() > limit  # every bucket that fits is kept
    for number, rank in enumerate(ranks):
        rank.kept = frozenset(rank.incremental.groups_of(buckets))
        rank.live = {group: value for group, value in rank.live.items() if group in rank.kept}
        assert rank.incremental.nbytes_of(rank.kept) == taken[number]
