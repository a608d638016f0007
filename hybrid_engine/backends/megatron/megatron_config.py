"""Megatron's configuration objects from ours.

Fused kernels and recomputation are on where a GPU is and what they need, by Megatron's own conditions:

    setting                        needs                           left out
    bias_activation_fusion         SwiGLU                          GELU: the kernel's is the tanh approximation
    bias_dropout_fusion            nothing
    gradient_accumulation_fusion   apex, also with Transformer Engine: the output layer is Megatron's own
    apply_rope_fusion              Transformer Engine              latent attention, interleaved rotation
    recompute_granularity          no Transformer Engine           with it attention keeps no scores

masked_softmax_fusion stays off: its kernels ignore sliding windows, and with Transformer Engine there are no scores.
persist_layer_norm stays off: without apex Megatron's norms refuse it. cross_entropy_loss_fusion stays off: its backward
pass rounds to bfloat16 whatever the dtype, and it is compiled anew for other lengths. Kernels for experts
(moe_permute_fusion, moe_router_fusion) ask for recent versions of Transformer Engine. `actor_config.overrides` turns
all of them on and off, and `recompute_granularity` comes before what is said here. **None that needs Transformer
Engine or apex has run on hardware.**
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from enum import Enum
from functools import partial
from importlib.util import find_spec
from typing import Any, TypeVar, get_args, get_type_hints

import megatron.core
import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from packaging.version import Version

from hybrid_engine.config import ActorConfig
from hybrid_engine.config import OptimizerConfig as OurOptimizerConfig
from hybrid_engine.errors import ConfigError, Violation
from hybrid_engine.layouts.parallelism import TrainParallelism, named
from hybrid_engine.layouts.stages import has_experts, num_hybrid_chunks
from hybrid_engine.models.table import ModelTable, RotaryScaling

ACTIVATIONS = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": partial(torch.nn.functional.gelu, approximate="tanh"),
}
"""Activation functions by the names that the tables use."""

_NEED_TRANSFORMER_ENGINE = frozenset({"layernorm", "mla_up_proj", "moe_act"})
"""Modules whose outputs megatron-core's CheckpointWithoutOutput discards, which looks for fp8 even where there is none.
"""


def has_transformer_engine() -> bool:
    """Whether layers are built of Transformer Engine's modules: with a GPU and the package; else of megatron-core's."""
    return torch.cuda.is_available() and find_spec("transformer_engine") is not None


def train_sizes(actor: ActorConfig, world_size: int) -> TrainParallelism:
    """The parallel sizes, with the virtual stages that an explicit layout or a hybrid pattern implies."""
    sizes = actor.sizes(world_size)
    if sizes.pipeline_layout is not None:
        num_chunks = PipelineParallelLayerLayout.get_num_stages_from_str(sizes.pipeline_layout) // sizes.pipeline
    elif sizes.hybrid_layer_pattern is not None:
        num_chunks = num_hybrid_chunks(sizes.hybrid_layer_pattern, sizes.pipeline)
    else:
        return sizes
    return replace(sizes, virtual_pipeline=num_chunks if num_chunks > 1 else None)


@dataclass(frozen=True)
class MegatronConfigs:
    """All that a model, its DDP and its optimizer are configured by."""

    transformer: TransformerConfig
    ddp: DistributedDataParallelConfig
    optimizer: OptimizerConfig


def megatron_configs(actor: ActorConfig, sizes: TrainParallelism, table: ModelTable) -> MegatronConfigs:
    """Of the model in this layout. Raises ConfigError for what the model needs and this megatron-core lacks, and for
    what Megatron itself refuses."""
    refused: list[Violation] = []

    def built(part: str, build: Callable[[], _Config]) -> _Config | None:
        try:
            return build()
        except ConfigError as error:
            refused.extend(error.findings)
        except (AssertionError, ValueError) as error:  # of a __post_init__
            key = f"actor_config.overrides.{part}" if getattr(actor.overrides, part) else "actor_config"
            remedy = "Change what it names"
            refused.append(Violation(key, f"Megatron's {type(error).__name__}: {error}", remedy))
        return None

    transformer = built("transformer", lambda: transformer_config(actor, sizes, table))
    ddp = built("ddp", lambda: ddp_config(actor))
    optimizer = built("optimizer", lambda: optimizer_config(actor))
    if transformer is None or ddp is None or optimizer is None:
        raise ConfigError(refused)
    return MegatronConfigs(transformer, ddp, optimizer)


def transformer_config(actor: ActorConfig, sizes: TrainParallelism, table: ModelTable) -> TransformerConfig:
    """Of the model in this layout. Raises ConfigError for what the model needs and this megatron-core lacks."""
    if sizes.hybrid_layer_pattern is not None:
        _require_hybrid_model()
    dtype = getattr(torch, actor.params_dtype)
    settings = {**table.transformer, **_size_settings(sizes, table), **_expert_settings(sizes, table)}
    settings["activation_func"] = ACTIVATIONS[settings["activation_func"]]
    return _config_of(
        _class_for(settings),
        actor.overrides.transformer,
        **settings,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        # what a rank holds does not depend on it, and megatron-core's own attention refuses more: config/loading.py
        context_parallel_size=1,
        sequence_parallel=actor.sequence_parallel,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        fp16=dtype is torch.float16,
        use_cpu_initialization=not torch.cuda.is_available(),
        **{
            **fusion_settings(settings, is_cuda=torch.cuda.is_available(), with_te=has_transformer_engine()),
            **_recomputation(actor),
        },
    )


def described_config(table: ModelTable) -> TransformerConfig:
    """Configuration of the table's model, all else at Megatron's defaults: others that compute it agree with this one.

    Raises ConfigError for what the model needs and this megatron-core lacks or refuses.
    """
    settings = {**table.transformer, "activation_func": ACTIVATIONS.get(table.transformer["activation_func"])}
    config_class = _class_for(settings)
    try:
        return config_class(**settings)
    except (AssertionError, ValueError) as error:  # of a __post_init__
        problem = f"Megatron's {type(error).__name__}: {error}"
        raise ConfigError([Violation("model", problem, "Choose another model")]) from error


def ddp_config(actor: ActorConfig) -> DistributedDataParallelConfig:
    """Of the flat buffers: gradients are reduced in float32."""
    return _config_of(
        DistributedDataParallelConfig,
        actor.overrides.ddp,
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=actor.overlap_grad_reduce,
        overlap_param_gather=actor.overlap_param_gather,
        use_distributed_optimizer=actor.use_distributed_optimizer,
    )


def optimizer_config(actor: ActorConfig) -> OptimizerConfig:
    """Of Adam in the training dtype."""
    dtype, schedule = getattr(torch, actor.params_dtype), actor.optimizer.schedule
    return _config_of(
        OptimizerConfig,
        actor.overrides.optimizer,
        optimizer="adam",
        lr=actor.optimizer.lr,
        min_lr=None if schedule is None else schedule.min_lr,
        weight_decay=actor.optimizer.weight_decay,
        adam_beta1=actor.optimizer.adam_beta1,
        adam_beta2=actor.optimizer.adam_beta2,
        adam_eps=actor.optimizer.adam_eps,
        clip_grad=actor.optimizer.clip_grad,
        params_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        fp16=dtype is torch.float16,
        use_distributed_optimizer=actor.use_distributed_optimizer,
        overlap_param_gather=actor.overlap_param_gather,
    )


def param_scheduler(optimizer: MegatronOptimizer, config: OurOptimizerConfig) -> OptimizerParamScheduler | None:
    """Megatron's own scheduler of learning rate and weight decay, whose steps are updates; None without a schedule."""
    schedule = config.schedule
    if schedule is None:
        return None
    num_warmup_steps = schedule.num_warmup_steps
    start_wd, end_wd = config.weight_decays
    return OptimizerParamScheduler(
        optimizer,
        init_lr=schedule.lr_warmup_init,
        max_lr=config.lr,
        min_lr=schedule.min_lr,
        lr_warmup_steps=num_warmup_steps,
        lr_decay_steps=schedule.lr_decay_steps or num_warmup_steps + 1,
        lr_decay_style=schedule.lr_decay_style,
        start_wd=start_wd,
        end_wd=end_wd,
        wd_incr_steps=schedule.num_weight_decay_steps or 1,
        wd_incr_style=schedule.weight_decay_incr_style,
        wsd_decay_steps=schedule.lr_wsd_decay_steps,
        lr_wsd_decay_style=schedule.lr_wsd_decay_style,
    )


_Config = TypeVar("_Config")


def _config_of(config_class: type[_Config], overrides: Mapping[str, Any], **settings: Any) -> _Config:
    """A configuration of Megatron, overrides first; they name dtypes and members of enums."""
    if not overrides:
        return config_class(**settings)
    hints = get_type_hints(config_class)
    if unknown := sorted(overrides.keys() - hints.keys()):  # of a subclass, for models of another kind
        raise ValueError(f"{config_class.__name__} has no {', '.join(unknown)}")
    return config_class(**{**settings, **{name: _object_of(value, hints[name]) for name, value in overrides.items()}})


def _object_of(value: Any, hint: Any) -> Any:
    """What a name stands for in a field of this type."""
    kinds = [hint, *get_args(hint)]
    if not isinstance(value, str) or str in kinds:
        return value
    if torch.dtype in kinds:
        return getattr(torch, value)
    enums = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Enum)]
    return enums[0][value] if enums else value


def _recomputation(actor: ActorConfig) -> dict[str, Any]:
    """What is computed again, where the configuration says so. Raises ConfigError for what needs another package."""
    if actor.recompute_granularity is None:
        return {}
    lacking = _NEED_TRANSFORMER_ENGINE.intersection(actor.recompute_modules or ())
    if lacking and not has_transformer_engine():
        problem = f"{', '.join(sorted(lacking))}: megatron-core recomputes it with Transformer Engine alone"
        raise ConfigError([Violation("actor_config.recompute_modules", problem, "Install it, or leave it out")])
    return {
        "recompute_granularity": actor.recompute_granularity,
        "recompute_method": actor.recompute_method,
        "recompute_num_layers": actor.recompute_num_layers,
        "recompute_modules": None if actor.recompute_modules is None else list(actor.recompute_modules),
    }


def _require_hybrid_model() -> None:
    installed = megatron.core.__version__
    if Version(installed) < Version("0.19"):
        problem = f"megatron-core {installed} has no HybridModel of all these layers"
        raise ConfigError([Violation("actor_config.hybrid_layer_pattern", problem, "Install 0.19 or later")])


def _class_for(settings: Mapping[str, Any]) -> type[TransformerConfig]:
    """Raise ConfigError unless it has a field for each of the settings."""
    config_class = MLATransformerConfig if settings.get("multi_latent_attention") else TransformerConfig
    unknown = sorted(settings.keys() - {field.name for field in fields(config_class)})
    if unknown:
        problem = f"needs {', '.join(unknown)}, which megatron-core {megatron.core.__version__} does not have"
        raise ConfigError([Violation("model", problem, "install a later megatron-core")])
    return config_class


def _size_settings(sizes: TrainParallelism, table: ModelTable) -> dict[str, Any]:
    return {
        **named(sizes, "model"),
        "num_layers": _num_positions(sizes, table),
        "mtp_num_layers": table.dims.num_mtp_layers or None,
        # with two stages the previous and the next rank are one, and batched sends of interleaved stages would be
        # matched with each other's receives
        "overlap_p2p_comm": sizes.virtual_pipeline is not None,
        "batch_p2p_comm": sizes.virtual_pipeline is None,
    }


def _num_positions(sizes: TrainParallelism, table: ModelTable) -> int:
    if sizes.hybrid_layer_pattern is not None:
        return 2 * table.dims.num_layers
    return table.dims.num_layers + len(sizes.noop_layers)


def _expert_settings(sizes: TrainParallelism, table: ModelTable) -> dict[str, Any]:
    """Which layers have experts and how these run; nothing for a dense model."""
    if not table.dims.num_experts:
        return {}
    if sizes.hybrid_layer_pattern is not None:
        with_experts = [int(has) for has in has_experts(sizes.hybrid_layer_pattern)]
    else:
        by_layer = iter(table.transformer["moe_layer_freq"])  # of the checkpoint; Megatron counts no-op layers
        positions = range(_num_positions(sizes, table))
        with_experts = [0 if position in sizes.noop_layers else next(by_layer) for position in positions]
    return {
        "moe_layer_freq": with_experts,
        "moe_token_dispatcher_type": "alltoall",
        "moe_grouped_gemm": has_transformer_engine(),
    }


def scaled_frequencies(frequencies: torch.Tensor, scaling: RotaryScaling) -> torch.Tensor:
    """Rotary frequencies in radians per token, scaled; see `RotaryScaling`.

    megatron-core has the llama3 rule for one set of numbers only. Source: the formulas of Llama 3.1's reference model.
    """
    if scaling.rope_type == "linear":
        return frequencies / scaling.factor
    # frequencies that turn often over the original context are kept, slow ones divided, those in between interpolated
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return (1 - kept) * frequencies / scaling.factor + kept * frequencies


_OFF: dict[str, Any] = {
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "masked_softmax_fusion": False,
    "persist_layer_norm": False,
    "gradient_accumulation_fusion": False,
    "apply_rope_fusion": False,
}


def fusion_settings(settings: Mapping[str, Any], *, is_cuda: bool, with_te: bool) -> dict[str, Any]:
    """What of the table above is on.

    Args:
        settings: of Megatron's configuration that follow from the model.
        is_cuda: the model is on a GPU; elsewhere everything is off.
        with_te: layers are Transformer Engine's.
    """
    if not is_cuda:
        return _OFF
    is_latent, is_interleaved = settings.get("multi_latent_attention"), settings.get("rotary_interleaved")
    on = {
        "bias_activation_fusion": settings["activation_func"] is torch.nn.functional.silu
        and bool(settings.get("gated_linear_unit")),
        "bias_dropout_fusion": True,
        "gradient_accumulation_fusion": find_spec("fused_weight_gradient_mlp_cuda") is not None,
        "apply_rope_fusion": with_te and not is_latent and not is_interleaved,
    }
    # a backward pass computes the scores of one layer again, in place of keeping those of all
    scores = {} if with_te else {"recompute_granularity": "selective"}
    return _OFF | on | scores
