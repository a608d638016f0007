"""Saves and loads a Megatron actor, to resume a run in the layout it had.

    directory/rank0000.pt, rank0001.pt, ...    one file per rank: its parameters, optimizer state, generators
    directory/manifest.json                    their lengths and checksums; see rank_files.py

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

from hybrid_engine.backends.megatron import rank_files
from hybrid_engine.backends.megatron.build import Actor
from hybrid_engine.backends.megatron.checkpoint_checks import differences, optimizer_differences
from hybrid_engine.backends.megatron.lora_layers import LoraLinear
from hybrid_engine.errors import ConfigError, StateError, Violation
from hybrid_engine.files.durable import current_directory, leftovers, naming, recover_directory, replace_directory
from hybrid_engine.ranks.agreement import Agreement
from megatron_patches import optimizers

_NUM_TOLD = 5
"""Differences, or files, that an error names."""


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

    Written and flushed beside it, and put in place at the end: a kill or a power cut at any moment leaves the
    checkpoint that was there or the new one, for `load_checkpoint` and for the next save. On file systems that cannot
    exchange two names the old one is called `<directory>.replaced` for the moment between two renames. A save that
    fails leaves nothing behind. A symbolic link stays one: what it points to is replaced. Raises FileError naming the
    file, ConfigError where the directory holds anything but a checkpoint.

    Pending parameter gathers are the caller's to finish. All training state must be on the device; nothing is copied
    in memory. All ranks see one file system.
    """
    rank = dist.get_rank()
    with agreement.phase("looking into the checkpoint's directory"), naming("preparing the checkpoint", directory):
        directory = Path(directory).resolve()
        incomplete = directory.with_name(f"{directory.name}.incomplete")
        if rank == 0:
            _require_nothing_foreign(directory, incomplete, *leftovers(directory))
    try:
        with agreement.phase("preparing the checkpoint's directory"):
            if rank == 0:
                _make_room(directory, incomplete)
        with agreement.phase("writing the checkpoint"):
            name = rank_files.file_name(rank)
            contents = rank_files.write_rank_file(incomplete / name, _state_of(actor))
        written = agreement.gather((name, contents), "writing the checkpoint")
        with agreement.phase("putting the checkpoint in place"):
            if rank == 0:
                rank_files.write_manifest(incomplete, dict(written))
                with naming("replacing the checkpoint", directory):
                    replace_directory(incomplete, directory)
    except BaseException as error:
        if rank == 0:
            _remove(incomplete, error)
        raise


def _require_nothing_foreign(*directories: Path) -> None:
    """Raise ConfigError unless those that exist hold a checkpoint's files only: they will be removed."""
    for directory in directories:
        if directory.exists() and (names := rank_files.foreign_names(directory)):
            more = f" and {len(names) - _NUM_TOLD} more" if len(names) > _NUM_TOLD else ""
            problem = f"{directory} holds other things than a checkpoint: {', '.join(names[:_NUM_TOLD])}{more}"
            raise ConfigError([Violation("directory", problem, "Save to another directory, or move these away")])


def _make_room(directory: Path, incomplete: Path) -> None:
    with naming("preparing the checkpoint", directory):
        recover_directory(directory)
        if incomplete.exists():  # of a save that was killed
            shutil.rmtree(incomplete)
        incomplete.mkdir(parents=True)


def _remove(incomplete: Path, error: BaseException) -> None:
    """After `error`, which is what counts; what cannot be removed is said with it."""
    try:
        if incomplete.exists():
            shutil.rmtree(incomplete)
    except OSError as left:
        error.add_note(f"{incomplete} is still there: {left}")


@torch.no_grad()
def load_checkpoint(directory: str | Path, actor: Actor, agreement: Agreement) -> None:
    """Take up what `save_checkpoint` wrote; afterwards every value is bitwise what it was. Collective.

    Parameters and main parameters keep their storage; moments get a new one, beside the old until all are there.
    Everything is read, compared with its checksum and with the actor, and allocated before any rank changes anything.
    Raises then, on all ranks, StateError when a rank's file is missing, was written in another layout, naming both, or
    is of another model; FileError naming a file that cannot be read or is not what was written.
    """
    with agreement.phase("reading the checkpoint"):
        with naming("reading the checkpoint", directory):
            found = current_directory(Path(directory).resolve())
        state = rank_files.read_rank_file(found, dist.get_rank())
        _require_fit(state, actor, found / rank_files.file_name(dist.get_rank()))
        moments = [
            _own_memory(values, member.optimizer)
            for values, member in zip(state["optimizer"]["members"], _members(actor.optimizer), strict=True)
        ]
    with agreement.phase("taking up the checkpoint"):
        for chunk, values in zip(actor.chunks, state["chunks"], strict=True):
            unwrap_model(chunk).load_state_dict(values, strict=False)  # without extra state, see _tensors_only
        _load_optimizer(actor.optimizer, state["optimizer"], moments)
        torch.set_rng_state(state["generators"]["torch"])
        get_cuda_rng_tracker().set_states(state["generators"]["tracker"])


def _require_fit(state: Any, actor: Actor, path: Path) -> None:
    """Raise StateError unless all of `state` can be taken up, naming what cannot."""
    live = _state_of(actor)
    layout = state.get("layout") if isinstance(state, dict) else None
    if isinstance(layout, dict) and layout != live["layout"]:
        changed = [
            f"{key} {layout.get(key)}, now {value}" for key, value in live["layout"].items() if layout.get(key) != value
        ]
        raise StateError(f"{path} was written in another layout ({'; '.join(changed)}): resume with the one it had")
    problems = list(differences(state, live))
    if not problems:
        problems = _member_problems(state["optimizer"]["members"], actor)
    if not problems and not _is_generator_state(state["generators"]["torch"]):
        problems = ["generators: torch: not a state of torch's generator"]
    if problems:
        more = f" and {len(problems) - _NUM_TOLD} more" if len(problems) > _NUM_TOLD else ""
        told = "; ".join(sorted(problems)[:_NUM_TOLD])
        raise StateError(f"{path} belongs to another model: {told}{more}. Load it into the model that saved it")


def _member_problems(members: Any, actor: Actor) -> list[str]:
    live = _members(actor.optimizer)
    if not isinstance(members, list) or len(members) != len(live):
        return [f"optimizer: {len(members) if isinstance(members, list) else 'no'} members, now {len(live)}"]
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


def _load_optimizer(optimizer: MegatronOptimizer, state: dict[str, Any], moments: list[dict[str, Any]]) -> None:
    for member, values in zip(_members(optimizer), moments, strict=True):
        member.optimizer.load_state_dict(values)
        if state["grad_scaler"] is not None:
            member.grad_scaler.load_state_dict(state["grad_scaler"])
    for main_param in _main_params(optimizer):
        main_param.tensor.copy_(state["main_params"][main_param.path])
    optimizers.set_weight_version(optimizer, state["weight_version"])


def _own_memory(values: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """A torch optimizer's state in memory of its own, where its parameters are.

    Copied, because what torch.load gives cannot be resized, which offloading does; and here, because nothing may fail
    for want of memory once a rank has begun to change.
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
    """Without the `_extra_state` of Transformer Engine's layers, which is about fp8 and not always a tensor."""
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}


def _members(optimizer: MegatronOptimizer) -> Sequence[MegatronOptimizer]:
    """The optimizers that hold state; one without parameters, as of a stage that is frozen, holds none."""
    if isinstance(optimizer, ChainedOptimizer):
        return [leaf for member in optimizer.chained_optimizers for leaf in _members(member)]
    return [] if getattr(optimizer, "is_stub_optimizer", False) else [optimizer]
