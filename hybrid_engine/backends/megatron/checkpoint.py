"""Saves and loads a Megatron actor, to resume a run in the layout it had.

    directory/rank0000.pt, rank0001.pt, ...    one file per rank: its parameters, optimizer state, generators

Not megatron-core's dist_checkpointing, because 0.16.1 cannot give back what it saved with torch's Adam: loading
`fully_reshardable` ends in KeyError 'step', saving `dp_reshardable` refuses virtual stages ("out of bounds chunk"),
and DistributedOptimizer loads one step tensor into all parameters, which the next step then counts up once for each.
A file per rank needs no collective, no forked writer process, and is bitwise what was there.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.utils import unwrap_model

from hybrid_engine.agreement import Agreement
from hybrid_engine.backends.megatron.build import Actor
from hybrid_engine.backends.megatron.lora import LoraLinear
from hybrid_engine.errors import StateError
from megatron_patches import optimizers


@dataclass(frozen=True)
class _Layout:
    """What must be the same when a checkpoint is loaded: axis sizes, this rank's coordinates, and chunks."""

    world_size: int
    tensor_parallel: int
    pipeline_parallel: int
    tensor_parallel_rank: int
    pipeline_parallel_rank: int
    data_parallel_rank: int
    expert_parallel: int
    expert_tensor_parallel: int
    expert_parallel_rank: int
    expert_tensor_parallel_rank: int
    num_chunks: int
    adapters: str
    optimizers: str

    @classmethod
    def of(cls, actor: Actor) -> _Layout:
        return cls(
            world_size=dist.get_world_size(),
            tensor_parallel=parallel_state.get_tensor_model_parallel_world_size(),
            pipeline_parallel=parallel_state.get_pipeline_model_parallel_world_size(),
            tensor_parallel_rank=parallel_state.get_tensor_model_parallel_rank(),
            pipeline_parallel_rank=parallel_state.get_pipeline_model_parallel_rank(),
            data_parallel_rank=parallel_state.get_data_parallel_rank(),
            expert_parallel=parallel_state.get_expert_model_parallel_world_size(),
            expert_tensor_parallel=parallel_state.get_expert_tensor_parallel_world_size(),
            expert_parallel_rank=parallel_state.get_expert_model_parallel_rank(),
            expert_tensor_parallel_rank=parallel_state.get_expert_tensor_parallel_rank(),
            num_chunks=len(actor.chunks),
            adapters=_adapters_of(actor.chunks),
            optimizers=" ".join(type(member).__name__ for member in _members(actor.optimizer)),
        )


def _adapters_of(chunks: Sequence[torch.nn.Module]) -> str:
    """Scale and rank of every adapter, by its layer's name; these are not in a state dict."""
    layers = [
        f"{index}.{name}: {layer.scale:g} x rank {layer.adapter.linear_in.weight.shape[0]}"
        for index, chunk in enumerate(chunks)
        for name, layer in chunk.named_modules()
        if isinstance(layer, LoraLinear)
    ]
    return ", ".join(layers)


def save_checkpoint(directory: str | Path, actor: Actor, agreement: Agreement) -> None:
    """Write parameters, optimizer state, generators and weight version to `directory`. Collective.

    Written beside it and renamed at the end: no reader finds half a checkpoint. One that exists is replaced, and is
    missing only between two renames. Pending parameter gathers are the caller's to finish. All training state must be
    on the device; nothing is copied in memory. All ranks see one file system.
    """
    directory = Path(directory)
    incomplete = directory.with_name(f"{directory.name}.incomplete")
    with agreement.phase("preparing the checkpoint's directory"):
        if dist.get_rank() == 0:
            shutil.rmtree(incomplete, ignore_errors=True)
            incomplete.mkdir(parents=True)
    with agreement.phase("writing the checkpoint"):
        torch.save(_state_of(actor), incomplete / _file_name(dist.get_rank()))
    with agreement.phase("putting the checkpoint in place"):
        if dist.get_rank() == 0:
            _replace_directory(incomplete, directory)


@torch.no_grad()
def load_checkpoint(directory: str | Path, actor: Actor, agreement: Agreement) -> None:
    """Take up what `save_checkpoint` wrote; afterwards every value is bitwise what it was. Collective.

    Parameters and main parameters keep their storage; moments get a new one. Raises StateError, before any rank has
    changed anything, when a rank's file is missing or was written in another layout, naming both.
    """
    path = Path(directory) / _file_name(dist.get_rank())
    with agreement.phase("reading the checkpoint"):
        state = _read(path, asdict(_Layout.of(actor)))
    with agreement.phase("taking up the checkpoint"):
        for chunk, values in zip(actor.chunks, state["chunks"], strict=True):
            _load_chunk(unwrap_model(chunk), values, path)
        _load_optimizer(actor.optimizer, state["optimizer"])
        torch.set_rng_state(state["generators"]["torch"])
        get_cuda_rng_tracker().set_states(state["generators"]["tracker"])


def _read(path: Path, layout: dict[str, Any]) -> dict[str, Any]:
    if not path.is_file():
        raise StateError(f"no checkpoint of rank {dist.get_rank()}: {path} does not exist")
    state = torch.load(path, map_location="cpu", weights_only=True)
    changed = [
        f"{key} {state['layout'].get(key)}, now {value}"
        for key, value in layout.items()
        if state["layout"].get(key) != value
    ]
    if changed:
        raise StateError(f"{path} was written in another layout ({'; '.join(changed)}): resume with the one it had")
    return state


def _state_of(actor: Actor) -> dict[str, Any]:
    """Everything that is saved; views of live memory."""
    return {
        "layout": asdict(_Layout.of(actor)),
        "chunks": [_tensors_only(unwrap_model(chunk).state_dict()) for chunk in actor.chunks],
        "optimizer": {
            "members": [member.optimizer.state_dict() for member in _members(actor.optimizer)],
            "main_params": {t.path: t.tensor for t in _main_params(actor.optimizer)},
            "grad_scaler": _grad_scaler_state(actor.optimizer),
            "weight_version": optimizers.weight_version(actor.optimizer),
        },
        "generators": {"torch": torch.get_rng_state(), "tracker": get_cuda_rng_tracker().get_states()},
    }


def _load_chunk(chunk: torch.nn.Module, values: dict[str, Any], path: Path) -> None:
    result = chunk.load_state_dict(values, strict=False)
    missing = [name for name in result.missing_keys if not name.endswith("_extra_state")]
    if missing or result.unexpected_keys:
        raise StateError(
            f"{path} belongs to another model: it lacks {missing or 'nothing'} and adds "
            f"{result.unexpected_keys or 'nothing'}; load it into the model that saved it"
        )


def _load_optimizer(optimizer: MegatronOptimizer, state: dict[str, Any]) -> None:
    for member, values in zip(_members(optimizer), state["members"], strict=True):
        member.optimizer.load_state_dict(values)
        _own_memory(member.optimizer)
        if state["grad_scaler"] is not None:
            member.grad_scaler.load_state_dict(state["grad_scaler"])
    for main_param in _main_params(optimizer):
        main_param.tensor.copy_(state["main_params"][main_param.path])
    optimizers.set_weight_version(optimizer, state["weight_version"])


def _own_memory(optimizer: torch.optim.Optimizer) -> None:
    """Copy the state that was just loaded: what torch.load gives cannot be resized, which offloading does."""
    for state in optimizer.state.values():
        state.update({key: value.clone() for key, value in state.items() if isinstance(value, torch.Tensor)})


def _main_params(optimizer: MegatronOptimizer) -> list[optimizers.OptimizerTensor]:
    """The fp32 copies of parameters, where the optimizer has any."""
    return [tensor for tensor in optimizers.optimizer_tensors(optimizer) if tensor.kind == "main_param"]


def _grad_scaler_state(optimizer: MegatronOptimizer) -> dict[str, Any] | None:
    """Of fp16 training; Megatron's chained optimizers share one scaler."""
    scalers = [scaler for member in _members(optimizer) if (scaler := getattr(member, "grad_scaler", None)) is not None]
    return scalers[0].state_dict() if scalers else None


def _tensors_only(state: dict[str, Any]) -> dict[str, Any]:
    """Without the `_extra_state` of Transformer Engine's layers, which is about fp8 and not always a tensor."""
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}


def _members(optimizer: MegatronOptimizer) -> Sequence[MegatronOptimizer]:
    """The optimizers that hold state; one without parameters, as of a stage that is frozen, holds none."""
    if isinstance(optimizer, ChainedOptimizer):
        return [leaf for member in optimizer.chained_optimizers for leaf in _members(member)]
    return [] if getattr(optimizer, "is_stub_optimizer", False) else [optimizer]


def _file_name(rank: int) -> str:
    return f"rank{rank:04d}.pt"


def _replace_directory(source: Path, target: Path) -> None:
    """Rename `source` to `target`, in place of a directory that may be there."""
    replaced = target.with_name(f"{target.name}.replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    if target.exists():
        target.rename(replaced)
    source.rename(target)
    shutil.rmtree(replaced, ignore_errors=True)
