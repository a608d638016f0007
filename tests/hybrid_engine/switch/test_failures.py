"""Failures during a switch, with fakes of both engines on one rank: states and recovery."""

from __future__ import annotations

import logging

import pytest
import torch

from hybrid_engine.errors import (
    LostRankError,
    OffloadError,
    RemoteError,
    ReshardError,
    StateError,
    WeightError,
)
from hybrid_engine.memory.offload_items import KINDS
from hybrid_engine.switch.sharding_manager import State
from tests.harness.errors import refused
from tests.hybrid_engine.switch.fakes import FORWARD, IDLE, INFER, TRAIN, Rig

# Failing call -> error of the fake, raised error, its message.
FAILURES = {
    "prepare": (OSError("disk on fire"), ReshardError, "prepare.*OSError: disk on fire"),
    "check": (WeightError(["first: 1 NaN"]), WeightError, "first: 1 NaN"),
    "allocate first": (
        MemoryError("full"),
        ReshardError,
        "bucket 0, phase allocate, groups first: MemoryError: full",
    ),
    "allocate second": (
        MemoryError("full"),
        ReshardError,
        "bucket 1, phase allocate, groups second: MemoryError",
    ),
    "buffers": (KeyError(), ReshardError, "bucket 0, phase release.*KeyError"),
    "commit first": (
        OSError("odd"),
        ReshardError,
        "bucket 0, phase commit, groups first: OSError: odd",
    ),
    "commit second": (
        OSError("odd"),
        ReshardError,
        "bucket 1, phase commit, groups second: OSError: odd",
    ),
    "offload grad": (OffloadError("stuck"), OffloadError, "stuck"),
    "offload param": (OffloadError("stuck"), OffloadError, "stuck"),
    "onload param": (OffloadError("full"), OffloadError, "full"),
    "wake": (MemoryError("full"), ReshardError, "resume.*MemoryError: full"),
    "reset": (OSError("odd"), ReshardError, "resume.*OSError: odd"),
}
NOT_FROM = {
    TRAIN: {"onload param"},
    FORWARD: {"onload param", "offload grad"},
    IDLE: {"offload grad"},
}
FAILURE_CASES = [
    (before, call) for before in NOT_FROM for call in FAILURES if call not in NOT_FROM[before]
]


@pytest.mark.parametrize("elastic", [True, False], ids=["elastic", "plain"])
@pytest.mark.parametrize(("before", "call"), FAILURE_CASES)
def test_a_failed_switch_to_infer_restores_the_previous_state(
    job: None, before: State, call: str, elastic: bool, caplog: pytest.LogCaptureFixture
):
    rig = Rig(elastic=elastic)
    rig.training.step()
    rig.manager.enter(before)
    report = rig.manager.last_report
    error, kind, message = FAILURES[call]
    rig.script.arm(call, error)
    with (
        caplog.at_level(logging.ERROR, "hybrid_engine"),
        pytest.raises(kind, match=message) as failure,
    ):
        rig.manager.enter(INFER)
    assert not isinstance(failure.value, RemoteError)
    assert call in rig.script.calls
    rig.assert_is(before)
    if before is TRAIN and call != "offload grad":  # it fails before gradients are dropped
        assert not rig.training.grad.any()
    assert rig.manager.last_report is report
    assert f"{before}->infer failed; state is {before}" in caplog.text
    for target in (INFER, TRAIN, INFER):
        rig.enter(target)


@pytest.mark.parametrize("call", ["allocate second", "reset"])
def test_a_failure_without_offload_keeps_gradients(job: None, call: str):
    rig = Rig(**{f"offload_train_{kind}": False for kind in KINDS})
    rig.training.step()
    rig.script.arm(call, OSError("odd"))
    with pytest.raises(ReshardError, match="OSError: odd"):
        rig.manager.enter(INFER)
    rig.assert_is(TRAIN)
    assert bool((rig.training.grad == 1).all())


@pytest.mark.parametrize(
    ("target", "call"),
    [
        *((TRAIN, "release"), (TRAIN, "onload param"), (TRAIN, "onload optimizer")),
        *((FORWARD, "release"), (FORWARD, "onload param"), (IDLE, "release")),
    ],
)
def test_a_failure_after_leaving_infer_ends_idle(rig: Rig, target: State, call: str):
    model = torch.nn.ParameterList([rig.training.param])
    rig.training.guard.reach([model])
    rig.fill()
    rig.script.arm(call, OffloadError("full"))
    with pytest.raises(OffloadError, match="full"):
        rig.manager.enter(target)
    rig.assert_is(IDLE)
    assert rig.script.calls[-1] == "give back", "another model may use the device"
    with refused(StateError, "wrong-state"):
        model[0].norm()
    rig.enter(target)
    rig.enter(INFER)


@pytest.mark.parametrize("target", [FORWARD, IDLE])
def test_a_failed_switch_between_training_states_restores_the_previous_one(rig: Rig, target: State):
    rig.training.step()
    rig.script.arm("offload optimizer", OffloadError("stuck"))
    with pytest.raises(OffloadError, match="stuck"):
        rig.manager.enter(target)
    rig.assert_is(TRAIN)
    rig.manager.enter(target)
    rig.script.arm("onload optimizer", OffloadError("full"))
    with pytest.raises(OffloadError, match="full"):
        rig.manager.enter(TRAIN)
    rig.assert_is(target)


def test_a_rank_lost_on_the_way_back_ends_the_job(rig: Rig):
    rig.script.arm("commit second", OSError("disk on fire"))
    rig.script.arm("release", LostRankError("gone"))
    with refused(LostRankError, "rank-lost-while-restoring", "disk on fire", "gone"):
        rig.manager.enter(INFER)


RESTORE_FAILURES = {
    "onload param": ("reset", "grad, optimizer"),
    "onload optimizer": ("reset", "optimizer"),
    "release": ("commit second", "grad, optimizer"),
}


@pytest.mark.parametrize("elastic", [True, False], ids=["elastic", "plain"])
@pytest.mark.parametrize("target", [TRAIN, FORWARD, INFER])
@pytest.mark.parametrize("restoring_call", RESTORE_FAILURES)
def test_after_a_failed_restore_the_next_switch_recovers(
    job: None, restoring_call: str, target: State, elastic: bool
):
    rig = Rig(elastic=elastic)
    rig.training.step()
    call, offloaded = RESTORE_FAILURES[restoring_call]
    rig.script.arm(call, OSError("disk on fire"))
    rig.script.arm(restoring_call, OffloadError("no memory left"))
    with refused(
        ReshardError, "restore-failed", "train->infer", "disk on fire", "no memory left"
    ) as failure:
        rig.manager.enter(INFER)
    assert offloaded in str(failure.value)
    assert "the state is interrupted" in str(failure.value)
    assert rig.manager.state is State.INTERRUPTED
    rig.enter(target)
    rig.enter(TRAIN)
