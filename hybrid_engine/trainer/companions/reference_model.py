"""`ReferenceModel`: the policy as it was, for the KL term of a loss."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import overload

import torch

from hybrid_engine.memory.offload_items import held_nbytes
from hybrid_engine.ports import Batch, Data
from hybrid_engine.trainer.batches.token_outputs import Outputs
from hybrid_engine.trainer.companions.companion import PARAMETERS, Companion, require_room
from hybrid_engine.trainer.global_batches import score
from hybrid_engine.trainer.worker import ActorHybridWorker


class ReferenceModel(Companion):
    """A frozen copy of the actor's present weights, off the device except while it scores.

    Args:
        worker: gives layout and weights; in train or forward state now, for the weights must be on the device, and
            those of the copy beside them.

    Raises StateError where `device_budget_gib` has no room for both.
    """

    def __init__(self, worker: ActorHybridWorker) -> None:
        worker.sharding.require_kinds(["param"])
        parameters = (item for item in worker.train.offload_items() if item.kind == "param")
        require_room(worker, "reference", held_nbytes(parameters, worker.job.device.type))
        self.engine = worker.train.frozen_copy()
        super().__init__("reference", worker, self.engine.offload_items)

    def forward_context(self) -> AbstractContextManager[None]:
        """Score inside, without the actor and vLLM's weights on the device."""
        return self.entered(PARAMETERS, "reference")

    @overload
    def compute_log_probs(self, batch: Batch, *, data: Data = ...) -> torch.Tensor: ...

    @overload
    def compute_log_probs(
        self, batch: Batch, *, data: Data = ..., entropy: bool, top_k: int = ...
    ) -> dict[str, torch.Tensor]: ...

    @overload
    def compute_log_probs(self, batch: Batch, *, data: Data = ..., top_k: int) -> dict[str, torch.Tensor]: ...

    def compute_log_probs(
        self, batch: Batch, *, data: Data = "global", entropy: bool = False, top_k: int = 0
    ) -> torch.Tensor | dict[str, torch.Tensor]:
        """Log-probability [B, S] fp32 of every label under the frozen weights. Collective; in any state.

        Outside `forward_context` it comes beside what is on the device, or, where `device_budget_gib` has no room for
        both, in its place. Args, returns and raises as `ActorHybridWorker.compute_log_probs`.
        """
        has_room = self._worker.has_room_for(self._offloader.away_nbytes(["param"])["param"])
        place = self.beside(PARAMETERS, read_only=True) if has_room else self.forward_context()
        with place:
            phase, outputs = "scoring by the reference", Outputs(entropy, top_k)
            return score(self.engine, batch, self._agreement, phase, data, outputs)
