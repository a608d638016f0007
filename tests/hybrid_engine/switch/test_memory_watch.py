"""What is said of a phase that takes more than was planned."""

from __future__ import annotations

import numpy as np
import pytest

from hybrid_engine.layouts.memory_peaks import TrainingMemory
from hybrid_engine.layouts.memory_plan import plan_memory
from hybrid_engine.switch.memory_watch import MemoryWatch

MIB = 2**20
TRAIN, SWITCH = 600 * MIB, 160 * MIB


@pytest.fixture
def watch() -> MemoryWatch:
    params, grads, optimizer = (np.array([nbytes * MIB]) for nbytes in (100, 200, 300))
    memory = TrainingMemory(params, grads, optimizer, copied=params + optimizer)
    plan = plan_memory(memory, np.array([150 * MIB]), 5 * MIB, budget=700 * MIB)
    assert (plan.phases["train"].total, plan.phases["switch"].total) == (TRAIN, SWITCH)
    return MemoryWatch(plan, rank=0)


def test_a_switch_begins_with_what_the_phase_before_it_has(
    watch: MemoryWatch, caplog: pytest.LogCaptureFixture
) -> None:
    watch.note("switch", TRAIN + MIB, "train")
    watch.note("switch", SWITCH + MIB, "forward")
    assert not caplog.messages
    assert watch.measured == {"switch": TRAIN + MIB}


def test_more_than_was_planned_or_allowed_is_said_once(watch: MemoryWatch, caplog: pytest.LogCaptureFixture) -> None:
    for nbytes in (SWITCH + 20 * MIB, SWITCH + 30 * MIB):
        watch.note("switch", nbytes, "forward")
    watch.note("train", 701 * MIB)
    assert caplog.messages == [
        "[Memory] rank 0, switch: 188,743,680 bytes on the device, planned 167,772,160",
        "[Memory] rank 0, train: 735,051,776 bytes on the device, planned 629,145,600 and the budget 734,003,200",
    ]
