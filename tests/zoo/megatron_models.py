"""Megatron actors for the models of `tiny_models`, on real ranks.

with running(path, ActorConfig(...)) as run:      # in a function that `engines.launch` runs
    load_canonical(run, path)                     # copies the checkpoint's weights to Megatron
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from hybrid_engine.config import ActorConfig
from hybrid_engine.models import ModelTable, table_for
from hybrid_engine.ranks.torch_internals import TensorDict
from hybrid_engine.records.layout import Layout, Shard
from tests.zoo.families import read_config
from tests.zoo.tiny_models import read_canonical

if TYPE_CHECKING:
    from hybrid_engine.trainer.megatron.build import Actor
    from hybrid_engine.trainer.megatron.train_engine import TrainEngine

DENSE_FLOAT32: dict[str, Any] = {"params_dtype": "float32", "make_vocab_size_divisible_by": 8, "seq_length": 12}


@dataclass(frozen=True)
class Run:
    actor: Actor
    table: ModelTable
    config: ActorConfig
    engine: TrainEngine


@contextlib.contextmanager
def running(path: Path, config: ActorConfig) -> Iterator[Run]:
    """Build Megatron's parallel state, model, DDP and optimizer on this rank, for the block."""
    with parallel_state_of(config):
        from hybrid_engine.trainer.megatron.build import build_actor, end_training
        from hybrid_engine.trainer.megatron.train_engine import TrainEngine

        table = table_for(read_config(path))
        actor = build_actor(config, table, read_config(path), dist.get_world_size())
        try:
            yield Run(actor, table, config, TrainEngine(actor, table, config.micro_batch_size))
        finally:
            end_training(actor)


def reference_of(run: Run, path: Path) -> TrainEngine:
    """Build a frozen model of the same layout with random weights, on the run's groups."""
    from hybrid_engine.trainer.megatron.build import build_reference
    from hybrid_engine.trainer.megatron.train_engine import TrainEngine

    actor = build_reference(run.config, run.table, read_config(path), dist.get_world_size())
    return TrainEngine(actor, run.table, micro_batch_size=1)


@contextlib.contextmanager
def parallel_state_of(config: ActorConfig) -> Iterator[None]:
    """Apply the patches and initialise Megatron's parallel state; keep the process group."""
    import megatron_patches

    megatron_patches.apply()
    if not dist.is_initialized():
        dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    from hybrid_engine.trainer.megatron.build import destroy_parallel_state, initialize_parallel_state

    initialize_parallel_state(config, dist.get_world_size(), timeout_seconds=120)
    dist.barrier()  # A short test would otherwise close connections that other ranks are still opening.
    try:
        yield
    finally:
        destroy_parallel_state()


def load_canonical(run: Run, path: Path) -> None:
    """Write the checkpoint into Megatron's parameters through the adaptor's records."""
    canonical = read_canonical(path)
    buffers = run.engine.model.weights.base.buffers()
    with torch.no_grad():
        for shard in run.engine.model.weights.base.layout().shards:
            view_of(buffers, shard).copy_(canonical[shard.region.tensor][region_slices(shard)])
    if run.actor.optimizer is not None:
        run.actor.optimizer.reload_model_params()


def whole_weights(weights: Any) -> TensorDict:
    """Assemble the checkpoint tensors from all ranks' training weights, through the records.

    Returns them on every rank, in host memory. Raises AssertionError if ranks hold different values
    of a region.
    """
    by_rank: list[Any] = [None] * dist.get_world_size()
    buffers = {name: flat.cpu().clone() for name, flat in weights.buffers().items()}
    dist.all_gather_object(by_rank, (weights.layout(), buffers))
    layout = Layout.merge(rank_layout for rank_layout, _ in by_rank)
    tensors = {name: torch.full(shape, torch.nan) for name, shape in layout.tensors.items()}
    for shard in layout.shards:
        values = view_of(by_rank[shard.place.buffer.rank][1], shard).float()
        target = tensors[shard.region.tensor][region_slices(shard)]
        assert torch.all(target.isnan() | (target == values)), f"ranks differ in {shard.region}"
        target.copy_(values)
    return tensors


def view_of(buffers: Mapping[str, torch.Tensor], shard: Shard) -> torch.Tensor:
    """Return the part of a flat buffer that a record describes."""
    place = shard.place
    flat = buffers[place.buffer.name]
    assert flat.dim() == 1
    assert flat.is_contiguous()
    return flat.as_strided(shard.region.lengths, place.strides, flat.storage_offset() + place.offset)


def region_slices(shard: Shard) -> tuple[slice, ...]:
    """Return the region of a record as an index into the canonical tensor."""
    return tuple(slice(low, high) for low, high in zip(shard.region.offsets, shard.region.ends, strict=True))


def negative_log_likelihood(
    _batch: Mapping[str, torch.Tensor], log_probs: torch.Tensor
) -> tuple[torch.Tensor, TensorDict]:
    """Return the loss, and a report that shares its memory, as reports of users may."""
    loss = -log_probs.mean()
    return loss, {"loss": loss.detach()}
