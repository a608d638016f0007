"""The actor of `ActorHybridWorker` where Megatron trains, and a critic beside it."""

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
from hybrid_engine.trainer.ports import ActorTrainer, GlobalBatches


class _Resumable(PipelineEngine):
    """A trained model whose whole state can be written and read."""

    actor: build.Actor
    _job: Job

    def save_checkpoint(self, directory: str | Path, *, check_nan: bool = True) -> None:
        """Write parameters, optimizer state and generators below `directory`. Collective."""
        self.guard(KINDS)
        self.weights.base.prepare()
        rank_checkpoint.save_checkpoint(directory, self.actor, self._job, check_nan=check_nan)

    def load_checkpoint(self, directory: str | Path) -> None:
        """Load what `save_checkpoint` wrote, on all ranks or on none. Collective."""
        self.guard(KINDS)
        rank_checkpoint.load_checkpoint(directory, self.actor, self._job)


class MegatronActor(GlobalBatches, _Resumable, TrainEngine):
    """A `TrainEngine` built from a configuration (port `ActorTrainer`).

    Args:
        actor: the Megatron objects.
        config: what they were built from.
        table: the model's name table.
        job: of all ranks.
    """

    def __init__(self, actor: build.Actor, config: HybridConfig, table: ModelTable, job: Job) -> None:
        separate_lora = config.generate_config.lora_delivery == "adapter"
        actor_config = config.actor_config
        super().__init__(actor, table, actor_config.micro_batch_size, separate_lora, seq_length=actor_config.seq_length)
        self.conclude = job.agreement.conclude
        self.actor = actor
        self._config, self._table, self._job = config, table, job

    def frozen_copy(self) -> TrainEngine:
        """A copy of the present weights, adapters added, that is only read. Collective."""
        actor_config = self._config.actor_config
        model = build.build_reference(actor_config, self._table, self._config.hf_config(), self._job.world_size)
        copy = TrainEngine(model, self._table, self.micro_batch_size, seq_length=actor_config.seq_length)
        copy.copy_weights_from(self)
        return copy


class MegatronCritic(_Resumable, ValueEngine):
    """A `ValueEngine` built from a configuration; args as of `MegatronActor`."""

    def __init__(self, actor: build.Actor, config: HybridConfig, critic: CriticContext, job: Job) -> None:
        super().__init__(actor, critic.table, critic.actor.micro_batch_size, seq_length=critic.actor.seq_length)
        self.conclude = job.agreement.conclude
        self.table = critic.table
        self.actor, self._job = actor, job

    def copy_decoder_from(self, actor: ActorTrainer) -> None:
        """Take an actor's present weights, adapters added, but for the head. Collective."""
        assert isinstance(actor, MegatronActor), "one trainer has both"
        self.copy_weights_from(actor, but_for="output_layer.")


def build_actor(
    config: HybridConfig, table: ModelTable, job: Job, owner: ExitStack, *, weights_only: bool = False
) -> MegatronActor:
    """Megatron's groups, model, DDP and optimizer, which end with `owner`. Collective.

    Args and errors as in `build.build_model`; StateError where Megatron has groups in this process already.
    """
    build.require_none()  # before those of somebody else are noted as what ends with `owner`
    actor_config, hf_config = config.actor_config, config.hf_config()
    owner.callback(build.destroy_parallel_state)
    build.initialize_parallel_state(actor_config, job.world_size, job.timeout_seconds)
    actor = build.build_actor(actor_config, table, hf_config, job.world_size, weights_only=weights_only)
    owner.callback(build.end_training, actor)
    trainer = MegatronActor(actor, config, table, job)
    if weights_only:
        trainer.cannot_compute = "the trainer holds weights and does not compute"
    return trainer


def build_critic(config: HybridConfig, job: Job, owner: ExitStack) -> MegatronCritic:
    """The critic that the configuration describes, on the groups of its actor; ends with `owner`. Collective.

    Raises ConfigError for what this megatron-core lacks.
    """
    critic = critic_of(config, job.world_size)
    actor = build.build_actor(critic.actor, critic.table, critic.hf_config, job.world_size)
    owner.callback(build.end_training, actor)
    return MegatronCritic(actor, config, critic, job)
