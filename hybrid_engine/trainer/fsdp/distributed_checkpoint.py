"""Saves and loads an FSDP2 trainer: on any number of ranks, sharded in any way.

Keys of the checkpoint (trainer/checkpoint_directory.py); all ranks have the same, but for generators:

    model.lm_head.weight, optimizer.lm_head.weight.exp_avg     each rank writes and reads its parts
    generator.cpu.0, generator.cuda.0                          of every rank
    values                                                     steps taken, hyperparameters, number of ranks
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from hybrid_engine.backends.fsdp.sharded_tensors import local_of
from hybrid_engine.backends.training_side import require_finite_to_save
from hybrid_engine.errors import StateError
from hybrid_engine.ranks.job import Job
from hybrid_engine.trainer.checkpoint_directory import SavedCheckpoint, below, differences, save
from hybrid_engine.trainer.fsdp.train_engine import FsdpTrainEngine

_VALUES, _MODEL, _OPTIMIZER, _GENERATOR = "values", "model.", "optimizer.", "generator."


def save_checkpoint(directory: str | Path, engine: FsdpTrainEngine, job: Job, *, check_nan: bool = True) -> None:
    """Write parameters, optimizer state, generators and weight version to `directory`. Collective.

    On errors and on what a kill leaves see `checkpoint_directory.save`. All training state must be on the device.
    Before anything is written, all ranks raise where any of it is not finite on one of them, a WeightError there with
    its names; `check_nan=False` does not look.
    """
    with job.agreement.phase("looking for values that are not finite"):
        engine.weights.prepare()
        state = _tensors_of(engine, job.rank)
        if check_nan:
            require_finite_to_save(
                lambda: ((f"{name} on rank {job.rank}", local_of(tensor)) for name, tensor in state.items())
            )
    save(directory, {**state, _VALUES: _values_of(engine, job.world_size)}, job)


@torch.no_grad()
def load_checkpoint(directory: str | Path, engine: FsdpTrainEngine, job: Job) -> None:
    """Restore what `save_checkpoint` wrote, every bit of it, on this or another number of ranks. Collective.

    Parameters keep their storage; optimizer state gets new storage, beside the old until all is restored. Everything is
    compared with its checksum and with the model, and read into host memory, before any rank changes anything; only
    until then is anything raised, on all ranks. With more ranks than have saved, generators begin with the states of
    the first again.

    Raises:
        StateError: when there is no such checkpoint, or when it belongs to another model.
        FileError: naming a file that cannot be read or is not what was written.
    """
    saved = SavedCheckpoint(directory, job)
    with job.agreement.phase("reading the checkpoint"):
        engine.weights.prepare()
        if _VALUES not in saved.entries(""):
            raise StateError(f"no checkpoint of an FSDP2 trainer: {saved.path}")
        values = saved.value(_VALUES)
        of_model = differences(saved.entries(_MODEL), _model_tensors(engine))
        saved.require_fit([*of_model, *_optimizer_differences(saved, values, engine)])
        state = saved.read(_room_for(saved, values["num_ranks"], engine, job.rank))
        optimizer_state = _on_the_device(state, engine)
    with job.agreement.phase("restoring the checkpoint"):
        for name, tensor in _model_tensors(engine).items():
            local_of(tensor).copy_(local_of(state[_MODEL + name]))
        engine.restore(
            optimizer_state, values["param_groups"], values["weight_version"], values["num_scheduled_updates"]
        )
        for name, generator_state in below(state, _GENERATOR).items():
            restore = torch.cuda.set_rng_state if name.startswith("cuda.") else torch.set_rng_state
            restore(generator_state)


# -- what is saved -----------------------------------------------------------------------------------------------------


def _tensors_of(engine: FsdpTrainEngine, rank: int) -> dict[str, torch.Tensor]:
    """Every tensor that is saved; views of live memory."""
    state = {_MODEL + name: tensor.detach() for name, tensor in _model_tensors(engine).items()}
    for name, parameter in _parameters(engine).items():
        for key, value in engine.trained_by.state.get(parameter, {}).items():
            state[f"{_OPTIMIZER}{name}.{key}"] = value
    return state | _generators(rank)


def _values_of(engine: FsdpTrainEngine, num_ranks: int) -> dict[str, Any]:
    groups = engine.trained_by.param_groups
    return {
        "num_ranks": num_ranks,
        "weight_version": engine.version,
        "param_groups": [{key: value for key, value in group.items() if key != "params"} for group in groups],
        "num_scheduled_updates": None if engine.scheduler is None else engine.scheduler.num_steps,
    }


def _model_tensors(engine: FsdpTrainEngine) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers, each once: tied ones have two names."""
    named = {id(tensor): name for name, tensor in reversed(engine.weights.tensors.tensors.items())}
    return {name: tensor for name, tensor in engine.weights.tensors.tensors.items() if named[id(tensor)] == name}


def _parameters(engine: FsdpTrainEngine) -> dict[str, torch.nn.Parameter]:
    return {name: tensor for name, tensor in _model_tensors(engine).items() if isinstance(tensor, torch.nn.Parameter)}


def _generators(rank: int) -> dict[str, torch.Tensor]:
    states = {f"{_GENERATOR}cpu.{rank}": torch.get_rng_state()}
    if torch.cuda.is_available():
        states[f"{_GENERATOR}cuda.{rank}"] = torch.cuda.get_rng_state()
    return states


# -- whether it fits, and room for it ----------------------------------------------------------------------------------


def _optimizer_differences(saved: SavedCheckpoint, values: Mapping[str, Any], engine: FsdpTrainEngine) -> Iterator[str]:
    parameters = _parameters(engine)
    for key, then in saved.entries(_OPTIMIZER).items():
        name = key.rpartition(".")[0]
        if name not in parameters:
            yield f"optimizer state of {name}, which is not a parameter of this model"
        elif then is not None and then.size and then.size != parameters[name].shape:
            yield f"optimizer state {key}: {tuple(then.size)}, expected {tuple(parameters[name].shape)}"
    groups, now = values["param_groups"], engine.trained_by.param_groups
    if [sorted(group) for group in groups] != [sorted(group.keys() - {"params"}) for group in now]:
        yield f"{len(groups)} parameter groups, not those of this optimizer"


def _room_for(
    saved: SavedCheckpoint, num_ranks: int, engine: FsdpTrainEngine, rank: int
) -> dict[str, torch.Tensor | None]:
    """Host memory for this rank's part of everything, sharded as it is now."""
    parameters = _parameters(engine)
    room: dict[str, torch.Tensor | None] = {
        _MODEL + name: _on_the_host(tensor) for name, tensor in _model_tensors(engine).items()
    }
    for key, entry in saved.entries(_OPTIMIZER).items():
        like = parameters[key.rpartition(".")[0]].detach() if entry is not None and entry.size else torch.empty(())
        room[_OPTIMIZER + key] = None if entry is None else _on_the_host(like, entry.properties.dtype)
    kinds = {name.removeprefix(_GENERATOR).partition(".")[0] for name in _generators(rank)}
    for key, entry in saved.entries(_GENERATOR).items():
        kind, _, saved_rank = key.partition(".")
        if entry is not None and int(saved_rank) == rank % num_ranks and kind in kinds:
            room[_GENERATOR + key] = torch.empty(entry.size, dtype=entry.properties.dtype)
    return room


def _on_the_host(like: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    return torch.empty_like(like.detach(), dtype=dtype, device="cpu")


def _on_the_device(state: Mapping[str, Any], engine: FsdpTrainEngine) -> dict[torch.Tensor, dict[str, Any]]:
    """The optimizer's state by parameter, in memory of its own, where its step expects it: numbers stay on the host."""
    found: dict[torch.Tensor, dict[str, Any]] = {}
    parameters = _parameters(engine)
    for key, value in below(state, _OPTIMIZER).items():
        name, _, kind = key.rpartition(".")
        parameter = parameters[name]
        is_moment = isinstance(value, torch.Tensor) and value.dim() > 0
        found.setdefault(parameter, {})[kind] = value.to(parameter.device) if is_moment else value
    return found
