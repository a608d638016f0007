"""The start of a job: torchrun's ranks meet, and join one process group."""

from __future__ import annotations

import datetime
import itertools
import os

import torch
import torch.distributed as dist

from hybrid_engine.errors import ConfigError, LostRankError, Violation
from hybrid_engine.ranks.agreement import SECONDS_TO_BUILD


def join_process_group(timeout_seconds: float) -> bool:
    """Join torchrun's process group unless there is one; True when it was created here.

    Raises ConfigError outside of torchrun, and LostRankError when not all ranks start.
    """
    if dist.is_initialized():
        return False
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ConfigError([Violation("environment", f"{', '.join(missing)} not set", "Start the script with torchrun")])
    start_up = max(timeout_seconds, SECONDS_TO_BUILD)
    try:
        store, rank, world_size = next(dist.rendezvous("env://", timeout=datetime.timedelta(seconds=start_up)))
        # torchrun's store outlives a group: under its own keys a second one would find the first one's addresses
        own_store = dist.PrefixStore(f"hybrid_engine/{next(_group_numbers)}", store)
        _meet(own_store, rank, world_size, start_up)
    except dist.DistError as error:
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise LostRankError(
            f"the ranks did not meet at {where} within {start_up:g} s ({error}): see the logs of those that are "
            "missing, or raise generate_config.timeout_seconds"
        ) from error
    timeout = datetime.timedelta(seconds=timeout_seconds)
    dist.init_process_group(default_backend(), store=own_store, rank=rank, world_size=world_size, timeout=timeout)
    return True


def own_device() -> torch.device:
    """The GPU of this process, made the current one, which Megatron and vLLM take; the CPU where there is none.

    Ranks of a host take the GPUs in order of LOCAL_RANK, and a process that sees one GPU takes that. A current device
    that the caller chose stays; device 0 is current where nobody chose, so it counts as not chosen.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    index = torch.cuda.current_device() or int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count()
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def default_backend() -> str:
    """Of the job's process group. On GPUs NCCL alone, as Megatron's own scripts have it.

    Megatron's groups, dozens on each rank, take the backends of this one, and gloo connects every rank with every other
    of each group. What needs the CPU has groups of its own.
    """
    return "nccl" if torch.cuda.is_available() else "gloo"


def _meet(store: dist.Store, rank: int, world_size: int, seconds: float) -> None:
    """Wait until every rank has started: they import for a minute on a busy host, and not at one speed.

    Afterwards a wait for a peer takes no longer than the timeout. Raises LostRankError naming the missing ranks.
    """
    names = [f"started/{each}" for each in range(world_size)]
    store.set(names[rank], "")
    try:
        store.wait(names, datetime.timedelta(seconds=seconds))
    except dist.DistStoreError as error:
        missing = [str(each) for each, name in enumerate(names) if not store.check([name])]
        raise LostRankError(
            f"rank {', '.join(missing)} of {world_size} did not start within {seconds:g} s: see its log, or raise "
            "generate_config.timeout_seconds"
        ) from error


_group_numbers = itertools.count()
