"""Saves and loads a Megatron actor, to resume a run in the same layout. Called by `ActorHybridWorker`.

Every rank has keys of its own in the checkpoint (trainer/checkpoint_directory.py):

    rank0/model.0.decoder.final_layernorm.weight     of the first chunk of its model
    rank0/optimizer.0.17.exp_avg                     state of parameter 17 of its first optimizer
    rank0/main_param.optimizer.param_groups[0]…      fp32 copies of parameters
    rank0/generator, rank0/tracker.…, rank0/values    layout, hyperparameters, counters

Not by megatron-core's dist_checkpointing: 0.16.1 cannot restore what it saved of torch's Adam. Loading
`fully_reshardable` ends in KeyError 'step', saving `dp_reshardable` refuses virtual stages ("out of bounds chunk"), and
DistributedOptimizer loads one step tensor into all parameters, so that the next step increments it once for each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.utils import unwrap_model

from hybrid_engine.backends.megatron.lora_layers import LoraLinear
from hybrid_engine.backends.training_side import require_finite_to_save, stepped_by
from hybrid_engine.errors import StateError
from hybrid_engine.ranks.job import Job
from hybrid_engine.trainer import learning_rate
from hybrid_engine.trainer.checkpoint_directory import SavedCheckpoint, below, differences, save
from hybrid_engine.trainer.megatron.build import Actor
from megatron_patches import optimizers

_VALUES, _OPTIMIZER, _MAIN_PARAM = "values", "optimizer.", "main_param."
_GENERATOR, _TRACKER = "generator", "tracker."
_OF_SCHEDULE = ("max_lr", "min_lr")
"""Of a parameter group, which a schedule reads before its own: the configuration's, as the schedule is."""


def save_checkpoint(directory: str | Path, actor: Actor, job: Job, *, check_nan: bool = True) -> None:
    """Write parameters, optimizer state, generators and weight version to `directory`. Collective.

    On errors and on what a kill leaves see `checkpoint_directory.save`. Before anything is written, all ranks raise
    where any of it is not finite on one of them, a WeightError there with its names; `check_nan=False` does not look.

    The caller has finished pending parameter gathers. All training state must be on the device.
    """
    with job.agreement.phase("looking for values that are not finite"):
        state = {f"rank{job.rank}/{key}": value for key, value in _state_of(actor, job).items()}
        if check_nan:
            require_finite_to_save(lambda: ((key, one) for key, one in state.items() if isinstance(one, torch.Tensor)))
    save(directory, state, job)


@torch.no_grad()
def load_checkpoint(directory: str | Path, actor: Actor, job: Job) -> None:
    """Restore what `save_checkpoint` wrote, every bit of it. Collective.

    Parameters and main parameters keep their storage; moments get new storage, beside the old until all are restored.
    Everything is compared with its checksum and with the actor, and read into host memory, before any rank changes
    anything, and only until then is anything raised, on all ranks.

    Raises:
        StateError: when there is no such checkpoint, or it was written in another layout (both are named), or is of
            another model.
        FileError: naming a file that cannot be read or is not what was written.
    """
    saved = SavedCheckpoint(directory, job)
    with job.agreement.phase("reading the checkpoint"):
        prefix, live = f"rank{job.rank}/", _state_of(actor, job)
        values = _values_in(saved, prefix, live[_VALUES]["layout"])
        entries = saved.entries(prefix)
        saved.require_fit([*_differences(entries, live), *_optimizer_differences(entries, values, live, actor)])
        state = below(saved.read_all(prefix), prefix)
        moments = [_moments(state, index, member) for index, member in enumerate(_members(actor.optimizer))]
    with job.agreement.phase("restoring the checkpoint"):
        for index, chunk in enumerate(actor.chunks):
            unwrap_model(chunk).load_state_dict(below(state, f"model.{index}."), strict=False)  # without extra state
        _load_optimizer(actor.optimizer, values, moments)
        for main_param in _main_params(actor.optimizer):
            main_param.tensor.copy_(state[_MAIN_PARAM + main_param.path])
        learning_rate.resume(actor.scheduler, values["num_scheduled_updates"])
        torch.set_rng_state(state[_GENERATOR])
        get_cuda_rng_tracker().set_states(below(state, _TRACKER))


# -- what is saved -----------------------------------------------------------------------------------------------------


def _state_of(actor: Actor, job: Job) -> dict[str, Any]:
    """Everything that is saved; views of live memory."""
    members = _members(actor.optimizer)
    states = [member.optimizer.state_dict() for member in members]
    state = {
        f"model.{index}.{name}": value
        for index, chunk in enumerate(actor.chunks)
        for name, value in unwrap_model(chunk).state_dict().items()
        if isinstance(value, torch.Tensor)  # the `_extra_state` of Transformer Engine is for fp8, and not always one
    }
    state |= {
        f"{_OPTIMIZER}{index}.{param}.{key}": value
        for index, one in enumerate(states)
        for param, of_param in one["state"].items()
        for key, value in of_param.items()
    }
    state |= {_MAIN_PARAM + one.path: one.tensor for one in _main_params(actor.optimizer)}
    state |= {_TRACKER + name: value for name, value in get_cuda_rng_tracker().get_states().items()}
    return state | {
        _GENERATOR: torch.get_rng_state(),
        _VALUES: {
            "layout": _layout_of(actor, job),
            "param_groups": [one["param_groups"] for one in states],
            "grad_scaler": _grad_scaler_state(members),
            "weight_version": optimizers.weight_version(actor.optimizer),
            "num_scheduled_updates": None if actor.scheduler is None else actor.scheduler.num_steps,
        },
    }


def _layout_of(actor: Actor, job: Job) -> dict[str, int | str]:
    """What must be the same when a checkpoint is loaded: axis sizes, this rank's coordinates, and chunks.

    The keys are part of the format.
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


def _members(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """The optimizers that hold state."""
    return [member for _, member in optimizers.optimizer_members(optimizer)]


def _main_params(optimizer: MegatronOptimizer) -> list[optimizers.OptimizerTensor]:
    """The fp32 copies of parameters, where the optimizer has any."""
    return [tensor for tensor in optimizers.optimizer_tensors(optimizer) if tensor.kind == "main_param"]


def _grad_scaler_state(members: Sequence[MegatronOptimizer]) -> dict[str, Any] | None:
    """Of fp16 training; Megatron's chained optimizers share one scaler."""
    scalers = [scaler for member in members if (scaler := getattr(member, "grad_scaler", None)) is not None]
    return scalers[0].state_dict() if scalers else None


# -- whether it fits, and restoring it ---------------------------------------------------------------------------------


def _values_in(saved: SavedCheckpoint, prefix: str, layout: Mapping[str, Any]) -> dict[str, Any]:
    """The values of this rank. Raises StateError for those of another layout or trainer."""
    keys = [key for key in (prefix + _VALUES, f"rank0/{_VALUES}") if key in saved.entries("")]
    if not keys:
        raise StateError(f"no checkpoint of a Megatron trainer: {saved.path}")
    values: dict[str, Any] = saved.value(keys[0])
    then = values["layout"]
    if changed := [f"{key} {then.get(key)}, now {now}" for key, now in layout.items() if then.get(key) != now]:
        raise StateError(f"{saved.path} was written in another layout ({'; '.join(changed)}): resume with that layout")
    return values


def _differences(entries: Mapping[str, Any], live: Mapping[str, Any]) -> Iterator[str]:
    """Of all but the optimizers' own states, which appear with the first step."""
    sides = ({key: one for key, one in side.items() if not key.startswith(_OPTIMIZER)} for side in (entries, live))
    yield from differences(*sides)


def _optimizer_differences(
    entries: Mapping[str, Any], values: Mapping[str, Any], live: Mapping[str, Any], actor: Actor
) -> Iterator[str]:
    if (values["grad_scaler"] is None) != (live[_VALUES]["grad_scaler"] is None):
        yield "grad_scaler: only one of the checkpoint and this optimizer has any"
    groups = zip(values["param_groups"], live[_VALUES]["param_groups"], _members(actor.optimizer), strict=True)
    for index, (then, now, member) in enumerate(groups):
        if [group["params"] for group in then] != [group["params"] for group in now]:
            yield f"{_OPTIMIZER}{index}: other parameter groups"
            continue
        yield from (  # a group's step appears with the first one
            f"{_OPTIMIZER}{index}: group {number}: {key} is missing"
            for number, (one, other) in enumerate(zip(then, now, strict=True))
            for key in other.keys() - one.keys() - {"step"}
        )
        params = stepped_by(member.optimizer)
        for name, entry in below(entries, f"{_OPTIMIZER}{index}.").items():
            expected = params[int(name.partition(".")[0])].shape
            if entry is not None and entry.size and entry.size != expected:
                yield f"{_OPTIMIZER}{index}.{name}: {tuple(entry.size)}, expected {tuple(expected)}"


def _moments(state: Mapping[str, Any], index: int, member: MegatronOptimizer) -> dict[int, dict[str, Any]]:
    """The state of one optimizer by parameter, on the parameters' devices: from then on no memory is needed."""
    params, found = stepped_by(member.optimizer), dict[int, dict[str, Any]]()
    for name, value in below(state, f"{_OPTIMIZER}{index}.").items():
        param, _, key = name.partition(".")
        is_moment = isinstance(value, torch.Tensor) and value.dim() > 0
        found.setdefault(int(param), {})[key] = value.to(params[int(param)].device) if is_moment else value
    return found


def _load_optimizer(
    optimizer: MegatronOptimizer, values: Mapping[str, Any], moments: Sequence[dict[int, dict[str, Any]]]
) -> None:
    for member, groups, state in zip(_members(optimizer), values["param_groups"], moments, strict=True):
        limits = [{key: group[key] for key in _OF_SCHEDULE if key in group} for group in member.optimizer.param_groups]
        member.optimizer.load_state_dict({"state": state, "param_groups": groups})
        for group, own in zip(member.optimizer.param_groups, limits, strict=True):
            group.update(own)
        if values["grad_scaler"] is not None:
            member.grad_scaler.load_state_dict(values["grad_scaler"])
    optimizers.set_weight_version(optimizer, values["weight_version"])
