"""Saves and loads a Megatron actor, to resume a run in the same layout. Called by `ActorHybridWorker`.

    directory/rank0000.pt, rank0001.pt, ...    one file per rank: its parameters, optimizer state, generators
    directory/manifest.json                    their lengths and checksums; see trainer/checkpoint_directory.py

Not by megatron-core's dist_checkpointing: 0.16.1 cannot restore what it saved of torch's Adam. Loading
`fully_reshardable` ends in KeyError 'step', saving `dp_reshardable` refuses virtual stages ("out of bounds chunk"), and
DistributedOptimizer loads one step tensor into all parameters, so that the next step increments it once for each. A
file per rank needs no collective and no forked writer process, and restores every bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.utils import unwrap_model

from hybrid_engine.backends.flat_buffers import require_finite_to_save
from hybrid_engine.backends.megatron.lora_layers import LoraLinear
from hybrid_engine.errors import StateError, first_of
from hybrid_engine.ranks.job import Job
from hybrid_engine.trainer import learning_rate
from hybrid_engine.trainer.checkpoint_directory import MOST_NAMED, new_checkpoint, present_checkpoint
from hybrid_engine.trainer.megatron import rank_files
from hybrid_engine.trainer.megatron.build import Actor
from hybrid_engine.trainer.megatron.checkpoint_checks import differences, optimizer_differences
from megatron_patches import optimizers


def _topology_of(actor: Actor, job: Job) -> dict[str, int | str]:
    """What must be the same when a checkpoint is loaded: axis sizes, this rank's coordinates, and chunks.

    The keys are part of the file format.
    """
    return {
        "world_size": job.world_size,
        "tensor_parallel": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline_parallel": parallel_state.get_pipeline_model_parallel_world_size(),
        "tensor_parallel_rank": parallel_state.get_tensor_model_parallel_rank(),
        "pipeline_parallel_rank": parallel_state.get_pipeline_model_parallel_rank(),
        "data_parallel_rank": parallel_state.get_data_parallel_rank(),
        "expert_parallel": parallel_state.get_expert_model_parallel_world_size(),
        "expert_tensor_parallel": parallel_state.get_expert_tensor_parallel_world_size(),
        "expert_parallel_rank": parallel_state.get_expert_model_parallel_rank(),
        "expert_tensor_parallel_rank": parallel_state.get_expert_tensor_parallel_rank(),
        "num_chunks": len(actor.chunks),
        "adapters": _lora_of(actor.chunks),
        "optimizers": " ".join(type(member).__name__ for member in _members(actor.optimizer)),
    }


def _lora_of(chunks: Sequence[torch.nn.Module]) -> str:
    """Scale and rank of every layer's LoRA, which are not in a state dict."""
    layers = [
        f"{index}.{name}: {layer.scale:g} x rank {layer.adapter.linear_in.weight.shape[0]}"
        for index, chunk in enumerate(chunks)
        for name, layer in chunk.named_modules()
        if isinstance(layer, LoraLinear)
    ]
    return ", ".join(layers)


def save_checkpoint(directory: str | Path, actor: Actor, job: Job, *, check_nan: bool = True) -> None:
    """Write parameters, optimizer state, generators and weight version to `directory`. Collective.

    On errors and on what a kill leaves see `new_checkpoint`. Before anything is written, all ranks raise where any of
    it is not finite on one of them, a WeightError there with its names; `check_nan=False` does not look.

    The caller has finished pending parameter gathers. All training state must be on the device; nothing is copied in
    memory.
    """
    with job.agreement.phase("looking for values that are not finite"):
        state = _saved_state(actor, job)
        if check_nan:
            require_finite_to_save(lambda: _tensors_in(state, f"rank {job.rank}: "))
    with new_checkpoint(directory, job) as new, job.agreement.phase("writing the checkpoint"):
        name = rank_files.file_name(job.rank)
        new.contents[name] = rank_files.write_rank_file(new.path / name, state)


def _tensors_in(state: Any, where: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a state, with its place."""
    if isinstance(state, torch.Tensor):
        yield where.removesuffix(": "), state
    elif isinstance(state, dict | list):
        for key, value in state.items() if isinstance(state, dict) else enumerate(state):
            yield from _tensors_in(value, f"{where}{key}: ")


@torch.no_grad()
def load_checkpoint(directory: str | Path, actor: Actor, job: Job) -> None:
    """Restore what `save_checkpoint` wrote, every bit of it. Collective.

    Parameters and main parameters keep their storage; moments get new storage, beside the old until all are restored.
    Everything is read, compared with its checksum and with the actor, and allocated before any rank changes anything,
    and only until then is anything raised, on all ranks.

    Raises:
        StateError: when a rank's file is missing, was written in another layout (both are named), or is of another
            model.
        FileError: naming a file that cannot be read or is not what was written.
    """
    with job.agreement.phase("reading the checkpoint"):
        found = present_checkpoint(directory)
        state = rank_files.read_rank_file(found, job.rank)
        num_updates = _num_scheduled_updates(state)
        _require_fit(state, actor, job, found / rank_files.file_name(job.rank))
        moments = [
            _own_memory(values, member.optimizer)
            for values, member in zip(state["optimizer"]["members"], _members(actor.optimizer), strict=True)
        ]
    with job.agreement.phase("restoring the checkpoint"):
        for chunk, values in zip(actor.chunks, state["chunks"], strict=True):
            unwrap_model(chunk).load_state_dict(values, strict=False)  # it has no extra state: see _tensors_only
        _load_optimizer(actor.optimizer, state["optimizer"], moments)
        learning_rate.resume(actor.scheduler, num_updates)
        torch.set_rng_state(state["generators"]["torch"])
        get_cuda_rng_tracker().set_states(state["generators"]["tracker"])


_SCHEDULE = "num_scheduled_updates"
_OF_SCHEDULE = ("max_lr", "min_lr")
"""Of a parameter group, which a schedule reads before its own: the configuration's, as the schedule is."""


def _num_scheduled_updates(state: Any) -> int | None:
    """Where a schedule was, taken out of a saved `state`; None for one without. What it is follows from the
    configuration, which may be another than before."""
    num_updates = state.pop(_SCHEDULE, None) if isinstance(state, dict) else None
    return num_updates if isinstance(num_updates, int) and num_updates >= 0 else None


def _require_fit(state: Any, actor: Actor, job: Job, path: Path) -> None:
    """Raise StateError unless all of `state` can be restored, naming what cannot."""
    live = _state_of(actor, job)
    layout = state.get("layout") if isinstance(state, dict) else None
    if isinstance(layout, dict) and layout != live["layout"]:
        changed = [
            f"{key} {layout.get(key)}, now {value}" for key, value in live["layout"].items() if layout.get(key) != value
        ]
        raise StateError(f"{path} was written in another layout ({'; '.join(changed)}): resume with that layout")
    problems = list(differences(state, live))
    if not problems:
        problems = _member_problems(state["optimizer"]["members"], actor)
    if not problems and state["optimizer"]["weight_version"] < 0:
        problems = [f"optimizer: weight_version is {state['optimizer']['weight_version']}"]
    if not problems and not _is_generator_state(state["generators"]["torch"]):
        problems = ["generators: torch: not a state of torch's generator"]
    if problems:
        named = first_of(sorted(problems), MOST_NAMED, "; ")
        raise StateError(f"{path} belongs to another model: {named}. Load it into the model that saved it")


def _member_problems(members: Any, actor: Actor) -> list[str]:
    live = _members(actor.optimizer)
    if not isinstance(members, list) or len(members) != len(live):
        return [f"optimizer: {len(members) if isinstance(members, list) else 'no'} members, expected {len(live)}"]
    return [
        problem
        for index, (found, member) in enumerate(zip(members, live, strict=True))
        for problem in optimizer_differences(found, member.optimizer, f"optimizer: member {index}: ")
    ]


def _is_generator_state(state: torch.Tensor) -> bool:
    try:
        torch.Generator().set_state(state)
    except RuntimeError:
        return False
    return True


def _saved_state(actor: Actor, job: Job) -> dict[str, Any]:
    schedule = {} if actor.scheduler is None else {_SCHEDULE: actor.scheduler.num_steps}
    return {**_state_of(actor, job), **schedule}


def _state_of(actor: Actor, job: Job) -> dict[str, Any]:
    """Everything that is saved, but for `_SCHEDULE`; views of live memory."""
    return {
        "layout": _topology_of(actor, job),
        "chunks": [_tensors_only(unwrap_model(chunk).state_dict()) for chunk in actor.chunks],
        "optimizer": {
            "members": [member.optimizer.state_dict() for member in _members(actor.optimizer)],
            "main_params": {t.path: t.tensor for t in _main_params(actor.optimizer)},
            "grad_scaler": _grad_scaler_state(actor.optimizer),
            "weight_version": optimizers.weight_version(actor.optimizer),
        },
        "generators": {"torch": torch.get_rng_state(), "tracker": get_cuda_rng_tracker().get_states()},
    }


def _load_optimizer(optimizer: MegatronOptimizer, state: dict[str, Any], moments: list[dict[str, Any]]) -> None:
    for member, values in zip(_members(optimizer), moments, strict=True):
        limits = [{key: group[key] for key in _OF_SCHEDULE if key in group} for group in member.optimizer.param_groups]
        member.optimizer.load_state_dict(values)
        for group, own in zip(member.optimizer.param_groups, limits, strict=True):
            group.update(own)
        if state["grad_scaler"] is not None:
            member.grad_scaler.load_state_dict(state["grad_scaler"])
    for main_param in _main_params(optimizer):
        main_param.tensor.copy_(state["main_params"][main_param.path])
    optimizers.set_weight_version(optimizer, state["weight_version"])


def _own_memory(values: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """A torch optimizer's state in memory of its own, on its parameters' devices.

    Copied, because offloading resizes storages and those of torch.load are not resizable; and copied before anything
    changes, because nothing may run out of memory from then on.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    state = {
        index: {key: _copied(value, params[index].device) for key, value in one.items()}
        for index, one in values["state"].items()
    }
    return {**values, "state": state}


def _copied(value: Any, device: torch.device) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.to(device, copy=True) if value.dim() else value.clone()


def _main_params(optimizer: MegatronOptimizer) -> list[optimizers.OptimizerTensor]:
    """The fp32 copies of parameters, where the optimizer has any."""
    return [tensor for tensor in optimizers.optimizer_tensors(optimizer) if tensor.kind == "main_param"]


def _grad_scaler_state(optimizer: MegatronOptimizer) -> dict[str, Any] | None:
    """Of fp16 training; Megatron's chained optimizers share one scaler."""
    scalers = [scaler for member in _members(optimizer) if (scaler := getattr(member, "grad_scaler", None)) is not None]
    return scalers[0].state_dict() if scalers else None


def _tensors_only(state: dict[str, Any]) -> dict[str, Any]:
    """Without the `_extra_state` of Transformer Engine's layers, which is for fp8 and not always a tensor."""
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}


def _members(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """The optimizers that hold state."""
    return [member for _, member in optimizers.optimizer_members(optimizer)]
