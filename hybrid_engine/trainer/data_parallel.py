"""The ranks that share a batch, and a decision of all ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class DataParallelRanks:
    """This rank's place among the ranks that share a batch.

    Attributes:
        rank: of this process among them.
        size: number of them.
        device: of this rank.
        group: their process group; None: all ranks.
    """

    rank: int
    size: int
    device: torch.device
    group: dist.ProcessGroup | None = None

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Join the shares [B, …] of all these ranks along dim 0, in the order of ranks."""
        # the group may support only this device's memory
        share = tensor.to(self.device).contiguous()
        shares = [torch.empty_like(share) for _ in range(self.size)]
        dist.all_gather(shares, share, group=self.group)
        return torch.cat(shares).to(tensor.device)


def is_true_anywhere(flag: torch.Tensor) -> bool:
    """Return True if `flag`, on the device, is true on any rank of the job. Collective."""
    num_true = flag.long()
    dist.all_reduce(num_true)
    return bool(num_true)
