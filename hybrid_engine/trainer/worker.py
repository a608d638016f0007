"""`ActorHybridWorker`: one rank of a group that trains, and generates with vLLM."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack, closing
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, overload

import torch

from hybrid_engine.assembly import inference_side
from hybrid_engine.backends.huggingface import fetch_weights, load_pretrained
from hybrid_engine.config import HybridConfig
from hybrid_engine.config.job_rules import require_room
from hybrid_engine.errors import ConfigError, needing_package
from hybrid_engine.hybrid_engine import HybridEngine
from hybrid_engine.layouts.parallelism import sizes_text
from hybrid_engine.ports import Batch, Data, Figures, LossFunction
from hybrid_engine.ranks.agreement import SHORT_PATIENCE, Agreement
from hybrid_engine.ranks.job import Job
from hybrid_engine.ranks.signals_and_forks import Ends
from hybrid_engine.switch.states import State
from hybrid_engine.trainer.batches.batch_checks import agreed_share
from hybrid_engine.trainer.batches.token_outputs import Outputs, Scores
from hybrid_engine.trainer.learning_rate import scheduler_class

if TYPE_CHECKING:
    from hybrid_engine.trainer.fsdp.actor import FsdpActor
    from hybrid_engine.trainer.fsdp.train_engine import FsdpTrainEngine
    from hybrid_engine.trainer.megatron.actor import MegatronActor
    from hybrid_engine.trainer.megatron.train_engine import TrainEngine

logger = logging.getLogger("hybrid_engine")


def score(
    engine: TrainEngine | FsdpTrainEngine,
    batch: Batch,
    agreement: Agreement,
    phase: str,
    data: Data,
    outputs: Outputs,
) -> torch.Tensor | Scores:
    """Score a batch, each data parallel rank its share. Collective.

    The results of a global batch are joined on every rank. Returns log-probabilities [B, S], or a
    dict that also contains `outputs`, if there are any; on the device of the batch.
    """
    share = agreed_share(batch, engine.limits, agreement, phase, data, outputs)
    with agreement.call(phase):
        results = engine.scores(share, outputs)
        if data == "global" and engine.data_parallel.size > 1:
            results = {name: engine.data_parallel.gather(value) for name, value in results.items()}
    results = {name: value.to(batch["tokens"].device) for name, value in results.items()}
    return results if outputs else results["log_probs"]


class ScoresBatches(ABC):
    """Model whose log-probabilities a user can ask for: the actor, or a frozen reference."""

    @overload
    def compute_log_probs(self, batch: Batch, *, data: Data = ...) -> torch.Tensor: ...

    @overload
    def compute_log_probs(
        self,
        batch: Batch,
        *,
        data: Data = ...,
        entropy: bool,
        top_k: int = ...,
    ) -> Scores: ...

    @overload
    def compute_log_probs(self, batch: Batch, *, data: Data = ..., top_k: int) -> Scores: ...

    def compute_log_probs(
        self,
        batch: Batch,
        *,
        data: Data = "global",
        entropy: bool = False,
        top_k: int = 0,
    ) -> torch.Tensor | Scores:
        """Return the log-probability [B, S] fp32 of every label. Collective.

        `ActorHybridWorker` computes it under the training weights, in train or forward context.
        `ReferenceModel` computes it under the frozen weights, in any state; outside its
        `forward_context` the other models stay on the device.

        Args:
            batch: see `batches.Batch`. All results are computed at its `temperature`.
            data: "global": all ranks pass the same batch and get the whole result; "local": each
                data parallel rank passes its own batch, of the same size on all ranks, and gets the
                result for it.
            entropy: return also `entropy` [B, S] in nats.
            top_k: if not 0, return also `top_log_probs` and `top_token_ids` [B, S, top_k], the most
                likely tokens first.

        Returns a tensor; with `entropy` or `top_k` a dict that contains it as `log_probs`; on the
        device of the batch. Values of padding are 0. Raises BatchError with every violation, and
        RemoteError with its message on the other ranks.
        """
        return self._score(batch, data, Outputs(entropy, top_k))

    @abstractmethod
    def _score(self, batch: Batch, data: Data, outputs: Outputs) -> torch.Tensor | Scores:
        """Call `score` with the engine of this model."""


class ActorHybridWorker(HybridEngine, ScoresBatches):
    """The actor: a `HybridEngine` whose trainer, Megatron or FSDP2, is built from a configuration.

        with ActorHybridWorker(config) as worker:             on every rank, under torchrun
            with worker.rollout_context():
                completions = worker.generate_sequences(prompts, sampling)
            with worker.train_context():
                report = worker.update(batch, loss_function)

    The constructor creates the process group if there is none, applies the Megatron patches if
    Megatron trains, and builds both engines. Each rank reads its part of the model's weights; with
    `random_weights` they are initialized instead. vLLM gets its weights by resharding.

    Batches and prompts are global by default: every rank passes the same, and gets the whole
    result. With `data="local"` each rank passes its own prompts, and each data parallel rank its
    own batch, of the same size on all ranks, and gets the result for it; ranks of one
    model-parallel group pass the same batch.

    Args:
        config: see `load_config`.
        weights_only: the training model only holds weights and cannot compute. For checks of the
            switch with models or layouts that this project does not train.
        load_weights: False if `load_checkpoint` or `load_hf_checkpoint` follows: weights are not
            read, and are random until then.
        module: a causal LM of transformers, perhaps wrapped by PEFT, in place of one with the
            weights of `config.model`; FSDP2 shards it in place. `assembly.settings_of` checks it,
            and makes its configuration.
        job: default: `Job.join`, which ends with this worker. A job that is passed outlives the
            worker, and must have the timeout of the configuration.

    Attributes:
        config: the configuration.
        rank: of this process.
        world_size: number of ranks.
        job: the ranks, their device (`job.device`), and the agreement between them.
        train: weights and state of the trainer.
        actor: steps, scores and checkpoints of the trainer; `actor.engine.limits` has the data
            parallel rank and size.
        inference: the `InferenceEngine`, with vLLM's `llm`.
    """

    def __init__(
        self,
        config: HybridConfig,
        *,
        weights_only: bool = False,
        load_weights: bool = True,
        module: torch.nn.Module | None = None,
        job: Job | None = None,
    ) -> None:
        self.config = config
        # `Ends` runs its callbacks in reverse order, and the others if one fails.
        with Ends() as undo:
            if job is None:
                job = undo.enter_context(closing(Job.join(config.generate_config.timeout_seconds)))
            with job.building():
                loads = load_weights and module is None and not config.random_weights
                self._build(job, weights_only, loads, undo, module)
            self.take_over(undo)

    def _build(
        self,
        job: Job,
        weights_only: bool,
        load_weights: bool,
        undo: ExitStack,
        module: torch.nn.Module | None,
    ) -> None:
        # fail before anything is downloaded or allocated
        with job.agreement.phase("checking what is installed"):
            job.require_timeout(self.config.generate_config.timeout_seconds)
            build_actor = _builder(self.config, module)
            table = self.config.table()
            inference_side(self.config).check(job)
            if job.device.type == "cuda" and not weights_only:
                _, device_nbytes = torch.cuda.mem_get_info(job.device)
                require_room(self.config, job.world_size, device_nbytes)
        if load_weights:
            fetch_weights(self.config.model, job)
        with job.agreement.phase("building the training engine", SHORT_PATIENCE):
            self.actor = build_actor(self.config, table, job, undo, weights_only=weights_only)
            train = self.actor.engine.model
        trainer = "Megatron" if self.config.actor_config.fsdp is None else "FSDP2"
        sizes = sizes_text(self.config.train_sizes(job.world_size))
        job.built(f"{trainer} {sizes} built")
        if load_weights:
            load_pretrained(self.config.model, train.weights.base, table, job)
            if job.rank == 0 and self.config.actor_config.lora is not None:
                logger.warning("actor_config.lora: the adapters are new; they add nothing yet")
            with job.agreement.phase("copying weights for the optimizer", SHORT_PATIENCE):
                train.reload_main_params()
            job.built("weights read")
        self._add_inference(
            train,
            self.config,
            table,
            job,
            undo,
            lora=self.actor.lora,
            gives_back=module is not None,  # nobody trains on with one that is built here
        )

    def _score(self, batch: Batch, data: Data, outputs: Outputs) -> torch.Tensor | Scores:
        self.sharding.require(State.TRAIN, State.FORWARD)
        return score(self.actor.engine, batch, self.job.agreement, "scoring", data, outputs)

    def update(
        self,
        batch: Batch,
        loss_function: LossFunction,
        *,
        data: Data = "global",
        entropy: bool = False,
        top_k: int = 0,
    ) -> Figures:
        """Take one optimizer step on the batch, and one step of the learning-rate schedule.

        In `train_context`.

        Args:
            batch: see `batches.Batch`.
            loss_function: see `batches.LossFunction`.
            data: see `compute_log_probs`.
            entropy, top_k: see `compute_log_probs`; the results are added to the loss function's
                micro batch, `entropy` with gradient.

        Returns the reported scalars, averaged, with `grad_norm`, `learning_rate` and `skipped`; see
        `TrainEngine.train_step`.

        Raises on all ranks, before any weight changes:
            BatchError: with every violation.
            LossError: if the loss function fails or returns no loss.
            RemoteError: with the message of the above, on ranks without an error.
        """
        self.sharding.require(State.TRAIN)
        phase = "training step"
        outputs = Outputs(entropy, top_k)
        share = agreed_share(
            batch,
            self.actor.engine.limits,
            self.job.agreement,
            phase,
            data,
            outputs,
            learning_rate=self.actor.engine.optimizer.learning_rate,
        )
        with self.job.agreement.call(phase):
            return self.actor.engine.train_step(share, loss_function, outputs)

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next update."""
        return self.actor.engine.optimizer.learning_rate

    def set_learning_rate(self, learning_rate: float) -> None:
        """Set the learning rate of later updates, a number from 0 to 1e30; in any state.

        Call it with the same value on every rank: an update raises BatchError if ranks differ.
        Raises, before anything changes, StateError if `actor_config.optimizer.schedule` sets the
        rate, and ArgumentError for another value.
        """
        self.actor.engine.optimizer.set_learning_rate(learning_rate)

    def save_checkpoint(
        self,
        directory: str | Path,
        *,
        check_nan: bool = True,
        wait: bool = True,
    ) -> Future[None] | None:
        """Write parameters, optimizer state, position of the schedule, and random generators.

        In `train_context`. A previous checkpoint in `directory` is replaced when the new one is
        complete. The state of vLLM's sampler is not saved: to reproduce completions, pass a
        `Sampling` with a seed for each step.

        With `wait=False` the state is copied to host memory, and written while the caller goes on.
        Returns a future of the writing. The next save or load, or `shutdown`, waits for it, and
        raises its error on all ranks.

        Raises ConfigError if `latest` in `directory` is a file of another program, FileError if a
        file cannot be written, and, unless `check_nan` is false, WeightError for NaN and
        infinities.
        """
        self.sharding.require(State.TRAIN)
        return self.actor.checkpoints.save(directory, check_nan=check_nan, wait=wait)

    def load_checkpoint(self, directory: str | Path) -> None:
        """Load a checkpoint that `save_checkpoint` wrote, on all ranks or on none.

        In `train_context`, in any layout; bit by bit in the same.
        """
        self.sharding.require(State.TRAIN)
        self.actor.checkpoints.load(directory)


def _builder(
    config: HybridConfig,
    module: torch.nn.Module | None,
) -> Callable[..., FsdpActor | MegatronActor]:
    """Return the function that builds the actor; apply Megatron's patches if Megatron trains.

    Raises DependencyError if its packages are missing or have untested versions, ConfigError for a
    module that Megatron would train.
    """
    # lazily: the other trainer's packages may not be installed
    if config.actor_config.fsdp is not None:
        if config.actor_config.optimizer.schedule is not None:
            scheduler_class()
        if config.actor_config.lora is not None:
            with needing_package("actor_config.lora with fsdp needs PEFT: pip install '.[lora]'"):
                metadata.version("peft")
        from hybrid_engine.trainer.fsdp.actor import build_actor as build_with_fsdp

        return partial(build_with_fsdp, module=module)
    if module is not None:
        raise ConfigError.of(
            "actor_config.fsdp",
            "is not set, but only FSDP2 trains a module",
            "Set it to {}",
            code="not-supported",
        )
    from hybrid_engine.attaching.attachment import apply_patches

    # before Megatron's modules are imported for the build
    apply_patches()
    from hybrid_engine.trainer.megatron.actor import build_actor as build_with_megatron

    return build_with_megatron
