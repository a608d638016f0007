"""Fences of a switch: memory is released only after all ranks have read it, and a failure leaves no
fence pending.

Ranks are threads of which each is the late one in turn; what ends by a timeout runs on real ranks.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from hybrid_engine.errors import PeerTransportError, TransportError
from hybrid_engine.memory.offload_items import Part
from hybrid_engine.ranks.agreement import Pace
from hybrid_engine.ranks.failure_watch import FailureWatch
from hybrid_engine.ranks.groups import RankGroup
from hybrid_engine.ranks.world import World
from hybrid_engine.records.layout import Extent
from hybrid_engine.switch.release_fence import ReleaseFence
from tests.harness.launch import Ranks
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


def fill(
    rank: int, group: RankGroup, failing: dict[int, tuple[int, str]], is_apart: bool
) -> tuple[str, list[int]]:
    """Fill the way `WeightContainer` does; returns the outcome and the released positions.

    failing: rank -> (bucket, "before" or "after" it was sent).
    is_apart: the last rank has no memory to release.
    """
    state = State()
    has_none = is_apart and rank == NUM_RANKS - 1
    schedule = {bucket: {} for bucket in SCHEDULE} if has_none else SCHEDULE
    buffers = {} if has_none else BUFFERS
    fence = ReleaseFence(rank, group, on_one_host(), state, buffers, schedule)
    fence.begin()
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
    def run_on_rank(world: World) -> list[tuple[tuple[str, list[int]], tuple[str, list[int]]]]:
        group = RankGroup(world, "fences", range(NUM_RANKS), TIMEOUT)
        return [
            (fill(world.rank, group, failing, is_apart), fill(world.rank, group, {}, is_apart))
            for failing in scenarios()
        ]

    by_rank = RankThreads(NUM_RANKS, late).run(run_on_rank)
    for number, failing in enumerate(scenarios()):
        for rank in range(NUM_RANKS):
            (outcome, released), after = by_rank[rank][number]
            has_none = is_apart and rank == NUM_RANKS - 1
            assert after == ("filled", [] if has_none else list(range(NUM_BUCKETS)))
            assert released == list(range(len(released)))
            # A bucket that some rank has not sent stays, since it may still be read.
            unread = [bucket for bucket, moment in failing.values() if moment == "before"]
            assert all(bucket < min(unread, default=NUM_BUCKETS) for bucket in released), failing
            if outcome == "filled":  # possible only if the other ranks failed after the last fence
                assert all(failed == (NUM_BUCKETS - 1, "after") for failed in failing.values()), (
                    failing
                )
            elif rank not in failing:
                assert outcome == PeerTransportError.__name__


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
    fence = ReleaseFence(0, group, steps, state, BUFFERS, SCHEDULE)
    fence.begin()
    fence.sent(BUCKETS[0])
    fence.sent(BUCKETS[1])
    with pytest.raises(PeerTransportError, match="rank 9"):
        fence.sent(BUCKETS[2])
    assert (group.num_begun, state.gone) == (2, [0])
    fence.abandon()
    fence.drain()
    assert state.gone == [0]


def wait_for_a_silent_rank() -> str:
    dist.init_process_group("gloo")
    group = RankGroup(World.of_default_group(), "fences", range(2), 0.5)
    schedule = {0: SCHEDULE[1], 1: SCHEDULE[2]}  # consecutive buckets
    fence = ReleaseFence(dist.get_rank(), group, on_one_host(), State(), BUFFERS, schedule)
    fence.begin()
    if dist.get_rank() == 1:
        dist.barrier()  # keeps its connections open
        return ""
    with pytest.raises(TransportError) as failure:
        _send_both(fence)
    dist.barrier()
    return str(failure.value)


def _send_both(fence: ReleaseFence) -> None:
    fence.sent(0)
    fence.sent(1)


def test_a_timeout_names_bucket_and_remedy(ranks: Ranks) -> None:
    message, _ = ranks.launch(wait_for_a_silent_rank, 2, timeout=100)
    assert "bucket 0, phase release" in message
    assert "timeout_seconds" in message


class Loss(Steps):
    """A pace that reports an ended rank from the second query on."""

    def __init__(self) -> None:
        super().__init__()
        self._answers = iter(["", "rank 2 has ended"])

    def ended(self) -> str:
        return next(self._answers)


def wait_for_an_ended_rank() -> tuple[str, float]:
    """Wait for rank 1, which stays connected but does not come; returns the error and seconds."""
    dist.init_process_group("gloo")
    group = RankGroup(World.of_default_group(), "fences", range(2), TIMEOUT)
    fence = ReleaseFence(dist.get_rank(), group, Loss(), State(), BUFFERS, SCHEDULE)
    fence.begin()
    dist.barrier()
    if dist.get_rank() == 1:
        dist.barrier()
        return "", 0.0
    fence.sent(BUCKETS[0])
    started = time.monotonic()
    with pytest.raises(TransportError) as failure:
        fence.sent(BUCKETS[1])
    group.close()
    seconds = time.monotonic() - started
    dist.barrier()
    return str(failure.value), seconds


def test_a_fence_ends_when_a_rank_has_ended(ranks: Ranks) -> None:
    (message, seconds), _ = ranks.launch(wait_for_an_ended_rank, 2, timeout=100)
    assert message.startswith(
        f"bucket {BUCKETS[0]}, phase release: not every rank read it: rank 2 has ended."
    )
    assert seconds < TIMEOUT / 4  # well before the timeout


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
        schedule = {bucket: {} for bucket in SCHEDULE} if is_server else SCHEDULE
        buffers = {} if is_server else BUFFERS
        fence = ReleaseFence(world.rank, group, on_one_host(), Device(), buffers, schedule)
        fence.begin()
        for bucket in BUCKETS:
            changes.extend([len(TRAINERS)] * is_server)
            fence.sent(bucket)
        fence.finish()

    RankThreads(NUM_RANKS, late).run(hand_over)
    assert max(itertools.accumulate(changes)) <= 2 * len(TRAINERS)
