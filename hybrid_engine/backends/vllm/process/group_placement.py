"""Which place in vLLM's groups each rank takes.

vLLM counts ranks in order: instance, replica, stage, shard. Another order is applied where it makes its groups: the
numbers in the lists it computes are positions, and each is replaced by the global rank that takes the position. All
else vLLM derives from its groups, but for the data parallel rank, which comes from RANK in the environment.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist

from hybrid_engine.backends.vllm.engine_settings import InferenceSettings
from hybrid_engine.errors import StateError


@contextlib.contextmanager
def placed(settings: InferenceSettings, rank: int) -> Iterator[None]:
    """Within this context vLLM's groups and configurations are those of this rank's place.

    Needed wherever vLLM makes groups or a configuration; its groups keep their order afterwards.
    """
    with _groups_in_order(settings.rank_order), _rank_in_instance(settings, rank):
        yield


@contextlib.contextmanager
def _rank_in_instance(settings: InferenceSettings, rank: int) -> Iterator[None]:
    """RANK is what vLLM takes it for: a number within one instance, of which the world may hold several."""
    replica_size = settings.tensor_parallel_size * settings.pipeline_parallel_size
    before = os.environ["RANK"]
    os.environ["RANK"] = str(settings.place_of(rank).position % (replica_size * settings.replicas_per_instance))
    try:
        yield
    finally:
        os.environ["RANK"] = before


@contextlib.contextmanager
def _groups_in_order(order: Sequence[int] | None) -> Iterator[None]:
    """vLLM's group lists hold positions; its groups are made of the ranks in these positions."""
    if order is None or list(order) == sorted(order):
        yield
        return
    from vllm.distributed import parallel_state

    make_group = parallel_state.init_model_parallel_group

    @functools.wraps(make_group)
    def make_ordered_group(group_ranks: list[list[int]], *args: Any, **kwargs: Any) -> Any:
        with _unsorted_process_groups():
            group = make_group([[order[position] for position in group] for group in group_ranks], *args, **kwargs)
        if group.rank_in_group != dist.get_rank(group.device_group):
            raise StateError(
                f"vLLM's group of ranks {group.ranks} is a process group in another order: rank_order needs groups "
                "that new_group made; unset VLLM_DISTRIBUTED_USE_SPLIT_GROUP, or leave rank_order out"
            )
        return group

    parallel_state.init_model_parallel_group = make_ordered_group
    try:
        yield
    finally:
        parallel_state.init_model_parallel_group = make_group


@contextlib.contextmanager
def _unsorted_process_groups() -> Iterator[None]:
    """Process groups count their members as listed. By default torch sorts them, and gathers come in that order."""
    new_group = dist.new_group
    dist.new_group = functools.partial(new_group, sort_ranks=False)
    try:
        yield
    finally:
        dist.new_group = new_group
