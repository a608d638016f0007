"""An exception that nobody may hold up, at every line of a switch: later calls are right, or refused."""

from __future__ import annotations

import contextlib
import gc
import itertools

import pytest

from hybrid_engine.errors import StateError
from hybrid_engine.memory.offload_items import KINDS
from hybrid_engine.switch.states import State
from tests.harness.signals_at_lines import Interrupter, Stop
from tests.hybrid_engine.switch.fakes import FORWARD, IDLE, INFER, TRAIN, Rig


def num_lines(rig: Rig, target: State) -> int:
    with Interrupter() as counting:
        rig.manager.enter(target)
    return counting.num_lines


def prepared(before: State, *, elastic: bool, **settings: object) -> Rig:
    rig = Rig(elastic=elastic, **settings)
    rig.training.step()
    rig.manager.enter(INFER)
    rig.manager.enter(before)
    if before is TRAIN:
        rig.training.step()
    return rig


SETTINGS = {
    "plain": {"elastic": False},
    "elastic": {"elastic": True},
    "all": {"elastic": True, "incremental": "auto", "incremental_mb": 2, "prefetch": "auto", "verify": "full"},
}
SWITCHES = [(TRAIN, INFER), (INFER, TRAIN), (FORWARD, INFER), (INFER, IDLE), (IDLE, INFER), (FORWARD, TRAIN)]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # in a finalizer nobody hears of it
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize(("before", "target"), SWITCHES, ids=str)
def test_an_interrupt_at_any_line_loses_nothing(job: None, before: State, target: State, settings: str) -> None:
    """What is trained stays bit by bit; the state says what can be relied on; each next switch comes out right."""
    rig = prepared(before, **SETTINGS[settings])
    lines = num_lines(rig, target)
    rig.close()
    num_interrupted = 0
    nexts = itertools.cycle([TRAIN, INFER, FORWARD, IDLE])
    for at in range(0, lines, max(1, lines // 40)):
        rig = prepared(before, **SETTINGS[settings])
        interrupter = Interrupter(at)
        with contextlib.suppress(Stop), interrupter:
            rig.manager.enter(target)
        num_interrupted += interrupter.is_done  # threads may have spared it the last lines
        assert rig.manager.state in (before, target, State.INTERRUPTED)
        if rig.manager.state is State.INTERRUPTED:
            for kinds in (["param"], ["optimizer"]):
                with pytest.raises(StateError):
                    rig.training.guard(kinds)
        else:  # what the state promises is there
            rig.training.assert_unchanged(rig.resident())
        for state in (next(nexts), TRAIN):
            rig.manager.enter(state)
            assert rig.manager.state is state
        rig.training.guard(KINDS)
        rig.training.assert_unchanged()
        rig.training.step()
        rig.manager.enter(INFER)
        rig.assert_is(INFER)
        rig.close()
    assert num_interrupted > 20


@pytest.mark.parametrize("at", range(0, 60, 3))
def test_a_context_that_was_interrupted_does_not_count_as_running(job: None, at: int) -> None:
    rig = Rig()
    interrupter = Interrupter(at)
    with contextlib.suppress(Stop), interrupter, rig.manager.entered(TRAIN), rig.manager.entered(TRAIN):
        pass
    gc.collect()
    with rig.manager.entered(INFER):
        rig.assert_is(INFER)
    rig.close()
