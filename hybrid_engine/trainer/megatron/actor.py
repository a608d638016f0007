"""The actor of `ActorHybridWorker` if Megatron trains; the critic, which Megatron always trains."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from hybrid_engine.config import HybridConfig
from hybrid_engine.config.job_rules import CriticContext, critic_of
from hybrid_engine.memory.offload_items import KINDS
from hybrid_engine.models.table import ModelTable
from hybrid_engine.ranks.job import Job
from hybrid_engine.trainer.megatron import build, rank_checkpoint
from hybrid_engine.trainer.megatron.pipeline_engine import PipelineEngine
from hybrid_engine.trainer.megatron.train_engine import TrainEngine, ValueEngine
from hybrid_engine.trainer.ports import ActorTrainer


class _Resumable(PipelineEngine):
    """Engine whose complete training state can be saved and loaded."""

    actor: build.Actor
    _job: Job

    def save_checkpoint(self, directory: str | Path, *, check_nan: bool = True) -> None:
        """Write parameters, optimizer state and generators below `directory`. Collective."""
        self.guard(KINDS)
        self.weights.base.prepare()
        rank_checkpoint.save_checkpoint(directory, self.actor, self._job, check_nan=check_nan)

    def load_checkpoint(self, directory: str | Path) -> None:
        """Load a checkpoint of `save_checkpoint`, on all ranks or on none. Collective."""
        self.guard(KINDS)
        rank_checkpoint.load_checkpoint(directory, self.actor, self._job)


class MegatronActor(_Resumable, TrainEngine):
    """A `TrainEngine` built from a configuration (port `ActorTrainer`).

    Args:
        actor: the Megatron objects.
        config: from which they were built.
        table: the model's name table.
        job: of all ranks.
    """

    def __init__(
        self, actor: build.Actor, config: HybridConfig, table: ModelTable, job: Job
    ) -> None:
        super().__init__(
            actor,
            table,
            config.actor_config.micro_batch_size,
            separate_lora=config.generate_config.lora_delivery == "adapter",
            seq_length=config.actor_config.seq_length,
        )
        self.conclude = job.agreement.conclude
        self.actor = actor
        self._config = config
        self._table = table
        self._job = job

    def frozen_copy(self) -> TrainEngine:
        """Return a copy of the current weights with LoRA merged, without training. Collective."""
        actor_config = self._config.actor_config
        model = build.build_reference(
            actor_config, self._table, self._config.hf_config(), self._job.world_size
        )
        copy = TrainEngine(
            model, self._table, self.micro_batch_size, seq_length=actor_config.seq_length
        )
        copy.copy_weights_from(self)
        return copy


class MegatronCritic(_Resumable, ValueEngine):
    """A `ValueEngine` built from a configuration.

    Args:
        actor: the Megatron objects.
        config: of the job.
        critic: configuration and name table of the critic.
        job: of all ranks.
    """

    def __init__(
        self, actor: build.Actor, config: HybridConfig, critic: CriticContext, job: Job
    ) -> None:
        super().__init__(
            actor, critic.table, critic.actor.micro_batch_size, seq_length=critic.actor.seq_length
        )
        self.conclude = job.agreement.conclude
        self.table = critic.table
        self.actor = actor
        self._job = job

    def copy_decoder_from(self, actor: ActorTrainer) -> None:
        """Copy an actor's current weights with LoRA merged, except the head. Collective."""
        # the configuration allows a critic only if Megatron trains the actor
        assert isinstance(actor, MegatronActor)
        self.copy_weights_from(actor, but_for="output_layer.")


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
    hf_config = config.hf_config()
    owner.callback(build.destroy_parallel_state)
    build.initialize_parallel_state(config.actor_config, job.world_size, job.timeout_seconds)
    actor = build.build_actor(
        config.actor_config,
        table,
        hf_config,
        job.world_size,
        weights_only=weights_only,
    )
    owner.callback(build.end_training, actor)
    trainer = MegatronActor(actor, config, table, job)
    if weights_only:
        trainer.cannot_compute = "the trainer holds weights only and does not compute"
    return trainer


def build_critic(config: HybridConfig, job: Job, owner: ExitStack) -> MegatronCritic:
    """Build the critic of the configuration, on the actor's process groups. Collective.

    `owner` ends its training. Raises ConfigError for features that this megatron-core lacks.
    """
    critic = critic_of(config, job.world_size)
    actor = build.build_actor(critic.actor, critic.table, critic.hf_config, job.world_size)
    owner.callback(build.end_training, actor)
    return MegatronCritic(actor, config, critic, job)
