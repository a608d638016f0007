"""An exception that cannot be handled, such as KeyboardInterrupt, at every line of a switch."""

from __future__ import annotations

import contextlib
import gc
import itertools

import pytest

from hybrid_engine.errors import StateError
from hybrid_engine.memory.offload_items import KINDS
from hybrid_engine.switch.states import State
from tests.harness.late_copies import LateCopies
from tests.harness.signals_at_lines import Interrupter, Stop
from tests.hybrid_engine.switch.fakes import FORWARD, IDLE, INFER, TRAIN, Rig


def count_lines(rig: Rig, target: State) -> int:
    with Interrupter() as counting:
        rig.manager.enter(target)
    return counting.num_lines


def prepare_rig(before: State, *, elastic: bool, **settings: object) -> Rig:
    rig = Rig(elastic=elastic, **settings)
    rig.fill()
    rig.manager.enter(before)
    if before is TRAIN:
        rig.training.step()
    return rig


SETTINGS = {
    "plain": {"elastic": False},
    "elastic": {"elastic": True},
    "all": {"elastic": True, "incremental": "auto", "incremental_mb": 2, "verify": "full"},
}
SWITCHES = [
    (TRAIN, INFER),
    (INFER, TRAIN),
    (FORWARD, INFER),
    (INFER, IDLE),
    (IDLE, INFER),
    (FORWARD, TRAIN),
]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # from finalizers
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize(("before", "target"), SWITCHES, ids=str)
def test_an_interrupt_at_any_line_loses_nothing(
    job: None, before: State, target: State, settings: str, late_copies: LateCopies
) -> None:
    """Trained values stay bit-identical, the state is accurate, and later switches succeed."""
    rig = prepare_rig(before, **SETTINGS[settings])
    lines = count_lines(rig, target)
    rig.close()
    num_interrupted = 0
    nexts = itertools.cycle([TRAIN, INFER, FORWARD, IDLE])
    for at in range(0, lines, max(1, lines // 40)):  # about 40 lines of each switch
        rig = prepare_rig(before, **SETTINGS[settings])
        interrupter = Interrupter(at)
        with contextlib.suppress(Stop), interrupter:
            rig.manager.enter(target)
        num_interrupted += interrupter.is_done  # threads may execute the last lines
        assert rig.manager.state in (before, target, State.INTERRUPTED)
        if rig.manager.state is State.INTERRUPTED:
            for kinds in (["param"], ["optimizer"]):  # must not be used until a switch completes
                with pytest.raises(StateError):
                    rig.training.guard(kinds)
        else:  # the kinds that this state needs are resident
            rig.offloader.wait()
            rig.training.assert_unchanged(rig.resident())
        for state in (next(nexts), TRAIN):
            rig.manager.enter(state)
            assert rig.manager.state is state
        rig.training.guard(KINDS)
        rig.training.assert_unchanged()
        rig.fill()
        rig.assert_is(INFER)
        rig.close()
    assert num_interrupted > 20


@pytest.mark.parametrize("at", range(60))
def test_an_interrupted_context_does_not_block_the_next_one(job: None, at: int) -> None:
    rig = Rig()
    interrupter = Interrupter(at)
    with (
        contextlib.suppress(Stop),
        interrupter,
        rig.manager.entered(TRAIN),
        rig.manager.entered(TRAIN),
    ):
        pass
    # Contexts that nothing refers to must not count as entered.
    gc.collect()
    with rig.manager.entered(INFER):
        rig.assert_is(INFER)
    rig.close()
