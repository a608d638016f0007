"""Incremental switches with fakes of both engines on one rank."""

from __future__ import annotations

import ctypes
import math
from unittest import mock

import pytest
import torch

from hybrid_engine.errors import OffloadError, ReshardError
from hybrid_engine.switch.report import ReshardReport
from hybrid_engine.switch.states import State
from tests.hybrid_engine.switch.fakes import FORWARD, IDLE, INFER, SHAPES, TRAIN, Rig

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
    first = rig.fill()
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
    rig.enter(INFER)
    assert sent_groups(rig) == set()
    switch(rig)
    assert sent_groups(rig) == BOTH


def test_unchanged_weights_are_not_onloaded_from_idle(job: None) -> None:
    rig = rig_with(2)
    rig.manager.enter(INFER)
    rig.manager.enter(IDLE)
    rig.assert_is(IDLE, kept=BOTH)
    rig.script.take()
    rig.enter(INFER)
    assert {"onload param", "prepare", "check"}.isdisjoint(rig.script.take())
    rig.manager.enter(TRAIN)
    rig.assert_is(TRAIN, kept=BOTH)


@pytest.mark.parametrize("between", [IDLE, FORWARD])
def test_weights_trained_before_another_state_are_sent(job: None, between: State) -> None:
    rig = rig_with(2)
    rig.manager.enter(INFER)
    rig.train()
    rig.manager.enter(between)
    rig.enter(INFER)


def test_weights_that_the_engine_has_voided_are_sent(job: None) -> None:
    rig = rig_with(2)
    rig.manager.enter(INFER)
    rig.manager.enter(TRAIN)
    rig.inference.in_force.discard("second")
    rig.script.take()
    rig.manager.enter(INFER)
    assert sent_groups(rig) == {"second"}


@pytest.mark.parametrize(("megabytes", "kept"), [(0, set()), (1, {"first"}), (2, BOTH)])
def test_kept_weights_stay_within_the_bound(job: None, megabytes: int, kept: set[str]) -> None:
    rig = rig_with(megabytes)
    rig.manager.enter(INFER)
    report = rig.manager.enter(TRAIN)
    rig.assert_is(TRAIN, kept=kept)
    assert (
        report.bytes_kept == rig.inference.resident_nbytes() == sum(NBYTES[name] for name in kept)
    )
    assert report.bytes_kept <= megabytes * 1024**2
    rig.script.take()
    rig.enter(INFER)
    assert sent_groups(rig) == BOTH - kept


def test_training_memory_of_skipped_buckets_leaves_before_the_others(job: None) -> None:
    rig = rig_with(1, "first")
    rig.manager.enter(INFER)
    with mock.patch.object(rig.offloader, "offload_parts", return_value=0) as offload_parts:
        switch(rig)
    (part,) = offload_parts.call_args_list[0].args[1]
    assert (part.start, part.stop) == (0, math.prod(SHAPES["first"])), "the first tensor stays"


def test_stale_weights_are_released_before_new_ones_are_allocated(job: None) -> None:
    rig = rig_with(2)
    rig.manager.enter(INFER)
    rig.train()
    assert rig.manager.has_written
    rig.script.take()
    rig.manager.enter(INFER)
    calls = rig.script.take()
    assert calls.index("release") < calls.index("allocate first")


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
    rig.train()
    rig.script.arm(call, OSError("odd") if call != "offload param" else OffloadError("stuck"))
    with pytest.raises((ReshardError, OffloadError)):
        rig.manager.enter(INFER)
    rig.assert_is(TRAIN)
    rig.script.take()
    rig.enter(INFER)
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
    rig.enter(INFER)
    assert sent_groups(rig) == BOTH
