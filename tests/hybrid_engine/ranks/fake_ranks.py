"""Any rank of any world in one process, for checks of parameters without communication.

    for rank in range(8):
        with fake_rank(ActorConfig(...), rank, world_size=8): ...   # Megatron's state of that rank

The process group is torch's fake one; its collectives do nothing. Use it in a separate process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.distributed as dist

from hybrid_engine.config import ActorConfig


@contextlib.contextmanager
def fake_rank(config: ActorConfig, rank: int, world_size: int) -> Iterator[None]:
    """Apply the patches and initialise Megatron's parallel state of rank `rank` of `world_size`."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    import megatron_patches

    megatron_patches.apply()
    from megatron.core import parallel_state, tensor_parallel

    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=config.tensor_model_parallel_size,
        pipeline_model_parallel_size=config.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=config.virtual_pipeline_model_parallel_size,
        expert_model_parallel_size=config.expert_model_parallel_size,
        expert_tensor_parallel_size=config.expert_tensor_parallel_size,
        create_gloo_process_groups=False,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(config.seed)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
