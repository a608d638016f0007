"""`ShardingManager` with fakes of its ports: states, contexts, hooks, non-finite values."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from hybrid_engine.errors import OffloadError, ReshardError, StateError, WeightError
from hybrid_engine.hybrid_engine import HybridEngine
from hybrid_engine.memory.offload_items import KINDS
from hybrid_engine.ranks.job import own_device
from hybrid_engine.switch.report import ReshardReport
from hybrid_engine.switch.states import State, call_hooks
from tests.harness.errors import refused
from tests.harness.late_copies import SECONDS, SECONDS_EXPOSED, LateCopies
from tests.hybrid_engine.switch.fakes import (
    FORWARD,
    IDLE,
    INFER,
    NBYTES,
    NEEDED,
    TRAIN,
    TRAINING_NBYTES,
    Rig,
)

# States.


@pytest.fixture
def unstarted(job: None) -> Rig:
    rig = Rig(build=False)
    rig.inference.allocate(["first"])  # an engine loads weights when it is built
    rig.offloader.offload()  # a worker offloads training to make room for it
    rig.script.take()
    rig.build(start=False)
    return rig


def moving_calls(rig: Rig) -> list[str]:
    return [call for call in rig.script.take() if call.startswith(("release", "onload"))]


def test_start_moves_state_once_and_building_does_not(unstarted: Rig):
    assert moving_calls(unstarted) == []
    assert unstarted.resident() == set()
    with pytest.raises(StateError):
        unstarted.training.guard(["param"])
    unstarted.manager.start()
    unstarted.assert_is(TRAIN)
    assert unstarted.manager.last_report is None
    assert len(moving_calls(unstarted)) == 4
    unstarted.manager.start()
    assert moving_calls(unstarted) == []


@pytest.mark.parametrize("target", [INFER, TRAIN, None])
def test_the_first_switch_starts_the_manager(unstarted: Rig, target: State | None):
    if target is None:
        unstarted.manager.require(TRAIN)
    else:
        unstarted.manager.enter(target)
    unstarted.assert_is(target or TRAIN)


@pytest.mark.parametrize("call", ["release", "onload optimizer"])
def test_a_failed_start_can_be_repeated(unstarted: Rig, call: str):
    unstarted.script.arm(call, OSError("no memory"))
    with pytest.raises(ReshardError, match="no memory"):
        unstarted.manager.start()
    assert unstarted.manager.state is State.INTERRUPTED
    unstarted.manager.start()
    unstarted.assert_is(TRAIN)
    unstarted.manager.close()
    with refused(StateError, "switch-is-closed"):
        unstarted.manager.start()


def test_resident_training_state_may_be_used_before_the_start(job: None):
    rig = Rig(build=False)
    rig.build(start=False)
    rig.training.guard(KINDS)
    rig.offloader.offload(["grad"])
    with pytest.raises(StateError):
        rig.training.guard(KINDS)


ALL_SWITCHES = [
    TRAIN,
    FORWARD,
    TRAIN,
    INFER,
    TRAIN,
    IDLE,
    FORWARD,
    INFER,
    FORWARD,
    IDLE,
    INFER,
    IDLE,
    TRAIN,
]
OFFLOADS = [
    dict(zip(KINDS, flags, strict=True)) for flags in itertools.product([True, False], repeat=3)
]


def test_a_closed_manager_refuses_to_switch(rig: Rig):
    rig.manager.close()
    rig.manager.close()
    for call in (lambda: rig.manager.enter(INFER), lambda: rig.manager.enter(TRAIN)):
        with refused(StateError, "switch-is-closed"):
            call()


@pytest.mark.parametrize("elastic", [True, False], ids=["elastic", "plain"])
@pytest.mark.parametrize(
    "offloads", OFFLOADS, ids=lambda flags: "+".join(k for k in flags if flags[k]) or "none"
)
def test_every_switch(job: None, offloads: dict[str, bool], elastic: bool):
    rig = Rig(elastic=elastic, **{f"offload_train_{kind}": flag for kind, flag in offloads.items()})
    rig.training.step()
    for before, target in itertools.pairwise(ALL_SWITCHES):
        report = rig.enter(target)
        assert (report.direction, report.version) == (f"{before}->{target}", rig.training.version)
        if target is TRAIN:
            left = 0 if offloads["grad"] else rig.training.version
            assert torch.equal(rig.training.grad, torch.full_like(rig.training.grad, left))
            rig.training.step()


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_what_fits_beside_inference_stays(job: None, share: float):
    """Once there is optimizer state, and until another model takes the device."""
    rig = Rig(
        offload_train_param="auto", offload_train_optimizer="auto", gpu_memory_utilization=share
    )
    staying = {"param", "optimizer"} if share < 1 or own_device().type == "cpu" else set()
    with mock.patch.object(rig.inference, "share_memory") as shares:
        rig.manager.enter(INFER)
    shares.assert_not_called()  # A kind that stays later must not lend its memory.
    assert rig.resident() == set(), "before the first step"
    rig.train()
    for state, resident in {INFER: staying, FORWARD: staying | {"param"}, IDLE: set()}.items():
        rig.manager.enter(state)
        assert rig.resident() == resident, state


@pytest.mark.parametrize("before", [INFER, FORWARD, IDLE])
@pytest.mark.parametrize("ends", ["a step", "close", "the next switch"])
def test_optimizer_state_comes_back_behind_training(
    rig: Rig, late_copies: LateCopies, before: State, ends: str
):
    rig.training.step()
    rig.manager.enter(INFER)
    rig.manager.enter(before)
    assert late_copies.under_way == [], "parameters do not come late"
    way_back = rig.manager.enter(TRAIN)
    rig.training.guard(["param", "grad"])
    rig.training.assert_unchanged(["param"])
    assert len(late_copies.under_way) == 2
    if ends == "a step":
        late_copies.errors = [OSError("bus")]
        with refused(OffloadError, "onload-failed", "bus"):
            rig.training.step()
        assert rig.manager.state is TRAIN
        rig.offloader.wait()
        rig.training.assert_unchanged()
        rig.training.step()
    elif ends == "close":
        rig.manager.close()
        rig.training.assert_unchanged()
        return
    report = rig.manager.enter(INFER)
    assert late_copies.under_way == []
    seconds = (2 * SECONDS - SECONDS_EXPOSED, SECONDS_EXPOSED) if ends == "a step" else (0, 0)
    assert (report.seconds_hidden, report.seconds_exposed) == seconds
    assert ("hidden 1.750 s, exposed 0.250 s" in str(report)) == any(seconds)
    assert way_back.bytes_onloaded == sum(TRAINING_NBYTES.values()) - (before is FORWARD) * NBYTES
    rig.assert_is(INFER)
    rig.manager.enter(TRAIN)
    rig.assert_is(TRAIN)


class ScriptedCommunicators:
    """Stand-in for NCCL communicators (tests/software_gpu/test_communicators.py)."""

    def __init__(self, rig: Rig) -> None:
        self.script = rig.script
        self.are_suspended = False

    def suspend(self) -> int:
        self.are_suspended = True
        self.script.reach("suspend")
        return 1000

    def require_room(self) -> None:
        self.script.reach("room")

    def resume(self) -> None:
        if self.are_suspended:
            self.script.reach("resume")
        self.are_suspended = False


@pytest.fixture
def suspending(job: None) -> Rig:
    rig = Rig(suspend_communicators=True)
    rig.manager._communicators = ScriptedCommunicators(rig)
    rig.script.take()
    return rig


def communicator_calls(rig: Rig) -> list[str]:
    return [
        call
        for call in rig.script.take()
        if call in ("prepare", "suspend", "resume", "release", "allocate first")
    ]


@pytest.mark.parametrize("target", [FORWARD, IDLE])
def test_without_inference_nothing_is_computed_from_the_weights(rig: Rig, target: State) -> None:
    rig.script.take()
    rig.manager.enter(target)
    calls = rig.script.take()
    assert "finish pending" in calls
    assert {"prepare", "check"}.isdisjoint(calls)


@pytest.mark.parametrize("target", [TRAIN, FORWARD, IDLE])
def test_communicators_are_suspended_during_inference(suspending: Rig, target: State):
    report = suspending.manager.enter(INFER)
    assert communicator_calls(suspending)[:3] == ["prepare", "suspend", "allocate first"]
    assert report.bytes_suspended == 1000
    suspending.manager.enter(target)
    assert communicator_calls(suspending)[:2] == ["release", "resume"]


@pytest.mark.parametrize("call", ["suspend", "allocate first", "commit second", "wake"])
def test_a_failed_switch_resumes_communicators(suspending: Rig, call: str):
    suspending.script.arm(call, OSError("no memory"))
    with pytest.raises(ReshardError, match="no memory"):
        suspending.manager.enter(INFER)
    suspending.assert_is(TRAIN)
    assert not suspending.manager._communicators.are_suspended


def test_the_next_switch_after_an_interrupt_resumes_communicators_first(suspending: Rig):
    suspending.script.arm("allocate first", KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        suspending.manager.enter(INFER)
    suspending.script.take()
    suspending.manager.enter(INFER)
    calls = communicator_calls(suspending)
    assert calls.index("resume") < calls.index("prepare") < calls.index("suspend")


@pytest.mark.parametrize(("is_alone", "resumes"), [(False, True), (True, False)])
def test_a_failed_rank_does_not_wait_for_communicators(
    suspending: Rig, is_alone: bool, resumes: bool
):
    suspending.manager.enter(INFER)
    suspending.script.take()
    if is_alone:
        suspending.job.agreement.leave(ValueError("a reward"))
    suspending.manager.close()
    assert communicator_calls(suspending) == ["resume"] * resumes


def test_order_of_a_switch_and_back(rig: Rig):
    rig.manager._communicators = ScriptedCommunicators(rig)  # not suspended unless configured
    rig.manager.enter(INFER)
    calls = rig.script.take()
    assert sorted(calls[:2]) == ["offload grad", "offload optimizer"]
    assert [call for call in calls[2:] if call != "buffers"] == [
        *("prepare", "check", "allocate first", "commit first", "allocate second", "commit second"),
        *("offload param", "wake", "reset"),
    ]
    rig.manager.enter(TRAIN)
    calls = rig.script.take()
    assert calls[0] == "release"
    assert sorted(calls[1:]) == ["onload grad", "onload optimizer", "onload param"]


def test_the_trainer_is_probed_with_its_parameters_on_the_device(rig: Rig):
    rig.manager.enter(IDLE)
    check = rig.manager._check = mock.Mock(is_due=True, is_pending=False)
    check.must_repeat.return_value = False
    check.probe_trainer.side_effect = partial(rig.script.reach, "probe")
    rig.script.take()
    rig.enter(INFER)
    assert rig.script.take()[:2] == ["onload param", "probe"]
    check.must_repeat.assert_called_with(has_trained=False, will_fill=True)


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="tests/software_gpu/test_mutants.py has it with real streams"
)
def test_weights_are_read_after_the_device_is_synchronised(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
):
    """Another process does not wait for kernels queued here, so the device is synchronised."""
    device = torch.device("cuda", 1)
    rig.manager.job = dataclasses.replace(rig.job, device=device)
    streams = {
        device: SimpleNamespace(synchronize=partial(rig.script.reach, f"synchronize {device}"))
    }
    monkeypatch.setattr(torch.cuda, "current_stream", streams.__getitem__)
    rig.manager.enter(INFER)
    calls = rig.script.take()
    assert calls[calls.index("prepare") :][:3] == ["prepare", "synchronize cuda:1", "check"]


@pytest.mark.parametrize("state", NEEDED)
def test_entering_the_current_state_is_not_a_switch(rig: Rig, state: State):
    rig.manager.enter(state)
    report = rig.manager.last_report
    called = []
    rig.manager.on_reshard_start(lambda *states: called.append(states))
    rig.manager.on_reshard_end(called.append)
    rig.script.take()
    assert rig.manager.enter(state) is None
    with rig.manager.entered(state):
        pass
    assert rig.script.take() == []
    assert called == []
    assert rig.manager.last_report is report
    rig.assert_is(state)


# Contexts.


@pytest.mark.parametrize(
    ("outer", "inner"),
    [pair for pair in itertools.permutations(NEEDED, 2) if pair[1] is not State.IDLE],
)
def test_a_nested_context_of_another_state_is_refused(rig: Rig, outer: State, inner: State):
    with rig.manager.entered(outer):
        rig.script.take()
        with (
            refused(StateError, "nested-contexts", inner.context, outer.context),
            rig.manager.entered(inner),
        ):
            raise AssertionError("inside")
        assert rig.script.take() == []
        rig.assert_is(outer)
        with rig.manager.entered(outer), rig.manager.entered(outer):
            rig.assert_is(outer)
        with pytest.raises(StateError), rig.manager.entered(inner):  # the outer one has not ended
            raise AssertionError("inside")
    with rig.manager.entered(inner):
        rig.assert_is(inner)


@pytest.mark.parametrize("outer", [TRAIN, State.FORWARD, INFER])
def test_an_idle_context_inside_another_frees_the_device(rig: Rig, outer: State):
    with rig.manager.entered(outer):
        with rig.manager.entered(State.IDLE):
            rig.assert_is(State.IDLE)
            with (
                refused(StateError, "nested-contexts", outer.context),
                rig.manager.entered(outer),
            ):
                raise AssertionError("inside")
        rig.assert_is(outer)
        with pytest.raises(ZeroDivisionError), rig.manager.entered(State.IDLE):
            raise ZeroDivisionError
        rig.assert_is(State.IDLE)  # ranks may have diverged, so only the next context switches
    with rig.manager.entered(State.IDLE):
        rig.assert_is(State.IDLE)
    rig.assert_is(State.IDLE)


def test_a_block_that_ends_without_an_error_leaves_no_job():
    owner = mock.Mock(**{"job.is_inherited": False})
    HybridEngine.__exit__(owner, None, None, None)
    owner.job.agreement.leave.assert_not_called()


# Hooks.


def test_hooks_are_called_in_order_with_their_arguments(rig: Rig):
    events: list[tuple[object, ...]] = []

    @rig.manager.on_reshard_start
    def first(before: State, target: State) -> None:
        events.append(("first", before, target, rig.manager.state, len(rig.script.calls)))

    @rig.manager.on_reshard_start
    def second(before: State, target: State) -> None:
        events.append(("second", before, target))

    @rig.manager.on_reshard_end
    def third(report: ReshardReport) -> None:
        events.append(("third", report, rig.manager.state, rig.manager.last_report))

    @rig.manager.on_reshard_end
    def fourth(report: ReshardReport) -> None:
        events.append(("fourth", report))

    assert all(callable(hook) for hook in (first, second, third, fourth))
    report = rig.manager.enter(INFER)
    assert events == [
        ("first", TRAIN, INFER, TRAIN, 0),
        ("second", TRAIN, INFER),
        ("third", report, INFER, report),
        ("fourth", report),
    ]
    first(IDLE, TRAIN)
    assert events[-1][:3] == ("first", IDLE, TRAIN)  # a decorated function can still be called


def test_a_failed_end_hook_does_not_undo_the_switch(rig: Rig):
    @rig.manager.on_reshard_end
    def fail_once(_report: ReshardReport) -> None:
        rig.script.reach("hook")

    rig.script.arm("hook", OSError("disk full"))
    with pytest.raises(ReshardError, match=r"end hooks.*OSError: disk full"):
        rig.manager.enter(INFER)
    rig.assert_is(INFER)
    assert rig.manager.last_report.direction == "train->infer"
    assert rig.manager.enter(INFER) is None
    rig.enter(TRAIN)


# Non-finite values.


def test_values_are_checked_only_with_check_nan(job: None):
    unchecked = Rig(check_nan=False)
    unchecked.script.arm("check", WeightError(["first: 1 NaN"]))
    unchecked.enter(INFER)
    assert "check" not in unchecked.script.calls


@pytest.mark.parametrize(("largest", "num_infinite"), [(65519, 0), (65520, 1), (-70000, 1)])
def test_a_cast_that_overflows_is_refused(job: None, largest: float, num_infinite: int):
    """float16 rounds 65519 to its largest number, and 65520 to infinity."""
    rig = Rig(build=False)
    rig.inference.dtype = "float16"
    rig.build()
    rig.training.param.zero_()
    rig.training.param[7] = largest
    rig.training._remember()
    if num_infinite:
        with pytest.raises(WeightError) as caught:
            rig.manager.enter(INFER)
        (finding,) = caught.value.findings
        assert finding.startswith("first on rank 0: 1 of 262144 elements are too large for float16")
        rig.assert_is(TRAIN)
        rig.manager.config = rig.config.model_copy(update={"check_nan": False})
    rig.manager.enter(INFER)
    assert int(rig.inference.live["first"].isinf().sum()) == num_infinite


def test_untrained_weights_are_copied_once(rig: Rig):
    """A switch without an optimizer step does not copy parameters to the host again."""
    rig.fill()
    for state in (FORWARD, INFER, IDLE, FORWARD, INFER):
        copied = rig.offloader.copies.nbytes
        rig.enter(state)
        assert rig.offloader.copies.nbytes == copied, state
    rig.manager.enter(TRAIN)
    rig.fill()
    assert rig.offloader.copies.nbytes > copied
    rig.manager.enter(TRAIN)
    rig.assert_is(TRAIN)


@pytest.mark.parametrize(
    ("make_hook", "expected"),
    [
        (lambda seen: lambda: seen.append(()), ()),
        (lambda seen: lambda report: seen.append((report,)), ("before",)),
        (
            lambda seen: lambda report=None, *, verbose=False: seen.append((report, verbose)),
            ("before", False),
        ),
        (lambda seen: lambda *arguments: seen.append(arguments), ("before", "after")),
    ],
)
@pytest.mark.parametrize("wrap", [lambda hook: hook, partial], ids=["function", "partial"])
def test_a_hook_gets_the_arguments_it_accepts(
    make_hook: Callable[..., Callable[..., None]],
    expected: tuple[object, ...],
    wrap: Callable[..., Callable[..., None]],
) -> None:
    seen: list[tuple[object, ...]] = []
    call_hooks([wrap(make_hook(seen))], "before", "after")
    assert seen == [expected]


def test_a_type_error_of_a_hook_is_not_hidden() -> None:
    def broken() -> None:
        raise TypeError("takes 0 positional arguments but 1 was given")

    with pytest.raises(TypeError, match="takes 0"):
        call_hooks([broken], "report")
