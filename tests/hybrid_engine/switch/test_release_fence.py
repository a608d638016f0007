"""Fences of a switch: memory is released only after all ranks have read it, and a failure leaves no
fence pending.

Ranks are threads of which each is the late one in turn; what ends by a timeout runs on real ranks.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hybrid_engine.errors import PeerTransportError, TransportError
from hybrid_engine.memory.offload_items import Part
from hybrid_engine.ranks.agreement import Pace
from hybrid_engine.ranks.failure_watch import FailureWatch
from hybrid_engine.ranks.groups import RankGroup
from hybrid_engine.ranks.job import join_process_group
from hybrid_engine.ranks.world import World
from hybrid_engine.records.layout import Extent
from hybrid_engine.switch.release_fence import ReleaseFence
from tests.harness.launch import on_ranks
from tests.harness.rank_threads import RankThreads

NUM_RANKS = 3
NUM_BUCKETS = 4
BUCKETS = (1, 2, 5, 7)  # the plan's other buckets are skipped
BUFFERS = {"flat": torch.zeros(NUM_BUCKETS)}
SCHEDULE = {
    bucket: {"flat": (Extent(position, position + 1),)} for position, bucket in enumerate(BUCKETS)
}
TIMEOUT = 30.0


class Failure(Exception):
    """Failure of this rank."""


class State:
    """Parameters with two calls of an offloader; parts are positions of buckets."""

    def __init__(self) -> None:
        self.saved: list[int] = []
        self.gone: list[int] = []

    def save_parts(self, kind: str, parts: list[Part]) -> None:
        self.saved += [part.start for part in parts]

    def offload_parts(self, kind: str, parts: list[Part]) -> int:
        gone = [part.start for part in parts]
        assert set(gone) <= set(self.saved)
        self.gone += gone
        return 100


def on_one_host() -> Pace:
    return Pace(
        FailureWatch(World(dist.HashStore(), 0, 1), TIMEOUT),
        1,
        is_first=True,
        timeout_seconds=TIMEOUT,
    )


def fence_of(
    group: RankGroup, rank: int, pace: Any, state: State, *, has_none: bool = False
) -> ReleaseFence:
    """Begin a fence; has_none: the rank has no memory to release."""
    schedule = {bucket: {} for bucket in SCHEDULE} if has_none else SCHEDULE
    fence = ReleaseFence(rank, group, pace, state, {} if has_none else BUFFERS, schedule)
    fence.begin()
    return fence


def fill(
    rank: int, group: RankGroup, failing: dict[int, tuple[int, str]], has_none: bool
) -> tuple[str, list[int]]:
    """Fill the way `WeightContainer` does; returns the outcome and the released positions.

    failing: rank -> (bucket, "before" or "after" it was sent).
    """
    state = State()
    fence = fence_of(group, rank, on_one_host(), state, has_none=has_none)
    bucket, moment = failing.get(rank, (None, ""))
    try:
        for index in range(NUM_BUCKETS):
            if (index, "before") == (bucket, moment):
                raise Failure
            fence.sent(BUCKETS[index])
            if (index, "after") == (bucket, moment):
                raise Failure
        fence.finish()
    except Exception as error:
        fence.abandon()
        fence.drain()
        return type(error).__name__, state.gone
    return "filled", state.gone


def scenarios() -> list[dict[int, tuple[int, str]]]:
    """Return every single failure, and 40 pairs and triples."""
    moments = list(itertools.product(range(NUM_BUCKETS), ("before", "after")))
    singles = [{rank: moment} for rank in range(NUM_RANKS) for moment in moments]
    draw = random.Random(0)
    several = [
        {rank: draw.choice(moments) for rank in draw.sample(range(NUM_RANKS), draw.choice([2, 3]))}
        for _ in range(40)
    ]
    return [*singles, *several]


each_is_late = pytest.mark.parametrize("late", range(NUM_RANKS))


@each_is_late
@pytest.mark.parametrize("is_apart", [False, True])
def test_no_failure_affects_the_next_switch(is_apart: bool, late: int) -> None:
    """If `is_apart`, the last rank has no memory to release."""

    def run_on_rank(world: World) -> None:
        group = RankGroup(world, "fences", range(NUM_RANKS), TIMEOUT)
        has_none = is_apart and world.rank == NUM_RANKS - 1
        for failing in scenarios():
            outcome, released = fill(world.rank, group, failing, has_none)
            after = fill(world.rank, group, {}, has_none)
            assert after == ("filled", [] if has_none else list(range(NUM_BUCKETS)))
            assert released == list(range(len(released)))
            # A bucket that some rank has not sent stays, since it may still be read.
            unread = [bucket for bucket, moment in failing.values() if moment == "before"]
            assert all(bucket < min(unread, default=NUM_BUCKETS) for bucket in released), failing
            if outcome == "filled":  # possible only if the other ranks failed after the last fence
                assert all(failed == (NUM_BUCKETS - 1, "after") for failed in failing.values()), (
                    failing
                )
            elif world.rank not in failing:
                assert outcome == PeerTransportError.__name__

    RankThreads(NUM_RANKS, late).run(run_on_rank)


class Alone:
    """A group of one rank that counts its fences."""

    def __init__(self) -> None:
        self.num_begun = 0

    def begin_maximum(self, values: torch.Tensor) -> int:
        self.num_begun += 1
        return self.num_begun

    def end_maximum(self, number: int, ended: Callable[[], str]) -> None:
        assert number <= self.num_begun


class Steps:
    """A pace that records its steps; optionally another host fails at one of them."""

    def __init__(self, failing: int | None = None) -> None:
        self.steps: list[int] = []
        self.failing = failing

    def reach(self, step: int) -> None:
        self.steps.append(step)
        if step == self.failing:
            raise PeerTransportError("rank 9, fill")

    def ended(self) -> str:
        return ""


def test_each_filled_bucket_is_a_step_of_the_host() -> None:
    steps = Steps()
    group = Alone()
    released = []
    fence = ReleaseFence(0, group, steps, State(), BUFFERS, SCHEDULE, released.append)
    fence.begin()
    for bucket in BUCKETS:
        fence.sent(bucket)
    fence.finish()
    assert steps.steps == [0, 1, 2, 3]
    assert (released, fence.released_nbytes) == ([0, 100, 200, 300], 400)


def test_a_failure_on_another_host_prevents_the_fence() -> None:
    steps = Steps(failing=2)
    group = Alone()
    state = State()
    fence = fence_of(group, 0, steps, state)
    fence.sent(BUCKETS[0])
    fence.sent(BUCKETS[1])
    with pytest.raises(PeerTransportError, match="rank 9"):
        fence.sent(BUCKETS[2])
    assert (group.num_begun, state.gone) == (2, [0])
    fence.abandon()
    fence.drain()
    assert state.gone == [0]


@contextmanager
def of_two_ranks(pace: Any, timeout: float) -> Iterator[tuple[RankGroup, ReleaseFence]]:
    """Begin a fence of two ranks, and keep the connections until both have ended."""
    join_process_group(60)
    group = RankGroup(World.of_default_group(), "fences", range(2), timeout)
    yield group, fence_of(group, dist.get_rank(), pace, State())
    dist.barrier()


@on_ranks(2, timeout=100)
def test_a_timeout_names_bucket_and_remedy() -> None:
    with of_two_ranks(on_one_host(), 0.5) as (_, fence):
        if dist.get_rank() == 0:
            with pytest.raises(TransportError, match=r"bucket 1, phase release.*timeout_seconds"):
                fence.sent(BUCKETS[0])
                fence.sent(BUCKETS[1])


class Loss(Steps):
    """A pace that reports an ended rank from the second query on."""

    def __init__(self) -> None:
        super().__init__()
        self._answers = iter(["", "rank 2 has ended"])

    def ended(self) -> str:
        return next(self._answers)


@on_ranks(2, timeout=100)
def test_a_fence_ends_when_a_rank_has_ended() -> None:
    """Rank 1 stays connected but does not come."""
    with of_two_ranks(Loss(), TIMEOUT) as (group, fence):
        dist.barrier()
        if dist.get_rank() == 0:
            fence.sent(BUCKETS[0])
            started = time.monotonic()
            ended = "^bucket 1, phase release: not every rank read it: rank 2 has ended[.]"
            with pytest.raises(TransportError, match=ended):
                fence.sent(BUCKETS[1])
            group.close()
            assert time.monotonic() - started < TIMEOUT / 4  # well before the timeout


# -- sides in separate processes --

TRAINERS = (0, 1)
SERVERS = (2,)


@each_is_late
def test_a_device_of_two_processes_holds_two_buckets_more(late: int) -> None:
    """The server holds all trainers' parts; changes of the device's memory count in buckets."""
    changes = []

    class Device(State):
        def offload_parts(self, kind: str, parts: list[Part]) -> int:
            changes.append(-len(parts))
            return super().offload_parts(kind, parts)

    def hand_over(world: World) -> None:
        group = RankGroup(world, "fences", range(NUM_RANKS), TIMEOUT)
        is_server = world.rank in SERVERS
        fence = fence_of(group, world.rank, on_one_host(), Device(), has_none=is_server)
        for bucket in BUCKETS:
            changes.extend([len(TRAINERS)] * is_server)
            fence.sent(bucket)
        fence.finish()

    RankThreads(NUM_RANKS, late).run(hand_over)
    assert max(itertools.accumulate(changes)) <= 2 * len(TRAINERS)
