"""Parallel sizes from a job's configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybrid_engine.layouts.inference import InferenceParallelism
from hybrid_engine.layouts.training import TrainParallelism

if TYPE_CHECKING:
    from hybrid_engine.config.keys import ActorConfig, GenerateConfig


def train_parallelism(actor: ActorConfig, world_size: int, *, cuts_whole_projections: bool = False) -> TrainParallelism:
    """The training side's; `cuts_whole_projections` as in `TrainParallelism`."""
    return TrainParallelism(
        world_size=world_size,
        tensor=actor.tensor_model_parallel_size,
        pipeline=actor.pipeline_model_parallel_size,
        virtual_pipeline=actor.virtual_pipeline_model_parallel_size,
        context=actor.context_parallel_size,
        expert=actor.expert_model_parallel_size,
        expert_tensor=actor.expert_tensor_parallel_size,
        num_layers_in_first_pipeline_stage=actor.num_layers_in_first_pipeline_stage,
        num_layers_in_last_pipeline_stage=actor.num_layers_in_last_pipeline_stage,
        account_for_embedding_in_pipeline_split=actor.account_for_embedding_in_pipeline_split,
        account_for_loss_in_pipeline_split=actor.account_for_loss_in_pipeline_split,
        pipeline_layout=actor.pipeline_model_parallel_layout,
        noop_layers=actor.noop_layers,
        make_vocab_size_divisible_by=actor.make_vocab_size_divisible_by,
        cuts_whole_projections=cuts_whole_projections,
    )


def inference_parallelism(
    generate: GenerateConfig, world_size: int, rank_order: tuple[int, ...] | None = None
) -> InferenceParallelism:
    """The inference side's, in the order that was found for it."""
    return InferenceParallelism(
        world_size=world_size,
        tensor=generate.infer_tensor_parallel_size,
        pipeline=generate.infer_pipeline_parallel_size,
        expert=generate.infer_expert_parallel_size,
        rank_order=rank_order,
    )
