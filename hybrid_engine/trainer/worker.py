"""`ActorHybridWorker`: one rank of a group that generates with vLLM and trains, all from a configuration."""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, overload
from weakref import WeakSet

import torch

from hybrid_engine.assembly import build_inference_engine, inference_settings, megatron_lora, served_weights
from hybrid_engine.config import HybridConfig
from hybrid_engine.config.memory_rules import memory_plan, watches_memory
from hybrid_engine.hybrid_engine import HybridEngine
from hybrid_engine.layouts.memory_plan import GIB, MemoryPlan
from hybrid_engine.memory.offload_items import held_nbytes
from hybrid_engine.memory.offloader import Offloader
from hybrid_engine.models import table_for
from hybrid_engine.ports import Data
from hybrid_engine.ranks.agreement import SHORT_PATIENCE, Agreement
from hybrid_engine.ranks.forks import Ends
from hybrid_engine.ranks.job import Job
from hybrid_engine.switch.contexts import SwitchContexts
from hybrid_engine.switch.memory_watch import MemoryWatch
from hybrid_engine.switch.rendezvous import gather_layouts
from hybrid_engine.switch.report import ReshardReport
from hybrid_engine.switch.states import State
from hybrid_engine.trainer.batches.same_batches import agreed_share
from hybrid_engine.trainer.batches.token_outputs import Outputs
from hybrid_engine.trainer.ports import ActorTrainer, Batch, LossFunction, Scorer

if TYPE_CHECKING:
    from hybrid_engine.backends.vllm import Completion, InferenceEngine
    from hybrid_engine.backends.vllm.generation.prompts import Prompts
    from hybrid_engine.backends.vllm.generation.sampling_params import AnySampling

logger = logging.getLogger("hybrid_engine")


class Companion(Protocol):
    """A model beside the actor (companions/)."""

    name: str

    @property
    def has_the_device(self) -> bool:
        """Whether it is there in place of the actor."""
        ...

    def resident_nbytes(self) -> int:
        """Bytes of its state on this rank's device."""
        ...


class ActorHybridWorker(SwitchContexts):
    """The actor: Megatron or FSDP2 for training, vLLM for generation, on the same devices.

    Build one on every rank, under torchrun; `with ActorHybridWorker(config) as worker:` shuts it down in the end. It
    creates the process group when there is none, applies the Megatron patches where Megatron trains, and builds both
    engines. Each rank reads its part of the model's weights; with `random_weights` they are initialised instead. vLLM's
    come by resharding.

    Batches and prompts are global: every rank passes the same, and gets the whole result. With `data="local"` each rank
    passes prompts of its own, and each data parallel rank a batch of its own, as large as the others', and gets the
    result for it; ranks of one model-parallel group pass the same batch.

    Args:
        config: see `load_config`.
        weights_only: the training model holds weights and is not asked to compute. For checks of the switch with models
            or layouts that this project does not train.
        load_weights: False for one that goes on from a checkpoint: the model's weights are not read, and are random
            until `load_checkpoint` or `load_hf_checkpoint`.
        job: default: `Job.join`, which ends with this worker. One that is given outlives it, and has the timeout of
            the configuration.

    Attributes:
        config: as given.
        rank: of this process.
        world_size: number of ranks.
        job: the ranks, their device (`job.device`) and how they agree.
        train: the trainer, an `ActorTrainer`; `train.limits` has the data parallel rank and size.
        inference: the `InferenceEngine`, with vLLM's `llm`.
    """

    _engine: HybridEngine[ActorTrainer] | None = None

    def __init__(
        self, config: HybridConfig, *, weights_only: bool = False, load_weights: bool = True, job: Job | None = None
    ) -> None:
        self.config = config
        self.companions: WeakSet[Companion] = WeakSet()
        self._memory: MemoryWatch | None = None  # where models are beside the actor, or memory is limited
        self.adapter: str | None = None  # what completions are sampled with, where adapters are delivered apart
        with Ends() as undo:  # the last first, each even if another fails
            if job is None:
                job = undo.enter_context(closing(Job.join(config.generate_config.timeout_seconds)))
            self.job, self.rank, self.world_size = job, job.rank, job.world_size
            with job.agreement.building():
                self._build(job, weights_only, load_weights and not config.random_weights, undo)
            self._ends = undo.pop_all()

    def _build(self, job: Job, weights_only: bool, load_weights: bool, undo: ExitStack) -> None:
        from hybrid_engine.backends.huggingface import fetch_weights, load_pretrained
        from hybrid_engine.backends.vllm import check_before_building, require_vllm

        with job.agreement.phase("checking what is installed"):
            job.require_timeout(self.config.generate_config.timeout_seconds)
            require_vllm(allow_version=self.config.generate_config.allow_version)
            build_actor = _builder(self.config)
            if watches_memory(self.config):
                self._memory = MemoryWatch(memory_plan(self.config, job.world_size), job.rank)
                if job.rank == 0:
                    logger.info("%s", self._memory.plan)
            self.table = table_for(self.config.hf_config())
            check_before_building(inference_settings(self.config, job.world_size), job)
        if load_weights:
            fetch_weights(self.config.model, job)
        with job.agreement.phase("building the training engine", SHORT_PATIENCE):
            self.train = build_actor(self.config, self.table, job, undo, weights_only=weights_only)
            self.actor = getattr(self.train, "actor", None)  # Megatron's own objects, where it trains
        if load_weights:
            load_pretrained(self.config.model, self.train.weights.base, self.table, job)
            if job.rank == 0 and self.config.actor_config.lora is not None:
                logger.warning("actor_config.lora: the adapters are new; they add nothing yet")
        with job.agreement.phase("taking training state off the device", SHORT_PATIENCE):
            if load_weights:
                self.train.reload_main_params()
            offloader = Offloader(self.train.offload_items, reachable=self.train.reachable_tensors)
            offloader.offload()  # vLLM looks at the memory that is free while it starts
        layouts = gather_layouts(job, self.train.weights)
        lora = megatron_lora(self.config, self.table)
        self.adapter = lora.name if lora is not None else None
        self.inference: InferenceEngine = build_inference_engine(self.config, self.table, layouts, job, lora)
        undo.callback(self.inference.shutdown)
        with job.agreement.phase("delivering adapters"):
            weights = served_weights(self.inference, self.config, lora)
        engine = HybridEngine(
            self.train, self.inference, self.config, offloader=offloader, weights=weights, training_layouts=layouts
        )
        self._engine, self._sharding = engine, engine.sharding
        undo.callback(self.sharding.close)
        if self._memory is not None:
            self._measure_switches()

    @property
    def engine(self) -> HybridEngine[ActorTrainer]:
        """The `HybridEngine` of both. Raises StateError after `shutdown`."""
        _ = self.sharding
        assert self._engine is not None, "it goes with its switch"
        return self._engine

    def barrier(self, phase: str) -> None:
        """Wait until all ranks are here. Raises RemoteError with what failed on another; `phase` names the place."""
        self.job.agreement.conclude(phase)

    def generate_sequences(
        self,
        prompts: Prompts,
        sampling: AnySampling | None = None,
        attention_mask: torch.Tensor | None = None,
        *,
        data: Data = "global",
    ) -> list[list[Completion]]:
        """`n` completions of each prompt, in their order, spread over the inference replicas. In `rollout_context`.

        Args:
            prompts: texts, chats, lists of token ids, or token ids [B, S] int64.
            sampling: how, ours or `vllm.SamplingParams`; default: `Sampling()`.
            attention_mask: [B, S], 0 where a prompt of a tensor is padded, on either side.
            data: "global": all ranks pass the same prompts and get all completions; "local": each rank passes its own,
                any number of them, and gets theirs.

        Raises StateError outside the context, ConfigError for prompts that cannot be, GenerationError.
        """
        self.sharding.require(State.INFER)
        return self.inference.generate_over_replicas(prompts, sampling, self.adapter, attention_mask, data)

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
        """Log-probability [B, S] fp32 of every label under the training weights. In train or forward context.

        Args:
            batch: see `batches.Batch`.
            data: whose it is, see above.
            entropy: return `entropy` [B, S] too, in nats.
            top_k: if not 0, return `top_log_probs` and `top_token_ids` [B, S, top_k] too, the most likely tokens first.

        Returns a tensor, or where more is asked for, a dict in which it is `log_probs`. Values of padding are 0. Raises
        BatchError with every violation, and RemoteError with its text on ranks that find none.
        """
        self.sharding.require(State.TRAIN, State.FORWARD)
        return score(self.train, batch, self.job.agreement, "scoring", data, Outputs(entropy, top_k))

    def update(
        self,
        batch: Batch,
        loss_function: LossFunction,
        *,
        data: Data = "global",
        entropy: bool = False,
        top_k: int = 0,
    ) -> dict[str, float]:
        """One optimizer step on the batch, and one of the learning-rate schedule. In `train_context`.

        Args:
            batch: see `batches.Batch`.
            loss_function: see `batches.LossFunction`.
            data, entropy, top_k: as of `compute_log_probs`; the loss function finds them in its micro batch, `entropy`
                with gradient.

        Returns what the loss function reports, averaged, with `grad_norm`, `learning_rate` and `skipped`; see
        `ActorTrainer.train_step`. Raises on all ranks, with no weight changed, BatchError with every violation, or
        LossError for a loss function that fails or returns no loss, and RemoteError with its text on ranks that are not
        at fault.
        """
        self.sharding.require(State.TRAIN)
        outputs = Outputs(entropy, top_k)
        call, rate = "training step", self.train.learning_rate
        share = agreed_share(batch, self.train.limits, self.job.agreement, call, data, outputs, learning_rate=rate)
        with self.job.agreement.call(call):
            return self.train.train_step(share, loss_function, outputs)

    @property
    def learning_rate(self) -> float:
        """Of the next update."""
        return self.train.learning_rate

    def set_learning_rate(self, learning_rate: float) -> None:
        """Set the learning rate of the updates to come, a number from 0 to 1e30; in any state.

        On every rank alike: an update raises BatchError where ranks differ. Raises StateError where
        `actor_config.optimizer.schedule` does that, and ArgumentError for another value, before anything changes.
        """
        self.train.set_learning_rate(learning_rate)

    def save_checkpoint(self, directory: str | Path, *, check_nan: bool = True) -> None:
        """Write parameters, optimizer state, the schedule's position and training's generators below `directory`.

        In `train_context`. A checkpoint that is there is replaced when the new one is complete; a directory that holds
        anything else is refused. So are NaN and infinities (WeightError), unless `check_nan` is false. vLLM's sampler
        is not in it: see `InferenceEngine.manual_seed`.
        """
        self.sharding.require(State.TRAIN)
        self.train.save_checkpoint(directory, check_nan=check_nan)

    def load_checkpoint(self, directory: str | Path) -> None:
        """Load what `save_checkpoint` wrote, on all ranks or on none. In `train_context`.

        What Megatron has saved is loaded in the same layout, what FSDP2 has saved on any number of ranks.
        """
        self.sharding.require(State.TRAIN)
        self.train.load_checkpoint(directory)

    def load_hf_checkpoint(self, path: str | Path) -> None:
        """Take the weights from a Hugging Face checkpoint (safetensors), whatever the layout. In `train_context`.

        Every rank reads only what it holds, and its share of the files to check their checksums. Main parameters
        follow; moments and step count stay as they are; adapters add nothing from then on, for a checkpoint holds sums.
        Raises, with nothing changed on any rank, ConfigError, FileError naming the file, or ParameterMismatchError
        naming every tensor that is missing, unknown or of another shape.
        """
        self.sharding.require(State.TRAIN)
        from hybrid_engine.backends.huggingface import load_hf_checkpoint

        load_hf_checkpoint(path, self.train.weights.base, self.table, self.job)
        self.train.reload_main_params()

    def save_hf_checkpoint(
        self, path: str | Path, dtype: str | torch.dtype | None = None, *, check_nan: bool = True
    ) -> None:
        """Write the weights, adapters added, as a Hugging Face checkpoint with config and tokenizer of `config.model`.

        In `train_context`. `path` is on storage that all ranks share; every rank writes its part and nothing is
        gathered. `dtype`: of the stored weights, e.g. "bfloat16" or torch.bfloat16; default: the training weights' own.
        Older weights of this model there are replaced: whatever happens, readers find those or the new ones. Raises
        FileError naming the file, ConfigError for another dtype, or where the weights are another model's, and, unless
        `check_nan` is false, WeightError for what would be stored as NaN or infinity, before anything is written.
        """
        self.sharding.require(State.TRAIN)
        from hybrid_engine.backends.huggingface import save_hf_checkpoint

        with self.job.agreement.phase("adding adapters"):
            weights = self.train.weights.merged
        save_hf_checkpoint(path, weights, self.table, self.job, self.config.model, dtype, check_nan=check_nan)

    def memory_plan(self) -> MemoryPlan:
        """What is on the devices in each phase, by the configuration; its text is a table.

        Raises ConfigError where memory is not planned: with FSDP2, or with adapters.
        """
        return memory_plan(self.config, self.world_size) if self._memory is None else self._memory.plan

    def memory_report(self) -> str:
        """This rank's memory plan as a table, with what was measured; the plan alone where nothing is measured."""
        return str(self.memory_plan()) if self._memory is None else self._memory.report()

    def resident_nbytes(self) -> dict[str, int]:
        """Bytes of weights and training state on this rank's device now, by model, caches left out. No collective."""
        actor = held_nbytes(self.train.offload_items(), self.job.device.type)
        found = Counter({"actor": actor, "vLLM": self.sharding.inference.resident_nbytes()})
        for companion in self.companions:
            found[companion.name] += companion.resident_nbytes()
        return found

    def note_memory(self, phase: str) -> None:
        """Compare what is on the device with the memory plan, where there is one. No collective."""
        if self._memory is not None:
            self._memory.note(phase, sum(self.resident_nbytes().values()))

    def has_room_for(self, nbytes: int) -> bool:
        """Whether so much fits beside what is on the devices into `device_budget_gib`, on every rank. Collective."""
        if self.config.device_budget_gib is None:
            return True
        is_over = sum(self.resident_nbytes().values()) + nbytes > self.config.device_budget_gib * GIB
        return not any(self.job.agreement.any_of([is_over], "room for another model"))

    def _measure_switches(self) -> None:
        # weak: the switch refers to the model, whose hooks in autograd Python's collector does not see through
        this = weakref.ref(self)
        phases = {State.TRAIN: "train", State.FORWARD: "forward", State.INFER: "generate"}
        began_in: str | None = None

        def measure_before(before: State, target: State) -> None:
            nonlocal began_in
            began_in = phases.get(before)
            if (worker := this()) is not None and before in phases:
                worker.note_memory(phases[before])

        def measure_peak(report: ReshardReport) -> None:
            if (worker := this()) is not None and worker._memory is not None and report.direction.endswith(State.INFER):
                beside = sum(companion.resident_nbytes() for companion in worker.companions)
                worker._memory.note("switch", report.peak_bytes + beside, began_in)

        self.engine.on_reshard_start(measure_before)
        self.engine.on_reshard_end(measure_peak)

    @property
    def ends(self) -> ExitStack:
        """What ends with this worker, the last first."""
        return self._ends

    def shutdown(self) -> None:
        """End vLLM, the trainer's groups, and the process group if it was created here; idempotent.

        Another worker may be built afterwards. This one keeps its configuration and the training weights, nothing else;
        they go with it.
        """
        self._ends.close()
        self._engine = self._sharding = None


def _builder(config: HybridConfig) -> Callable[..., ActorTrainer]:
    """How the actor is built by whoever trains it; Megatron is patched. Raises DependencyError where it cannot be."""
    if config.actor_config.fsdp is not None:
        from hybrid_engine.trainer.fsdp.actor import build_actor as build_with_fsdp

        return build_with_fsdp
    from hybrid_engine.attaching.preparing import apply_patches

    apply_patches()
    from hybrid_engine.trainer.megatron.actor import build_actor as build_with_megatron

    return build_with_megatron


def score(
    engine: Scorer, batch: Batch, agreement: Agreement, phase: str, data: Data, outputs: Outputs
) -> torch.Tensor | dict[str, torch.Tensor]:
    """Score a batch: each data parallel rank its share; of a global one the results are joined on every rank."""
    share = agreed_share(batch, engine.limits, agreement, phase, data, outputs)
    with agreement.call(phase):
        found = engine.scores(share, outputs)
        if data == "global" and engine.limits.dp_size > 1:
            found = {name: engine.gather_over_data_parallel(value) for name, value in found.items()}
    found = {name: value.to(batch["tokens"].device) for name, value in found.items()}
    return found if outputs else found["log_probs"]
