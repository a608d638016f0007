"""Saves and loads an FSDP2 trainer through torch.distributed.checkpoint: on any number of ranks, sharded in any way.

    directory/__0_0.distcp, __1_0.distcp, ...    each rank's parts of parameters and optimizer state; its generators
    directory/.metadata                          what of which tensor is where
    directory/counters.json                      steps taken, hyperparameters, number of ranks
    directory/manifest.json                      lengths and checksums of all; see trainer/checkpoint_directory.py

torch's planner and storage, called one after the other as `torch.distributed.checkpoint.save` and `load` do, for these
raise what is no Exception, about files they do not name. In between all ranks agree, as everywhere here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from hybrid_engine.backends.flat_buffers import require_finite_to_save
from hybrid_engine.backends.fsdp.sharded_tensors import local_of
from hybrid_engine.errors import StateError, first_of
from hybrid_engine.files.durable import naming, write_text
from hybrid_engine.ranks.job import Job
from hybrid_engine.trainer.checkpoint_directory import (
    MOST_NAMED,
    REMEDY,
    NewCheckpoint,
    contents_of,
    names_in_manifest,
    new_checkpoint,
    present_checkpoint,
    require_as_written,
)
from hybrid_engine.trainer.fsdp.train_engine import FsdpTrainEngine

METADATA, COUNTERS = ".metadata", "counters.json"
_MODEL, _OPTIMIZER, _GENERATOR = "model.", "optimizer.", "generator."


def save_checkpoint(directory: str | Path, engine: FsdpTrainEngine, job: Job, *, check_nan: bool = True) -> None:
    """Write parameters, optimizer state, generators and weight version to `directory`. Collective.

    On errors and on what a kill leaves see `new_checkpoint`. All training state must be on the device. Before anything
    is written, all ranks raise where any of it is not finite on one of them, a WeightError there with its names;
    `check_nan=False` does not look.
    """
    with job.agreement.phase("looking for values that are not finite"):
        engine.weights.prepare()
        state = _state_of(engine, job.rank)
        if check_nan:
            require_finite_to_save(
                lambda: ((f"{name} on rank {job.rank}", local_of(tensor)) for name, tensor in state.items())
            )
    with new_checkpoint(directory, job) as new:
        _write(new, state, job)
        with job.agreement.phase("writing the checkpoint's counters"):
            if job.rank == 0:
                counters = json.dumps(_counters_of(engine, job.world_size), indent=2)
                write_text(new.path / COUNTERS, counters + "\n")
                for name in (COUNTERS, METADATA):
                    new.contents[name] = contents_of(new.path / name)


def _write(new: NewCheckpoint, state: dict[str, torch.Tensor], job: Job) -> None:
    """Each rank its share of what all have."""
    planner, writer = DefaultSavePlanner(), FileSystemWriter(new.path)
    with job.agreement.phase("planning the checkpoint"):
        planner.set_up_planner(state, writer.storage_meta(), is_coordinator=True)
        writer.set_up_storage_writer(is_coordinator=True)
        own = writer.prepare_local_plan(planner.create_local_plan())
    plans = job.agreement.gather(own, "planning the checkpoint")
    with job.agreement.phase("writing the checkpoint"), naming("writing the checkpoint", new.path):
        plans, metadata = planner.create_global_plan(plans)  # the same on every rank
        plan = planner.finish_plan(writer.prepare_global_plan(plans)[job.rank])
        results = writer.write_data(plan, planner).wait()
        for name in {result.storage_data.relative_path for result in results}:
            new.contents[name] = contents_of(new.path / name)
    written = job.agreement.gather(results, "writing the checkpoint")
    with job.agreement.phase("writing the checkpoint"), naming("writing the checkpoint", new.path):
        if job.rank == 0:
            writer.finish(metadata, written)


@torch.no_grad()
def load_checkpoint(directory: str | Path, engine: FsdpTrainEngine, job: Job) -> None:
    """Restore what `save_checkpoint` wrote, every bit of it, on this or another number of ranks. Collective.

    Parameters keep their storage; optimizer state gets new storage, beside the old until all is restored. Everything is
    compared with its checksum and with the model, and read into host memory, before any rank changes anything; only
    until then is anything raised, on all ranks. The ranks share the comparison of the files. With more ranks than have
    saved, generators begin with the states of the first again.

    Raises:
        StateError: when there is no such checkpoint, or when it belongs to another model.
        FileError: naming a file that cannot be read or is not what was written.
    """
    with job.agreement.phase("verifying the checkpoint"):
        engine.weights.prepare()
        found = present_checkpoint(directory)
        if not (found / METADATA).exists():
            raise StateError(f"no checkpoint of an FSDP2 trainer: {found / METADATA} does not exist")
        listed = {*names_in_manifest(found), METADATA, COUNTERS}  # these are read whatever is listed
        for name in sorted(listed)[job.rank :: job.world_size]:
            require_as_written(found / name)
    with job.agreement.phase("reading the checkpoint"):
        with naming("reading the checkpoint", found, REMEDY):
            counters = json.loads((found / COUNTERS).read_text(encoding="utf-8"))
            reader = FileSystemReader(found)
            metadata = reader.read_metadata()
            for name in {stored.relative_path for stored in metadata.storage_data.values()} - listed:
                require_as_written(found / name)
            _require_fit(metadata, counters, engine, found)
            state = _room_for(metadata, counters, engine, job.rank)
            _read(state, metadata, reader)
        optimizer_state = _on_the_device(state, engine)
    with job.agreement.phase("restoring the checkpoint"):
        for name, tensor in _model_tensors(engine).items():
            local_of(tensor).copy_(local_of(state[_MODEL + name]))
        num_updates = counters.get("num_scheduled_updates")
        engine.restore(optimizer_state, counters["param_groups"], counters["weight_version"], num_updates)
        _set_generators({name: value for name, value in state.items() if name.startswith(_GENERATOR)})


def _read(state: dict[str, torch.Tensor], metadata: Metadata, reader: FileSystemReader) -> None:
    """Fill this rank's part of the tensors."""
    planner = DefaultLoadPlanner(flatten_state_dict=False)
    planner.set_up_planner(state, metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    (plan,) = reader.prepare_global_plan(planner.create_global_plan([plan]))
    reader.read_data(planner.finish_plan(plan), planner).wait()


# -- what is saved -----------------------------------------------------------------------------------------------------


def _state_of(engine: FsdpTrainEngine, rank: int) -> dict[str, torch.Tensor]:
    """Every tensor that is saved; views of live memory."""
    state = {_MODEL + name: tensor.detach() for name, tensor in _model_tensors(engine).items()}
    for name, parameter in _parameters(engine).items():
        for key, value in engine.trained_by.state.get(parameter, {}).items():
            state[f"{_OPTIMIZER}{name}.{key}"] = value
    return state | _generators(rank)


def _counters_of(engine: FsdpTrainEngine, num_ranks: int) -> dict[str, Any]:
    groups = [
        {key: value for key, value in group.items() if key != "params"} for group in engine.trained_by.param_groups
    ]
    schedule = {} if engine.scheduler is None else {"num_scheduled_updates": engine.scheduler.num_steps}
    return {"num_ranks": num_ranks, "weight_version": engine.version, "param_groups": groups, **schedule}


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


def _set_generators(states: Mapping[str, torch.Tensor]) -> None:
    for name, state in states.items():
        restore = torch.cuda.set_rng_state if name.startswith(f"{_GENERATOR}cuda.") else torch.set_rng_state
        restore(state)


# -- whether it fits, and room for it ----------------------------------------------------------------------------------


def _require_fit(metadata: Metadata, counters: Any, engine: FsdpTrainEngine, directory: Path) -> None:
    """Raise StateError unless all of the checkpoint can be restored, naming what cannot."""
    problems = [
        *_model_differences(metadata, engine),
        *_optimizer_differences(metadata, engine),
        *_other_differences(metadata, counters, engine),
    ]
    if problems:
        named = first_of(problems, MOST_NAMED, "; ")
        raise StateError(f"{directory} belongs to another model: {named}. Load it into the model that saved it")


def _model_differences(metadata: Metadata, engine: FsdpTrainEngine) -> Iterator[str]:
    live, saved = _model_tensors(engine), _saved(metadata, _MODEL)
    yield from (f"{name} is missing" for name in live.keys() - saved.keys())
    yield from (f"{name} is unknown to this model" for name in saved.keys() - live.keys())
    for name in live.keys() & saved.keys():
        now, then = live[name], saved[name]
        if (tuple(now.shape), now.dtype) != (tuple(then.size), then.properties.dtype):
            yield (f"{name}: {tuple(then.size)} of {then.properties.dtype}, expected {tuple(now.shape)} of {now.dtype}")


def _optimizer_differences(metadata: Metadata, engine: FsdpTrainEngine) -> Iterator[str]:
    parameters = _parameters(engine)
    for key, then in _saved(metadata, _OPTIMIZER).items():
        name = key.rpartition(".")[0]
        if name not in parameters:
            yield f"optimizer state of {name}, which is not a parameter of this model"
        elif then.size and tuple(then.size) != tuple(parameters[name].shape):
            yield f"optimizer state {key}: {tuple(then.size)}, expected {tuple(parameters[name].shape)}"


def _other_differences(metadata: Metadata, counters: Any, engine: FsdpTrainEngine) -> Iterator[str]:
    live = {name.removeprefix(_GENERATOR).partition(".")[0]: state for name, state in _generators(0).items()}
    for key, then in _saved(metadata, _GENERATOR).items():
        kind = key.partition(".")[0]
        if kind in live and tuple(then.size) != tuple(live[kind].shape):
            yield f"generator {key}: {tuple(then.size)}, expected {tuple(live[kind].shape)}"
    match counters:
        case {"num_ranks": int(num_ranks), "weight_version": int(), "param_groups": [*groups]} if num_ranks > 0:
            keys = [sorted(group.keys() - {"params"}) for group in engine.trained_by.param_groups]
            if [sorted(group) for group in groups] != keys:
                yield f"{COUNTERS}: {len(groups)} parameter groups, not those of this optimizer"
            if not isinstance(counters.get("num_scheduled_updates", 0), int):
                yield f"{COUNTERS}: num_scheduled_updates is not a number"
        case _:
            yield f"{COUNTERS} has other entries"


def _saved(metadata: Metadata, prefix: str) -> dict[str, TensorStorageMetadata]:
    return {
        key.removeprefix(prefix): entry
        for key, entry in metadata.state_dict_metadata.items()
        if key.startswith(prefix) and isinstance(entry, TensorStorageMetadata)
    }


def _room_for(metadata: Metadata, counters: Any, engine: FsdpTrainEngine, rank: int) -> dict[str, torch.Tensor]:
    """Host memory for this rank's part of everything, sharded as it is now."""
    parameters = _parameters(engine)
    state = {_MODEL + name: _on_the_host(tensor) for name, tensor in _model_tensors(engine).items()}
    for key, entry in _saved(metadata, _OPTIMIZER).items():
        like = parameters[key.rpartition(".")[0]].detach() if entry.size else torch.empty(())
        state[_OPTIMIZER + key] = _on_the_host(like, entry.properties.dtype)
    for key, entry in _saved(metadata, _GENERATOR).items():
        kind, _, saved_rank = key.partition(".")
        if int(saved_rank) == rank % counters["num_ranks"] and f"{_GENERATOR}{kind}.{rank}" in _generators(rank):
            state[_GENERATOR + key] = torch.empty(tuple(entry.size), dtype=entry.properties.dtype)
    return state


def _on_the_host(like: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    return torch.empty_like(like.detach(), dtype=dtype, device="cpu")


def _on_the_device(state: Mapping[str, torch.Tensor], engine: FsdpTrainEngine) -> dict[torch.Tensor, dict[str, Any]]:
    """The optimizer's state by parameter, in memory of its own, where its step expects it: numbers stay on the host."""
    found: dict[torch.Tensor, dict[str, Any]] = {}
    parameters = _parameters(engine)
    for key, value in state.items():
        if key.startswith(_OPTIMIZER):
            name, _, kind = key.removeprefix(_OPTIMIZER).rpartition(".")
            parameter = parameters[name]
            found.setdefault(parameter, {})[kind] = value.to(parameter.device) if value.dim() else value
    return found
