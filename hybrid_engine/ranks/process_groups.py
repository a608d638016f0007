"""The end of process groups: torch keeps every group until it is told to end it, or until the job ends."""

from __future__ import annotations

import re

import torch.distributed as dist

from hybrid_engine.ranks.torch_internals import is_alive

_SOURCE = re.compile(r"^\[[^\]]*\]\s*")
_ADVICE = re.compile(r"\s*This is typically caused by .*", re.DOTALL)


def is_lost_connection(error: BaseException) -> bool:
    """Whether torch says of a group that a member ended or did not come; gloo raises plain RuntimeErrors for that."""
    if isinstance(error, (dist.DistBackendError, dist.DistNetworkError)):
        return True
    return type(error) is RuntimeError and "third_party/gloo/" in str(error)


def plain_text(error: BaseException) -> str:
    """What gloo says of a broken connection, without its source file and its advice to look for other errors."""
    return _ADVICE.sub("", _SOURCE.sub("", str(error)))


def end_groups(*groups: dist.ProcessGroup | None) -> None:
    """End groups; None is no group, and those of a job that has ended are gone already. On all ranks of a group.

    Their connections and threads, of which gloo has three for each, go once nothing refers to them. Never run on NCCL.
    """
    for group in groups:
        if is_alive(group):
            dist.destroy_process_group(group)
