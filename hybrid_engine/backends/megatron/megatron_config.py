"""Construction of Megatron's configuration objects from the engine's configuration.

Fused kernels and recomputation are on if there is a GPU and Megatron's own conditions hold:

    setting                        needs                   off for
    bias_activation_fusion         SwiGLU                  GELU: the kernel computes the tanh
                                                           approximation
    bias_dropout_fusion            nothing
    gradient_accumulation_fusion   apex, even with Transformer Engine, because the output layer is
                                   megatron-core's
    apply_rope_fusion              Transformer Engine      latent attention, interleaved rotation
    recompute_granularity          no Transformer Engine, whose attention stores no scores

Three settings stay off. masked_softmax_fusion: its kernels ignore sliding windows, and with
Transformer Engine there are no scores. persist_layer_norm: without apex Megatron's norms refuse it.
cross_entropy_loss_fusion: its backward pass rounds to bfloat16 in every dtype, and it is recompiled
for other lengths. Kernels for experts (moe_permute_fusion, moe_router_fusion) need recent versions
of Transformer Engine. `actor_config.overrides` turns each of these on or off, and
`actor_config.recompute_granularity` takes precedence over the table. **No setting that needs
Transformer Engine or apex has run on hardware.**
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
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from packaging.version import Version

from hybrid_engine.config import ActorConfig
from hybrid_engine.errors import ConfigError, Violation
from hybrid_engine.layouts.parallelism import TrainParallelism, named
from hybrid_engine.layouts.stages import has_experts, num_hybrid_chunks
from hybrid_engine.models.table import ModelTable, RotaryScaling

ACTIVATIONS = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": partial(torch.nn.functional.gelu, approximate="tanh"),
}
"""Name of an activation function in a name table -> function."""

_NEED_TRANSFORMER_ENGINE = frozenset({"layernorm", "mla_up_proj", "moe_act"})
"""Recomputable modules that use megatron-core's CheckpointWithoutOutput.

It queries Transformer Engine's fp8 state even if no layer uses fp8.
"""

_Config = TypeVar("_Config")

Settings = Mapping[str, Any]
"""Fields of a configuration of Megatron, with their values."""


def has_transformer_engine() -> bool:
    """Return True if layers are built from Transformer Engine's modules, not from megatron-core's.

    They need a GPU and the package.
    """
    return torch.cuda.is_available() and find_spec("transformer_engine") is not None


def train_sizes(actor: ActorConfig, world_size: int) -> TrainParallelism:
    """Return the parallel sizes, with virtual stages implied by a layout or a hybrid pattern."""
    sizes = actor.sizes(world_size)
    if sizes.pipeline_layout is not None:
        num_stages = PipelineParallelLayerLayout.get_num_stages_from_str(sizes.pipeline_layout)
        num_chunks = num_stages // sizes.pipeline
    elif sizes.hybrid_layer_pattern is not None:
        num_chunks = num_hybrid_chunks(sizes.hybrid_layer_pattern, sizes.pipeline)
    else:
        return sizes
    return replace(sizes, virtual_pipeline=num_chunks if num_chunks > 1 else None)


@dataclass(frozen=True)
class MegatronConfigs:
    """Configuration of a model, its DDP and its optimizer."""

    transformer: TransformerConfig
    ddp: DistributedDataParallelConfig
    optimizer: OptimizerConfig


def megatron_configs(
    actor: ActorConfig,
    sizes: TrainParallelism,
    table: ModelTable,
) -> MegatronConfigs:
    """Return Megatron's configuration of the model in this layout.

    Raises:
        ConfigError: listing every setting that the model needs and this megatron-core lacks, and
            every part that Megatron itself refuses.
    """
    violations: list[Violation] = []

    def build(part: str, construct: Callable[[], _Config]) -> _Config | None:
        try:
            return construct()
        except ConfigError as error:
            violations.extend(error.findings)
        # Megatron's `__post_init__` raises these.
        except (AssertionError, ValueError) as error:
            has_overrides = bool(getattr(actor.overrides, part))
            violations.append(
                Violation(
                    f"actor_config.overrides.{part}" if has_overrides else "actor_config",
                    f"Megatron's {type(error).__name__}: {error}",
                    "Change the setting that the message names",
                    code="refused-by-megatron",
                )
            )
        return None

    transformer = build("transformer", lambda: transformer_config(actor, sizes, table))
    ddp = build("ddp", lambda: ddp_config(actor))
    optimizer = build("optimizer", lambda: optimizer_config(actor))
    if transformer is None or ddp is None or optimizer is None:
        raise ConfigError(violations)
    return MegatronConfigs(transformer, ddp, optimizer)


def transformer_config(
    actor: ActorConfig,
    sizes: TrainParallelism,
    table: ModelTable,
) -> TransformerConfig:
    """Return the TransformerConfig of the model in this layout.

    Raises:
        ConfigError: the model needs a setting that this megatron-core lacks, or recomputation needs
            Transformer Engine.
        ValueError: an override names a field of another class, or Megatron refuses a value.
        AssertionError: Megatron refuses a value.
    """
    installed = megatron.core.__version__
    if sizes.hybrid_layer_pattern is not None and Version(installed) < Version("0.19"):
        raise ConfigError.of(
            "actor_config.hybrid_layer_pattern",
            f"megatron-core {installed} has no HybridModel with all layer types of the pattern",
            "Install 0.19 or later",
            code="megatron-core-too-old",
        )
    is_cuda = torch.cuda.is_available()
    dtype = getattr(torch, actor.params_dtype)
    settings = {
        **table.transformer,
        **named(sizes, "model"),
        "num_layers": _num_positions(sizes, table),
        "mtp_num_layers": table.dims.num_mtp_layers or None,
        # With two stages the previous rank is also the next one, so batched sends of interleaved
        # stages would match the wrong receives.
        "overlap_p2p_comm": sizes.virtual_pipeline is not None,
        "batch_p2p_comm": sizes.virtual_pipeline is None,
        **_expert_settings(sizes, table),
    }
    settings["activation_func"] = ACTIVATIONS[settings["activation_func"]]
    fusion = fusion_settings(settings, is_cuda=is_cuda, with_te=has_transformer_engine())
    return _config_of(
        _class_for(settings),
        actor.overrides.transformer,
        **settings,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        # The weights of a rank do not depend on context parallelism, and megatron-core's own
        # attention refuses more than 1; see config/loading.py.
        context_parallel_size=1,
        sequence_parallel=actor.sequence_parallel,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        fp16=dtype is torch.float16,
        use_cpu_initialization=not is_cuda,
        # The configured recomputation overrides the default of `fusion_settings`.
        **{**fusion, **_recomputation(actor)},
    )


def described_config(table: ModelTable) -> TransformerConfig:
    """Return the configuration of the table's model, with Megatron's defaults for all else.

    A model that computes the same function has the same values in its configuration.

    Raises:
        ConfigError: this megatron-core lacks a setting that the model needs, or refuses a value.
    """
    activation = ACTIVATIONS.get(table.transformer["activation_func"])
    settings = {**table.transformer, "activation_func": activation}
    config_class = _class_for(settings)
    try:
        return config_class(**settings)
    except (AssertionError, ValueError) as error:  # from a `__post_init__`
        raise ConfigError.of(
            "model",
            f"Megatron's {type(error).__name__}: {error}",
            "Choose another model",
            code="refused-by-megatron",
        ) from error


def ddp_config(actor: ActorConfig) -> DistributedDataParallelConfig:
    """Return the configuration of DDP and its flat buffers; gradients are reduced in float32."""
    return _config_of(
        DistributedDataParallelConfig,
        actor.overrides.ddp,
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=actor.overlap_grad_reduce,
        overlap_param_gather=actor.overlap_param_gather,
        use_distributed_optimizer=actor.use_distributed_optimizer,
    )


def optimizer_config(actor: ActorConfig) -> OptimizerConfig:
    """Return the configuration of Adam in the training dtype."""
    dtype = getattr(torch, actor.params_dtype)
    schedule = actor.optimizer.schedule
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


def _config_of(config_class: type[_Config], overrides: Settings, **settings: Any) -> _Config:
    """Return a Megatron configuration of `settings`, in which `overrides` take precedence.

    Overrides give dtypes and members of enums by name.

    Raises:
        ValueError: `config_class` has no field of an override's name.
    """
    if not overrides:
        return config_class(**settings)
    hints = get_type_hints(config_class)
    # Fields of a subclass, for another kind of model, are unknown to this one.
    unknown = sorted(overrides.keys() - hints.keys())
    if unknown:
        raise ValueError(f"{config_class.__name__} has no {', '.join(unknown)}")
    for name, value in overrides.items():
        settings[name] = _override_value(value, hints[name])
    return config_class(**settings)


def _override_value(value: Any, hint: Any) -> Any:
    """Return the dtype or enum member that `value` names, if a field with this type takes one."""
    kinds = [hint, *get_args(hint)]
    if not isinstance(value, str) or str in kinds:
        return value
    if torch.dtype in kinds:
        return getattr(torch, value)
    enums = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Enum)]
    return enums[0][value] if enums else value


def _recomputation(actor: ActorConfig) -> Settings:
    """Return the configured recomputation settings.

    Raises:
        ConfigError: a module to recompute needs Transformer Engine, which is not used.
    """
    if actor.recompute_granularity is None:
        return {}
    modules = actor.recompute_modules
    lacking = _NEED_TRANSFORMER_ENGINE.intersection(modules or ())
    if lacking and not has_transformer_engine():
        names = ", ".join(sorted(lacking))
        raise ConfigError.of(
            "actor_config.recompute_modules",
            f"{names}: megatron-core recomputes it only with Transformer Engine",
            "Install transformer_engine, or remove the module from the list",
            code="needs-transformer-engine",
        )
    return {
        "recompute_granularity": actor.recompute_granularity,
        "recompute_method": actor.recompute_method,
        "recompute_num_layers": actor.recompute_num_layers,
        "recompute_modules": None if modules is None else list(modules),
    }


def _class_for(settings: Settings) -> type[TransformerConfig]:
    """Return the configuration class of a model with these settings.

    Raises:
        ConfigError: the installed class lacks a field for some of the settings.
    """
    is_latent = settings.get("multi_latent_attention")
    config_class = MLATransformerConfig if is_latent else TransformerConfig
    unknown = sorted(settings.keys() - {field.name for field in fields(config_class)})
    if unknown:
        installed = megatron.core.__version__
        raise ConfigError.of(
            "model",
            f"needs {', '.join(unknown)}, which megatron-core {installed} does not have",
            "Install a later megatron-core",
            code="megatron-core-too-old",
        )
    return config_class


def _num_positions(sizes: TrainParallelism, table: ModelTable) -> int:
    """Return the number of layers as Megatron counts them."""
    # A HybridModel counts attention and MLP of a decoder layer as two layers.
    if sizes.hybrid_layer_pattern is not None:
        return 2 * table.dims.num_layers
    return table.dims.num_layers + len(sizes.noop_layers)


def _expert_settings(sizes: TrainParallelism, table: ModelTable) -> Settings:
    """Return the settings of layers with experts; none for a dense model."""
    if not table.dims.num_experts:
        return {}
    if sizes.hybrid_layer_pattern is not None:
        layer_freq = [int(has) for has in has_experts(sizes.hybrid_layer_pattern)]
    else:
        # The table counts the layers of the checkpoint, Megatron also layers that do nothing.
        in_checkpoint = iter(table.transformer["moe_layer_freq"])
        layer_freq = []
        for position in range(_num_positions(sizes, table)):
            is_noop = position in sizes.noop_layers
            layer_freq.append(0 if is_noop else next(in_checkpoint))
    return {
        "moe_layer_freq": layer_freq,
        "moe_token_dispatcher_type": "alltoall",
        "moe_grouped_gemm": has_transformer_engine(),
    }


def scaled_frequencies(frequencies: torch.Tensor, scaling: RotaryScaling) -> torch.Tensor:
    """Return the scaled rotary frequencies, in radians per token; see `RotaryScaling`.

    megatron-core implements the llama3 rule for one set of numbers only. Source: the formulas of
    Llama 3.1's reference model.
    """
    if scaling.rope_type == "linear":
        return frequencies / scaling.factor
    # Frequencies with many turns within the original context stay, frequencies with few are
    # divided by the factor, and the rest are interpolated.
    # Llama 3.1 (8,192 tokens, factors 1 and 4, divided by 8): a wavelength of 8,192 tokens makes 1
    # turn and is divided, one of 2,048 makes 4 and stays, one of 4,096 is between: 0.417 times.
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return (1 - kept) * frequencies / scaling.factor + kept * frequencies


_ALL_OFF: dict[str, Any] = {
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "masked_softmax_fusion": False,
    "persist_layer_norm": False,
    "gradient_accumulation_fusion": False,
    "apply_rope_fusion": False,
}


def fusion_settings(settings: Settings, *, is_cuda: bool, with_te: bool) -> Settings:
    """Return the fusion and recomputation settings of the module's table.

    Args:
        settings: Megatron's settings that follow from the model.
        is_cuda: the model is on a GPU; otherwise everything is off.
        with_te: layers are Transformer Engine's.
    """
    if not is_cuda:
        return _ALL_OFF
    is_silu = settings["activation_func"] is torch.nn.functional.silu
    is_latent = settings.get("multi_latent_attention")
    is_interleaved = settings.get("rotary_interleaved")
    enabled = {
        "bias_activation_fusion": is_silu and bool(settings.get("gated_linear_unit")),
        "bias_dropout_fusion": True,
        "gradient_accumulation_fusion": find_spec("fused_weight_gradient_mlp_cuda") is not None,
        "apply_rope_fusion": with_te and not is_latent and not is_interleaved,
    }
    # Recompute the scores of a layer in its backward pass, instead of storing them for all layers.
    recomputation = {} if with_te else {"recompute_granularity": "selective"}
    return _ALL_OFF | enabled | recomputation
