"""Megatron to Megatron: megatron-core's `resharding` and ours, to the inference layout.

megatron-core 0.16.1 runs with its planner, executor and gloo copy service. Its planner supports the
experts of Transformer Engine's layers, so parameters of the local layers, which a CPU needs, are
presented under Transformer Engine's names. Both contenders plan before the first run and keep the
plan.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import unwrap_model
from msgspec.structs import replace

from benchmarks.resharding.bridges import transformer_engine_name
from benchmarks.resharding.measuring import Clock, Digests, digest
from benchmarks.resharding.ours import connect, fill
from hybrid_engine.backends.megatron.adaptor import MegatronAdaptor
from hybrid_engine.backends.megatron.model_tensors import ModelTensors
from hybrid_engine.config import ActorConfig, HybridConfig
from hybrid_engine.errors import StateError
from hybrid_engine.records.layout import BufferId, Layout
from hybrid_engine.trainer.megatron import build
from hybrid_engine.trainer.worker import ActorHybridWorker

SECONDS_TO_WAIT = 900


class MegatronDestination:
    """Share of this rank in a Megatron model that is filled from another model.

    Args:
        adaptor: adaptor of the filled model, built while the model's parallel state is active.

    Every flat buffer is a separate group. Weights are written in place: nothing is allocated,
    committed or freed, so `release` keeps memory and contents. `SecondModel.clear` zeroes padding.

    Raises StateError for a model with LoRA, whose base weights and adapters are separate.
    """

    def __init__(self, adaptor: MegatronAdaptor) -> None:
        if adaptor.scratch:
            raise StateError("cannot fill a model with LoRA: build it without lora")
        self._adaptor = adaptor
        self._buffers = adaptor.buffers()
        layout = adaptor.layout()
        grouped = {
            buffer_id: replace(buffer, group=buffer_id.name)
            for buffer_id, buffer in layout.buffers.items()
        }
        self._layout = Layout(layout.tensors, grouped, layout.shards)

    def layout(self) -> Layout:
        """Return the records of this rank."""
        return self._layout

    def allocate(self, groups: Sequence[str]) -> Mapping[str, torch.Tensor]:
        """Return the live flat buffers of these groups. Raises StateError for an unknown group."""
        self._check_known(groups)
        return {name: self._buffers[name] for name in groups}

    def commit(self, groups: Sequence[str]) -> None:
        """Do nothing: writes are already live. Raises StateError for an unknown group."""
        self._check_known(groups)

    def finish_fill(self) -> None:
        """Do nothing: there is no temporary memory."""

    def abandon(self) -> None:
        """Do nothing: no rank waits for another in `commit`."""

    def release(self) -> None:
        """Do nothing: the model keeps its memory."""

    def _check_known(self, groups: Sequence[str]) -> None:
        rank = self._adaptor.rank
        unknown = [name for name in groups if BufferId(rank, name) not in self._layout.buffers]
        if unknown:
            raise StateError(f"unknown buffers on rank {rank}: {', '.join(unknown)}")


class SecondModel:
    """Megatron model in the inference layout, with separate process groups. Collective.

    Takes the memory of this rank's inference shard in the training dtype.
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
        """Zero all weights and padding, so that an earlier run cannot hide missing writes."""
        for flat in self.adaptor.buffers().values():
            flat.zero_()

    @contextmanager
    def digesting(self) -> Iterator[Digests]:
        """Zero all weights, then yield digests of the weights at the end of the block."""
        digests: dict[str, str] = {}
        self.clear()
        yield digests
        digests.update(
            {name: digest(tensor) for name, tensor in self.adaptor.model.named_weights()}
        )


def inference_layout(config: HybridConfig) -> ActorConfig:
    """Return the actor settings with vLLM's parallel sizes; EP keeps experts whole."""
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
    """Reset Megatron's global parallel state for the block and restore it afterwards."""
    saved = {
        name: value
        for name, value in vars(parallel_state).items()
        if name.startswith("_") and name.isupper()
    }
    # the only global of the state in lower case
    saved["_global_process_group_list"] = parallel_state._global_process_group_list
    parallel_state.destroy_model_parallel()
    try:
        yield
    finally:
        vars(parallel_state).update(saved)


class OursToMegatron:
    """Writes the second model by our plan and transports."""

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
    """Writes the second model by `megatron.core.resharding` with its gloo copy service."""

    def __init__(self, worker: ActorHybridWorker) -> None:
        from megatron.core.resharding.copy_services.gloo_copy_service import GlooCopyService
        from megatron.core.resharding.refit import build_centralized_reshard_plan

        self._model = SecondModel(worker)
        source = single_chunk(worker.train.chunks)
        target = single_chunk(self._model.chunks)
        # megatron-core reads the groups of both models from this attribute
        source.pg_collection = ProcessGroupCollection.use_mpu_process_groups()
        target.pg_collection = self._model.groups
        num_experts = source.config.num_moe_experts
        self._source = _TransformerEngineNames(source, bool(num_experts))
        self._target = _TransformerEngineNames(target, bool(num_experts))
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


def single_chunk(chunks: list[torch.nn.Module]) -> Any:
    """Return the model of a rank. Raises ValueError with virtual stages."""
    if len(chunks) > 1:
        raise ValueError(
            f"megatron-core's resharding supports 1 model chunk per rank, not {len(chunks)}"
        )
    return unwrap_model(chunks[0])


class _TransformerEngineNames(torch.nn.Module):
    """Proxy of a model with the parameter names of Transformer Engine's layers."""

    def __init__(self, model: Any, has_experts: bool) -> None:
        super().__init__()
        self.__dict__["_model"] = model  # a submodule would prefix all names
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
