"""The actor of `ActorHybridWorker` if FSDP2 trains, and its critic.

Their models are built from a config.json, layer by layer, so that a rank never holds more than one
unsharded layer:

    meta device:  AutoModelForCausalLM.from_config       shapes only
    each layer:   memory -> random values -> fully_shard
    the rest:     embedding, head, norm, in the same way
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from hybrid_engine.backends.fsdp.attention import settings_left_out
from hybrid_engine.backends.fsdp.internals import allocate_modules, model_of_modules
from hybrid_engine.backends.fsdp.model_checks import set_epsilon_of_norms, untrainable
from hybrid_engine.backends.fsdp.names import model_of_config, transformers_model, with_adapters
from hybrid_engine.backends.fsdp.sharded_model import ShardedModel
from hybrid_engine.backends.fsdp.sharded_tensors import mesh_of, shard_model
from hybrid_engine.config import FsdpConfig, HybridConfig, OptimizerConfig
from hybrid_engine.config.job_rules import critic_of
from hybrid_engine.errors import Violation, require_none
from hybrid_engine.models.lora_tensors import ActorLora
from hybrid_engine.models.table import VALUE_HEAD, Head, ModelTable, value_table
from hybrid_engine.ports import Trainer
from hybrid_engine.ranks.groups import end_groups
from hybrid_engine.ranks.job import Job
from hybrid_engine.trainer.fsdp.train_engine import FsdpTrainEngine, copy_weights
from hybrid_engine.trainer.fsdp.training_state import FsdpState
from hybrid_engine.trainer.learning_rate import param_scheduler
from hybrid_engine.trainer.training_checkpoint import TrainingCheckpoints


@dataclass(frozen=True)
class FsdpActor:
    """Parts of an actor or a critic that FSDP2 trains, built from a configuration.

    Attributes:
        engine: steps and scores; `engine.model` has the weights and the state.
        checkpoints: of the training state.
        frozen_copy: copies the current weights, adapters merged, into a model for scoring. Without
            a copy it returns an engine of the same model without its adapters, if they add nothing
            yet. Collective.
        lora: adapters that are delivered separately.
    """

    engine: FsdpTrainEngine
    checkpoints: TrainingCheckpoints
    frozen_copy: Callable[[], FsdpTrainEngine]
    lora: ActorLora | None

    def copy_decoder_from(self, actor: Trainer) -> None:
        """Copy an actor's current weights with LoRA merged, except the head. Collective."""
        assert isinstance(actor, ShardedModel), "both have one trainer"
        copy_weights(actor, self.engine.model, but_for=VALUE_HEAD)


def build_critic(config: HybridConfig, job: Job, owner: ExitStack) -> FsdpActor:
    """Build the critic of the configuration; see `build_actor`. Collective."""
    alone = critic_of(config, job.world_size).alone
    return build_actor(alone, value_table(alone.table()), job, owner)


def build_actor(
    config: HybridConfig,
    table: ModelTable,
    job: Job,
    owner: ExitStack,
    *,
    weights_only: bool = False,
    module: torch.nn.Module | None = None,
) -> FsdpActor:
    """Build a sharded transformers model with random weights, and Adam. Collective.

    Args:
        config: with `actor_config.fsdp`.
        table: the model's name table; of a critic, its `value_table`.
        job: of all ranks.
        owner: ends the process groups.
        weights_only: ignored; for Megatron. A transformers model can always compute.
        module: the caller's model, which is sharded in place; its trained parameters stay so.
    """
    actor = config.actor_config
    mesh = mesh_of(_fsdp_config(config), job.device, job.world_size)
    # the default group belongs to the job
    groups = [group for group in mesh.get_all_groups() if group is not dist.group.WORLD]
    # for random numbers of a loss function; the weights are seeded separately
    torch.manual_seed(actor.seed)
    is_of_caller = module is not None
    if module is None:
        owner.callback(end_groups, *groups)
        module = build_sharded_model(config, mesh, job.device, table.head)
    else:
        shard_model(module, _fsdp_config(config), mesh)
        module.eval()  # without dropout, as vLLM
    optimizer = _adam(module, actor.optimizer)
    engine = FsdpTrainEngine(
        module,
        optimizer,
        table,
        job,
        actor.micro_batch_size,
        actor.optimizer.clip_grad,
        param_scheduler(optimizer, actor.optimizer),
        actor.seq_length,
        # A critic has no adapters, and vLLM does not get it.
        "merge" if table.head == "value" else config.generate_config.lora_delivery,
    )
    if is_of_caller:
        # It stays sharded, so its groups stay as well.
        owner.callback(engine.model.close)

    def frozen_copy() -> FsdpTrainEngine:
        is_changed = not engine.model.weights.adapters_add_nothing
        if not any(job.agreement.any_of([is_changed], "looking at the adapters")):
            return engine.without_adapters()
        plain = actor.model_copy(update={"lora": None, "frozen_parameters": ()})
        of_copy = config.model_copy(update={"actor_config": plain})
        copied: Any = build_sharded_model(of_copy, mesh, job.device).requires_grad_(False)
        # Another kernel rounds otherwise, which would count as a difference of the models.
        original: Any = transformers_model(engine.model.model)
        copied.set_attn_implementation(original.config._attn_implementation)
        copy = FsdpTrainEngine(
            copied, None, table, job, actor.micro_batch_size, seq_length=actor.seq_length
        )
        copy_weights(engine.model, copy.model)
        return copy

    checkpoints = TrainingCheckpoints(FsdpState(engine, job), job, owner)
    return FsdpActor(engine, checkpoints, frozen_copy, engine.model.weights.lora)


def _fsdp_config(config: HybridConfig) -> FsdpConfig:
    assert config.actor_config.fsdp is not None
    return config.actor_config.fsdp


def build_sharded_model(
    config: HybridConfig,
    mesh: DeviceMesh,
    device: torch.device,
    head: Head = "vocabulary",
) -> torch.nn.Module:
    """Build a causal LM with transformers' initial values, the same on any number of ranks.

    The head of a value model has zeros. With `actor_config.lora` it is a model of PEFT, whose
    adapters add nothing yet.

    Collective. The model computes without dropout, in training too, as `build_model` of Megatron's
    side: vLLM has none.

    Args:
        config: with `actor_config.fsdp`; its seed leaves the state of torch's generators as it is.
        mesh: see `mesh_of`.
        device: of this rank.
        head: output of the model; see `ModelTable`.

    Raises ConfigError if transformers cannot build a model from the config, for a pattern without
    a parameter, for adapters that FSDP2 cannot train, and if nothing is left to train.
    """
    actor = config.actor_config
    model = model_of_config(config.model, head, getattr(torch, actor.params_dtype))
    set_epsilon_of_norms(model)
    # eager attention honours all settings of a model
    if settings_left_out(model, model.config._attn_implementation):
        model.set_attn_implementation("eager")
    if actor.lora is not None:
        model = with_adapters(model, actor.lora, config.model)
        require_none(untrainable(model))
    _freeze(model, actor.frozen_parameters)
    owners = model_of_modules(model)

    def allocate(part: torch.nn.Module) -> None:
        adapted: list[Any] = [
            module
            for module in part.modules()
            # PEFT's, which may not be installed
            if hasattr(module, "reset_lora_parameters")
            and any(tensor.is_meta for name, tensor in module.named_parameters() if "lora_" in name)
        ]
        allocate_modules(part.modules(), owners, device)
        for layer in adapted:
            layer.reset_lora_parameters("default", init_lora_weights=True)

    # restores the state of the CPU's generator and of this device's
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(actor.seed)
        shard_model(model, _fsdp_config(config), mesh, allocate)
    if head == "value":
        torch.nn.init.zeros_(model.score.weight)
    return model.eval()


def _freeze(model: torch.nn.Module, patterns: Sequence[str]) -> None:
    key = "actor_config.frozen_parameters"
    parameters = dict(model.named_parameters())
    violations = []
    for pattern in patterns:
        names = fnmatch.filter(parameters, pattern)
        for name in names:
            parameters[name].requires_grad_(False)
        if not names:
            violations.append(
                Violation(
                    key,
                    f"no parameter matches {pattern}",
                    f"Names look like {next(iter(parameters))}",
                    code="no-parameter-matches",
                )
            )
    if not any(parameter.requires_grad for parameter in parameters.values()):
        violations.append(
            Violation(
                key,
                f"{', '.join(patterns[:5])} would freeze every parameter",
                "Leave some out",
                code="nothing-is-trained",
            )
        )
    require_none(violations)


def _adam(model: torch.nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """Build AdamW with Megatron's groups: no weight decay of norms and biases."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {
            # matrices, including embeddings
            "params": [parameter for parameter in parameters if parameter.dim() > 1],
            "weight_decay": config.weight_decay,
        },
        {
            "params": [parameter for parameter in parameters if parameter.dim() <= 1],
            "weight_decay": 0.0,
            "wd_mult": 0.0,  # for a schedule, which sets the weight decay of every group
        },
    ]
    betas = (config.adam_beta1, config.adam_beta2)
    return torch.optim.AdamW(groups, lr=config.lr, betas=betas, eps=config.adam_eps)
