"""Which place in vLLM's groups each rank takes.

vLLM counts ranks in order: instance, replica, stage, shard. Another order is applied where it makes its groups: the
numbers in the lists it computes are positions, and each is replaced by the global rank that takes the position. All
else vLLM derives from its groups, but for the data parallel rank, which comes from RANK in the environment.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from hybrid_engine.backends.vllm import internals
from hybrid_engine.backends.vllm.engine_settings import InferenceSettings
from hybrid_engine.errors import StateError
from hybrid_engine.ranks.job import Job


@contextlib.contextmanager
def rank_in_instance(settings: InferenceSettings, rank: int) -> Iterator[None]:
    """Within this context RANK is what vLLM takes it for, a number within one instance, of which there may be several.

    Needed wherever vLLM makes groups or a configuration.
    """
    position = settings.sizes.place_of(rank).position % settings.sizes.ranks_per_instance
    with _in_environment(RANK=str(position)):
        yield


@contextlib.contextmanager
def _in_environment(**values: str) -> Iterator[None]:
    """Within this context these variables have these values."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def building_groups(settings: InferenceSettings, job: Job) -> Iterator[None]:
    """Within this context vLLM's groups are those of this rank's place, and keep their order afterwards; its
    device is the job's."""
    # vLLM takes the GPU of this number, which need not be torchrun's: a process may see its own GPU only
    device = {} if job.device.index is None else {"LOCAL_RANK": str(job.device.index)}
    order = settings.sizes.ranks.ravel().tolist()

    def build(make_group: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(make_group)
        def make_ordered_group(group_ranks: list[list[int]], *args: Any, **kwargs: Any) -> Any:
            kwargs["use_message_queue_broadcaster"] = False  # 24 MiB of shared memory each; see cpu/shm_cleanup.py
            with internals.NEW_GROUP.replaced(lambda new_group: functools.partial(new_group, sort_ranks=False)):
                group = make_group([[order[position] for position in group] for group in group_ranks], *args, **kwargs)
            if group.rank_in_group != dist.get_rank(group.device_group):
                raise StateError(
                    f"vLLM's group of ranks {group.ranks} is a process group in another order: rank_order needs groups "
                    "that new_group made; unset VLLM_DISTRIBUTED_USE_SPLIT_GROUP, or leave rank_order out"
                )
            return group

        return make_ordered_group

    with (
        rank_in_instance(settings, job.rank),
        _in_environment(**device),
        internals.MAKE_GROUP.replaced(build),
        internals.REGISTER_GRAPH_BUFFERS.replaced(lambda original: register_graph_buffers),
    ):
        yield


def register_graph_buffers(communicator: Any) -> None:
    """Tell vLLM's custom all-reduce, for each rank of its group in the group's order, what captured graphs reduce.

    Collective. On CUDA, at the end of each graph's capture.
    """
    ops = internals.CUSTOM_OPS.load()
    ranks = dist.get_process_group_ranks(communicator.group)
    of_all: list[list[Any]] = [[None, None] for _ in ranks]
    of_all[communicator.rank] = list(ops.get_graph_buffer_ipc_meta(communicator._ptr))
    for of_rank, rank in zip(of_all, ranks, strict=True):  # gloo gathers no objects while graphs are captured
        dist.broadcast_object_list(of_rank, src=rank, group=communicator.group, device=torch.device("cpu"))
    handles, offsets = zip(*of_all, strict=True)
    ops.register_graph_buffers(communicator._ptr, list(handles), list(offsets))
