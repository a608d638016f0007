"""Two real ranks with fakes of their engines: each holds half of every tensor and wants all of it."""

from __future__ import annotations

import signal
from collections.abc import Callable
from contextlib import nullcontext
from unittest import mock

import pytest
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
from hybrid_engine.switch import verifier
from hybrid_engine.switch.states import State
from hybrid_engine.switch.verifier import Verifier
from hybrid_engine.transports.collective import CollectiveTransport
from hybrid_engine.transports.pull import SharedMemoryTransport
from hybrid_engine.transports.router import TransportSet
from tests.harness.launch import Ranks
from tests.hybrid_engine.switch.fakes import IDLE, INFER, NBYTES, SHAPES, TRAIN, Rig

SCENARIOS: dict[str, Callable[[], object]] = {}


def scenario(function: Callable[[], object]) -> Callable[[], object]:
    """One of the things that two ranks do in one launch."""
    SCENARIOS[function.__name__] = function
    return function


def error_of(call: Callable[[], object]) -> dict[str, object]:
    """The error of a call that must fail; its classes by name, to be compared in the process of the test."""
    try:
        call()
    except Exception as error:
        return {"names": [cls.__name__ for cls in type(error).__mro__], "text": str(error)}
    raise AssertionError("it did not fail")


def assert_goes_on(rig: Rig) -> None:
    """This rank, together with the other, can do everything again."""
    for target in (INFER, TRAIN, INFER):
        rig.manager.enter(target)
        rig.assert_is(target)
        if target is TRAIN:
            rig.training.step()


@scenario
def plan_faults() -> dict[str, object]:
    rig = Rig(build=False)
    if rig.training.rank == 1:
        rig.training.tensors["orphan"] = (2, 2)
    else:
        rig.inference.tensors["longed_for"] = (2, 2)
    error = error_of(rig.build)
    rig.training.tensors = rig.inference.tensors = dict(SHAPES)
    rig.build()
    assert_goes_on(rig)
    return error


@scenario
def layout_fails_on_rank_1() -> dict[str, object]:
    rig = Rig(build=False)
    if rig.training.rank == 1:
        rig.script.arm("layout", OSError("disk on fire"))
    return error_of(rig.build)


@scenario
def other_device_on_rank_1() -> dict[str, object]:
    return error_of(Rig(build=False, device="meta" if dist.get_rank() == 1 else None).build)


@scenario
def other_plan_on_rank_1() -> dict[str, object]:
    return error_of(Rig(build=False, bucket_mb=1 + dist.get_rank()).build)


@scenario
def shared_memory_without_exported_buffers() -> dict[str, object]:
    return error_of(lambda: Rig(elastic=False, transport="shared_memory"))


def _count_pulled(transport: type, counts: dict[str, int]) -> Callable[[], None]:
    """Count the bytes that this rank reads by a transport; returns what ends the counting."""
    run = transport.run

    def counting(self, bucket, transfers, source, destination):
        own = [transfer.nbytes for transfer in transfers if transfer.dst_rank == self.rank]
        counts[self.name] = counts.get(self.name, 0) + sum(own)
        return run(self, bucket, transfers, source, destination)

    transport.run = counting
    return lambda: setattr(transport, "run", run)


@scenario
def transports() -> dict[str, object]:
    """By transport and kind of buffers: what the report says and what each transport carried."""
    results = {}
    cases = [("shared_memory", True), ("collective", True), ("collective", False), ("auto", True), ("auto", False)]
    for transport, elastic in cases:
        groups = [
            mock.patch.object(Job, name, autospec=True, side_effect=getattr(Job, name))
            for name in ("new_group", "new_nccl_group")
        ]
        with groups[0] as new_group, groups[1] as new_nccl_group:
            rig, counts = Rig(elastic=elastic, transport=transport), {}
        restore = [_count_pulled(kind, counts) for kind in (SharedMemoryTransport, CollectiveTransport)]
        rig.training.step()
        report = rig.manager.enter(INFER)
        rig.assert_is(INFER)
        for end in restore:
            end()
        assert_goes_on(rig)
        rig.close()
        rig.close()
        results[f"{transport}, {'elastic' if elastic else 'plain'}"] = {
            "received": report.bytes_received,
            "least": report.bytes_least,
            "own": report.bytes_own,
            "carried": {name: nbytes for name, nbytes in counts.items() if nbytes},
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
    assert_goes_on(rig)
    return error


@scenario
def one_rank_fails() -> dict[str, object]:
    """In the second of two buckets and elsewhere, over both transports."""
    results = {}
    for call in ("prepare", "buffers", "proving", "allocate second", "commit second", "wake"):
        results[f"{call}, shared_memory"] = _fail_on_rank_0(
            call, elastic=True, transport="shared_memory", verify="full"
        )
        results[f"{call}, collective"] = _fail_on_rank_0(call, transport="collective", verify="full")
    return results


@scenario
def sampling_fails_on_rank_0() -> dict[str, object]:
    """Both sample the same tensors afterwards."""
    with mock.patch.object(verifier, "NUM_SAMPLED", 1):
        rig = Rig(verify="sample")
        rig.training.step()
        failing = mock.patch.object(Verifier, "begin", side_effect=MemoryError("no sample"))
        with failing if rig.training.rank == 0 else nullcontext():
            error = error_of(lambda: rig.manager.enter(INFER))
        rig.assert_is(TRAIN)
        assert_goes_on(rig)
    return error


@scenario
def start_hook_fails_on_rank_1() -> dict[str, object]:
    rig = Rig()
    rig.manager.on_reshard_start(lambda _before, _target: rig.script.reach("hook"))
    if rig.training.rank == 1:
        rig.script.arm("hook", OSError("no licence"))
    error = error_of(lambda: rig.manager.enter(INFER))
    rig.assert_is(TRAIN)
    assert_goes_on(rig)
    return error


@scenario
def way_back_fails_on_rank_1() -> dict[str, object]:
    """Rank 0 fails, and while both go back rank 1 does."""
    rig = Rig(elastic=True)
    rig.training.step()
    if rig.training.rank == 0:
        rig.script.arm("reset", OSError("disk on fire"))
    else:
        rig.script.arm("onload param", OffloadError("no memory left"))
    error = error_of(lambda: rig.manager.enter(INFER))
    error["state"] = str(rig.manager.state)
    rig.manager.enter(TRAIN)
    rig.assert_is(TRAIN)
    assert_goes_on(rig)
    return error


@scenario
def prefetch_on_rank_0() -> dict[str, object]:
    """Its replica is done while rank 1 still generates, or fails."""
    rig = Rig(elastic=True, prefetch="auto")
    prefetched = []
    for fails in (False, True):
        rig.training.step()
        rig.manager.enter(INFER)
        if rig.training.rank == 0:
            rig.manager.near_end()

        def generate(fails: bool = fails) -> None:
            with rig.job.agreement.phase("generate"):
                if fails and rig.training.rank == 1:
                    raise OSError("out of tokens")

        error = error_of(generate) if fails else generate()
        prefetched.append(rig.manager.enter(TRAIN).bytes_prefetched)
        rig.assert_is(TRAIN)
    rig.training.step()
    assert_goes_on(rig)
    return {**error, "prefetched": prefetched, "comes_in_chunks": rig.comes_in_chunks}


@scenario
def interrupted_on_rank_0() -> dict[str, object]:
    """Ctrl-C came to rank 0 before the end of a switch, to rank 1 after: the next one is one of both."""
    rig = Rig(elastic=True)
    rig.training.step()
    for target in (INFER, TRAIN):
        rig.manager.enter(target)
        if rig.training.rank == 0:
            rig.manager.state = State.INTERRUPTED
        rig.manager.enter(target)
        rig.assert_is(target)
    error = error_of(lambda: rig.manager.enter(INFER if rig.training.rank else IDLE))
    assert_goes_on(rig)
    return error


@scenario
def release_fails_on_rank_0() -> dict[str, object]:
    """Its inference weights are still there when both start again; the next fill must not leave rank 1 waiting."""
    rig = Rig(transport="collective", timeout_seconds=5)
    rig.training.step()
    if rig.training.rank == 0:
        rig.script.arm("reset", OSError("disk on fire"))
        rig.script.arm("release", OSError("busy"))
    error = error_of(lambda: rig.manager.enter(INFER))
    error["state"] = str(rig.manager.state)
    try:
        assert_goes_on(rig)
        error["afterwards"] = "goes on"
    except Exception as problem:
        error["afterwards"] = f"{type(problem).__name__}: {problem}"
    return error


def _interrupt(owner: type, name: str, incremental: str = "delta") -> dict[str, object]:
    """Ctrl-C comes to rank 0 in the first call of a method within the second fill."""
    rig = Rig(elastic=True, transport="collective", incremental=incremental, incremental_mb=0, timeout_seconds=20)
    is_interrupted, method, came = rig.job.rank == 0, getattr(owner, name), list[int]()

    def interrupting(*args: object) -> object:
        if not came:
            came.append(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
        return method(*args)

    rig.manager.enter(INFER)
    rig.manager.enter(TRAIN)
    rig.training.step()
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    raised = KeyboardInterrupt if is_interrupted else HybridEngineError
    interruption = mock.patch.object(owner, name, interrupting) if is_interrupted else nullcontext()
    with interruption, pytest.raises(raised) as caught:
        rig.manager.enter(INFER)
    signal.signal(signal.SIGINT, handler)
    for _ in range(2 if is_interrupted else 0):  # the other is at the end of the fill, then on its way back
        error_of(lambda: rig.manager.enter(TRAIN))
    rig.manager.enter(TRAIN)
    rig.assert_is(TRAIN)
    rig.training.step()
    deltas = rig.manager.enter(INFER).messages_delta
    assert_goes_on(rig)
    rig.close()
    return {"error": type(caught.value).__name__, "deltas": deltas}


@scenario
def interrupted_before_deltas() -> dict[str, object]:
    """The fill before was whole."""
    return _interrupt(TransportSet, "prepare")


@scenario
def interrupted_among_deltas() -> dict[str, object]:
    """When it has the headers of a bucket, and has sent nothing else of it."""
    return _interrupt(CollectiveTransport, "_announced")


@scenario
def interrupted_before_the_first_message() -> dict[str, object]:
    return _interrupt(CollectiveTransport, "_pack", incremental="off")


@scenario
def what_was_skipped_and_then_changed() -> list[object]:
    """What the other rank got two fills ago is what a delta is made from."""
    rig = Rig(elastic=True, transport="collective", incremental="delta", incremental_mb=2)
    found = []
    for element in (None, -1, -1, 0, -1, None, 0):
        if element is not None:
            rig.training.param.data[element] += 1
            rig.training.remember_parameters()
        report = rig.manager.enter(INFER)
        rig.assert_is(INFER)
        rig.manager.enter(TRAIN)
        found.append((report.messages_delta, report.messages_whole, report.bytes_skipped < NBYTES))
    rig.close()
    return found


@scenario
def only_what_changed() -> dict[str, object]:
    """What one rank alone knows to be written, or has lost, all ranks send."""
    rig = Rig(build=False, elastic=True, incremental="auto", incremental_mb=2)
    rig.training.frozen = ("first",)
    rig.build()
    sent: dict[str, object] = {}

    def rounds(name: str, action: Callable[[], object] | None = None) -> None:
        rig.manager.enter(TRAIN)
        if action is not None:
            action()
        rig.script.take()
        report = rig.manager.enter(INFER)
        rig.assert_is(INFER)
        sent[name] = [call for call in rig.script.take() if call.startswith("commit")], report.bytes_skipped

    def on_rank_1(action: Callable[[], object]) -> Callable[[], object]:
        return action if rig.training.rank == 1 else lambda: None

    rounds("first")
    rounds("step", rig.training.step)
    rounds("nothing")
    rounds("written", on_rank_1(rig.training.write))
    rounds("lost", on_rank_1(rig.inference.release))
    rig.manager.enter(TRAIN)
    rig.training.step()
    if rig.training.rank == 1:
        rig.script.arm("commit second", MemoryError("no memory"))
    error_of(lambda: rig.manager.enter(INFER))
    rig.assert_is(TRAIN)
    rounds("failed")
    return sent


def run_scenarios() -> dict[str, object]:
    dist.init_process_group("gloo")
    results = {name: run() for name, run in SCENARIOS.items()}
    dist.destroy_process_group()
    return results


@pytest.fixture(scope="module")
def two_ranks(ranks: Ranks) -> list[dict[str, dict]]:
    """What each scenario gave, by rank."""
    return ranks.launch(run_scenarios, 2, timeout=200)


REMOTE = RemoteError
# scenario -> class of each rank's error, what both say, and what else is found on both
ERRORS: dict[str, tuple[tuple[type, type], list[str], dict[str, str]]] = {
    "plan_faults": ((PlanError, PlanError), ["orphan: a training parameter", "longed_for", "no training rank"], {}),
    "other_plan_on_rank_1": ((PlanError, PlanError), ["different plans"], {}),
    "layout_fails_on_rank_1": ((REMOTE, ReshardError), ["OSError: disk on fire"], {}),
    "other_device_on_rank_1": ((REMOTE, ConfigError), ["meta, but training weights of rank 1 are on "], {}),
    "shared_memory_without_exported_buffers": ((ConfigError, ConfigError), ["generate_config.transport"], {}),
    "interrupted_on_rank_0": (
        (DifferentCallsError, DifferentCallsError),
        ["entering rollout_context (1 numbers) on rank 1"],
        {},
    ),
    "sampling_fails_on_rank_0": ((ReshardError, REMOTE), ["MemoryError: no sample"], {}),
    "start_hook_fails_on_rank_1": ((REMOTE, ReshardError), ["OSError: no licence"], {}),
    "way_back_fails_on_rank_1": (
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
def test_what_fails_is_told_to_both(two_ranks: list[dict[str, dict]], name: str):
    kinds, texts, more = ERRORS[name]
    for results, kind in zip(two_ranks, kinds, strict=True):
        error = results[name]
        assert error["names"][0] == kind.__name__
        assert [text for text in texts if text not in error["text"]] == []
        assert more.items() <= error.items()


def test_each_transport_brings_the_other_half_and_no_more(two_ranks: list[dict[str, dict]]):
    half = NBYTES // 2
    by_name = {
        **dict.fromkeys(("shared_memory, elastic", "auto, elastic"), "shared_memory"),
        **dict.fromkeys(("collective, elastic", "collective, plain", "auto, plain"), "collective"),
    }
    for results in two_ranks:
        assert results["transports"] == {
            case: {
                **{"received": half, "least": half, "own": half, "carried": {name: half}},
                "groups": int(name == "collective"),  # a communicator keeps memory of a GPU
            }
            for case, name in by_name.items()
        }


@pytest.mark.parametrize("transport", ["shared_memory", "collective"])
@pytest.mark.parametrize("call", ["prepare", "buffers", "proving", "allocate second", "commit second", "wake"])
def test_one_rank_fails_both_raise_and_go_on(two_ranks: list[dict[str, dict]], call: str, transport: str):
    own, remote = (results["one_rank_fails"][f"{call}, {transport}"] for results in two_ranks)
    assert own["names"][0] == ReshardError.__name__
    assert RemoteError.__name__ in remote["names"]
    assert "no memory on rank 0" in own["text"]
    assert "no memory on rank 0" in remote["text"]


def test_what_one_rank_has_a_reason_for_all_ranks_send(two_ranks: list[dict[str, dict]]):
    both = ["commit first", "commit second"]
    for results in two_ranks:
        found = results["only_what_changed"]
        assert {name: calls for name, (calls, _) in found.items()} == {
            **dict.fromkeys(("first", "lost", "failed"), both),
            **{"step": ["commit second"], "written": ["commit second"], "nothing": []},
        }
        assert found["nothing"][1] == NBYTES


@pytest.mark.parametrize("name", ["before_deltas", "among_deltas", "before_the_first_message"])
def test_an_interrupt_in_a_fill_leaves_both_in_step(two_ranks: list[dict[str, dict]], name: str):
    found = [results[f"interrupted_{name}"] for results in two_ranks]
    assert [each["error"] for each in found] == ["KeyboardInterrupt", "ReshardError"]
    assert [each["deltas"] for each in found] == [0, 0]


def test_what_was_skipped_goes_as_a_delta_of_what_came_last(two_ranks: list[dict[str, dict]]):
    one = (1, 0, True)
    for results in two_ranks:
        found = results["what_was_skipped_and_then_changed"]
        assert found == [(0, 2, True), one, one, one, one, (0, 0, False), one]


def test_one_rank_prefetches_and_both_go_on(two_ranks: list[dict[str, dict]]):
    done, other = (results["prefetch_on_rank_0"] for results in two_ranks)
    parameters = NBYTES // 2
    # Once training has followed, also that half of optimizer state which stays within the peak of the switches; with
    # chunks, which make it higher, all of it.
    assert done["prefetched"] == [parameters, (3 if done["comes_in_chunks"] else 2) * parameters]
    assert other["prefetched"] == [0, 0]
    assert all("OSError: out of tokens" in each["text"] for each in (done, other))
