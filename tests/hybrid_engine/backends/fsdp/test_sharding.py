"""How a model is sharded by a configuration: on real ranks, without vLLM."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from hybrid_engine.backends.fsdp.sharding import mesh_of
from hybrid_engine.config import FsdpConfig
from hybrid_engine.ranks.process_groups import end_groups
from tests.harness.launch import Ranks

HYBRID = FsdpConfig(sharding_strategy="HYBRID_SHARD", replicas=2)


@pytest.mark.ranks
def test_replicas_train_again_after_the_groups_of_others_have_ended(ranks: Ranks) -> None:
    """torch remembers how tensors of an equal mesh were reduced, by the groups of then."""
    first, second = ranks.launch(two_norms, 4)[0]
    assert first == second > 0


def two_norms() -> list[float]:
    """Norms of the gradients of one model that was sharded twice."""
    dist.init_process_group("gloo")
    norms = []
    for _ in range(2):
        mesh = mesh_of(HYBRID, torch.device("cpu"), dist.get_world_size())
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 8)
        fully_shard(model, mesh=mesh)
        model(torch.ones(2, 8)).sum().backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor().item())
        end_groups(*(group for group in mesh.get_all_groups() if group is not dist.group.WORLD))
    dist.destroy_process_group()
    return norms
