"""Training state of a Megatron trainer, as checkpoints have it (trainer/training_checkpoint.py).

megatron-core's dist_checkpointing is not used, because 0.16.1 cannot restore its own checkpoints of
torch's Adam. Loading `fully_reshardable` fails with KeyError 'step'; saving `dp_reshardable`
rejects virtual stages ("out of bounds chunk"); and DistributedOptimizer loads one step tensor into
all parameters, so that the next step increments it once for each of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.optimizer import DistributedOptimizer, MegatronOptimizer
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.module import param_is_not_shared
from megatron.core.utils import unwrap_model

from hybrid_engine.backends.computed_sources import Home
from hybrid_engine.backends.megatron.live_model import LiveModel
from hybrid_engine.backends.megatron.lora_layers import LoraLinear
from hybrid_engine.backends.training_side import Modules
from hybrid_engine.memory.offload_items import KINDS
from hybrid_engine.ranks.job import Job
from hybrid_engine.ranks.torch_internals import Tensors
from hybrid_engine.records.regions import Shapes
from hybrid_engine.trainer.canonical_state import Weight
from hybrid_engine.trainer.checkpoint_directory import below, generator_states, restore_generators
from hybrid_engine.trainer.learning_rate import ScheduledOptimizer
from hybrid_engine.trainer.megatron.build import Actor
from megatron_patches import optimizers

_TRACKER = "tracker."


class MegatronState:
    """State of a Megatron trainer on this rank (port `CheckpointedState`).

    Args:
        model: weights of the trainer.
        optimizer: of the trainer, whose schedule is resumed.
        actor: its Megatron objects.
        job: of all ranks.
    """

    def __init__(
        self,
        model: LiveModel,
        optimizer: ScheduledOptimizer,
        actor: Actor,
        job: Job,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._actor = actor
        self._job = job

    @property
    def shapes(self) -> Shapes:
        return self._model.weights.model.table.refined_shapes

    @property
    def version(self) -> int:
        return optimizers.weight_version(self._actor.optimizer)

    def settle(self) -> None:
        self._model.guard(KINDS)
        # Finishes pending parameter gathers.
        self._model.weights.finish_pending()

    def weights(self) -> list[Weight]:
        actor = self._actor
        adaptor = self._model.weights
        parts = {part.param: part for part in optimizers.stepped_parts(actor.optimizer)}
        is_distributed = any(
            isinstance(member, DistributedOptimizer) for member in _members(actor.optimizer)
        )
        weights: dict[torch.Tensor, Weight] = {}
        tensors = [(pair, True) for pair in adaptor.model.named_weights()]
        tensors += [(pair, False) for pair in adaptor.model.named_lora()]
        tensors += [(pair, False) for pair in _persistent(actor.chunks)]
        for (name, tensor), has_names in tensors:
            if tensor in weights:
                continue
            part = parts.get(tensor)
            stepped = None if part is None else part.tensor
            if part is None and tensor.requires_grad and is_distributed:
                # Other ranks step on all of it.
                stepped = tensor.new_empty(0)
            weights[tensor] = Weight(
                name,
                tensor.detach() if part is None or part.tensor is not tensor else tensor,
                adaptor.names_of(name, tensor) if has_names else (),
                adaptor.shards_of(name, tensor, Home("", 0)) if has_names else (),
                stepped,
                0 if part is None else part.start,
                None if part is None else part.optimizer,
                is_copy=not param_is_not_shared(tensor),
            )
        return list(weights.values())

    def layout(self) -> dict[str, int | str]:
        """Return sizes of axes, this rank's coordinates, and chunks; part of the file format."""
        members = _members(self._actor.optimizer)
        return {
            "world_size": self._job.world_size,
            "tensor_parallel": parallel_state.get_tensor_model_parallel_world_size(),
            "pipeline_parallel": parallel_state.get_pipeline_model_parallel_world_size(),
            "tensor_parallel_rank": parallel_state.get_tensor_model_parallel_rank(),
            "pipeline_parallel_rank": parallel_state.get_pipeline_model_parallel_rank(),
            "data_parallel_rank": parallel_state.get_data_parallel_rank(),
            "expert_parallel": parallel_state.get_expert_model_parallel_world_size(),
            "expert_tensor_parallel": parallel_state.get_expert_tensor_parallel_world_size(),
            "expert_parallel_rank": parallel_state.get_expert_model_parallel_rank(),
            "expert_tensor_parallel_rank": parallel_state.get_expert_tensor_parallel_rank(),
            "num_chunks": len(self._actor.chunks),
            "adapters": _lora_of(self._actor.chunks),
            "optimizers": " ".join(type(member).__name__ for member in members),
        }

    def generators(self) -> dict[str, torch.Tensor]:
        trackers = get_cuda_rng_tracker().get_states().items()
        return generator_states() | {_TRACKER + name: value for name, value in trackers}

    def values(self) -> dict[str, Any]:
        return {
            "grad_scaler": _grad_scaler_state(self._actor.optimizer),
            "norms_minus_one": self._model.weights.model.norm_factors is not None,
            "num_scheduled_updates": self._optimizer.num_scheduled_updates,
        }

    def restore(self, values: Mapping[str, Any], generators: Tensors) -> None:
        optimizer = self._actor.optimizer
        for member in _members(optimizer):
            # The optimizer of float32 weights has no copies.
            if hasattr(member, "_copy_main_params_to_model_params"):
                member._copy_main_params_to_model_params()
        for chunk in self._model.weights.model.ddp_chunks:
            if chunk.ddp_config.use_distributed_optimizer:
                chunk.start_param_sync(force_sync=True)
        if values["grad_scaler"] is not None:
            for member in _members(optimizer):
                member.grad_scaler.load_state_dict(values["grad_scaler"])
        optimizers.set_weight_version(optimizer, values["weight_version"])
        self._optimizer.resume_schedule(values["num_scheduled_updates"])
        restore_generators(generators)
        if generators:
            get_cuda_rng_tracker().set_states(below(generators, _TRACKER))


def _persistent(chunks: Modules) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield all tensors of the chunks' state dicts, with unique names."""
    for index, chunk in enumerate(chunks):
        for name, value in unwrap_model(chunk).state_dict(keep_vars=True).items():
            # Transformer Engine's `_extra_state` is for fp8, and may be something else.
            if isinstance(value, torch.Tensor):
                yield f"chunk{index}.{name}", value


def _lora_of(chunks: Modules) -> str:
    """Return scale and rank of the LoRA of every layer, which are not in a state dict."""
    layers = []
    for index, chunk in enumerate(chunks):
        for name, layer in chunk.named_modules():
            # another scale would give other weights from the same tensors
            if isinstance(layer, LoraLinear):
                rank = layer.adapter.linear_in.weight.shape[0]
                layers.append(f"{index}.{name}: {layer.scale:g} x rank {rank}")
    return ", ".join(layers)


def _members(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """Return the optimizers that hold state; a chained optimizer has several."""
    return [member for _, member in optimizers.optimizer_members(optimizer)]


def _grad_scaler_state(optimizer: MegatronOptimizer) -> dict[str, Any] | None:
    """Return the state of the loss scale; None without fp16. Chained optimizers share one."""
    for member in _members(optimizer):
        scaler = getattr(member, "grad_scaler", None)
        if scaler is not None:
            return dict(scaler.state_dict())
    return None
