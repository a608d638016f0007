"""Checkpoints of a Megatron trainer, for the same layout.

Every rank has its own keys in the checkpoint (trainer/checkpoint_directory.py):

    rank0/model.0.decoder.final_layernorm.weight     of the first chunk of its model
    rank0/optimizer.0.17.exp_avg                     state of parameter 17 of its first optimizer
    rank0/main_param.optimizer.param_groups[0]…      fp32 copies of parameters
    rank0/generator.cpu, generator.cuda, tracker.…   random generators of torch and of Megatron
    rank0/values                                     layout, hyperparameters, counters

megatron-core's dist_checkpointing is not used, because 0.16.1 cannot restore its own checkpoints of
torch's Adam. Loading `fully_reshardable` fails with KeyError 'step'; saving `dp_reshardable`
rejects virtual stages ("out of bounds chunk"); and DistributedOptimizer loads one step tensor into
all parameters, so that the next step increments it once for each of them.
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

from hybrid_engine.backends.megatron.live_model import LiveModel
from hybrid_engine.backends.megatron.lora_layers import LoraLinear
from hybrid_engine.backends.training_side import Modules, require_finite_to_save, stepped_by
from hybrid_engine.errors import StateError
from hybrid_engine.memory.offload_items import KINDS
from hybrid_engine.ranks.job import Job
from hybrid_engine.trainer.checkpoint_directory import (
    SavedCheckpoint,
    below,
    differences,
    generator_states,
    restore_generators,
    save,
)
from hybrid_engine.trainer.learning_rate import ScheduledOptimizer
from hybrid_engine.trainer.megatron.build import Actor
from megatron_patches import optimizers

_VALUES = "values"
_OPTIMIZER = "optimizer."
_MAIN_PARAM = "main_param."
_GENERATOR = "generator."
_TRACKER = "tracker."

States = dict[int, dict[str, Any]]
"""Number of a parameter in its optimizer -> its state."""

_KEYS_OF_CONFIGURATION = ("max_lr", "min_lr")
"""Keys of a parameter group that belong to the schedule of the current configuration.

A schedule prefers them to its own settings, so they must not come from a checkpoint.
"""


class RankCheckpoints:
    """Checkpoints of a Megatron trainer, for the same layout (port `Checkpoints`).

    All training state must be on the device.

    Args:
        model: weights of the trainer.
        optimizer: of the trainer, whose schedule is resumed.
        actor: its Megatron objects.
        job: of all ranks.
    """

    def __init__(
        self, model: LiveModel, optimizer: ScheduledOptimizer, actor: Actor, job: Job
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._actor = actor
        self._job = job

    def save(self, directory: str | Path, *, check_nan: bool = True) -> None:
        """Write parameters, optimizer state, generators and weight version. Collective.

        `checkpoint_directory.save` describes errors and the effect of a kill. Before anything is
        written, all ranks raise if any value is not finite on one of them, with a WeightError there
        that names the tensors; `check_nan=False` skips the check.
        """
        job = self._job
        self._model.guard(KINDS)
        # finishes pending parameter gathers
        self._model.weights.finish_pending()
        with job.agreement.phase("looking for values that are not finite"):
            live = self._live_state()
            state = {f"rank{job.rank}/{key}": value for key, value in live.items()}
            if check_nan:
                require_finite_to_save(
                    lambda: (
                        (key, value)
                        for key, value in state.items()
                        if isinstance(value, torch.Tensor)
                    )
                )
        save(directory, state, job)

    @torch.no_grad()
    def load(self, directory: str | Path) -> None:
        """Restore a checkpoint bit by bit. Collective.

        Parameters and main parameters keep their storage. Moments get new storage, so both old and
        new moments are in memory until all are restored. Before any rank changes anything, all
        entries are verified by checksum, compared with the actor, and read into host memory; errors
        are raised only until then, on all ranks.

        Raises:
            StateError: if there is no such checkpoint, if it was written in another layout (names
                both layouts), or if it belongs to another model.
            FileError: names a file that cannot be read or differs from the file that was written.
        """
        job = self._job
        actor = self._actor
        self._model.guard(KINDS)
        saved = SavedCheckpoint(directory, job)
        with job.agreement.phase("reading the checkpoint"):
            members = _members(actor.optimizer)
            prefix = f"rank{job.rank}/"
            live = self._live_state()
            values = _values_in(saved, prefix, live[_VALUES]["layout"])
            entries = saved.entries(prefix)
            optimizer_differences = _optimizer_differences(entries, values, live[_VALUES], members)
            saved.require_fit([*_differences(entries, live), *optimizer_differences])
            state = below(saved.read_all(prefix), prefix)
            moments = [_moments_of(state, index, member) for index, member in enumerate(members)]
        with job.agreement.phase("restoring the checkpoint"):
            for index, chunk in enumerate(actor.chunks):
                # not strict, because extra state is not saved
                unwrap_model(chunk).load_state_dict(below(state, f"model.{index}."), strict=False)
            _load_optimizer(actor.optimizer, values, moments)
            for main_param in _main_params(actor.optimizer):
                main_param.tensor.copy_(state[_MAIN_PARAM + main_param.path])
            self._optimizer.resume_schedule(values["num_scheduled_updates"])
            restore_generators(below(state, _GENERATOR))
            get_cuda_rng_tracker().set_states(below(state, _TRACKER))

    def _live_state(self) -> dict[str, Any]:
        """Return all tensors and values to save: views of live memory."""
        actor = self._actor
        members = _members(actor.optimizer)
        # read once, because an optimizer may convert its moments for it
        optimizer_states = [member.optimizer.state_dict() for member in members]
        state: dict[str, Any] = {}
        for index, chunk in enumerate(actor.chunks):
            for name, value in unwrap_model(chunk).state_dict().items():
                # Transformer Engine's `_extra_state` is for fp8, and may be something else
                if isinstance(value, torch.Tensor):
                    state[f"model.{index}.{name}"] = value
        for index, optimizer_state in enumerate(optimizer_states):
            for param, param_state in optimizer_state["state"].items():
                for key, value in param_state.items():
                    state[f"{_OPTIMIZER}{index}.{param}.{key}"] = value
        for main_param in _main_params(actor.optimizer):
            state[_MAIN_PARAM + main_param.path] = main_param.tensor
        for name, value in get_cuda_rng_tracker().get_states().items():
            state[_TRACKER + name] = value
        for kind, value in generator_states().items():
            state[_GENERATOR + kind] = value
        state[_VALUES] = {
            "layout": _layout_of(actor, self._job),
            "param_groups": [saved["param_groups"] for saved in optimizer_states],
            "grad_scaler": _grad_scaler_state(members),
            "weight_version": optimizers.weight_version(actor.optimizer),
            "num_scheduled_updates": self._optimizer.num_scheduled_updates,
        }
        return state


# -- contents of a checkpoint ----------------------------------------------------------------------


def _layout_of(actor: Actor, job: Job) -> dict[str, int | str]:
    """Return the layout that a checkpoint requires: axis sizes, this rank's coordinates, chunks.

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


def _main_params(optimizer: MegatronOptimizer) -> list[optimizers.OptimizerTensor]:
    """Return the fp32 copies of parameters, if the optimizer has any."""
    return [
        tensor for tensor in optimizers.optimizer_tensors(optimizer) if tensor.kind == "main_param"
    ]


def _grad_scaler_state(members: Sequence[MegatronOptimizer]) -> dict[str, Any] | None:
    """Return the state of the loss scale; None without fp16. Chained optimizers share one."""
    for member in members:
        scaler = getattr(member, "grad_scaler", None)
        if scaler is not None:
            return scaler.state_dict()
    return None


# -- comparison with this actor --------------------------------------------------------------------


def _values_in(saved: SavedCheckpoint, prefix: str, layout: Mapping[str, Any]) -> dict[str, Any]:
    """Return this rank's values. Raises StateError if the layout or the trainer differs."""
    # with more ranks than were saved, rank 0's values show the other layout
    keys = [key for key in (prefix + _VALUES, f"rank0/{_VALUES}") if key in saved.entries("")]
    if not keys:
        raise StateError(
            f"no checkpoint of a Megatron trainer: {saved.path}. Load it with the trainer that "
            "saved it",
            code="checkpoint-of-another-trainer",
        )
    values: dict[str, Any] = saved.value(keys[0])
    saved_layout = values["layout"]
    changes = [
        f"{key} {saved_layout.get(key)}, now {value}"
        for key, value in layout.items()
        if saved_layout.get(key) != value
    ]
    if changes:
        raise StateError(
            f"{saved.path} was written in another layout ({'; '.join(changes)}): resume with that "
            "layout",
            code="checkpoint-of-another-layout",
        )
    return values


def _differences(entries: Mapping[str, Any], live: Mapping[str, Any]) -> Iterator[str]:
    """Yield the differences of all entries but optimizer states: the first step creates these."""
    saved_entries = {key: entry for key, entry in entries.items() if not key.startswith(_OPTIMIZER)}
    live_entries = {key: value for key, value in live.items() if not key.startswith(_OPTIMIZER)}
    yield from differences(saved_entries, live_entries)


def _optimizer_differences(
    entries: Mapping[str, Any],
    values: Mapping[str, Any],
    live_values: Mapping[str, Any],
    members: Sequence[MegatronOptimizer],
) -> Iterator[str]:
    if (values["grad_scaler"] is None) != (live_values["grad_scaler"] is None):
        yield "grad_scaler: only one of the checkpoint and this optimizer has a state of it"
    all_groups = zip(values["param_groups"], live_values["param_groups"], members, strict=True)
    for index, (saved_groups, live_groups, member) in enumerate(all_groups):
        name = f"{_OPTIMIZER}{index}"
        if [group["params"] for group in saved_groups] != [
            group["params"] for group in live_groups
        ]:
            yield f"{name}: other parameter groups"
            continue
        for number, (saved, live) in enumerate(zip(saved_groups, live_groups, strict=True)):
            # a group's step appears with the first step
            for key in live.keys() - saved.keys() - {"step"}:
                yield f"{name}: group {number}: {key} is missing"
        params = stepped_by(member.optimizer)
        for key, entry in below(entries, f"{name}.").items():
            expected = params[int(key.partition(".")[0])].shape
            # numbers, such as a step count, have no size
            if entry is not None and entry.size and entry.size != expected:
                yield f"{name}.{key}: {tuple(entry.size)}, expected {tuple(expected)}"


# -- restoring -------------------------------------------------------------------------------------


def _moments_of(state: Mapping[str, Any], index: int, member: MegatronOptimizer) -> States:
    """Return the state of optimizer `index` by parameter, moments on the parameters' devices.

    Afterwards restoring needs no further device memory, so it cannot fail for lack of it.
    """
    params = stepped_by(member.optimizer)
    moments: States = {}
    for name, value in below(state, f"{_OPTIMIZER}{index}.").items():
        param, _, key = name.partition(".")
        is_moment = isinstance(value, torch.Tensor) and value.dim() > 0
        param_state = moments.setdefault(int(param), {})
        param_state[key] = value.to(params[int(param)].device) if is_moment else value
    return moments


def _load_optimizer(
    optimizer: MegatronOptimizer,
    values: Mapping[str, Any],
    moments: Sequence[States],
) -> None:
    members = _members(optimizer)
    for member, groups, state in zip(members, values["param_groups"], moments, strict=True):
        configured = [
            {key: group[key] for key in _KEYS_OF_CONFIGURATION if key in group}
            for group in member.optimizer.param_groups
        ]
        # replaces the parameter groups, including these keys
        member.optimizer.load_state_dict({"state": state, "param_groups": groups})
        for group, settings in zip(member.optimizer.param_groups, configured, strict=True):
            group.update(settings)
        if values["grad_scaler"] is not None:
            member.grad_scaler.load_state_dict(values["grad_scaler"])
    optimizers.set_weight_version(optimizer, values["weight_version"])
