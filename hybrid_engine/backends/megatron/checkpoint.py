"""Saves and loads a Megatron actor with megatron-core's distributed checkpoints, to resume a run where it was.

    directory/
      metadata.json, common.pt      megatron-core's own
      .metadata, *.distcp           parameters, main parameters and moments (canonical Megatron names, one file or two
                                    per rank), generators, weight version

Parameters and optimizer state are stored by tensor of the whole model (`fully_reshardable`), so megatron-core can read
them in another layout; generators are per rank. Sources: Megatron-LM `megatron/training/checkpointing.py`,
`megatron/core/dist_checkpointing`.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.utils import unwrap_model

from hybrid_engine.backends.megatron.build import Actor
from hybrid_engine.errors import StateError
from megatron_patches import optimizers

_OPTIMIZER_METADATA = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}


def save_checkpoint(directory: str | Path, actor: Actor) -> None:
    """Write parameters, optimizer state, generators and weight version to `directory`. Collective.

    Written beside it and renamed at the end, so that `directory` is either whole or as it was before; one that exists
    is replaced. All training state must be on the device. Needs host memory for one copy of this rank's share.
    """
    directory = Path(directory)
    incomplete = directory.with_name(f"{directory.name}.incomplete")
    if dist.get_rank() == 0:
        shutil.rmtree(incomplete, ignore_errors=True)
        incomplete.mkdir(parents=True)
    dist.barrier()
    # One writer process per rank: state that is worth more is far beyond what starting a second one costs.
    strategy = TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=1)
    dist_checkpointing.save(_sharded_state(actor, is_loading=False), str(incomplete), strategy)
    dist.barrier()
    if dist.get_rank() == 0:
        _replace_directory(incomplete, directory)
    dist.barrier()


def load_checkpoint(directory: str | Path, actor: Actor) -> None:
    """Take up what `save_checkpoint` wrote; afterwards every tensor is bitwise what it was. Collective.

    Tensors keep their storage where Megatron's optimizers do. Raises StateError when there is no checkpoint, and
    megatron-core's CheckpointingException when it belongs to another model.
    """
    directory = Path(directory)
    if not dist_checkpointing.check_is_distributed_checkpoint(str(directory)):
        raise StateError(f"{directory} holds no checkpoint; save_checkpoint writes one")
    state = dist_checkpointing.load(_sharded_state(actor, is_loading=True), str(directory))
    for key, chunk in _named_chunks(actor):
        unwrap_model(chunk).load_state_dict(state[key], strict=True)
    if actor.optimizer is None:
        return
    actor.optimizer.load_state_dict(state["optimizer"])
    optimizers._versions[actor.optimizer] = state["progress"]["weight_version"]
    torch.set_rng_state(state["generators"]["torch"])
    get_cuda_rng_tracker().set_states(state["generators"]["tracker"])


def _sharded_state(actor: Actor, is_loading: bool) -> dict[str, Any]:
    """Everything that is saved, as megatron-core's sharded state dict."""
    state: dict[str, Any] = {key: unwrap_model(chunk).sharded_state_dict() for key, chunk in _named_chunks(actor)}
    if actor.optimizer is None:
        return state
    _create_missing_state(actor.optimizer)
    state["optimizer"] = actor.optimizer.sharded_state_dict(state, is_loading, metadata=_OPTIMIZER_METADATA)
    state["progress"] = {"weight_version": optimizers.weight_version(actor.optimizer)}
    generators = {"torch": torch.get_rng_state(), "tracker": get_cuda_rng_tracker().get_states()}
    state["generators"] = ShardedObject("generators", generators, (dist.get_world_size(),), (dist.get_rank(),))
    return state


def _named_chunks(actor: Actor) -> Iterator[tuple[str, torch.nn.Module]]:
    """Chunks under the keys Megatron-LM gives them."""
    if len(actor.chunks) == 1:
        yield "model", actor.chunks[0]
        return
    yield from ((f"model{index}", chunk) for index, chunk in enumerate(actor.chunks))


def _create_missing_state(optimizer: MegatronOptimizer) -> None:
    """Give an Adam that has not stepped the state of step 0: what its first step would start from.

    Megatron reads the step from the state and asserts that there is one.
    """
    for member in _members(optimizer):
        for group in member.optimizer.param_groups:
            for parameter in group["params"]:
                state = member.optimizer.state[parameter]
                state.setdefault("step", torch.tensor(0.0))
                for moment in ("exp_avg", "exp_avg_sq"):
                    if moment not in state:
                        state[moment] = torch.zeros_like(parameter)


def _members(optimizer: MegatronOptimizer) -> Sequence[MegatronOptimizer]:
    """The optimizers that hold state."""
    if isinstance(optimizer, ChainedOptimizer):
        return [leaf for member in optimizer.chained_optimizers for leaf in _members(member)]
    return [optimizer]


def _replace_directory(source: Path, target: Path) -> None:
    """Rename `source` to `target`, in place of a directory that may be there."""
    replaced = target.with_name(f"{target.name}.replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    if target.exists():
        target.rename(replaced)
    source.rename(target)
    shutil.rmtree(replaced, ignore_errors=True)
