"""Fill and release of inference weights, with a fake engine in one process.

test_ranks.py fails on one of two ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from unittest import mock

import pytest
import torch

from hybrid_engine.errors import PlanError, ReshardError, StateError, TransportError, WeightError
from hybrid_engine.memory import elastic
from hybrid_engine.planning.plan import Bucket, Costs, Link, ReshardPlan, Transfer
from hybrid_engine.ranks.torch_internals import TensorDict
from hybrid_engine.records.layout import Buffer, BufferId, Place
from hybrid_engine.switch.release_fence import ReleaseFence
from hybrid_engine.switch.report import costs_of_all
from hybrid_engine.switch.weight_container import ContainerState, WeightContainer
from hybrid_engine.transports.context import RelayBuffers, TransportContext
from hybrid_engine.transports.router import TransportSet
from tests.harness.errors import refused
from tests.hybrid_engine.memory.device_rig import Rig as DeviceRig
from tests.hybrid_engine.switch.fakes import FakeInference, Script
from tests.hybrid_engine.transports.in_process import InProcessTransport
from tests.software_gpu.device import mapped

NUM_RANKS = 2
NUM_GROUPS = 4
NUMEL = 16
NBYTES = NUMEL * 4


class Weights(FakeInference):
    """Weights with a buffer per group; rank 1 lacks the last group. Records the end of fills."""

    def __init__(self, rank: int, fails_in: str = "") -> None:
        super().__init__(
            Script(), rank, {f"group{number}": (NUMEL,) for number in range(NUM_GROUPS - rank)}
        )
        if fails_in:
            self.fail_in(fails_in)

    def fail_in(self, call: str) -> None:
        self.script.arm(call, MemoryError(f"no memory for {call}"))

    def finish_fill(self) -> None:
        assert not torch.is_grad_enabled()
        self.script.reach("finish_fill")

    def abandon(self) -> None:
        self.script.reach("abandon")


def value_of(rank: int, group: int) -> float:
    return float(10 * rank + group)


def transfer_of(src_rank: int, dst_rank: int, group: int, link: Link) -> Transfer:
    src = Place(BufferId(src_rank, "src"), group * NUMEL, (1,))
    dst = Place(BufferId(dst_rank, f"group{group}.weight"), 0, (1,))
    return Transfer(f"tensor{group}", (NUMEL,), src, dst, NBYTES, link)


def make_plan(link: Link = Link.HOST) -> ReshardPlan:
    """Plan groups 0 and 1 in one bucket, the others alone.

    A rank reads even groups from itself and odd groups from the other rank.
    """
    buckets = []
    for index, groups in enumerate(([0, 1], [2], [3])):
        transfers = tuple(
            transfer_of(
                1 - rank if group % 2 else rank, rank, group, link if group % 2 else Link.SELF
            )
            for group in groups
            for rank in range(NUM_RANKS)
            if group < NUM_GROUPS - rank
        )
        buckets.append(
            Bucket(
                index,
                (),
                transfers,
                tuple(f"group{group}" for group in groups),
                NBYTES * len(groups),
            )
        )
    return ReshardPlan(tuple(buckets), (), "fingerprint")


def source_of(rank: int) -> TensorDict:
    values = torch.tensor([value_of(rank, group) for group in range(NUM_GROUPS)])
    return {"src": values.repeat_interleave(NUMEL)}


def in_process_router(rank: int) -> TransportSet:
    sources = {BufferId(peer, "src"): source_of(peer)["src"] for peer in range(NUM_RANKS)}
    transports = [InProcessTransport(rank, sources)]
    return TransportSet(rank, transports, lambda _transfer: InProcessTransport.name, RelayBuffers())


def fill(
    container: WeightContainer,
    source: Mapping[str, torch.Tensor],
    fence: ReleaseFence | None = None,
    skipped: Collection[int] = (),
) -> Costs:
    container.begin(skipped)
    return container.fill(source, fence)


def assert_filled(weights: Weights) -> None:
    for group in range(NUM_GROUPS - weights.rank):
        src_rank = 1 - weights.rank if group % 2 else weights.rank
        assert bool((weights.live[f"group{group}"] == value_of(src_rank, group)).all())
    assert weights.in_force == set(weights.tensors)


@pytest.mark.parametrize("link", [Link.HOST, Link.NETWORK])
@pytest.mark.parametrize("rank", range(NUM_RANKS))
def test_fill_walks_buckets_and_leaves_out_groups_of_other_ranks(rank: int, link: Link):
    weights = Weights(rank)
    container = WeightContainer(weights, make_plan(link), in_process_router(rank))
    assert container.state is ContainerState.EMPTY
    report = fill(container, source_of(rank))
    expected = ["allocate group0", "allocate group1", "commit group0", "commit group1"]
    expected += ["allocate group2", "commit group2"]
    expected += ["allocate group3", "commit group3"] if rank == 0 else []
    assert weights.script.calls == [*expected, "finish_fill"]
    assert container.state is ContainerState.FILLED
    assert_filled(weights)
    from_peer = 2 if rank == 0 else 1
    from_ranks = {Link.SELF: 2 * NBYTES, link: from_peer * NBYTES}
    assert report.nbytes_by_link == from_ranks
    assert report.nbytes_by_peer == {"in_process": {rank: 2 * NBYTES, 1 - rank: from_peer * NBYTES}}
    agreement = mock.Mock(**{"gather.side_effect": lambda of_rank, *_: [of_rank] * NUM_RANKS})
    assert sorted(costs_of_all(report, agreement).nbytes_by_peer["in_process"]) == [
        *range(NUM_RANKS**2)
    ]
    assert set(report.seconds) == {"allocate", "read", "transfer", "write", "commit"}
    assert report.seconds["transfer"] > 0


def test_cycles_and_idempotent_release():
    weights = Weights(0)
    container = WeightContainer(weights, make_plan(), in_process_router(0))
    container.release()
    assert weights.script.calls == []
    for _ in range(3):
        fill(container, source_of(0))
        assert_filled(weights)
        assert not any(container.gone())
        with refused(StateError, "fill-without-begin"):
            container.fill({})
        with refused(StateError, "container-not-empty", "filled"):
            fill(container, source_of(0))
        container.release()
        container.release()
        assert container.state is ContainerState.EMPTY
        assert not weights.in_force
    assert weights.script.calls.count("release") == 3
    with refused(StateError, "group-not-kept", "group2"):
        container.begin({1})


class Follower:
    """Records its calls, with the number of groups in force at each."""

    def __init__(self, weights: Weights, fail_at: int | None = None) -> None:
        self.calls: list[object] = []
        self._weights = weights
        self._fail_at = fail_at

    def begin(self) -> None:
        self.has_begun = True

    def sent(self, index: int) -> None:
        assert self.has_begun
        self.calls.append((index, len(self._weights.in_force)))
        if index == self._fail_at:
            raise WeightError(["tensor0: NaN"])

    def finish(self) -> None:
        self.calls.append("finish")

    def abandon(self) -> None:
        self.calls.append("abandon")

    def drain(self) -> None:
        self.calls.append("drain")


def test_a_follower_is_called_before_a_bucket_is_in_force_and_its_errors_are_not_wrapped():
    weights = Weights(0)
    router = in_process_router(0)
    container = WeightContainer(weights, make_plan(), router)
    follower = Follower(weights)
    fill(container, source_of(0), follower)
    assert follower.calls == [(0, 0), (1, 2), (2, 3), "finish"]
    container.release()
    router.abandon = mock.Mock()
    follower = Follower(weights, fail_at=1)
    with pytest.raises(WeightError, match="tensor0: NaN"):
        fill(container, source_of(0), follower)
    assert follower.calls == [(0, 0), (1, 2), "abandon", "drain"]
    assert [call.args[0].index for call in router.abandon.mock_calls] == [2]
    with refused(StateError, "container-not-empty", "partial"):
        fill(container, source_of(0))
    container.release()
    for where, call, phase in ((follower, "begin", "release"), (router, "run", "transfer")):
        message = f"bucket 0, phase {phase}, groups group0, group1: OSError: odd"
        fails = mock.patch.object(where, call, side_effect=OSError("odd"))
        with fails, pytest.raises(ReshardError, match=message):
            fill(container, source_of(0), follower)
        container.release()


@pytest.mark.parametrize(
    ("fails_in", "message"),
    [
        ("commit group2", "bucket 1, phase commit"),
        ("finish_fill", "rank 0, after the last bucket: MemoryError: no memory for finish_fill"),
        ("", "rank 0, after the last bucket: MemoryError: finish"),
    ],
)
def test_a_failed_fill_unmaps_memory_of_peers(fails_in: str, message: str):
    """The last bucket that reads the peer's memory is skipped."""
    with pytest.MonkeyPatch.context() as patch:
        rig = DeviceRig(patch)
        buffer = rig.buffer(NUM_GROUPS * NUMEL * 4)
        buffer.tensor.view(torch.float32).copy_(source_of(1)["src"])
        plan = make_plan()
        weights = Weights(0)
        layouts = {
            BufferId(peer, "src"): Buffer(NUM_GROUPS * NUMEL, "float32")
            for peer in range(NUM_RANKS)
        }
        handles = dict.fromkeys(layouts, elastic.export_tensor(buffer.tensor.view(torch.float32)))
        router = TransportSet.connect(TransportContext(0, layouts, handles))
        container = WeightContainer(weights, plan, router)
        num_mapped = mapped()
        fill(container, source_of(0))
        container.release(["group3"])
        follower = Follower(weights)
        if fails_in:
            weights.fail_in(fails_in)
        else:
            follower.finish = mock.Mock(side_effect=MemoryError("finish"))
        rig.driver.calls.clear()
        with pytest.raises(ReshardError, match=message):
            fill(container, source_of(0), follower, skipped={2})
        assert rig.driver.calls.count("cuMemMap") == 1  # the peer's memory was mapped
        assert mapped() == num_mapped
        assert weights.script.calls[-1] == "abandon"
        assert follower.calls[-2:] == ["abandon", "drain"]
        assert container.state is ContainerState.PARTIAL
        router.close()


class DeadTransport(InProcessTransport):
    """A transport that cannot notify its peers."""

    def __init__(self) -> None:
        super().__init__(0, {})
        self.abandoned: list[int] = []

    def abandon(self, bucket: int, share: object, reason: str) -> None:
        self.abandoned.append(bucket)
        raise TransportError("the group is dead")


def test_a_dead_transport_prevents_no_other_notification():
    dead = DeadTransport()
    other = InProcessTransport(0, {})
    dead.name = "dead"
    abandoned: list[int] = []
    weights = Weights(0, "allocate group0")

    def abandon(bucket: int, share: object, reason: str) -> None:
        # First of all: peers may wait in the engine's `abandon` and never come to the buckets.
        assert weights.script.calls[-1] == "abandon"
        abandoned.append(bucket)

    other.abandon = abandon
    names = {Link.SELF: dead.name, Link.HOST: other.name}
    router = TransportSet(0, [dead, other], lambda moved: names[moved.link], RelayBuffers())
    container = WeightContainer(weights, make_plan(), router)
    with refused(ReshardError, "fill-failed", "no memory for allocate"):
        fill(container, {})
    assert (dead.abandoned, abandoned) == ([0, 1], [0, 2])


def test_no_fill_follows_an_interrupt_of_the_notification() -> None:
    weights = Weights(0, "allocate group0")
    weights.abandon = mock.Mock(side_effect=KeyboardInterrupt)
    container = WeightContainer(weights, make_plan(), in_process_router(0), num_ranks=2)
    with pytest.raises(KeyboardInterrupt):
        fill(container, {})
    container.release()
    with refused(StateError, "interrupted-twice", "rank 0"):
        container.begin()


def test_a_plan_that_does_not_complete_each_group_is_refused():
    plan = make_plan()
    with pytest.raises(PlanError, match="no bucket completes groups group2, group3 of rank 0"):
        WeightContainer(Weights(0), ReshardPlan(plan.buckets[:1], (), ""), in_process_router(0))
