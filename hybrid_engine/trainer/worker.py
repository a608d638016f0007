"""`ActorHybridWorker`: one rank of a group that generates with vLLM and trains, all from a configuration."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from contextlib import ExitStack, closing

from hybrid_engine.assembly import check_inference, megatron_lora, put_beside
from hybrid_engine.backends.huggingface import fetch_weights, load_pretrained
from hybrid_engine.config import HybridConfig
from hybrid_engine.config.job_rules import memory_plan, watches_memory
from hybrid_engine.hybrid_engine import HybridEngine
from hybrid_engine.layouts.memory import GIB, MemoryPlan
from hybrid_engine.models import table_for
from hybrid_engine.ranks.agreement import SHORT_PATIENCE
from hybrid_engine.ranks.job import Job
from hybrid_engine.ranks.process import Ends
from hybrid_engine.switch.report import MemoryWatch, ReshardReport
from hybrid_engine.switch.states import State
from hybrid_engine.trainer.ports import ActorTrainer

logger = logging.getLogger("hybrid_engine")


class ActorHybridWorker(HybridEngine[ActorTrainer]):
    """The actor: a `HybridEngine` whose trainer, Megatron or FSDP2, is built from a configuration.

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

    def __init__(
        self, config: HybridConfig, *, weights_only: bool = False, load_weights: bool = True, job: Job | None = None
    ) -> None:
        self.config = config
        self._memory: MemoryWatch | None = None  # where models are beside the actor, or memory is limited
        with Ends() as undo:  # the last first, each even if another fails
            if job is None:
                job = undo.enter_context(closing(Job.join(config.generate_config.timeout_seconds)))
            with job.agreement.building():
                self._build(job, weights_only, load_weights and not config.random_weights, undo)
            self.take_over(undo)

    def _build(self, job: Job, weights_only: bool, load_weights: bool, undo: ExitStack) -> None:
        with job.agreement.phase("checking what is installed"):
            job.require_timeout(self.config.generate_config.timeout_seconds)
            build_actor = _builder(self.config)
            if watches_memory(self.config):
                self._memory = MemoryWatch(memory_plan(self.config, job.world_size), job.rank)
                if job.rank == 0:
                    logger.info("%s", self._memory.plan)
            table = table_for(self.config.hf_config())
            check_inference(self.config, job)
        if load_weights:
            fetch_weights(self.config.model, job)
        with job.agreement.phase("building the training engine", SHORT_PATIENCE):
            train = build_actor(self.config, table, job, undo, weights_only=weights_only)
            self.actor = getattr(train, "actor", None)  # Megatron's own objects, where it trains
        if load_weights:
            load_pretrained(self.config.model, train.weights.base, table, job)
            if job.rank == 0 and self.config.actor_config.lora is not None:
                logger.warning("actor_config.lora: the adapters are new; they add nothing yet")
            with job.agreement.phase("copying weights for the optimizer", SHORT_PATIENCE):
                train.reload_main_params()
        parts = put_beside(
            train, self.config, table, job, undo, lora=megatron_lora(self.config, table), gives_back=False
        )
        self._take(parts, undo)
        if self._memory is not None:
            self._measure_switches()

    def memory_plan(self) -> MemoryPlan:
        """What is on the devices in each phase, by the configuration; its text is a table.

        Raises ConfigError where memory is not planned: with FSDP2, or with adapters.
        """
        return memory_plan(self.config, self.world_size) if self._memory is None else self._memory.plan

    def memory_report(self) -> str:
        """This rank's memory plan as a table, with what was measured; the plan alone where nothing is measured."""
        return str(self.memory_plan()) if self._memory is None else self._memory.report()

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

        self.on_reshard_start(measure_before)
        self.on_reshard_end(measure_peak)


def _builder(config: HybridConfig) -> Callable[..., ActorTrainer]:
    """How the actor is built by whoever trains it; Megatron is patched. Raises DependencyError where it cannot be."""
    if config.actor_config.fsdp is not None:
        from hybrid_engine.trainer.fsdp.actor import build_actor as build_with_fsdp

        return build_with_fsdp
    from hybrid_engine.attaching.attachment import apply_patches

    apply_patches()
    from hybrid_engine.trainer.megatron.actor import build_actor as build_with_megatron

    return build_with_megatron
