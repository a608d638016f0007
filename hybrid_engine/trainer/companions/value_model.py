"""`ValueModel`: the critic of PPO."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

import torch

from hybrid_engine.errors import ConfigError, Violation
from hybrid_engine.ports import Batch, Data, LossFunction
from hybrid_engine.ranks.agreement import SHORT_PATIENCE
from hybrid_engine.switch.states import State
from hybrid_engine.trainer.batches.same_batches import agreed_share
from hybrid_engine.trainer.companions.companion import ALL, PARAMETERS, Companion, require_room
from hybrid_engine.trainer.worker import ActorHybridWorker


class ValueModel(Companion):
    """A model that gives one number for each token, trained by Megatron in the actor's parallel sizes.

    Its state is on the device inside its contexts only, and there alone: what of the actor and of vLLM can leave has
    left. Batches are global, as the worker's.

    Each rank reads its part of the model's weights, unless the configuration has `random_weights`.

    Args:
        worker: of the actor; its configuration has a `critic_config`. The critic ends with it.
        load_weights: False for one that goes on from a checkpoint, or begins as the actor does (`copy_actor`).

    Raises ConfigError without a `critic_config`, and for what this megatron-core lacks; errors of the weights as of
    `load_hf_checkpoint`.
    """

    def __init__(self, worker: ActorHybridWorker, *, load_weights: bool = True) -> None:
        critic = worker.config.critic_config
        if critic is None:
            raise ConfigError([Violation("critic_config", "is missing", "Add it, if only as {}")])
        key = "model" if critic.model is None else "critic_config.model"
        model, job = critic.model or worker.config.model, worker.job
        loads = load_weights and not worker.config.random_weights
        with worker.sharding.entered(State.IDLE):
            with job.agreement.building():
                self._build(worker, model if loads else None, key)
            items, reachable = self.engine.offload_items, self.engine.reachable_tensors
            late = worker.config.actor_config.overlap_param_gather
            super().__init__("critic", worker, items, reachable=reachable, offloads=critic.offload, gathers_late=late)
        self.engine.guard = self.require

    def _build(self, worker: ActorHybridWorker, model: Path | None, key: str) -> None:
        """The engine, with the weights of `model` if there is one."""
        from hybrid_engine.backends.huggingface import fetch_weights, load_pretrained

        job = worker.job
        if model is not None:
            fetch_weights(model, job, key)
        with job.agreement.phase("building the critic", SHORT_PATIENCE):
            from hybrid_engine.trainer.megatron.actor import build_critic

            self.engine = build_critic(worker.config, job, worker.ends)
        if model is not None:
            load_pretrained(model, self.engine.weights.base, self.engine.table, job, key=key)
            with job.agreement.phase("taking up the critic's weights"):
                self.engine.reload_main_params()

    def train_context(self) -> AbstractContextManager[None]:
        """Train inside: parameters, gradients and optimizer state are on the device."""
        return self.entered(ALL, "critic train")

    def forward_context(self) -> AbstractContextManager[None]:
        """Read values inside: only parameters need to be on the device."""
        return self.entered(PARAMETERS, "critic forward")

    def values(self, batch: Batch, *, data: Data = "global") -> torch.Tensor:
        """Value [B, S] fp32 after each of `tokens` [B, S], 0 for padding. In train or forward context.

        Args:
            batch: see `batches.Batch`; without `labels`.
            data: as of `ActorHybridWorker.compute_log_probs`.

        Raises BatchError with every violation, and RemoteError with its text on ranks that find none.
        """
        self.require(PARAMETERS)
        call = "values by the critic"
        share = agreed_share(batch, self.engine.limits, self._agreement, call, data, needs_labels=False)
        with self._agreement.call(call):
            values = self.engine.values(share)
            if data == "global" and self.engine.dp_size > 1:
                values = self.engine.gather_over_data_parallel(values)
            return values.to(batch["tokens"].device)

    def update(self, batch: Batch, loss_function: LossFunction, *, data: Data = "global") -> dict[str, float]:
        """One optimizer step. In `train_context`.

        Args:
            batch: see `batches.Batch`; without `labels`.
            loss_function: of the micro batch and its values [b, S] fp32; see `batches.LossFunction`.
            data: as of `ActorHybridWorker.compute_log_probs`.

        Returns the scalars, with `grad_norm`, `learning_rate` and `skipped`, and raises, as `ActorHybridWorker.update`.
        """
        self.require(ALL)
        call, rate = "training step of the critic", self.engine.learning_rate
        share = agreed_share(
            batch, self.engine.limits, self._agreement, call, data, needs_labels=False, learning_rate=rate
        )
        with self._agreement.call(call):
            return self.engine.train_step(share, loss_function)

    def set_learning_rate(self, learning_rate: float) -> None:
        """Set the learning rate of the updates to come, on every rank alike. No collective.

        Raises StateError where `critic_config.optimizer.schedule` does that, and as `ActorHybridWorker`'s.
        """
        self.engine.set_learning_rate(learning_rate)

    def copy_actor(self) -> None:
        """Take the actor's present weights, but for the head: a critic may begin as the policy does.

        In train or forward context of the worker; both models' parameters are on the device for it. The critic is of
        the actor's architecture. Raises StateError where `device_budget_gib` has no room for both.
        """
        critic = self._worker.config.critic_config
        if critic is not None and critic.model is not None:
            problem = "the critic has a model of its own, whose weights are not the actor's"
            raise ConfigError([Violation("critic_config.model", problem, "Leave it out, or call load_hf_checkpoint")])
        self._worker.train.guard(["param"])
        if not self._present:
            require_room(self._worker, self.name, self._offloader.away_nbytes(["param"])["param"])
        with self.beside(PARAMETERS, read_only=False), self._agreement.phase("copying the actor's weights"):
            self.engine.copy_decoder_from(self._worker.train)
        with self.train_context():
            self.engine.reload_main_params()

    def load_hf_checkpoint(self, path: str | Path) -> None:
        """Take the weights from a Hugging Face checkpoint (safetensors), whatever the layout. In `train_context`.

        The head is its `score.weight` [1, hidden_size]; without one the critic keeps its own, and a warning says so.
        A language model's output layer is not read. Errors as of `ActorHybridWorker.load_hf_checkpoint`.
        """
        self.require(ALL)
        from hybrid_engine.backends.huggingface import load_hf_checkpoint

        load_hf_checkpoint(path, self.engine.weights.base, self.engine.table, self._worker.job)
        self.engine.reload_main_params()

    def save_checkpoint(self, directory: str | Path, *, check_nan: bool = True) -> None:
        """Write parameters and optimizer state below `directory`, one of its own. In `train_context`."""
        self.require(ALL)
        self.engine.save_checkpoint(directory, check_nan=check_nan)

    def load_checkpoint(self, directory: str | Path) -> None:
        """Load what `save_checkpoint` wrote, in the same layout, on all ranks or on none. In `train_context`."""
        self.require(ALL)
        self.engine.load_checkpoint(directory)
