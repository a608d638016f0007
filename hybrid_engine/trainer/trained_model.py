"""Base class of both trainers: learning rate, and gathering over data parallel ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from hybrid_engine.errors import StateError
from hybrid_engine.trainer.learning_rate import Scheduler, learning_rate_of, set_learning_rate


class TrainedModel:
    """Model with an optimizer, and with data parallel ranks that share a batch.

    Attributes:
        optimizer: torch's or Megatron's; None for a model without training.
        scheduler: of learning rate and weight decay; None if both are constant.
        dp_rank, dp_size: this rank's data parallel rank, and the number of such ranks.
    """

    optimizer: Any
    scheduler: Scheduler | None
    dp_rank: int
    dp_size: int
    _device: torch.device
    _data_parallel: dist.ProcessGroup | None
    """None: all ranks."""

    @property
    def trained_by(self) -> Any:
        """The optimizer. Raises StateError if there is none."""
        if self.optimizer is None:
            raise StateError(
                "this model has no optimizer and cannot be trained; train the actor, or the critic",
                code="no-optimizer",
            )
        return self.optimizer

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next step."""
        return learning_rate_of(self.trained_by.param_groups)

    def set_learning_rate(self, learning_rate: float) -> None:
        """Set the learning rate of every parameter group.

        Raises StateError if a schedule sets it, and ArgumentError for an invalid value.
        """
        set_learning_rate(self.trained_by.param_groups, self.scheduler, learning_rate)

    def gather_over_data_parallel(self, tensor: torch.Tensor) -> torch.Tensor:
        """Join the shares [B, …] of all data parallel ranks along dim 0, in the order of ranks."""
        # the group may support only this device's memory
        share = tensor.to(self._device).contiguous()
        shares = [torch.empty_like(share) for _ in range(self.dp_size)]
        dist.all_gather(shares, share, group=self._data_parallel)
        return torch.cat(shares).to(tensor.device)
