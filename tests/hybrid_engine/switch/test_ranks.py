"""Two ranks with fakes of their engines: each trains half of every tensor and serves all.

They are threads, each the late one in turn; what takes signals or patches classes runs on real
ranks.
"""

from __future__ import annotations

import itertools
import signal
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from hybrid_engine.errors import (
    ConfigError,
    DifferentCallsError,
    HybridEngineError,
    OffloadError,
    PlanError,
    RemoteError,
    ReshardError,
)
from hybrid_engine.ranks.job import Job, join_process_group
from hybrid_engine.switch.states import State
from hybrid_engine.transports.collective import CollectiveTransport
from hybrid_engine.transports.deltas import Deltas
from hybrid_engine.transports.pull import SharedMemoryTransport
from hybrid_engine.transports.router import TransportSet
from tests.harness.launch import on_ranks
from tests.harness.rank_threads import RankThreads
from tests.hybrid_engine.switch.fakes import IDLE, INFER, NBYTES, SHAPES, TRAIN, Rig

Body = Callable[[int], None]
"""Body of a test; takes the rank."""
ON_THREADS: dict[str, Body] = {}


def on_threads(body: Body) -> Body:
    ON_THREADS[body.__name__] = body
    return body


def raised(
    kind: type[HybridEngineError], *texts: str
) -> AbstractContextManager[pytest.ExceptionInfo[HybridEngineError]]:
    """Expect an error of exactly this class, with each of `texts` in its message."""

    def check(error: BaseException) -> bool:
        assert type(error) is kind
        assert [text for text in texts if text not in str(error)] == []
        return True

    return pytest.raises(HybridEngineError, check=check)


def assert_switches_succeed(rig: Rig) -> None:
    """Assert that both ranks can complete more switches."""
    for target in (INFER, TRAIN, INFER):
        rig.enter(target)
        if target is TRAIN:
            rig.training.step()


# -- errors of one rank are raised on both ---------------------------------------------------------


@on_threads
def plan_faults(rank: int) -> None:
    rig = Rig(build=False)
    if rank == 1:
        rig.training.tensors["orphan"] = (2, 2)
    else:
        rig.inference.tensors["longed_for"] = (2, 2)
    with raised(PlanError, "orphan: a training parameter", "longed_for", "no training rank"):
        rig.build()
    rig.training.tensors = rig.inference.tensors = dict(SHAPES)
    rig.build()
    assert_switches_succeed(rig)


@on_threads
def layout_fails_on_rank_1(rank: int) -> None:
    rig = Rig(build=False)
    if rank == 1:
        rig.script.arm("layout", OSError("disk on fire"))
    with raised(ReshardError if rank == 1 else RemoteError, "OSError: disk on fire"):
        rig.build()


@on_threads
def other_device_on_rank_1(rank: int) -> None:
    rig = Rig(build=False, device="meta" if rank == 1 else None)
    problem = "meta, but training weights of rank 1 are on "
    with raised(ConfigError if rank == 1 else RemoteError, problem):
        rig.build()


@on_threads
def other_settings_on_rank_1(rank: int) -> None:
    for settings in ({"bucket_mb": 1 + rank}, {"verify": "full" if rank == 1 else "off"}):
        rig = Rig(build=False, **settings)
        with raised(PlanError, "different plans"):
            rig.build()


@on_threads
def shared_memory_without_exported_buffers(rank: int) -> None:
    with raised(ConfigError, "generate_config.transport"):
        Rig(transport="shared_memory")


def fail_on_rank_0(call: str, transport: str, rank: int) -> None:
    """Fail in a call, the second bucket's included."""
    rig = Rig(elastic=transport == "shared_memory", transport=transport, verify="full")
    rig.training.step()
    if rank == 0:
        rig.script.arm(call, MemoryError("no memory on rank 0"))
    problem = "no memory on rank 0"
    with raised(ReshardError, problem) if rank == 0 else pytest.raises(RemoteError, match=problem):
        rig.manager.enter(INFER)
    rig.assert_is(TRAIN)
    assert_switches_succeed(rig)


CALLS = ("prepare", "buffers", "proving", "allocate second", "commit second", "wake")
ON_THREADS |= {
    f"{call} fails, {transport}": partial(fail_on_rank_0, call, transport)
    for call, transport in itertools.product(CALLS, ("shared_memory", "collective"))
}


@on_threads
def start_hook_fails_on_rank_1(rank: int) -> None:
    rig = Rig()
    rig.manager.on_reshard_start(lambda _before, _target: rig.script.reach("hook"))
    if rank == 1:
        rig.script.arm("hook", OSError("no licence"))
    with raised(ReshardError if rank == 1 else RemoteError, "OSError: no licence"):
        rig.manager.enter(INFER)
    rig.assert_is(TRAIN)
    assert_switches_succeed(rig)


@on_threads
def restore_fails_on_rank_1(rank: int) -> None:
    """Rank 0 fails, then rank 1 fails to restore training."""
    rig = Rig(elastic=True)
    rig.training.step()
    if rank == 0:
        rig.script.arm("reset", OSError("disk on fire"))
    else:
        rig.script.arm("onload param", OffloadError("no memory left"))
    with raised(ReshardError, "disk on fire", "no memory left"):
        rig.manager.enter(INFER)
    assert rig.manager.state is State.INTERRUPTED
    rig.enter(TRAIN)
    assert_switches_succeed(rig)


@on_threads
def release_fails_on_rank_0(rank: int) -> None:
    """Rank 0 keeps inference weights; the next fill must not leave rank 1 waiting."""
    rig = Rig(transport="collective", timeout_seconds=15)  # a waiting rank fails soon
    rig.training.step()
    if rank == 0:
        rig.script.arm("reset", OSError("disk on fire"))
        rig.script.arm("release", OSError("busy"))
    with raised(ReshardError, "disk on fire", "busy"):
        rig.manager.enter(INFER)
    assert rig.manager.state is State.INTERRUPTED
    assert_switches_succeed(rig)


# -- interrupts ------------------------------------------------------------------------------------


@on_threads
def interrupted_on_rank_0(rank: int) -> None:
    """Ctrl-C reaches rank 0 before the end of a switch, rank 1 after it; both recover together."""
    rig = Rig(elastic=True)
    rig.training.step()
    for target in (INFER, TRAIN):
        rig.manager.enter(target)
        if rank == 0:
            rig.manager.state = State.INTERRUPTED  # as Ctrl-C before the end leaves it
        rig.enter(target)
    with raised(DifferentCallsError, "entering rollout_context (3 numbers) on rank 1"):
        rig.manager.enter(INFER if rank else IDLE)
    assert_switches_succeed(rig)


def interrupt(owner: type, name: str, incremental: str, rank: int) -> None:
    """Interrupt rank 0 in the first call of a method within the second fill."""
    rig = Rig(
        elastic=True,
        transport="collective",
        incremental=incremental,
        incremental_mb=0,
        timeout_seconds=20,
    )
    method = getattr(owner, name)
    signals = list[int]()

    def interrupting(*args: object) -> object:
        if not signals:
            signals.append(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
        return method(*args)

    rig.manager.enter(INFER)
    rig.train()
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    interruption = nullcontext() if rank else mock.patch.object(owner, name, interrupting)
    with interruption, raised(ReshardError) if rank else pytest.raises(KeyboardInterrupt):
        rig.manager.enter(INFER)
    signal.signal(signal.SIGINT, handler)
    for _ in range(0 if rank else 2):  # rank 1 ends its fill, then restores training
        with pytest.raises(HybridEngineError):
            rig.manager.enter(TRAIN)
    rig.enter(TRAIN)
    assert rig.fill().messages_delta == 0
    assert_switches_succeed(rig)
    rig.close()


# -- what is sent ----------------------------------------------------------------------------------


def each_transport_reads_only_the_other_half(rank: int) -> None:
    half = NBYTES // 2
    for transport, elastic, carrier in (
        ("shared_memory", True, "shared_memory"),
        ("collective", True, "collective"),
        ("collective", False, "collective"),
        ("auto", True, "shared_memory"),
        ("auto", False, "collective"),
    ):
        groups = [
            mock.patch.object(Job, name, autospec=True, side_effect=getattr(Job, name))
            for name in ("new_group", "new_nccl_group")
        ]
        with groups[0] as new_group, groups[1] as new_nccl_group:
            rig = Rig(elastic=elastic, transport=transport)
        with ExitStack() as ends:
            shares = {
                kind.name: ends.enter_context(
                    mock.patch.object(kind, "prepare", autospec=True, side_effect=kind.prepare)
                )
                for kind in (SharedMemoryTransport, CollectiveTransport)
            }
            report = rig.fill()
        rig.assert_is(INFER)
        carried = Counter[str]()
        for name, prepare in shares.items():
            for _, transfers in (call.args for call in prepare.call_args_list):
                carried[name] += sum(
                    transfer.nbytes for transfer in transfers if transfer.dst_rank == rank
                )
        assert_switches_succeed(rig)
        rig.close()
        rig.close()  # idempotent
        assert report.bytes_received == report.bytes_least == report.bytes_own == half
        assert +carried == Counter({carrier: half})
        # A communicator keeps memory of a GPU.
        num_groups = new_group.call_count + new_nccl_group.call_count
        assert num_groups == 1 + (carrier == "collective")


@on_threads
def a_skipped_bucket_is_later_sent_as_a_delta(rank: int) -> None:
    """A delta refers to the other rank's last message, here of two fills ago."""
    rig = Rig(elastic=True, transport="collective", incremental="delta", incremental_mb=2)
    delta = (1, 0, True)
    for element, expected in (
        *((None, (0, 2, True)), (-1, delta), (-1, delta), (0, delta), (-1, delta)),
        *((None, (0, 0, False)), (0, delta)),
    ):
        if element is not None:
            rig.training.param.data[element] += 1
            rig.training.remember_parameters()
        report = rig.enter(INFER)
        rig.manager.enter(TRAIN)
        is_partial = report.bytes_skipped < NBYTES
        assert (report.messages_delta, report.messages_whole, is_partial) == expected
    rig.close()


@on_threads
def all_ranks_send_what_one_rank_has_changed_or_lost(rank: int) -> None:
    rig = Rig(build=False, elastic=True, incremental="auto", incremental_mb=2)
    rig.training.frozen = ("first",)
    rig.build()

    def switch(*expected: str, action: Callable[[], object] = lambda: None) -> int:
        """Switch after `action` in training; the commits are `expected`. Return bytes skipped."""
        rig.manager.enter(TRAIN)
        action()
        rig.script.take()
        report = rig.enter(INFER)
        assert [call for call in rig.script.take() if call.startswith("commit")] == [*expected]
        return report.bytes_skipped

    def on_rank_1(action: Callable[[], object]) -> Callable[[], object]:
        return action if rank == 1 else lambda: None

    switch("commit first", "commit second")
    switch("commit second", action=rig.training.step)
    assert switch() == NBYTES
    switch("commit second", action=on_rank_1(rig.training.write))
    switch("commit first", "commit second", action=on_rank_1(rig.inference.release))
    rig.train()
    if rank == 1:
        rig.script.arm("commit second", MemoryError("no memory"))
    with pytest.raises(HybridEngineError):
        rig.manager.enter(INFER)
    rig.assert_is(TRAIN)
    switch("commit first", "commit second")


IN_PROCESSES = {
    "each transport reads only the other half": each_transport_reads_only_the_other_half,
    # The fill before was complete.
    "interrupted before deltas": partial(interrupt, TransportSet, "prepare", "delta"),
    # They have come, and none is applied.
    "interrupted among deltas": partial(interrupt, Deltas, "decode", "delta"),
    "interrupted before the first message": partial(interrupt, CollectiveTransport, "_pack", "off"),
}
if torch.cuda.is_available():  # NCCL's messages need processes
    IN_PROCESSES |= ON_THREADS
    ON_THREADS.clear()


@pytest.mark.parametrize("late", [0, 1], ids="rank {} is late".format)
@pytest.mark.parametrize("name", ON_THREADS)
def test_ranks_as_threads(name: str, late: int) -> None:
    RankThreads(2, late, early=True).run(lambda world: ON_THREADS[name](world.rank))


@on_ranks({2: [*IN_PROCESSES]}, timeout=200)
def test_ranks_as_processes(case: str) -> None:
    join_process_group(60)
    IN_PROCESSES[case](dist.get_rank())
