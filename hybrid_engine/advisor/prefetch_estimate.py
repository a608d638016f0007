"""What `generate_config.prefetch: auto` would bring back during a rollout, and the time that a switch then saves.

    returning      parameters and optimizer state, by copies; gradients come as zeros, at no time that counts here
    within_peak    of it, what fits beside the inference weights without a new peak: the default
    with_room      of it, what fits beside vLLM's share of the device, with prefetch_mb large enough

The rule is the runtime's (switch/prefetch.py), which brings whole storages only. No more time is saved than the last
sequences take to be drawn.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from hybrid_engine.layouts.memory_peaks import MemoryPeaks


@dataclass(frozen=True, eq=False)
class PrefetchEstimate:
    """Bytes by rank, int arrays; see the module's text.

    Attributes:
        memory: of the job.
        device_nbytes: size of a device.
        utilization: vLLM's share of it, `gpu_memory_utilization`.
        rate: bytes per second from the host to one device, while all of a host's copy.
    """

    memory: MemoryPeaks
    device_nbytes: float
    utilization: float
    rate: float

    @property
    def returning(self) -> np.ndarray:
        """All that comes back."""
        return self.memory.host

    @cached_property
    def within_peak(self) -> np.ndarray:
        """No more than `with_room`."""
        return np.minimum(self.with_room, self.memory.device - self.memory.inference)

    @cached_property
    def with_room(self) -> np.ndarray:
        """Bounded by the device alone."""
        beside = int(self.device_nbytes * (1 - self.utilization))
        return np.minimum(self.returning, beside)

    @property
    def peak(self) -> np.ndarray:
        """Training state and inference weights together, with all of `with_room`."""
        return np.maximum(self.memory.device, self.memory.inference + self.with_room)

    def seconds(self, nbytes: np.ndarray) -> float:
        """Of the slowest rank's copies."""
        return float(nbytes.max()) / self.rate

    def seconds_left(self, prefetched: np.ndarray) -> float:
        """For which a switch to training still copies once so much has come; of the slowest rank."""
        return self.seconds(self.returning - prefetched)

    def settings(self) -> Mapping[str, Any]:
        """What it was made with."""
        return {"gpu_memory_utilization": self.utilization, "bytes_per_second": self.rate}
