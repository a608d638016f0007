"""Models beside the actor, the reference and the critic: they run alone on the device, and are offloaded afterwards."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import overload

import torch

from hybrid_engine.backends.huggingface import fetch_weights, load_hf_checkpoint, load_pretrained
from hybrid_engine.errors import ConfigError, StateError, Violation
from hybrid_engine.memory.offload_items import KINDS, Kind, Offloadable, held_nbytes
from hybrid_engine.memory.offloader import Offloader
from hybrid_engine.ports import Batch, Data, LossFunction
from hybrid_engine.ranks.agreement import SHORT_PATIENCE
from hybrid_engine.switch.states import State
from hybrid_engine.trainer.batches.batch_checks import agreed_share
from hybrid_engine.trainer.batches.token_outputs import Outputs
from hybrid_engine.trainer.ports import score
from hybrid_engine.trainer.worker import ActorHybridWorker

ALL: frozenset[Kind] = frozenset(KINDS)
PARAMETERS: frozenset[Kind] = frozenset({"param"})


def require_room(worker: ActorHybridWorker, name: str, nbytes: int) -> None:
    """Raise StateError unless the budget has room for a model's parameters beside what is on the device. Collective."""
    if not worker.has_room_for(nbytes):
        problem = f"device_budget_gib has no room for the parameters of the {name} beside what is on the device"
        raise StateError(f"{problem}; do this in worker.forward_context(), or raise the budget")


class Companion:
    """A model beside the actor. All methods are collective, but for `require` and `resident_nbytes`.

    Args:
        name: in messages, and in the memory plan.
        worker: of the actor.
        engine: of this model, which is on the device now.
        offloads: it leaves the device outside its contexts.
        gathers_late: reading it completes parameters that its optimizer left to be gathered, and so writes them.
    """

    def __init__(
        self,
        name: str,
        worker: ActorHybridWorker,
        engine: Offloadable,
        *,
        offloads: bool = True,
        gathers_late: bool = False,
    ) -> None:
        self.name = name
        self._worker = worker
        self._agreement = worker.job.agreement
        self._state = engine
        self._offloader = Offloader(engine)
        engine.guard.add(self.require)
        self._offloads, self._gathers_late = offloads, gathers_late
        self._present: frozenset[Kind] = ALL
        if offloads:
            self._leave_together()
        worker.companions.add(self)

    @property
    def has_the_device(self) -> bool:
        """Whether it is in one of its contexts."""
        return self._offloads and bool(self._present)

    def resident_nbytes(self) -> int:
        """Bytes of this model's state on this rank's device."""
        return held_nbytes(self._state.offload_items(), self._worker.job.device.type)

    def require(self, kinds: Collection[str]) -> None:
        """Raise StateError unless these kinds of state are on the device."""
        wanted = set(kinds)
        if not wanted <= self._present:
            where = "forward_context or train_context" if wanted <= PARAMETERS else "train_context"
            raise StateError(f"the {self.name} is not on the device; call this in its {where}")

    def entered(self, kinds: frozenset[Kind], phase: str) -> AbstractContextManager[None]:
        """Be on the device with these kinds inside the context, and, unless it stays there, alone.

        The actor's state and vLLM's weights leave it, as far as the configuration lets them. Inside a context of the
        worker they are back at the end; elsewhere the worker's next context brings what it needs. `phase` is the memory
        plan's.
        """
        if kinds <= self._present:  # it stays there, or is in another context of its own
            return nullcontext()
        present = [one.name for one in self._worker.companions if one.has_the_device]
        if present:
            raise StateError(f"{phase} inside a context of the {present[0]}; leave that one first")
        return self._alone(kinds, phase)

    @contextmanager
    def _alone(self, kinds: frozenset[Kind], phase: str) -> Iterator[None]:
        # what is gathered must be kept: Megatron notes that it was, and never does it again
        read_only = kinds == PARAMETERS and not self._gathers_late
        with self._worker.sharding.entered(State.IDLE), self._here(kinds, read_only=read_only):
            yield
            self._worker.note_memory(phase)

    def beside(self, kinds: frozenset[Kind], *, read_only: bool) -> AbstractContextManager[None]:
        """Be on the device with these kinds inside the context, beside what is there; `read_only`: nothing changes."""
        return nullcontext() if kinds <= self._present else self._here(kinds, read_only=read_only)

    @contextmanager
    def _here(self, kinds: frozenset[Kind], *, read_only: bool) -> Iterator[None]:
        """On the device inside the context; all ranks leave it together, but those with an error."""
        try:
            with self._agreement.phase(f"onload of the {self.name}"):
                self._offloader.onload(kinds, read_only=read_only)
            self._present = kinds
            yield
        except BaseException:
            self._leave()  # alone: the others may be well, and elsewhere
            raise
        self._leave_together()

    def _leave_together(self) -> None:
        with self._agreement.phase(f"offload of the {self.name}"):
            self._leave()

    def _leave(self) -> None:
        self._present = frozenset()
        self._offloader.offload()


class ReferenceModel(Companion):
    """A frozen copy of the actor's present weights, off the device except while it scores.

    Args:
        worker: gives layout and weights; in train or forward state now, for the weights must be on the device, and
            those of the copy beside them.

    Raises StateError where `device_budget_gib` has no room for both.
    """

    def __init__(self, worker: ActorHybridWorker) -> None:
        worker.sharding.require_kinds(["param"])
        parameters = (item for item in worker.train.offload_items() if item.kind == "param")
        require_room(worker, "reference", held_nbytes(parameters, worker.job.device.type))
        self.engine = worker.train.frozen_copy()
        super().__init__("reference", worker, self.engine)

    def forward_context(self) -> AbstractContextManager[None]:
        """Score inside, without the actor and vLLM's weights on the device."""
        return self.entered(PARAMETERS, "reference")

    @overload
    def compute_log_probs(self, batch: Batch, *, data: Data = ...) -> torch.Tensor: ...

    @overload
    def compute_log_probs(
        self, batch: Batch, *, data: Data = ..., entropy: bool, top_k: int = ...
    ) -> dict[str, torch.Tensor]: ...

    @overload
    def compute_log_probs(self, batch: Batch, *, data: Data = ..., top_k: int) -> dict[str, torch.Tensor]: ...

    def compute_log_probs(
        self, batch: Batch, *, data: Data = "global", entropy: bool = False, top_k: int = 0
    ) -> torch.Tensor | dict[str, torch.Tensor]:
        """Log-probability [B, S] fp32 of every label under the frozen weights. Collective; in any state.

        Outside `forward_context` it comes beside what is on the device, or, where `device_budget_gib` has no room for
        both, in its place. Args, returns and raises as `ActorHybridWorker.compute_log_probs`.
        """
        has_room = self._worker.has_room_for(self._offloader.away_nbytes(["param"])["param"])
        place = self.beside(PARAMETERS, read_only=True) if has_room else self.forward_context()
        with place:
            phase, outputs = "scoring by the reference", Outputs(entropy, top_k)
            return score(self.engine, batch, self._agreement, phase, data, outputs)


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
            late = worker.config.actor_config.overlap_param_gather
            super().__init__("critic", worker, self.engine, offloads=critic.offload, gathers_late=late)

    def _build(self, worker: ActorHybridWorker, model: Path | None, key: str) -> None:
        """The engine, with the weights of `model` if there is one."""
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
