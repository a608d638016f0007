"""Only what changed, with fakes of both engines on one rank: what is sent, what stays, and what failures leave."""

from __future__ import annotations

import ctypes
import itertools

import pytest
import torch

from hybrid_engine.errors import OffloadError, ReshardError
from hybrid_engine.switch.report import ReshardReport
from hybrid_engine.switch.states import State
from tests.hybrid_engine.switch.fakes import FORWARD, IDLE, INFER, NEEDED, SHAPES, TRAIN, Rig

NBYTES = {name: 4 * rows * columns for name, (rows, columns) in SHAPES.items()}
BOTH = set(SHAPES)


def rig_with(megabytes: int = 1, *frozen: str, **settings: object) -> Rig:
    """1 MiB is what "first" takes; "second" takes an eighth of it."""
    rig = Rig(build=False, elastic=True, incremental="auto", incremental_mb=megabytes, **settings)
    rig.training.frozen = frozen
    rig.build()
    return rig


def sent(rig: Rig) -> set[str]:
    """Groups that were filled since the last time."""
    return {call.removeprefix("commit ") for call in rig.script.take() if call.startswith("commit")}


def switch(rig: Rig, *, step: bool = True) -> ReshardReport:
    """From INFER to TRAIN and back, with or without an optimizer step."""
    rig.manager.enter(TRAIN)
    if step:
        rig.training.step()
    rig.script.take()
    report = rig.manager.enter(INFER)
    assert report is not None
    rig.assert_is(INFER)
    return report


@pytest.mark.parametrize("frozen", SHAPES)
def test_what_is_frozen_is_sent_once(job: None, frozen: str) -> None:
    rig = rig_with(1, frozen)
    rig.training.step()
    first = rig.manager.enter(INFER)
    assert sent(rig) == BOTH
    (trained,) = BOTH - {frozen}
    for _ in range(3):
        report = switch(rig)
        assert sent(rig) == {trained}
        assert (report.bytes_own, report.bytes_skipped) == (NBYTES[trained], NBYTES[frozen])
    assert (first.bytes_own, first.bytes_skipped, first.bytes_kept) == (sum(NBYTES.values()), 0, 0)


def test_without_a_step_nothing_is_sent_within_the_bound(job: None) -> None:
    rig = rig_with(2)
    rig.manager.enter(INFER)
    report = switch(rig, step=False)
    assert sent(rig) == set()
    assert (report.bytes_own, report.bytes_skipped) == (0, sum(NBYTES.values()))
    assert {"compare", "fill"} <= report.seconds_by_phase.keys()
    rig.manager.enter(FORWARD)
    rig.assert_is(FORWARD, kept=BOTH)
    rig.manager.enter(INFER)
    rig.assert_is(INFER)
    assert sent(rig) == set()
    switch(rig)
    assert sent(rig) == BOTH


def test_from_idle_unchanged_weights_do_not_even_come_back_to_be_read(job: None) -> None:
    rig = rig_with(2)
    rig.manager.enter(INFER)
    rig.manager.enter(IDLE)
    rig.assert_is(IDLE, kept=BOTH)
    rig.script.take()
    rig.manager.enter(INFER)
    rig.assert_is(INFER)
    assert {"onload param", "prepare", "check"}.isdisjoint(rig.script.take())
    rig.manager.enter(TRAIN)
    rig.assert_is(TRAIN, kept=BOTH)


@pytest.mark.parametrize(("megabytes", "kept"), [(0, set()), (1, {"first"}), (2, BOTH)])
def test_no_more_stays_than_the_bound_allows(job: None, megabytes: int, kept: set[str]) -> None:
    rig = rig_with(megabytes)
    rig.manager.enter(INFER)
    report = rig.manager.enter(TRAIN)
    rig.assert_is(TRAIN, kept=kept)
    assert report.bytes_kept == rig.inference.resident_nbytes() == sum(NBYTES[name] for name in kept)
    assert report.bytes_kept <= megabytes * 1024**2
    rig.script.take()
    rig.manager.enter(INFER)
    rig.assert_is(INFER)
    assert sent(rig) == BOTH - kept


def test_what_is_frozen_stays_before_what_is_trained(job: None) -> None:
    rig = rig_with(1, "second")
    rig.manager.enter(INFER)
    rig.manager.enter(TRAIN)
    rig.assert_is(TRAIN, kept={"second"})  # both do not fit


def test_what_is_trained_after_all_gives_way_to_what_is_not(job: None) -> None:
    rig = rig_with(1)
    rig.training.frozen = ("second",)  # since the set-up
    rig.manager.enter(INFER)
    switch(rig)
    assert sent(rig) == BOTH
    rig.manager.enter(TRAIN)
    rig.assert_is(TRAIN, kept={"second"})
    rig.training.frozen = ()
    rig.training.step()
    rig.script.take()
    rig.manager.enter(INFER)
    rig.assert_is(INFER)
    assert sent(rig) == BOTH


def test_stale_weights_are_released_before_new_ones_come(job: None) -> None:
    rig = rig_with(2)
    rig.manager.enter(INFER)
    rig.manager.enter(TRAIN)
    rig.training.step()
    rig.script.take()
    rig.manager.enter(INFER)
    calls = rig.script.take()
    assert calls.index("release") < calls.index("allocate first")


def test_training_memory_of_what_is_skipped_leaves_all_the_same(job: None) -> None:
    rig = rig_with(2, "first")
    rig.manager.enter(INFER)
    report = switch(rig)
    assert report.bytes_offloaded == sum(item.tensor.nbytes for item in rig.training.offload_items())


def test_the_peak_is_higher_by_what_stays(job: None) -> None:
    """By as much as the bound at most, and only where something stays."""
    peaks = {}
    for megabytes in (0, 1):
        rig = rig_with(megabytes, "first", offload_train_grad=False, offload_train_optimizer=False)
        rig.manager.enter(INFER)
        peaks[megabytes] = switch(rig).peak_bytes
        rig.close()
    assert peaks[1] - peaks[0] <= 1024**2


def test_it_is_off_unless_asked_for(rig: Rig) -> None:
    rig.training.frozen = tuple(SHAPES)
    rig.manager.enter(INFER)
    for _ in range(2):
        report = switch(rig, step=False)
        assert sent(rig) == BOTH
        assert (report.bytes_skipped, report.bytes_kept) == (0, 0)
        assert "compare" not in report.seconds_by_phase
    assert "skipped" not in str(report)


def test_memory_that_is_never_released_has_no_bound(job: None) -> None:
    rig = rig_with(0, "first", release_weights=False)
    rig.manager.enter(INFER)
    switch(rig)
    assert sent(rig) == {"second"}


WRITES = {
    "data": lambda flat: flat.data.mul_(2),
    "foreach": lambda flat: torch._foreach_mul_([flat], 2),
    "view": lambda flat: flat.view(torch.int32)[:1].add_(1),
    "numpy-like": lambda flat: torch.frombuffer(memory_of(flat), dtype=torch.uint8)[:1].add_(1),
}


def memory_of(flat: torch.Tensor) -> ctypes.Array[ctypes.c_char]:
    return (ctypes.c_char * flat.nbytes).from_address(flat.data_ptr())


@pytest.mark.parametrize("written", WRITES)
def test_whatever_writes_is_seen(job: None, written: str) -> None:
    rig = rig_with(2)
    rig.manager.enter(INFER)
    rig.manager.enter(TRAIN)
    WRITES[written](rig.training.param)
    rig.training.remember_parameters()
    rig.script.take()
    rig.manager.enter(INFER)
    assert sent(rig) == (BOTH if written in ("data", "foreach") else {"first"})
    switch(rig, step=False)
    assert sent(rig) == set()


@pytest.mark.parametrize("state", [TRAIN, FORWARD])
def test_a_write_in_any_state_that_has_parameters_reaches_both_sides(job: None, state: State) -> None:
    rig = rig_with(2)
    rig.manager.enter(INFER)
    rig.manager.enter(state)
    rig.training.param.add_(1)
    rig.training.remember_parameters()
    rig.manager.enter(INFER)
    assert sent(rig) >= BOTH
    rig.assert_is(INFER)
    rig.manager.enter(IDLE)
    rig.manager.enter(TRAIN)
    rig.assert_is(TRAIN, kept=BOTH)


def test_a_step_that_writes_the_same_bytes_sends_nothing(job: None) -> None:
    rig = rig_with(2)
    rig.manager.enter(INFER)
    rig.manager.enter(TRAIN)
    rig.training.version += 1
    rig.training.param.copy_(rig.training.param.clone())
    rig.script.take()
    rig.manager.enter(INFER)
    assert sent(rig) == set()


def test_an_engine_that_lost_what_it_was_to_keep_gets_it_again(job: None) -> None:
    rig = rig_with(2)
    rig.manager.enter(INFER)
    rig.manager.enter(TRAIN)
    rig.inference.release()  # the user's own call
    rig.script.take()
    rig.manager.enter(INFER)
    rig.assert_is(INFER)
    assert sent(rig) == BOTH


FAILURES = ["prepare", "check", "allocate second", "commit second", "offload param", "reset"]


@pytest.mark.parametrize("call", FAILURES)
def test_after_a_failure_nothing_counts_as_delivered(job: None, call: str) -> None:
    rig = rig_with(2, "first")
    rig.manager.enter(INFER)
    rig.manager.enter(TRAIN)
    rig.training.step()
    rig.script.arm(call, OSError("odd") if call != "offload param" else OffloadError("stuck"))
    with pytest.raises((ReshardError, OffloadError)):
        rig.manager.enter(INFER)
    rig.assert_is(TRAIN)
    rig.script.take()
    rig.manager.enter(INFER)
    rig.assert_is(INFER)
    assert sent(rig) == BOTH
    switch(rig)
    assert sent(rig) == {"second"}


def test_a_release_that_fails_keeps_nothing(job: None) -> None:
    rig = rig_with(2)
    rig.manager.enter(INFER)
    rig.script.arm("release", OffloadError("stuck"))
    with pytest.raises(OffloadError):
        rig.manager.enter(TRAIN)
    rig.assert_is(IDLE)
    rig.manager.enter(INFER)
    rig.assert_is(INFER)
    assert sent(rig) == BOTH


@pytest.mark.parametrize("megabytes", [0, 1, 2])
def test_every_switch_with_and_without_steps(job: None, megabytes: int) -> None:
    rig = rig_with(megabytes, "second")
    for number, target in enumerate([INFER, *itertools.chain(*itertools.permutations(NEEDED, 2))]):
        rig.manager.enter(target)
        assert rig.manager.state is target
        if target is INFER:
            rig.assert_is(INFER)
        if target is TRAIN and number % 3:
            rig.training.step()
        assert rig.inference.resident_nbytes() <= megabytes * 1024**2 or target is INFER
