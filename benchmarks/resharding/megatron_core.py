"""Megatron to Megatron: megatron-core's own `resharding`, and ours, into a second model in the inference layout.

Real: megatron-core 0.16.1's planner, executor and gloo copy service, both models, their process groups. The parameters'
names: its planner knows the experts of Transformer Engine's layers; those of megatron-core's local layers, which a CPU
runs, are shown to it under Transformer Engine's names. The plan is made before the first run and kept, by both.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import unwrap_model

from benchmarks.resharding.bridges import transformer_engine_name
from benchmarks.resharding.measuring import Clock, Digests, digest
from benchmarks.resharding.ours import connect, fill
from hybrid_engine.backends.megatron.adaptor import SUMS, MegatronAdaptor
from hybrid_engine.backends.megatron.model_tensors import ModelTensors
from hybrid_engine.config import ActorConfig, HybridConfig
from hybrid_engine.errors import StateError
from hybrid_engine.records.layout import BufferId, Layout
from hybrid_engine.trainer.megatron import build
from hybrid_engine.trainer.worker import ActorHybridWorker

SECONDS_TO_WAIT = 900


class MegatronDestination:
    """One rank's share of a Megatron model that is filled from another one.

    Args:
        adaptor: of the model that is filled; made while that model's parallel state is Megatron's present one.

    Every flat buffer is a group of its own. Weights are written in place: nothing is allocated, committed or freed, so
    `release` keeps memory and contents. Padding is zeroed here, once.

    Raises StateError for a model with LoRA, whose weights do not lie where its sums would be written.
    """

    def __init__(self, adaptor: MegatronAdaptor) -> None:
        if SUMS in adaptor.buffers():
            raise StateError("cannot write a model with LoRA: build it without lora")
        self._adaptor = adaptor
        self._buffers = adaptor.buffers()
        adaptor.zero_padding()
        layout = adaptor.layout()
        grouped = {
            buffer_id: replace(buffer, group=buffer_id.name)
            for buffer_id, buffer in layout.buffers.items()
        }
        self._layout = Layout(layout.tensors, grouped, layout.shards)

    def layout(self) -> Layout:
        """The records of this rank."""
        return self._layout

    def allocate(self, groups: Sequence[str]) -> Mapping[str, torch.Tensor]:
        """The live flat buffers of these groups. Raises StateError for one that this rank does not have."""
        self._check_known(groups)
        return {name: self._buffers[name] for name in groups}

    def commit(self, groups: Sequence[str]) -> None:
        """Nothing to do: what was written is live. Raises StateError for an unknown group."""
        self._check_known(groups)

    def finish_fill(self) -> None:
        """Do nothing: all memory is the buffers' own."""

    def abandon(self) -> None:
        """Do nothing: no rank waits for another in `commit`."""

    def release(self) -> None:
        """Nothing: the model keeps its memory."""

    def _check_known(self, groups: Sequence[str]) -> None:
        if unknown := [
            name
            for name in groups
            if BufferId(self._adaptor.rank, name) not in self._layout.buffers
        ]:
            raise StateError(f"unknown buffers on rank {self._adaptor.rank}: {', '.join(unknown)}")


class SecondModel:
    """A Megatron model of the same kind in the inference layout, with groups of its own. Collective.

    Memory: this rank's inference shard in the training dtype, until it is dropped.
    """

    def __init__(self, worker: ActorHybridWorker) -> None:
        actor = inference_layout(worker.config)
        with second_parallel_state():
            build.initialize_parallel_state(actor, worker.world_size, SECONDS_TO_WAIT)
            self.chunks, _ = build.build_model(
                actor, worker.table, worker.config.hf_config(), worker.world_size, weights_only=True
            )
            self.adaptor = MegatronAdaptor(ModelTensors(self.chunks, worker.table))
            self.groups = ProcessGroupCollection.use_mpu_process_groups()

    @torch.no_grad()
    def clear(self) -> None:
        """Zero everything, so that nothing of an earlier run counts."""
        for flat in self.adaptor.buffers().values():
            flat.zero_()

    @contextmanager
    def digesting(self) -> Iterator[Digests]:
        """Digests of all parameters at the end of the block, which starts with zeros."""
        digests: dict[str, str] = {}
        self.clear()
        yield digests
        digests.update(
            {name: digest(tensor) for name, tensor in self.adaptor.model.named_weights()}
        )


def inference_layout(config: HybridConfig) -> ActorConfig:
    """Megatron's settings with vLLM's parallel sizes: with expert parallelism whole experts, else cut ones."""
    generate = config.generate_config
    expert = generate.infer_expert_parallel_size
    sizes = {
        "tensor_model_parallel_size": generate.infer_tensor_parallel_size,
        "pipeline_model_parallel_size": generate.infer_pipeline_parallel_size,
        "expert_model_parallel_size": expert,
        "expert_tensor_parallel_size": 1 if expert > 1 else None,
    }
    return config.actor_config.model_copy(
        update={**sizes, "virtual_pipeline_model_parallel_size": None}
    )


@contextmanager
def second_parallel_state() -> Iterator[None]:
    """Megatron's module-wide groups as if not initialised; as they were at the end of the block."""
    kept = {
        name: value
        for name, value in vars(parallel_state).items()
        if name.startswith("_") and name.isupper()
    }
    kept["_global_process_group_list"] = parallel_state._global_process_group_list
    parallel_state.destroy_model_parallel()
    try:
        yield
    finally:
        vars(parallel_state).update(kept)


class OursToMegatron:
    """Our plan and transports into the second model."""

    def __init__(self, worker: ActorHybridWorker) -> None:
        self._source = worker.train.weights
        self._model = SecondModel(worker)
        self._ends = ExitStack()
        self._container = connect(
            worker, MegatronDestination(self._model.adaptor), self._ends
        ).container

    def prepare(self) -> None:
        self._container.release()

    def run(self, clock: Clock) -> None:
        fill(self._container, self._source, clock)

    def digesting(self) -> Any:
        return self._model.digesting()

    def close(self) -> None:
        self._ends.close()
        del self._container, self._model
        gc.collect()


class MegatronResharding:
    """`megatron.core.resharding` with its gloo copy service."""

    def __init__(self, worker: ActorHybridWorker) -> None:
        from megatron.core.resharding.copy_services.gloo_copy_service import GlooCopyService
        from megatron.core.resharding.refit import build_centralized_reshard_plan

        self._model = SecondModel(worker)
        source, target = one_chunk(worker.train.chunks), one_chunk(self._model.chunks)
        source.pg_collection = ProcessGroupCollection.use_mpu_process_groups()
        target.pg_collection = self._model.groups
        num_experts = source.config.num_moe_experts
        self._source, self._target = (
            _TransformerEngineNames(each, bool(num_experts)) for each in (source, target)
        )
        self._target._cached_reshard_plan = build_centralized_reshard_plan(
            self._source, self._target, num_experts
        )
        self._service = GlooCopyService()

    def prepare(self) -> None:
        pass

    def run(self, clock: Clock) -> None:
        from megatron.core.resharding.refit import swap_model_weights

        with clock.phase("transfer"):
            swap_model_weights(self._source, self._target, self._service)

    def digesting(self) -> Any:
        return self._model.digesting()

    def close(self) -> None:
        dist.destroy_process_group(self._service.gloo_pg)
        del self._source, self._target, self._model, self._service
        gc.collect()


def one_chunk(chunks: list[torch.nn.Module]) -> Any:
    """The model of a rank without virtual stages. Raises ValueError: megatron-core reshards one chunk."""
    if len(chunks) > 1:
        raise ValueError(
            f"megatron-core's resharding takes 1 model chunk of a rank, not {len(chunks)}"
        )
    return unwrap_model(chunks[0])


class _TransformerEngineNames(torch.nn.Module):
    """A model whose parameters are called as those of Transformer Engine's layers; otherwise the model itself."""

    def __init__(self, model: Any, has_experts: bool) -> None:
        super().__init__()
        self.__dict__["_model"] = model  # not a submodule: that would prefix all names
        self._has_experts = has_experts
        self.config = model.config
        self.pg_collection = model.pg_collection

    def named_parameters(
        self, *args: Any, **kwargs: Any
    ) -> Iterator[tuple[str, torch.nn.Parameter]]:
        for name, parameter in self._model.named_parameters(*args, **kwargs):
            yield transformer_engine_name(name, self._has_experts), parameter

    def named_modules(self, *args: Any, **kwargs: Any) -> Any:
        return self._model.named_modules(*args, **kwargs)
