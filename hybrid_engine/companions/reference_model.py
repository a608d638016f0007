"""`ReferenceModel`: the policy as it was, for the KL term of a loss."""

from __future__ import annotations

import torch

from hybrid_engine.memory.offloader import Offloader
from hybrid_engine.ports import Batch
from hybrid_engine.worker import ActorHybridWorker, whole_log_probs


class ReferenceModel:
    """A frozen copy of the actor's present weights, off the device except while it scores.

    Args:
        worker: gives layout and weights; in train or forward state now, for the weights must be on the device.
    """

    def __init__(self, worker: ActorHybridWorker) -> None:
        worker.train.guard(["param"])
        self.engine = worker.train.frozen_copy()
        self._agreement = worker.job.agreement
        self._offloader = Offloader(self.engine.offload_items)
        self._offloader.offload({"param"})

    def compute_log_probs(self, batch: Batch) -> torch.Tensor:
        """Log-probability [B, S] fp32 of every label under the frozen weights. Collective; in any state."""
        with self._agreement.phase("onload of the reference"):
            self._offloader.onload({"param"}, read_only=True)
        try:
            with self._agreement.call("scoring by the reference"):
                return whole_log_probs(self.engine, batch)
        finally:
            self._offloader.offload({"param"})
