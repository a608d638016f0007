"""The end of process groups: torch keeps every group until it is told to end it, or until the job ends."""

from __future__ import annotations

import torch.distributed as dist


def end_groups(*groups: dist.ProcessGroup | None) -> None:
    """End groups, with their connections and threads, of which gloo has three for each. None is no group.

    On all ranks of a group. Those of a job that has ended are gone already.
    """
    for group in groups:
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)
