"""The actor of `ActorHybridWorker` where FSDP2 trains.

Its model is built from a config.json, layer by layer, so that no rank ever holds more than one layer whole:

    meta device:  AutoModelForCausalLM.from_config       shapes alone
    each layer:   memory -> random values -> fully_shard
    the rest:     embedding, head, norm, the same way
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoConfig, AutoModelForCausalLM

from hybrid_engine.backends.fsdp.attention import settings_left_out
from hybrid_engine.backends.fsdp.internals import initialize_module
from hybrid_engine.backends.fsdp.model_checks import set_epsilon_of_norms
from hybrid_engine.backends.fsdp.sharded_tensors import mesh_of, shard_model
from hybrid_engine.config import FsdpConfig, HybridConfig, OptimizerConfig
from hybrid_engine.memory.offload_items import KINDS
from hybrid_engine.models.table import ModelTable
from hybrid_engine.ranks.groups import end_groups
from hybrid_engine.ranks.job import Job
from hybrid_engine.trainer.fsdp import distributed_checkpoint
from hybrid_engine.trainer.fsdp.train_engine import FsdpTrainEngine
from hybrid_engine.trainer.learning_rate import ParamSchedule
from hybrid_engine.trainer.ports import GlobalBatches


def build_sharded_model(
    directory: Path, config: FsdpConfig, mesh: DeviceMesh, device: torch.device, dtype: str, seed: int
) -> torch.nn.Module:
    """A causal LM with the values that transformers would draw, the same on any number of ranks. Collective.

    Args:
        directory: with config.json.
        config: how it is sharded.
        mesh: see `mesh_of`.
        device: of this rank.
        dtype: of the parameters.
        seed: of their values; torch's generators are left as they were.

    It computes without dropout, in training too, as `build_model` of Megatron's side: the sampler has none.
    """
    hf_config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hf_config, dtype=getattr(torch, dtype))
    set_epsilon_of_norms(model)
    if settings_left_out(model, hf_config._attn_implementation):
        model.set_attn_implementation("eager")
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        shard_model(model, config, mesh, lambda module: _fill(module, model, device))
    return model.eval()


@torch.no_grad()
def _fill(part: torch.nn.Module, model: torch.nn.Module, device: torch.device) -> None:
    """Give what of `part` has no memory yet some, and the values that the model draws for it."""
    made: dict[torch.Tensor, torch.Tensor] = {}  # parameters that two modules share stay shared
    for module in part.modules():
        bare = [item for item in _own_tensors(module) if item[1].is_meta]
        for name, tensor in bare:
            if tensor not in made:
                filled = torch.zeros_like(tensor, device=device)
                is_parameter = isinstance(tensor, torch.nn.Parameter)
                made[tensor] = torch.nn.Parameter(filled, tensor.requires_grad) if is_parameter else filled
            setattr(module, name, made[tensor])
        if bare:
            initialize_module(model, module)


def _own_tensors(module: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Parameters and buffers of the module itself."""
    return [
        *module.named_parameters(recurse=False, remove_duplicate=False),
        *module.named_buffers(recurse=False, remove_duplicate=False),
    ]


class FsdpActor(GlobalBatches, FsdpTrainEngine):
    """An `FsdpTrainEngine` built from a configuration (port `ActorTrainer`).

    Args:
        config: whose `actor_config.fsdp` is given.
        table: the model's name table.
        job: of all ranks.
        mesh: see `mesh_of`.
    """

    def __init__(self, config: HybridConfig, table: ModelTable, job: Job, mesh: DeviceMesh) -> None:
        actor = config.actor_config
        self._config, self._mesh = config, mesh
        model = _build_model(config, job, mesh)
        optimizer = _adam(model, actor.optimizer)
        clip_grad = actor.optimizer.clip_grad
        schedule = None if actor.optimizer.schedule is None else ParamSchedule(optimizer, actor.optimizer)
        super().__init__(model, optimizer, table, job, actor.micro_batch_size, clip_grad, schedule, actor.seq_length)

    def save_checkpoint(self, directory: str | Path, *, check_nan: bool = True) -> None:
        """Write parameters, optimizer state and generators below `directory`. Collective."""
        self.guard(KINDS)
        distributed_checkpoint.save_checkpoint(directory, self, self._job, check_nan=check_nan)

    def load_checkpoint(self, directory: str | Path) -> None:
        """Load what any number of ranks has saved, on all ranks or on none. Collective."""
        self.guard(KINDS)
        distributed_checkpoint.load_checkpoint(directory, self, self._job)

    def frozen_copy(self) -> FsdpTrainEngine:
        """A copy of the present weights that is only read. Collective."""
        model = _build_model(self._config, self._job, self._mesh).requires_grad_(False)
        seq_length = self._config.actor_config.seq_length
        copy = FsdpTrainEngine(model, None, self.table, self._job, self.micro_batch_size, seq_length=seq_length)
        copy.copy_weights_from(self)
        return copy


def build_actor(
    config: HybridConfig, table: ModelTable, job: Job, owner: ExitStack, *, weights_only: bool = False
) -> FsdpActor:
    """A transformers model with random weights, sharded, and Adam; its groups end with `owner`. Collective.

    `weights_only` is Megatron's: a transformers model can compute in any case.
    """
    mesh = mesh_of(_fsdp_of(config), job.device, job.world_size)
    groups = [group for group in mesh.get_all_groups() if group is not dist.group.WORLD]
    owner.callback(end_groups, *groups)
    torch.manual_seed(config.actor_config.seed)  # for what a loss function draws
    return FsdpActor(config, table, job, mesh)


def _fsdp_of(config: HybridConfig) -> FsdpConfig:
    assert config.actor_config.fsdp is not None
    return config.actor_config.fsdp


def _build_model(config: HybridConfig, job: Job, mesh: DeviceMesh) -> torch.nn.Module:
    actor = config.actor_config
    return build_sharded_model(config.model, _fsdp_of(config), mesh, job.device, actor.params_dtype, actor.seed)


def _adam(model: torch.nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """As Megatron's: norms and biases do not decay."""
    groups = [
        {"params": [each for each in model.parameters() if each.dim() > 1], "weight_decay": config.weight_decay},
        {"params": [each for each in model.parameters() if each.dim() <= 1], "weight_decay": 0.0},
    ]
    betas = (config.adam_beta1, config.adam_beta2)
    return torch.optim.AdamW(groups, lr=config.lr, betas=betas, eps=config.adam_eps)
