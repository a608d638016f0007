"""What prefetch would hide, on sizes that can be counted by hand."""

from __future__ import annotations

import numpy as np
import pytest

from hybrid_engine.advisor.prefetch_estimate import PrefetchEstimate
from hybrid_engine.layouts.memory_peaks import MemoryPeaks, TrainingMemory


def estimate(inference: int, *, device: float = 100.0, utilization: float = 0.5) -> PrefetchEstimate:
    """Of two ranks: 10 bytes of parameters, 20 of gradients, 15 and 14 of optimizer state; 5 bytes per second."""
    params, grads, optimizer = (np.array(each) for each in ([10, 10], [20, 20], [15, 14]))
    state = TrainingMemory(params, grads, optimizer, copied=params + optimizer)
    memory = MemoryPeaks(state, np.array([inference, inference]), 1)
    return PrefetchEstimate(memory, device, utilization, 5.0)


@pytest.mark.parametrize(
    ("inference", "within_peak"),
    [
        (60, [2, 2]),  # a switch takes 62, more than training
        (30, [15, 14]),  # training takes 45 and 44
        (8, [25, 24]),
    ],
)
def test_within_the_peak_comes_what_fits_beside_inference_weights(inference: int, within_peak: list[int]) -> None:
    found = estimate(inference)
    assert found.returning.tolist() == [25, 24]
    assert found.within_peak.tolist() == within_peak
    assert found.seconds_left(found.within_peak) == (25 - within_peak[0]) / 5
    assert found.seconds(found.within_peak) == within_peak[0] / 5


def test_nothing_comes_into_vllms_share_of_the_device() -> None:
    assert estimate(8, utilization=0.875).within_peak.tolist() == [12, 12]
    assert estimate(40, utilization=1.0).with_room.tolist() == [0, 0]


def test_with_room_all_comes_and_the_peak_says_so() -> None:
    found = estimate(40)
    assert found.with_room.tolist() == [25, 24]
    assert found.peak.tolist() == [65, 64]
    assert estimate(8).peak.tolist() == [45, 44], "training takes more"
