"""Two ranks with fakes of their engines: each trains half of every tensor and serves all.

They are threads, each the late one in turn; what takes signals or patches classes runs on real
ranks.
"""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
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
from hybrid_engine.ranks.job import Job
from hybrid_engine.switch.states import State
from hybrid_engine.transports.collective import CollectiveTransport
from hybrid_engine.transports.deltas import Deltas
from hybrid_engine.transports.pull import SharedMemoryTransport
from hybrid_engine.transports.router import TransportSet
from tests.harness.launch import Ranks
from tests.harness.rank_threads import RankThreads
from tests.hybrid_engine.switch.fakes import IDLE, INFER, NBYTES, SHAPES, TRAIN, Rig

Scenario = Callable[[int], object]
"""Takes the rank."""
ON_THREADS: dict[str, Scenario] = {}
ByRank = list[dict[str, dict]]
"""Results of each rank, by scenario."""


def scenario(function: Scenario) -> Scenario:
    ON_THREADS[function.__name__] = function
    return function


def error_of(call: Callable[[], object]) -> dict[str, object]:
    """Return class names and text of the error of a call that must fail."""
    try:
        call()
    except Exception as error:
        return {"names": [cls.__name__ for cls in type(error).__mro__], "text": str(error)}
    raise AssertionError("it did not fail")


def assert_switches_succeed(rig: Rig) -> None:
    """Assert that both ranks can complete more switches."""
    for target in (INFER, TRAIN, INFER):
        rig.enter(target)
        if target is TRAIN:
            rig.training.step()


@scenario
def plan_faults(rank: int) -> dict[str, object]:
    rig = Rig(build=False)
    if rig.training.rank == 1:
        rig.training.tensors["orphan"] = (2, 2)
    else:
        rig.inference.tensors["longed_for"] = (2, 2)
    error = error_of(rig.build)
    rig.training.tensors = rig.inference.tensors = dict(SHAPES)
    rig.build()
    assert_switches_succeed(rig)
    return error


@scenario
def layout_fails_on_rank_1(rank: int) -> dict[str, object]:
    rig = Rig(build=False)
    if rig.training.rank == 1:
        rig.script.arm("layout", OSError("disk on fire"))
    return error_of(rig.build)


def transports(rank: int) -> dict[str, object]:
    """Return the report's figures and the bytes counted, by transport and kind of buffers."""
    results = {}
    cases = [
        ("shared_memory", True),
        ("collective", True),
        ("collective", False),
        ("auto", True),
        ("auto", False),
    ]
    for transport, elastic in cases:
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
        carried = Counter()
        for name, prepare in shares.items():
            for _, transfers in (call.args for call in prepare.call_args_list):
                carried[name] += sum(
                    transfer.nbytes for transfer in transfers if transfer.dst_rank == rank
                )
        assert_switches_succeed(rig)
        rig.close()
        rig.close()  # idempotent
        results[f"{transport}, {'elastic' if elastic else 'plain'}"] = {
            "received": report.bytes_received,
            "least": report.bytes_least,
            "own": report.bytes_own,
            "carried": dict(+carried),
            "groups": new_group.call_count + new_nccl_group.call_count,
        }
    return results


def _fail_on_rank_0(call: str, **settings: object) -> dict[str, object]:
    rig = Rig(**settings)
    rig.training.step()
    if rig.training.rank == 0:
        rig.script.arm(call, MemoryError("no memory on rank 0"))
    error = error_of(lambda: rig.manager.enter(INFER))
    rig.assert_is(TRAIN)
    assert_switches_succeed(rig)
    return error


@scenario
def one_rank_fails(rank: int) -> dict[str, object]:
    """Fail in each of several calls, the second bucket's included, over both transports."""
    results = {}
    for call in ("prepare", "buffers", "proving", "allocate second", "commit second", "wake"):
        results[f"{call}, shared_memory"] = _fail_on_rank_0(
            call, elastic=True, transport="shared_memory", verify="full"
        )
        results[f"{call}, collective"] = _fail_on_rank_0(
            call, transport="collective", verify="full"
        )
    return results


@scenario
def start_hook_fails_on_rank_1(rank: int) -> dict[str, object]:
    rig = Rig()
    rig.manager.on_reshard_start(lambda _before, _target: rig.script.reach("hook"))
    if rig.training.rank == 1:
        rig.script.arm("hook", OSError("no licence"))
    error = error_of(lambda: rig.manager.enter(INFER))
    rig.assert_is(TRAIN)
    assert_switches_succeed(rig)
    return error


@scenario
def restore_fails_on_rank_1(rank: int) -> dict[str, object]:
    """Rank 0 fails, then rank 1 fails to restore training."""
    rig = Rig(elastic=True)
    rig.training.step()
    if rig.training.rank == 0:
        rig.script.arm("reset", OSError("disk on fire"))
    else:
        rig.script.arm("onload param", OffloadError("no memory left"))
    error = error_of(lambda: rig.manager.enter(INFER))
    error["state"] = str(rig.manager.state)
    rig.enter(TRAIN)
    assert_switches_succeed(rig)
    return error


@scenario
def interrupted_on_rank_0(rank: int) -> dict[str, object]:
    """Ctrl-C reaches rank 0 before the end of a switch, rank 1 after it; both recover together."""
    rig = Rig(elastic=True)
    rig.training.step()
    for target in (INFER, TRAIN):
        rig.manager.enter(target)
        if rig.training.rank == 0:
            rig.manager.state = State.INTERRUPTED  # as Ctrl-C before the end leaves it
        rig.enter(target)
    error = error_of(lambda: rig.manager.enter(INFER if rig.training.rank else IDLE))
    assert_switches_succeed(rig)
    return error


@scenario
def release_fails_on_rank_0(rank: int) -> dict[str, object]:
    """Rank 0 keeps inference weights; the next fill must not leave rank 1 waiting."""
    rig = Rig(transport="collective", timeout_seconds=15)  # a waiting rank fails soon
    rig.training.step()
    if rig.training.rank == 0:
        rig.script.arm("reset", OSError("disk on fire"))
        rig.script.arm("release", OSError("busy"))
    error = error_of(lambda: rig.manager.enter(INFER))
    error["state"] = str(rig.manager.state)
    try:
        assert_switches_succeed(rig)
        error["afterwards"] = "goes on"
    except Exception as problem:
        error["afterwards"] = f"{type(problem).__name__}: {problem}"
    return error


def _interrupt(owner: type, name: str, incremental: str) -> dict[str, object]:
    """Interrupt rank 0 in the first call of a method within the second fill."""
    rig = Rig(
        elastic=True,
        transport="collective",
        incremental=incremental,
        incremental_mb=0,
        timeout_seconds=20,
    )
    is_interrupted = rig.job.rank == 0
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
    raised = KeyboardInterrupt if is_interrupted else HybridEngineError
    interruption = mock.patch.object(owner, name, interrupting) if is_interrupted else nullcontext()
    with interruption, pytest.raises(raised) as caught:
        rig.manager.enter(INFER)
    signal.signal(signal.SIGINT, handler)
    for _ in range(2 if is_interrupted else 0):  # rank 1 ends its fill, then restores training
        error_of(lambda: rig.manager.enter(TRAIN))
    rig.enter(TRAIN)
    deltas = rig.fill().messages_delta
    assert_switches_succeed(rig)
    rig.close()
    return {"error": type(caught.value).__name__, "deltas": deltas}


INTERRUPTIONS = {
    "interrupted_before_deltas": (TransportSet, "prepare", "delta"),  # the fill before was complete
    "interrupted_among_deltas": (Deltas, "decode", "delta"),  # they have come, and none is applied
    "interrupted_before_the_first_message": (CollectiveTransport, "_pack", "off"),
}
"""Scenario on ranks of its own -> class, its method, and `generate_config.incremental`."""


@scenario
def skipped_then_changed(rank: int) -> list[object]:
    """A delta refers to the other rank's last message, here of two fills ago."""
    rig = Rig(elastic=True, transport="collective", incremental="delta", incremental_mb=2)
    counts = []
    for element in (None, -1, -1, 0, -1, None, 0):
        if element is not None:
            rig.training.param.data[element] += 1
            rig.training.remember_parameters()
        report = rig.enter(INFER)
        rig.manager.enter(TRAIN)
        counts.append((report.messages_delta, report.messages_whole, report.bytes_skipped < NBYTES))
    rig.close()
    return counts


@scenario
def only_what_changed(rank: int) -> dict[str, object]:
    """A tensor that one rank has changed or lost is sent by all ranks."""
    rig = Rig(build=False, elastic=True, incremental="auto", incremental_mb=2)
    rig.training.frozen = ("first",)
    rig.build()
    sent: dict[str, object] = {}

    def rounds(name: str, action: Callable[[], object] | None = None) -> None:
        rig.manager.enter(TRAIN)
        if action is not None:
            action()
        rig.script.take()
        report = rig.enter(INFER)
        sent[name] = (
            [call for call in rig.script.take() if call.startswith("commit")],
            report.bytes_skipped,
        )

    def on_rank_1(action: Callable[[], object]) -> Callable[[], object]:
        return action if rig.training.rank == 1 else lambda: None

    rounds("first")
    rounds("step", rig.training.step)
    rounds("nothing")
    rounds("written", on_rank_1(rig.training.write))
    rounds("lost", on_rank_1(rig.inference.release))
    rig.train()
    if rig.training.rank == 1:
        rig.script.arm("commit second", MemoryError("no memory"))
    error_of(lambda: rig.manager.enter(INFER))
    rig.assert_is(TRAIN)
    rounds("failed")
    return sent


ON_THREADS |= {
    "other_device_on_rank_1": lambda rank: error_of(
        Rig(build=False, device="meta" if rank == 1 else None).build
    ),
    "other_plan_on_rank_1": lambda rank: error_of(Rig(build=False, bucket_mb=1 + rank).build),
    "other_setting_on_rank_1": lambda rank: error_of(
        Rig(build=False, verify="full" if rank == 1 else "off").build
    ),
    "shared_memory_without_exported_buffers": lambda _: error_of(
        lambda: Rig(transport="shared_memory")
    ),
}


@pytest.fixture(scope="module", params=[0, 1], ids="rank {} is late".format)
def two_ranks(request: pytest.FixtureRequest) -> ByRank:
    """Results of each scenario on threads, by rank; on GPUs in processes, which NCCL's messages
    need.
    """
    if torch.cuda.is_available():
        return request.getfixturevalue("two_processes")
    return RankThreads(2, request.param, early=True).run(
        lambda world: {name: run(world.rank) for name, run in ON_THREADS.items()}
    )


def run_scenarios() -> dict[str, object]:
    dist.init_process_group("gloo")
    scenarios = {"transports": transports, **(ON_THREADS if torch.cuda.is_available() else {})}
    results = {name: run(dist.get_rank()) for name, run in scenarios.items()}
    results |= {name: _interrupt(*call) for name, call in INTERRUPTIONS.items()}
    dist.destroy_process_group()
    return results


@pytest.fixture(scope="module")
def two_processes(ranks: Ranks) -> ByRank:
    return ranks.launch(run_scenarios, 2, timeout=200)


REMOTE = RemoteError
# scenario -> class of each rank's error, texts in both messages, further results of both ranks
ERRORS: dict[str, tuple[tuple[type, type], list[str], dict[str, str]]] = {
    "plan_faults": (
        (PlanError, PlanError),
        ["orphan: a training parameter", "longed_for", "no training rank"],
        {},
    ),
    "other_plan_on_rank_1": ((PlanError, PlanError), ["different plans"], {}),
    "other_setting_on_rank_1": ((PlanError, PlanError), ["different plans"], {}),
    "layout_fails_on_rank_1": ((REMOTE, ReshardError), ["OSError: disk on fire"], {}),
    "other_device_on_rank_1": (
        (REMOTE, ConfigError),
        ["meta, but training weights of rank 1 are on "],
        {},
    ),
    "shared_memory_without_exported_buffers": (
        (ConfigError, ConfigError),
        ["generate_config.transport"],
        {},
    ),
    "interrupted_on_rank_0": (
        (DifferentCallsError, DifferentCallsError),
        ["entering rollout_context (3 numbers) on rank 1"],
        {},
    ),
    "start_hook_fails_on_rank_1": ((REMOTE, ReshardError), ["OSError: no licence"], {}),
    "restore_fails_on_rank_1": (
        (ReshardError, ReshardError),
        ["disk on fire", "no memory left"],
        {"state": "interrupted"},
    ),
    "release_fails_on_rank_0": (
        (ReshardError, ReshardError),
        ["disk on fire", "busy"],
        {"state": "interrupted", "afterwards": "goes on"},
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_of_one_rank_is_raised_on_both(two_ranks: ByRank, name: str):
    kinds, texts, more = ERRORS[name]
    for results, kind in zip(two_ranks, kinds, strict=True):
        error = results[name]
        assert error["names"][0] == kind.__name__
        assert [text for text in texts if text not in error["text"]] == []
        assert more.items() <= error.items()


def test_each_transport_reads_only_the_other_half(two_processes: ByRank):
    half = NBYTES // 2
    by_name = {
        **dict.fromkeys(("shared_memory, elastic", "auto, elastic"), "shared_memory"),
        **dict.fromkeys(("collective, elastic", "collective, plain", "auto, plain"), "collective"),
    }
    for results in two_processes:
        assert results["transports"] == {
            case: {
                **{"received": half, "least": half, "own": half, "carried": {name: half}},
                "groups": 1 + (name == "collective"),  # A communicator keeps memory of a GPU.
            }
            for case, name in by_name.items()
        }


@pytest.mark.parametrize("transport", ["shared_memory", "collective"])
@pytest.mark.parametrize(
    "call", ["prepare", "buffers", "proving", "allocate second", "commit second", "wake"]
)
def test_a_failure_of_one_rank_is_raised_on_both(two_ranks: ByRank, call: str, transport: str):
    local, remote = (results["one_rank_fails"][f"{call}, {transport}"] for results in two_ranks)
    assert local["names"][0] == ReshardError.__name__
    assert RemoteError.__name__ in remote["names"]
    assert "no memory on rank 0" in local["text"]
    assert "no memory on rank 0" in remote["text"]


def test_all_ranks_send_what_one_rank_must_send(two_ranks: ByRank):
    all_commits = ["commit first", "commit second"]
    for results in two_ranks:
        switches = results["only_what_changed"]
        assert {name: calls for name, (calls, _) in switches.items()} == {
            **dict.fromkeys(("first", "lost", "failed"), all_commits),
            **{"step": ["commit second"], "written": ["commit second"], "nothing": []},
        }
        assert switches["nothing"][1] == NBYTES


@pytest.mark.parametrize("name", ["before_deltas", "among_deltas", "before_the_first_message"])
def test_an_interrupt_in_a_fill_leaves_both_ranks_in_step(two_processes: ByRank, name: str):
    outcomes = [results[f"interrupted_{name}"] for results in two_processes]
    assert [outcome["error"] for outcome in outcomes] == ["KeyboardInterrupt", "ReshardError"]
    assert [outcome["deltas"] for outcome in outcomes] == [0, 0]


def test_a_skipped_bucket_is_later_sent_as_a_delta(two_ranks: ByRank):
    delta = (1, 0, True)
    for results in two_ranks:
        counts = results["skipped_then_changed"]
        assert counts == [(0, 2, True), delta, delta, delta, delta, (0, 0, False), delta]
