"""The end of process groups: torch keeps every group until it is told to end it, or until the job ends."""

from __future__ import annotations

import logging
import re
import time

import torch
import torch.distributed as dist

from hybrid_engine.ranks.torch_internals import is_alive

logger = logging.getLogger("hybrid_engine")

_SECONDS_TO_FINISH = 10.0
"""For what is queued on the device when its groups end: a collective whose peer was lost never finishes."""
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
    alive = [group for group in groups if is_alive(group)]
    if any("nccl" in dist.get_backend_config(group) for group in alive):
        let_device_finish()
    for group in alive:
        if is_alive(group):  # a group is given twice where two parallel sizes have the same ranks
            dist.destroy_process_group(group)


def let_device_finish() -> None:
    """Wait a while for what this thread has queued on the current stream: NCCL aborts what is under way in a group that
    ends. A device that has failed is not waited for."""
    if not torch.cuda.is_initialized():
        return
    deadline = time.monotonic() + _SECONDS_TO_FINISH
    try:
        queued = torch.cuda.Event()
        queued.record()
        while not queued.query() and time.monotonic() < deadline:
            time.sleep(0.001)
    except RuntimeError as error:  # groups must end all the same, and why the device failed is told elsewhere
        logger.warning("the device cannot be asked whether it has finished: %s", error)
