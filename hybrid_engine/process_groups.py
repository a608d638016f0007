"""The end of process groups: torch keeps every group until it is told to end it, or until the job ends."""

from __future__ import annotations

import torch.distributed as dist


def end_groups(*groups: dist.ProcessGroup | None) -> None:
    """End groups; None is no group, and those of a job that has ended are gone already. On all ranks of a group.

    Their connections and threads, of which gloo has three for each, go once nothing refers to them. Never run on NCCL.
    """
    for group in groups:
        if group in dist.distributed_c10d._world.pg_map:
            dist.destroy_process_group(group)
