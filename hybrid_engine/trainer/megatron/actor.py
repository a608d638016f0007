"""The actor of `ActorHybridWorker` if Megatron trains, and its critic."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

from hybrid_engine.assembly import megatron_lora
from hybrid_engine.backends.megatron.live_model import LiveModel
from hybrid_engine.config import HybridConfig
from hybrid_engine.config.job_rules import critic_of
from hybrid_engine.models.lora_tensors import ActorLora
from hybrid_engine.models.table import ModelTable
from hybrid_engine.ports import Trainer
from hybrid_engine.ranks.job import Job
from hybrid_engine.trainer.megatron import build
from hybrid_engine.trainer.megatron.train_engine import TrainEngine, copy_weights
from hybrid_engine.trainer.megatron.training_state import MegatronState
from hybrid_engine.trainer.training_checkpoint import TrainingCheckpoints


@dataclass(frozen=True)
class MegatronActor:
    """Parts of an actor or a critic that Megatron trains, built from a configuration.

    Attributes:
        engine: steps and scores; `engine.model` has the weights and the state.
        checkpoints: of the training state.
        frozen_copy: copies the current weights, adapters merged, into a model for scoring.
            Collective.
        lora: adapters that are delivered separately.
    """

    engine: TrainEngine
    checkpoints: TrainingCheckpoints
    frozen_copy: Callable[[], TrainEngine]
    lora: ActorLora | None

    def copy_decoder_from(self, actor: Trainer) -> None:
        """Copy an actor's current weights with LoRA merged, except the head. Collective."""
        assert isinstance(actor, LiveModel), "both have one trainer"
        copy_weights(actor, self.engine.model, but_for="output_layer.")


def build_actor(
    config: HybridConfig,
    table: ModelTable,
    job: Job,
    owner: ExitStack,
    *,
    weights_only: bool = False,
) -> MegatronActor:
    """Build Megatron's groups, model, DDP and optimizer. Collective.

    Args:
        config: of the job.
        table: the model's name table.
        job: of all ranks.
        owner: ends the groups and the training.
        weights_only: see `build.build_model`, as other errors.

    Raises StateError if this process already has groups of Megatron.
    """
    # before the callback: `owner` must not end groups that it did not create
    build.require_no_groups()
    owner.callback(build.destroy_parallel_state)
    build.initialize_parallel_state(config.actor_config, job.world_size, job.timeout_seconds)
    return _build_on_groups(config, table, job, owner, weights_only=weights_only)


def build_critic(config: HybridConfig, job: Job, owner: ExitStack) -> MegatronActor:
    """Build the critic of the configuration, on the actor's process groups. Collective.

    `owner` ends its training. Raises ConfigError for features that this megatron-core lacks.
    """
    critic = critic_of(config, job.world_size)
    return _build_on_groups(critic.alone, critic.table, job, owner)


def _build_on_groups(
    config: HybridConfig,
    table: ModelTable,
    job: Job,
    owner: ExitStack,
    *,
    weights_only: bool = False,
) -> MegatronActor:
    actor_config = config.actor_config
    hf_config = config.hf_config()
    actor = build.build_actor(
        actor_config, table, hf_config, job.world_size, weights_only=weights_only
    )
    owner.callback(build.end_training, actor)
    is_separate = config.generate_config.lora_delivery == "adapter"
    lora = megatron_lora(actor_config, table) if is_separate else None
    engine = TrainEngine(
        actor,
        table,
        actor_config.micro_batch_size,
        separate_lora=lora is not None,
        seq_length=actor_config.seq_length,
        conclude=job.agreement.conclude,
    )
    if weights_only:
        engine.model.cannot_compute = "the trainer holds weights only and does not compute"

    def frozen_copy() -> TrainEngine:
        model = build.build_reference(actor_config, table, hf_config, job.world_size)
        copy = TrainEngine(
            model, table, actor_config.micro_batch_size, seq_length=actor_config.seq_length
        )
        copy_weights(engine.model, copy.model)
        return copy

    return MegatronActor(
        engine,
        TrainingCheckpoints(MegatronState(engine.model, engine.optimizer, actor, job), job, owner),
        frozen_copy,
        lora,
    )
