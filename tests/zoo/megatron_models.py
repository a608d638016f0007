"""Megatron actors for the models of `tiny_models`, on real ranks.

with loaded(path, tensor_model_parallel_size=2) as run:      # in the body of a test on ranks
    run.engine.train_step(...)

check_training(path, TP2)                                    # against transformers
"""

from __future__ import annotations

import contextlib
import functools
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from hybrid_engine.compute_check.probes import attributes_set
from hybrid_engine.config import ActorConfig
from hybrid_engine.models import ModelTable, table_for
from hybrid_engine.ports import Batch
from hybrid_engine.ranks.torch_internals import TensorDict
from hybrid_engine.records.layout import Layout, Shard
from hybrid_engine.trainer.batches import chunked_scores
from tests.harness.launch import of_all_ranks
from tests.harness.values import Values
from tests.zoo import padded_batches
from tests.zoo.families import read_config
from tests.zoo.shares import share_of
from tests.zoo.tiny_models import label_log_probs, read_canonical, token_batch, train_by_torch

if TYPE_CHECKING:
    from hybrid_engine.trainer.megatron.build import Actor
    from hybrid_engine.trainer.megatron.train_engine import TrainEngine

TP2 = {"tensor_model_parallel_size": 2}
SP2 = {**TP2, "sequence_parallel": True}
PP2 = {"pipeline_model_parallel_size": 2}
VPP2 = {**PP2, "virtual_pipeline_model_parallel_size": 2}
EP2 = {"expert_model_parallel_size": 2}
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}

# fp32 sums are only reordered; logits reach about 5.
ATOL = 2e-5
# With the usual epsilon Adam turns rounding errors of tiny gradients into whole steps.
ADAM_EPS = 1e-3
WEIGHT_DECAY = 0.1


def actor_config(**settings: Any) -> ActorConfig:
    defaults = {
        **{"params_dtype": "float32", "make_vocab_size_divisible_by": 8, "seq_length": 12},
        "optimizer": {"lr": 1e-2},  # large enough to change bfloat16 weights
    }
    return ActorConfig(**{**defaults, **settings})


@dataclass(frozen=True)
class Run:
    actor: Actor
    table: ModelTable
    config: ActorConfig
    engine: TrainEngine


@contextlib.contextmanager
def running(path: Path, **settings: Any) -> Iterator[Run]:
    """Build Megatron's parallel state, model, DDP and optimizer on this rank, for the block.

    Args:
        settings: keys of actor_config; the remaining ranks are data parallel.
    """
    config = actor_config(**settings)
    with parallel_state_of(config):
        from hybrid_engine.trainer.megatron.build import build_actor, end_training
        from hybrid_engine.trainer.megatron.train_engine import TrainEngine

        table = table_for(read_config(path))
        actor = build_actor(config, table, read_config(path), dist.get_world_size())
        try:
            yield Run(actor, table, config, TrainEngine(actor, table, config.micro_batch_size))
        finally:
            end_training(actor)


@contextlib.contextmanager
def loaded(path: Path, **settings: Any) -> Iterator[Run]:
    """Do the same as `running`, with the weights of the checkpoint."""
    with running(path, **settings) as run:
        load_canonical(run, path)
        yield run


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
    from hybrid_engine.trainer.megatron.build import (
        destroy_parallel_state,
        initialize_parallel_state,
    )

    initialize_parallel_state(config, dist.get_world_size(), timeout_seconds=120)
    # A short test would otherwise close connections that other ranks are still opening.
    dist.barrier()
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
    by_rank = [None] * dist.get_world_size()
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


def view_of(buffers: Batch, shard: Shard) -> torch.Tensor:
    """Return the part of a flat buffer that a record describes."""
    place = shard.place
    flat = buffers[place.buffer.name]
    assert flat.dim() == 1
    assert flat.is_contiguous()
    return flat.as_strided(
        shard.region.lengths, place.strides, flat.storage_offset() + place.offset
    )


def region_slices(shard: Shard) -> tuple[slice, ...]:
    """Return the region of a record as an index into the canonical tensor."""
    return tuple(
        slice(low, high) for low, high in zip(shard.region.offsets, shard.region.ends, strict=True)
    )


def negative_log_likelihood(
    _batch: Batch, log_probs: torch.Tensor
) -> tuple[torch.Tensor, TensorDict]:
    """Return the loss, and a report that shares its memory, as reports of users may."""
    loss = -log_probs.mean()
    return loss, {"loss": loss.detach()}


def make_batch() -> TensorDict:
    """Sequences longer than every window; token 129 is the last before Megatron's padding."""
    batch = token_batch(3, 4, 12)
    batch["tokens"][0, 0] = batch["tokens"][0, 5] = batch["labels"][0, 4] = 129
    return batch


@dataclass(frozen=True)
class Trained:
    """Results of two steps by transformers and torch's Adam; `weights` by checkpoint name."""

    losses: list[float]
    norms: list[float]
    log_probs: torch.Tensor
    weights: TensorDict


@functools.cache
def trained_by_transformers(path: Path) -> Trained:
    from transformers import AutoModelForCausalLM

    # Other implementations of attention ignore soft caps.
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    )
    batch = make_batch()
    parameters = [*model.parameters()]

    def log_probs() -> torch.Tensor:
        return label_log_probs(model(batch["tokens"]).logits, batch["labels"])

    losses, norms = train_by_torch(
        parameters,
        lambda: -log_probs().mean(),
        num_steps=2,
        weight_decay=WEIGHT_DECAY,
        eps=ADAM_EPS,
    )
    assert losses[1] < losses[0], "the reference does not learn"
    weights = {}
    if dist.get_rank() == 0:  # transformers saves on rank 0 alone
        with tempfile.TemporaryDirectory() as directory:
            model.save_pretrained(directory)
            weights = read_canonical(Path(directory))
    return Trained(losses, norms, log_probs().detach(), weights)


def check_training(path: Path, actor: Values) -> None:
    """Compare two steps, and all trained weights, with those of transformers.

    Args:
        path: checkpoint of the model.
        actor: actor_config; the remaining ranks are data parallel.
    """
    optimizer = {"lr": 3e-3, "weight_decay": WEIGHT_DECAY, "adam_eps": ADAM_EPS}
    # several chunks of tokens a row, the last one shorter
    with (
        loaded(path, **actor, optimizer=optimizer) as run,
        attributes_set([chunked_scores], MAX_LOGIT_NBYTES=1500),
    ):
        settings = run.actor.transformer_config
        # transformers has no moving router bias and no loss for MTP
        settings.moe_router_bias_update_rate = settings.mtp_loss_scaling_factor = 0.0
        expected = trained_by_transformers(path)
        engine = run.engine
        share = share_of(engine, make_batch())
        for loss, norm in zip(expected.losses, expected.norms, strict=True):
            report = engine.train_step(share, negative_log_likelihood)
            assert all(other == report for other in of_all_ranks(report))
            assert report["skipped"] == 0.0
            assert report["loss"] == pytest.approx(loss, abs=1e-4)
            # The norm is right only if every parameter has its gradient, under all layouts.
            assert report["grad_norm"] == pytest.approx(norm, rel=1e-3)
            log_probs = engine.data_parallel.gather(
                engine.log_probs(share)
            )  # must not affect training
        assert engine.model.version == 2
        torch.testing.assert_close(log_probs, expected.log_probs, atol=ATOL, rtol=0)
        engine.model.weights.prepare()
        buffers = engine.model.weights.layout().buffers.values()
        assert all(buffer.exported for buffer in buffers), "peers cannot read all buffers"
        weights = whole_weights(engine.model.weights)
        if dist.get_rank() == 0:
            _check_weights(weights, read_canonical(path), expected.weights)


def _check_weights(weights: TensorDict, initial: TensorDict, expected: TensorDict) -> None:
    assert weights.keys() == initial.keys()
    assert len(expected) > 10
    for name, values in expected.items():
        torch.testing.assert_close(
            weights[name],
            values,
            atol=ATOL,
            rtol=0,
            msg=lambda message, name=name: f"{name}: {message}",
        )
        # Every other tensor moved in training, so that the comparison is not trivial.
        assert torch.equal(values, initial[name]) == name.endswith("e_score_correction_bias"), name


def check_padding(path: Path, model: torch.nn.Module, actor: Values) -> None:
    """Check that scores, entropy, most likely tokens and gradients agree with the plain batch."""
    with loaded(path, **actor, seq_length=padded_batches.WIDTH) as run:
        run.actor.transformer_config.moe_router_bias_update_rate = 0.0
        reads = padded_batches.read_all(run.engine)
    padded_batches.assert_all_ways_agree(reads, ATOL)
    padded_batches.assert_is_that_of_logits(reads["right"], model)
