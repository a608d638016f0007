"""The switch between training and inference with fakes of its ports: states, contexts, hooks, NaN."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from hybrid_engine.errors import ReshardError, StateError, WeightError
from hybrid_engine.memory.offload_items import KINDS
from hybrid_engine.switch.report import ReshardReport
from hybrid_engine.switch.states import State, call_hook
from tests.harness.errors import has_code
from tests.hybrid_engine.switch.fakes import FORWARD, IDLE, INFER, NEEDED, TRAIN, TRAINING_NBYTES, Rig

# States.


@pytest.fixture
def unstarted(job: None) -> Rig:
    rig = Rig(build=False)
    rig.inference.allocate(["first"])  # as an engine that comes with weights of its own
    rig.offloader.offload()  # as a worker that made room for it
    rig.script.take()
    rig.build(start=False)
    return rig


def moves(rig: Rig) -> list[str]:
    return [call for call in rig.script.take() if call.startswith(("release", "onload"))]


def test_building_moves_nothing_and_starting_does_once(unstarted: Rig):
    assert moves(unstarted) == []
    assert unstarted.resident() == set()
    with pytest.raises(StateError):
        unstarted.training.guard(["param"])
    unstarted.manager.start()
    unstarted.assert_is(TRAIN)
    assert unstarted.manager.last_report is None
    assert len(moves(unstarted)) == 4
    unstarted.manager.start()
    assert moves(unstarted) == []


@pytest.mark.parametrize("target", [INFER, TRAIN, None])
def test_the_first_switch_starts(unstarted: Rig, target: State | None):
    if target is None:
        unstarted.manager.require(TRAIN)
    else:
        unstarted.manager.enter(target)
    unstarted.assert_is(target or TRAIN)


@pytest.mark.parametrize("call", ["release", "onload optimizer"])
def test_a_start_that_fails_can_be_made_again_or_the_manager_closed(unstarted: Rig, call: str):
    unstarted.script.arm(call, OSError("no memory"))
    with pytest.raises(ReshardError, match="no memory"):
        unstarted.manager.start()
    assert unstarted.manager.state is State.INTERRUPTED
    unstarted.manager.start()
    unstarted.assert_is(TRAIN)
    unstarted.manager.close()
    with pytest.raises(StateError, check=has_code("switch-is-closed")):
        unstarted.manager.start()


def test_before_the_start_training_state_may_be_used_as_long_as_all_is_there(job: None):
    rig = Rig(build=False)
    rig.build(start=False)
    rig.training.guard(KINDS)
    rig.offloader.offload(["grad"])
    with pytest.raises(StateError):
        rig.training.guard(KINDS)


ALL_SWITCHES = [TRAIN, FORWARD, TRAIN, INFER, TRAIN, IDLE, FORWARD, INFER, FORWARD, IDLE, INFER, IDLE, TRAIN]
OFFLOADS = [dict(zip(KINDS, flags, strict=True)) for flags in itertools.product([True, False], repeat=3)]


def test_a_closed_one_switches_no_more(rig: Rig):
    rig.manager.close()
    rig.manager.close()
    for call in (lambda: rig.manager.enter(INFER), lambda: rig.manager.enter(TRAIN), rig.manager.prefetch):
        with pytest.raises(StateError, check=has_code("switch-is-closed")):
            call()


def test_the_walk_takes_every_switch_once():
    assert sorted(itertools.pairwise(ALL_SWITCHES)) == sorted(itertools.permutations(NEEDED, 2))


@pytest.mark.parametrize("elastic", [True, False], ids=["elastic", "plain"])
@pytest.mark.parametrize("offloads", OFFLOADS, ids=lambda flags: "+".join(k for k in flags if flags[k]) or "none")
def test_every_switch(job: None, offloads: dict[str, bool], elastic: bool):
    rig = Rig(elastic=elastic, **{f"offload_train_{kind}": flag for kind, flag in offloads.items()})
    rig.training.step()
    for before, target in itertools.pairwise(ALL_SWITCHES):
        report = rig.manager.enter(target)
        rig.assert_is(target)
        assert (report.direction, report.version) == (f"{before}->{target}", rig.training.version)
        if target is TRAIN:
            left = 0 if offloads["grad"] else rig.training.version
            assert torch.equal(rig.training.grad, torch.full_like(rig.training.grad, left))
            rig.training.step()


class ScriptedCommunicators:
    """In place of the trainer's, which only NCCL has (tests/software_gpu/test_communicators.py)."""

    def __init__(self, rig: Rig) -> None:
        self.script, self.are_suspended = rig.script, False

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


def of_communicators(rig: Rig) -> list[str]:
    return [call for call in rig.script.take() if call in ("prepare", "suspend", "resume", "release", "allocate first")]


@pytest.mark.parametrize("target", [TRAIN, FORWARD, IDLE])
def test_communicators_are_suspended_from_the_last_use_to_the_way_back(suspending: Rig, target: State):
    report = suspending.manager.enter(INFER)
    assert of_communicators(suspending)[:3] == ["prepare", "suspend", "allocate first"]
    assert report.bytes_suspended == 1000
    suspending.manager.enter(target)
    assert of_communicators(suspending)[:2] == ["release", "resume"]


@pytest.mark.parametrize("call", ["suspend", "allocate first", "commit second", "wake"])
def test_a_switch_that_fails_leaves_no_communicator_suspended(suspending: Rig, call: str):
    suspending.script.arm(call, OSError("no memory"))
    with pytest.raises(ReshardError, match="no memory"):
        suspending.manager.enter(INFER)
    suspending.assert_is(TRAIN)
    assert not suspending.manager._communicators.are_suspended


def test_after_an_interrupt_the_next_switch_resumes_before_anything_uses_them(suspending: Rig):
    suspending.script.arm("allocate first", KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        suspending.manager.enter(INFER)
    suspending.script.take()
    suspending.manager.enter(INFER)
    calls = of_communicators(suspending)
    assert calls.index("resume") < calls.index("prepare") < calls.index("suspend")


@pytest.mark.parametrize(("is_alone", "resumes"), [(False, True), (True, False)])
def test_a_rank_that_goes_by_an_error_waits_for_nobody(suspending: Rig, is_alone: bool, resumes: bool):
    suspending.manager.enter(INFER)
    suspending.script.take()
    if is_alone:
        suspending.job.agreement.leave(ValueError("a reward"))
    suspending.manager.close()
    assert of_communicators(suspending) == ["resume"] * resumes


def test_order_of_a_switch_and_back(rig: Rig):
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


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/software_gpu/test_mutants.py has it with real streams")
def test_weights_are_read_once_the_device_has_finished_them(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    """Another process that reads them does not wait for what this one has queued; CUDA's call is recorded."""
    device = torch.device("cuda", 1)
    rig.manager.job = dataclasses.replace(rig.job, device=device)
    streams = {device: SimpleNamespace(synchronize=partial(rig.script.reach, f"synchronize {device}"))}
    monkeypatch.setattr(torch.cuda, "current_stream", streams.__getitem__)
    rig.manager.enter(INFER)
    calls = rig.script.take()
    assert calls[calls.index("prepare") :][:3] == ["prepare", "synchronize cuda:1", "check"]


@pytest.mark.parametrize("state", NEEDED)
def test_the_same_state_again_is_no_switch(rig: Rig, state: State):
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
    ("outer", "inner"), [pair for pair in itertools.permutations(NEEDED, 2) if pair[1] is not State.IDLE]
)
def test_a_context_inside_one_of_another_state(rig: Rig, outer: State, inner: State):
    with rig.manager.entered(outer):
        rig.script.take()
        refused = has_code("nested-contexts", inner.context, outer.context)
        with pytest.raises(StateError, check=refused), rig.manager.entered(inner):
            raise AssertionError("inside")
        assert rig.script.take() == []
        rig.assert_is(outer)
        with rig.manager.entered(outer), rig.manager.entered(outer):
            rig.assert_is(outer)
        with pytest.raises(StateError), rig.manager.entered(inner):  # the inner ones did not end the outer one
            raise AssertionError("inside")
    with rig.manager.entered(inner):
        rig.assert_is(inner)


@pytest.mark.parametrize("outer", [TRAIN, State.FORWARD, INFER])
def test_the_device_is_free_inside_any_context_and_its_state_is_back_afterwards(rig: Rig, outer: State):
    with rig.manager.entered(outer):
        with rig.manager.entered(State.IDLE):
            rig.assert_is(State.IDLE)
            with (
                pytest.raises(StateError, check=has_code("nested-contexts", outer.context)),
                rig.manager.entered(outer),
            ):
                raise AssertionError("inside")
        rig.assert_is(outer)
        with pytest.raises(ZeroDivisionError), rig.manager.entered(State.IDLE):
            raise ZeroDivisionError
        rig.assert_is(State.IDLE)  # the ranks may have parted: the next context switches
    with rig.manager.entered(State.IDLE):
        rig.assert_is(State.IDLE)
    rig.assert_is(State.IDLE)


# Hooks.


def test_hooks_are_called_in_order_with_what_they_ask_for(rig: Rig):
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
    assert events[-1][:3] == ("first", IDLE, TRAIN)  # the decorated functions are still what they were


def test_a_start_hook_that_raises_leaves_the_state(rig: Rig):
    ended: list[ReshardReport] = []
    rig.manager.on_reshard_end(ended.append)

    @rig.manager.on_reshard_start
    def refuse_once(_before: State, _target: State) -> None:
        rig.script.reach("hook")

    rig.script.arm("hook", OSError("no licence"))
    with pytest.raises(ReshardError, match=r"start hooks.*OSError: no licence"):
        rig.manager.enter(INFER)
    assert rig.script.take() == ["hook"]
    assert ended == []
    assert rig.manager.last_report is None
    rig.assert_is(TRAIN)
    rig.manager.enter(INFER)
    rig.assert_is(INFER)


def test_when_only_an_end_hook_raises_the_switch_stands(rig: Rig):
    @rig.manager.on_reshard_end
    def fail_once(_report: ReshardReport) -> None:
        rig.script.reach("hook")

    rig.script.arm("hook", OSError("disk full"))
    with pytest.raises(ReshardError, match=r"end hooks.*OSError: disk full"):
        rig.manager.enter(INFER)
    rig.assert_is(INFER)
    assert rig.manager.last_report.direction == "train->infer"
    assert rig.manager.enter(INFER) is None
    rig.manager.enter(TRAIN)
    rig.assert_is(TRAIN)


# NaN.


def test_values_are_checked_only_when_asked(job: None):
    unchecked = Rig(check_nan=False)
    unchecked.script.arm("check", WeightError(["first: 1 NaN"]))
    unchecked.manager.enter(INFER)
    unchecked.assert_is(INFER)
    assert "check" not in unchecked.script.calls

    checked = Rig(check_nan=True)
    checked.script.arm("check", WeightError(["first: 1 NaN"]))
    with pytest.raises(WeightError, match="first: 1 NaN"):
        checked.manager.enter(INFER)
    checked.assert_is(TRAIN)
    assert not any(call.startswith("allocate") for call in checked.script.calls)
    checked.script.take()
    checked.manager.enter(FORWARD)
    assert "check" not in checked.script.calls  # only what goes to inference is looked at


@pytest.mark.parametrize(("largest", "num_infinite"), [(65519, 0), (65520, 1), (-70000, 1)])
def test_a_cast_that_makes_infinities_is_refused(job: None, largest: float, num_infinite: int):
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


def test_prefetch_is_there_when_training_comes(rig: Rig):
    with pytest.raises(StateError, check=has_code("wrong-state", "train")):
        rig.manager.prefetch()
    rig.training.step()
    rig.manager.enter(INFER)
    rig.manager.prefetch(["optimizer"])
    assert not rig.offloader.is_offloaded("optimizer")
    assert rig.offloader.is_offloaded("param")
    report = rig.manager.enter(TRAIN)
    assert report.bytes_onloaded == sum(TRAINING_NBYTES.values()), "what was prefetched counts in the next report"
    rig.assert_is(TRAIN)
    assert rig.manager.enter(IDLE).bytes_onloaded == 0


def test_weights_that_are_not_trained_are_copied_once(rig: Rig):
    """From the arena to the device and back, without a step between: it has them already."""
    rig.training.step()
    rig.manager.enter(INFER)
    for state in (FORWARD, INFER, IDLE, FORWARD, INFER):
        copied = rig.offloader.copied_nbytes
        rig.manager.enter(state)
        rig.assert_is(state)
        assert rig.offloader.copied_nbytes == copied, state
    rig.manager.enter(TRAIN)
    rig.training.step()
    rig.manager.enter(INFER)
    assert rig.offloader.copied_nbytes > copied
    rig.manager.enter(TRAIN)
    rig.training.assert_unchanged()


class Recorder:
    def __init__(self) -> None:
        self.seen: list[tuple[object, ...]] = []

    def nothing(self) -> None:
        self.seen.append(())

    def one(self, report: object) -> None:
        self.seen.append((report,))

    def defaulted(self, report: object = None, *, verbose: bool = False) -> None:
        self.seen.append((report, verbose))

    def everything(self, *arguments: object) -> None:
        self.seen.append(arguments)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("nothing", ()), ("one", ("before",)), ("defaulted", ("before", False)), ("everything", ("before", "after"))],
)
@pytest.mark.parametrize("wrap", [lambda hook: hook, partial], ids=["method", "partial"])
def test_a_hook_gets_what_it_takes(
    name: str, expected: tuple[object, ...], wrap: Callable[..., Callable[..., None]]
) -> None:
    recorder = Recorder()
    call_hook(wrap(getattr(recorder, name)), "before", "after")
    assert recorder.seen == [expected]


def test_its_own_errors_are_not_taken_for_wrong_arguments() -> None:
    def broken() -> None:
        raise TypeError("takes 0 positional arguments but 1 was given")

    with pytest.raises(TypeError, match="takes 0"):
        call_hook(broken, "report")
