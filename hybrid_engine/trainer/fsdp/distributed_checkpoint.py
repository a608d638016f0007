"""Checkpoints of an FSDP2 trainer, for any number of ranks and any sharding.

Keys of the checkpoint (trainer/checkpoint_directory.py), the same on all ranks except generators:

    model.lm_head.weight, optimizer.lm_head.weight.exp_avg     each rank writes and reads its parts
    generator.cpu.0, generator.cuda.0                          of every rank
    values                                                     number of steps and of ranks,
                                                               hyperparameters
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from hybrid_engine.backends.fsdp.sharded_tensors import local_of
from hybrid_engine.backends.training_side import require_finite_to_save
from hybrid_engine.errors import StateError
from hybrid_engine.memory.offload_items import KINDS
from hybrid_engine.ranks.job import Job
from hybrid_engine.ranks.torch_internals import TensorDict
from hybrid_engine.trainer.checkpoint_directory import (
    SavedCheckpoint,
    below,
    differences,
    generator_states,
    restore_generators,
    save,
)
from hybrid_engine.trainer.fsdp.train_engine import FsdpTrainEngine

_VALUES = "values"
_MODEL = "model."
_OPTIMIZER = "optimizer."
_GENERATOR = "generator."

_NOT_SAVED = frozenset({"params", "wd_mult"})
"""Keys of parameter groups: parameters are saved by name; older checkpoints have no wd_mult."""


class ShardedCheckpoints:
    """Checkpoints of an FSDP2 trainer, for any number of ranks (port `Checkpoints`).

    All training state must be on the device.

    Args:
        engine: of the trainer.
        job: of all ranks.
    """

    def __init__(self, engine: FsdpTrainEngine, job: Job) -> None:
        self._engine = engine
        self._job = job

    def save(self, directory: str | Path, *, check_nan: bool = True) -> None:
        """Write parameters, optimizer state, generators and weight version. Collective.

        `checkpoint_directory.save` describes errors and the effect of a kill. Before anything is
        written, all ranks raise if any value is not finite on one of them, with a WeightError there
        that names the tensors; `check_nan=False` skips the check.
        """
        engine = self._engine
        job = self._job
        engine.model.guard(KINDS)
        with job.agreement.phase("looking for values that are not finite"):
            engine.model.weights.finish_pending()
            state = _tensors_of(engine, job.rank)
            if check_nan:
                require_finite_to_save(
                    lambda: (
                        (f"{name} on rank {job.rank}", local_of(tensor))
                        for name, tensor in state.items()
                    )
                )
        save(directory, {**state, _VALUES: _values_of(engine, job.world_size)}, job)

    @torch.no_grad()
    def load(self, directory: str | Path) -> None:
        """Restore a checkpoint bit by bit, on this or another number of ranks. Collective.

        Parameters keep their storage. Optimizer state gets new storage, so both old and new state
        are in memory until all is restored. Before any rank changes anything, all entries are
        verified by checksum, compared with the model, and read into host memory; errors are raised
        only until then, on all ranks. With more ranks than the checkpoint has, the further ranks
        reuse the generators of the first ones.

        Raises:
            StateError: if there is no such checkpoint, or if it belongs to another model.
            FileError: names a file that cannot be read or differs from the file that was written.
        """
        engine = self._engine
        job = self._job
        engine.model.guard(KINDS)
        saved = SavedCheckpoint(directory, job)
        with job.agreement.phase("reading the checkpoint"):
            engine.model.weights.finish_pending()
            if _VALUES not in saved.entries(""):
                raise StateError(
                    f"no checkpoint of an FSDP2 trainer: {saved.path}. Load it with the trainer "
                    "that saved it",
                    code="checkpoint-of-another-trainer",
                )
            values = saved.value(_VALUES)
            model_differences = differences(saved.entries(_MODEL), _model_tensors(engine))
            optimizer_differences = _optimizer_differences(saved, values, engine)
            saved.require_fit([*model_differences, *optimizer_differences])
            state = saved.read(_allocate(saved, values["num_ranks"], engine, job.rank))
            # the last allocation of device memory, so restoring cannot fail for lack of it
            optimizer_state = _optimizer_state_on_device(state, engine)
        with job.agreement.phase("restoring the checkpoint"):
            for name, tensor in _model_tensors(engine).items():
                local_of(tensor).copy_(local_of(state[_MODEL + name]))
            _restore_optimizer(engine, optimizer_state, values)
            generators = below(state, _GENERATOR).items()
            # without the number of the rank that saved it
            restore_generators({name.partition(".")[0]: value for name, value in generators})


# -- contents of a checkpoint ----------------------------------------------------------------------


def _tensors_of(engine: FsdpTrainEngine, rank: int) -> TensorDict:
    """Return all tensors to save: views of live memory."""
    state = {_MODEL + name: tensor.detach() for name, tensor in _model_tensors(engine).items()}
    optimizer_state = engine.optimizer.inner.state
    for name, parameter in _parameters(engine).items():
        # before the first step a parameter has no state
        for key, value in optimizer_state.get(parameter, {}).items():
            state[f"{_OPTIMIZER}{name}.{key}"] = value
    return state | {
        f"{_GENERATOR}{kind}.{rank}": value for kind, value in generator_states().items()
    }


def _values_of(engine: FsdpTrainEngine, num_ranks: int) -> dict[str, Any]:
    param_groups = [
        {key: value for key, value in group.items() if key not in _NOT_SAVED}
        for group in engine.optimizer.inner.param_groups
    ]
    return {
        "num_ranks": num_ranks,
        "weight_version": engine.model.version,
        "param_groups": param_groups,
        "num_scheduled_updates": engine.optimizer.num_scheduled_updates,
    }


def _model_tensors(engine: FsdpTrainEngine) -> TensorDict:
    """Return parameters and persistent buffers, tied ones under the first of their names."""
    tensors = engine.model.weights.tensors.tensors
    first_names = {id(tensor): name for name, tensor in reversed(tensors.items())}
    return {name: tensor for name, tensor in tensors.items() if first_names[id(tensor)] == name}


def _parameters(engine: FsdpTrainEngine) -> dict[str, torch.nn.Parameter]:
    return {
        name: tensor
        for name, tensor in _model_tensors(engine).items()
        if isinstance(tensor, torch.nn.Parameter)
    }


# -- comparison with this model, and memory --------------------------------------------------------


def _optimizer_differences(
    saved: SavedCheckpoint, values: Mapping[str, Any], engine: FsdpTrainEngine
) -> Iterator[str]:
    parameters = _parameters(engine)
    for key, entry in saved.entries(_OPTIMIZER).items():
        name = key.rpartition(".")[0]
        if name not in parameters:
            yield f"optimizer state of {name}, which is not a parameter of this model"
            continue
        shape = parameters[name].shape
        # numbers, such as a step count, have no size
        if entry is not None and entry.size and entry.size != shape:
            yield f"optimizer state {key}: {tuple(entry.size)}, expected {tuple(shape)}"
    saved_keys = [sorted(group) for group in values["param_groups"]]
    live_keys = [sorted(group.keys() - _NOT_SAVED) for group in engine.optimizer.inner.param_groups]
    if saved_keys != live_keys:
        yield f"{len(saved_keys)} parameter groups, unlike this optimizer's {len(live_keys)}"


def _allocate(
    saved: SavedCheckpoint, num_ranks: int, engine: FsdpTrainEngine, rank: int
) -> dict[str, torch.Tensor | None]:
    """Return empty tensors in host memory for this rank's part of all entries.

    They are sharded as the live tensors. Values are represented by None. `num_ranks`: of the
    checkpoint.
    """
    parameters = _parameters(engine)
    state: dict[str, torch.Tensor | None] = {}
    for name, tensor in _model_tensors(engine).items():
        state[_MODEL + name] = torch.empty_like(tensor.detach(), device="cpu")
    for key, entry in saved.entries(_OPTIMIZER).items():
        if entry is None:
            state[_OPTIMIZER + key] = None
            continue
        dtype = entry.properties.dtype
        parameter = parameters[key.rpartition(".")[0]].detach()
        like = parameter if entry.size else torch.empty(())
        state[_OPTIMIZER + key] = torch.empty_like(like, dtype=dtype, device="cpu")
    # a checkpoint of a GPU can be loaded on a CPU, which has fewer generators
    kinds = generator_states()
    for key, entry in saved.entries(_GENERATOR).items():
        kind, _, saved_rank = key.partition(".")
        # further ranks reuse the generators of the first ones
        if entry is not None and int(saved_rank) == rank % num_ranks and kind in kinds:
            state[_GENERATOR + key] = torch.empty(entry.size, dtype=entry.properties.dtype)
    return state


def _optimizer_state_on_device(
    state: Mapping[str, Any], engine: FsdpTrainEngine
) -> dict[torch.Tensor, dict[str, Any]]:
    """Return the optimizer's state by parameter, in new memory of the parameters' devices.

    Numbers stay on the host, where the optimizer's step expects them.
    """
    parameters = _parameters(engine)
    result: dict[torch.Tensor, dict[str, Any]] = {}
    for key, value in below(state, _OPTIMIZER).items():
        name, _, kind = key.rpartition(".")
        parameter = parameters[name]
        is_moment = isinstance(value, torch.Tensor) and value.dim() > 0
        values = result.setdefault(parameter, {})
        values[kind] = value.to(parameter.device) if is_moment else value
    return result


def _restore_optimizer(
    engine: FsdpTrainEngine,
    optimizer_state: Mapping[torch.Tensor, dict[str, Any]],
    values: Mapping[str, Any],
) -> None:
    """Replace the optimizer's state and hyperparameters, and set the number of steps taken.

    Args:
        engine: of the optimizer.
        optimizer_state: by parameter; other parameters have no state afterwards.
        values: of the checkpoint.
    """
    optimizer = engine.optimizer.inner
    optimizer.state.clear()
    optimizer.state.update(optimizer_state)
    for group, saved_group in zip(optimizer.param_groups, values["param_groups"], strict=True):
        for key, value in saved_group.items():
            # optimizers have tuples, e.g. Adam's betas
            group[key] = tuple(value) if isinstance(value, list) else value
    engine.model.resume_version(optimizer, values["weight_version"])
    engine.optimizer.resume_schedule(values["num_scheduled_updates"])
