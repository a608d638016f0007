"""The reference and the critic: models that share the actor's devices.

Each of them is on the device without the actor and vLLM while it computes, and offloaded otherwise.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from hybrid_engine.backends.huggingface import fetch_weights, load_hf_checkpoint, load_pretrained
from hybrid_engine.errors import ConfigError, StateError
from hybrid_engine.memory.offload_items import KINDS, LATE_KINDS, Items, Kind, Offloadable
from hybrid_engine.memory.offloader import Offloader
from hybrid_engine.ports import Batch, Data, Figures, LossFunction
from hybrid_engine.ranks.agreement import SHORT_PATIENCE
from hybrid_engine.switch.states import State
from hybrid_engine.trainer.batches.batch_checks import agreed_share
from hybrid_engine.trainer.batches.token_outputs import Outputs, Scores
from hybrid_engine.trainer.worker import ActorHybridWorker, ScoresBatches, score

if TYPE_CHECKING:
    from hybrid_engine.trainer.fsdp.actor import FsdpActor
    from hybrid_engine.trainer.megatron.actor import MegatronActor

ALL: frozenset[Kind] = frozenset(KINDS)
PARAMETERS: frozenset[Kind] = frozenset({"param"})


class AuxiliaryModel:
    """Model that shares the devices with the actor (port `ColocatedModel`).

    All methods but `require` and `resident_nbytes` are collective.

    Args:
        name: for messages.
        worker: the actor's.
        state: of this model, on the device now.
        offloads: offload the state outside of this model's contexts.
        gathers_late: its optimizer leaves the gathering of parameters to the next reader, which
            then writes them.
    """

    def __init__(
        self,
        name: str,
        worker: ActorHybridWorker,
        state: Offloadable,
        *,
        offloads: bool = True,
        gathers_late: bool = False,
    ) -> None:
        self.name = name
        self._worker = worker
        self._agreement = worker.job.agreement
        self._offloader = Offloader(state)
        # the model checks before it uses its state
        state.guard.add(self.require)
        self._offloads = offloads
        self._gathers_late = gathers_late
        self._kinds_on_device: frozenset[Kind] = ALL
        if offloads:
            self._offload_together()
        # the worker reports their memory
        worker.colocated_models.add(self)

    @property
    def has_the_device(self) -> bool:
        """True inside the contexts of a model that is otherwise offloaded."""
        return self._offloads and bool(self._kinds_on_device)

    def resident_nbytes(self) -> int:
        """Return the bytes of this model's state on this rank's device."""
        return self._offloader.held_nbytes()

    def require(self, kinds: Collection[str]) -> None:
        """Raise StateError unless these kinds of state are on the device."""
        required = set(kinds)
        if required <= self._kinds_on_device:
            return
        contexts = "train_context"
        if required <= PARAMETERS:
            contexts = "forward_context or train_context"
        raise StateError(
            f"the {self.name} is not on the device; call this in its {contexts}",
            code="not-on-the-device",
        )

    def exclusive_context(self, kinds: frozenset[Kind], phase: str) -> AbstractContextManager[None]:
        """Return a context with these kinds of state on the device, and no other model.

        The actor's state and vLLM's weights are offloaded, as far as the configuration lets them.
        Inside a context of the worker they are back at the end; elsewhere the worker's next context
        onloads what it needs. A model that is never offloaded does nothing here.

        Args:
            kinds: to onload.
            phase: name in the memory plan.

        Raises StateError inside a context of another model.
        """
        # never offloaded, or inside another context of this model
        if kinds <= self._kinds_on_device:
            return nullcontext()
        for model in self._worker.colocated_models:
            if model.has_the_device:
                raise StateError(
                    f"{phase} inside a context of the {model.name}; leave that context first",
                    code="inside-another-context",
                )
        return self._alone(kinds)

    @contextmanager
    def _alone(self, kinds: frozenset[Kind]) -> Iterator[None]:
        # Megatron notes that parameters were gathered, and never gathers these again: if that
        # happens here, the offload must copy them back to the host
        read_only = kinds == PARAMETERS and not self._gathers_late
        with (
            self._worker.sharding.entered(State.IDLE),
            self._onloaded(kinds, read_only=read_only),
        ):
            yield

    def shared_context(
        self,
        kinds: frozenset[Kind],
        *,
        read_only: bool,
    ) -> AbstractContextManager[None]:
        """Return a context with these kinds of state on the device, in addition to other models.

        `read_only`: nothing changes inside, so the end need not copy it to the host.
        """
        if kinds <= self._kinds_on_device:
            return nullcontext()
        return self._onloaded(kinds, read_only=read_only)

    @contextmanager
    def _onloaded(self, kinds: frozenset[Kind], *, read_only: bool) -> Iterator[None]:
        try:
            with self._agreement.phase(f"onload of the {self.name}"):
                self._offloader.onload(kinds, read_only=read_only, late=LATE_KINDS)
            self._kinds_on_device = kinds
            yield
        except BaseException:
            # without the other ranks, which may be in another call without an error
            self._offload()
            raise
        self._offload_together()

    def _offload_together(self) -> None:
        with self._agreement.phase(f"offload of the {self.name}"):
            self._offload()

    def _offload(self) -> None:
        self._kinds_on_device = frozenset()
        self._offloader.offload()


class ReferenceModel(AuxiliaryModel, ScoresBatches):
    """Frozen copy of the actor's current weights, on the device only while it computes.

    PEFT's adapters that add nothing yet need no copy: the actor without them has these weights. It
    scores in the worker's train and forward contexts then.

    Args:
        worker: provides layout and weights. It is in train or forward state now, because its
            weights must be on the device, which must also have room for the copy.
    """

    def __init__(self, worker: ActorHybridWorker) -> None:
        worker.sharding.require_kinds(["param"])
        self.engine = worker.actor.frozen_copy()
        self._is_copy = self.engine.model is not worker.train
        # Without a copy there is nothing to move: `list()` has no items.
        state = self.engine.model if self._is_copy else Items(list)
        super().__init__("reference", worker, state, offloads=self._is_copy)

    def forward_context(self) -> AbstractContextManager[None]:
        """Return a context for scoring without the actor and vLLM's weights on the device."""
        if not self._is_copy:
            return self._worker.forward_context()
        return self.exclusive_context(PARAMETERS, "reference")

    def _score(self, batch: Batch, data: Data, outputs: Outputs) -> torch.Tensor | Scores:
        # scoring writes no weight, so the context is read-only
        with self.shared_context(PARAMETERS, read_only=True):
            phase = "scoring by the reference"
            return score(self.engine, batch, self._agreement, phase, data, outputs)


class ValueModel(AuxiliaryModel):
    """Model with one output for each token, trained by the actor's trainer in its parallel sizes.

    Its state is on the device only inside its contexts, and there without the actor and vLLM, as
    far as these can be offloaded. Batches are global, as the worker's. Each rank reads its part of
    the model's weights, unless the configuration has `random_weights`.

    Args:
        worker: the actor's; its configuration has a `critic_config`. The critic ends with it.
        load_weights: False for a critic that gets its weights from a checkpoint or from the actor
            (`copy_actor`).

    Raises ConfigError without a `critic_config`, and for features that this megatron-core lacks;
    errors of the weights as `load_hf_checkpoint`.
    """

    def __init__(self, worker: ActorHybridWorker, *, load_weights: bool = True) -> None:
        critic = worker.config.critic_config
        if critic is None:
            raise ConfigError.of(
                "critic_config", "is missing", "Add it, even if it is {}", code="missing-section"
            )
        loads = load_weights and not worker.config.random_weights
        with worker.sharding.entered(State.IDLE):
            with worker.job.building("the critic"):
                self._build(worker, critic.model, loads)
                worker.job.built("critic built")
            super().__init__(
                "critic",
                worker,
                self.engine.model,
                offloads=critic.offload,
                gathers_late=worker.config.actor_config.overlap_param_gather,
            )

    def _build(self, worker: ActorHybridWorker, own_model: Path | None, loads: bool) -> None:
        """Build the engine; with `loads`, read its weights, of the actor's model by default."""
        job = worker.job
        key = "model" if own_model is None else "critic_config.model"
        model = own_model or worker.config.model
        if loads:
            fetch_weights(model, job, key)
        with job.agreement.phase("building the critic", SHORT_PATIENCE):
            # lazily, because FSDP2 trains where Megatron is not installed
            self._parts: FsdpActor | MegatronActor
            if worker.config.actor_config.fsdp is None:
                from hybrid_engine.trainer.megatron.actor import build_critic

                self._parts = build_critic(worker.config, job, worker.ends)
            else:
                from hybrid_engine.trainer.fsdp.actor import build_critic as build_with_fsdp

                self._parts = build_with_fsdp(worker.config, job, worker.ends)
        self.engine = self._parts.engine
        if loads:
            weights = self.engine.model.weights
            load_pretrained(model, weights.base, weights.table, job, key=key)
            with job.agreement.phase("copying the critic's weights for the optimizer"):
                self.engine.model.reload_main_params()

    def train_context(self) -> AbstractContextManager[None]:
        """Return a context with parameters, gradients and optimizer state on the device."""
        return self.exclusive_context(ALL, "critic train")

    def forward_context(self) -> AbstractContextManager[None]:
        """Return a context with only the parameters on the device."""
        return self.exclusive_context(PARAMETERS, "critic forward")

    def values(self, batch: Batch, *, data: Data = "global") -> torch.Tensor:
        """Return the value [B, S] fp32 after each of `tokens` [B, S], 0 for padding.

        In train or forward context.

        Args:
            batch: see `batches.Batch`; without `labels`.
            data: see `ActorHybridWorker.compute_log_probs`.

        Raises BatchError with every violation, and RemoteError with its text on other ranks.
        """
        self.require(PARAMETERS)
        call = "values by the critic"
        share = agreed_share(
            batch, self.engine.limits, self._agreement, call, data, needs_labels=False
        )
        with self._agreement.call(call):
            values = self.engine.values(share)
            if data == "global" and self.engine.data_parallel.size > 1:
                values = self.engine.data_parallel.gather(values)
            return values.to(batch["tokens"].device)

    def update(
        self,
        batch: Batch,
        loss_function: LossFunction,
        *,
        data: Data = "global",
    ) -> Figures:
        """Take one optimizer step. In `train_context`.

        Args:
            batch: see `batches.Batch`; without `labels`.
            loss_function: called with the micro batch and its values [b, S] fp32; see
                `batches.LossFunction`.
            data: see `ActorHybridWorker.compute_log_probs`.

        Returns the reported scalars, `grad_norm`, `learning_rate` and `skipped`; result and errors
        as in `ActorHybridWorker.update`.
        """
        self.require(ALL)
        call = "training step of the critic"
        share = agreed_share(
            batch,
            self.engine.limits,
            self._agreement,
            call,
            data,
            needs_labels=False,
            learning_rate=self.engine.optimizer.learning_rate,
        )
        with self._agreement.call(call):
            return self.engine.train_step(share, loss_function)

    def set_learning_rate(self, learning_rate: float) -> None:
        """Set the learning rate of later updates, the same on every rank. No collective.

        Raises StateError if `critic_config.optimizer.schedule` sets it; other errors as in
        `ActorHybridWorker.set_learning_rate`.
        """
        self.engine.optimizer.set_learning_rate(learning_rate)

    def copy_actor(self) -> None:
        """Copy the actor's current weights, except the head, e.g. to start from the policy.

        In train or forward context of the worker; the parameters of both models are on the device
        meanwhile. The critic must have the actor's architecture.
        """
        critic = self._worker.config.critic_config
        if critic is not None and critic.model is not None:
            raise ConfigError.of(
                "critic_config.model",
                "the critic has another model than the actor, so weights cannot be copied",
                "Leave it out, or call load_hf_checkpoint",
                code="not-the-actors-model",
            )
        self._worker.train.guard(["param"])
        with (
            self.shared_context(PARAMETERS, read_only=False),
            self._agreement.phase("copying the actor's weights"),
        ):
            # copies parameters only: main parameters are offloaded here
            self._parts.copy_decoder_from(self._worker.train)
        with self.train_context():
            self.engine.model.reload_main_params()

    def load_hf_checkpoint(self, path: str | Path) -> None:
        """Load the weights of a Hugging Face checkpoint (safetensors) in any layout.

        In `train_context`. The head is `score.weight` [1, hidden_size]; if the checkpoint has none,
        the critic keeps its head and a warning is logged. The output layer of a language model is
        not read. Errors as in `ActorHybridWorker.load_hf_checkpoint`.
        """
        self.require(ALL)
        weights = self.engine.model.weights
        load_hf_checkpoint(path, weights.base, weights.table, self._worker.job)
        self.engine.model.reload_main_params()

    def save_checkpoint(
        self,
        directory: str | Path,
        *,
        check_nan: bool = True,
        wait: bool = True,
    ) -> Future[None] | None:
        """Write parameters and optimizer state below `directory`. In `train_context`.

        The actor's checkpoints need another directory. `wait`, and the result: as of
        `ActorHybridWorker.save_checkpoint`.
        """
        self.require(ALL)
        return self._parts.checkpoints.save(directory, check_nan=check_nan, wait=wait)

    def load_checkpoint(self, directory: str | Path) -> None:
        """Load a checkpoint that `save_checkpoint` wrote, on all ranks or none.

        In `train_context`.
        """
        self.require(ALL)
        self._parts.checkpoints.load(directory)
