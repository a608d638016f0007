"""What both trainers have in common: an optimizer and its learning rate, and shares of a batch."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from hybrid_engine.errors import StateError
from hybrid_engine.trainer.learning_rate import Scheduler, learning_rate_of, set_learning_rate


class TrainedModel:
    """What both trainers have: an optimizer with its learning rate, and data parallel ranks that share a batch.

    Attributes:
        optimizer: torch's or Megatron's; None for a model that is only read.
        scheduler: of learning rate and weight decay; None where these stay.
        dp_rank, dp_size: this rank's data parallel rank, and their number.
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
        """The optimizer. Raises StateError where there is none."""
        if self.optimizer is None:
            raise StateError("this model has no optimizer and cannot be trained")
        return self.optimizer

    @property
    def learning_rate(self) -> float:
        """Of the next step."""
        return learning_rate_of(self.trained_by.param_groups)

    def set_learning_rate(self, learning_rate: float) -> None:
        """Set the learning rate of every parameter group. Raises StateError where a schedule does that."""
        set_learning_rate(self.trained_by.param_groups, self.scheduler, learning_rate)

    def gather_over_data_parallel(self, tensor: torch.Tensor) -> torch.Tensor:
        """Join the shares [B, …] of all data parallel ranks along dim 0, in order of rank."""
        own = tensor.to(self._device).contiguous()
        shares = [torch.empty_like(own) for _ in range(self.dp_size)]
        dist.all_gather(shares, own, group=self._data_parallel)
        return torch.cat(shares).to(tensor.device)
