"""Fields of Megatron's configuration that change weights, memory or the computed function.

REFUSED, FUNCTION_FIELDS and READ_OFF_THE_MODEL list them. Every other field is accepted that a
supported megatron-core has (known_fields.py); one of a newer version must have its default.
`live_refusals` and `argument_refusals` return the refused fields of live objects and of a script's
arguments, with reasons. FUNCTION_FIELDS are accepted here, and compared by callers that have a
description of the model. The lists contain fields of all supported versions; a field that a
configuration lacks is skipped.
"""

from __future__ import annotations

import dataclasses
import importlib
import textwrap
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from packaging.version import Version

from megatron_patches.known_fields import KNOWN_FIELDS
from megatron_patches.patch import CORE_VERSIONS, release_of

DeclaredFields = Mapping[tuple[str, str], "dataclasses.Field[Any]"]
"""(configuration class, name) -> field."""


@dataclass(frozen=True)
class Refused:
    """Restriction of a field's values.

    Attributes:
        reason: why other values are refused.
        accepted: accepted values, Megatron's default first.
        until: the megatron-core from which on every value is accepted; empty if there is none.
        unless: function of a configuration that has the field; every value is accepted if True.
    """

    reason: str
    accepted: tuple[object, ...] = (False,)
    until: str = ""
    unless: Callable[[Any], bool] = lambda _config: False

    def accepts(self, value: object) -> bool:
        """Return True if the field may have this value, or a list if it may have each item."""
        if value in self.accepted:
            return True
        if not isinstance(value, list | tuple):
            return False
        return bool(value) and all(item in self.accepted for item in value)


@dataclass(frozen=True)
class FieldRefusal:
    """Field with a value that prevents a switch.

    Attributes:
        section: its configuration class, a key of `REFUSED`.
        field: its name.
        problem: the value, and the reason why it is refused.
        remedy: what to do.
    """

    section: str
    field: str
    problem: str
    remedy: str


_BITS = Refused("a switch transfers weights in 8, 16 or 32 bits")
_GRAPHS = "captured graphs contain addresses of caches that a switch frees"
_INTERLEAVED = "Transformer Engine decides whether rows of gates and units are interleaved"
_ONE_BUFFER = Refused(
    "with overlap_param_gather the weights to be gathered are in the memory of gradients, which a "
    "switch frees, and a second gather of them overwrites the weights",
    unless=lambda config: not getattr(config, "overlap_param_gather", False),
)
_NO_BUFFERS = Refused("there are no flat buffers to read")
_SPLIT = Refused("weights are split a second time, over ranks that regions do not record", (1,))

REFUSED: Final[Mapping[str, Mapping[str, Refused]]] = {
    "TransformerConfig": {
        # vLLM computes another function.
        # Learned offsets are parameters, so the checkpoint has to have them.
        "softmax_type": Refused("vLLM's softmax has no fixed offset", ("vanilla", "learnable")),
        "moe_router_load_balancing_type": Refused(
            "it chooses experts by more than the scores, and vLLM by the scores alone",
            ("aux_loss", "seq_aux_loss", "global_aux_loss", "none"),
        ),
        "use_mup": Refused("it scales embeddings, attention and logits, which vLLM does not do"),
        # Weights have another format, or several copies.
        "fp8": Refused(
            "Transformer Engine keeps 8-bit copies of the weights, which a switch does not offload"
            ", unless fp8_param is set",
            (None,),
            unless=lambda config: bool(getattr(config, "fp8_param", False)),
        ),
        "fp4": Refused(
            "Transformer Engine keeps 4-bit copies of the weights, which a switch does not offload",
            (None,),
        ),
        "fp4_param": _BITS,
        "quant_recipe": Refused(
            "it may keep the weights of chosen layers in other formats", (None,)
        ),
        "use_kitchen": Refused("the weight format of Kitchen's layers was not examined"),
        "transformer_impl": Refused(
            "layers for inference keep a second copy of weights",
            ("transformer_engine", "local"),
        ),
        "init_model_with_meta_device": Refused(
            "parameters do not have memory yet when they move into shared buffers"
        ),
        # Addresses are captured.
        "enable_cuda_graph": Refused(_GRAPHS),
        "external_cuda_graph": Refused(_GRAPHS),
        "cuda_graph_impl": Refused(_GRAPHS, ("none",)),
        # Parameters are in no name table.
        "experimental_attention_variant": Refused(
            "its layers have parameters that are in no name table", (None, "gated_delta_net")
        ),
        "heterogeneous_block_specs": Refused("differences between layers are in no name table"),
        "mla_down_proj_fusion": Refused(
            "the projections to latent vectors are one weight, which is in no name table"
        ),
        "moe_latent_size": Refused(
            "its projections around the experts are in no name table", (None,)
        ),
        "mtp_use_repeated_layer": Refused("one layer replaces all MTP layers of the checkpoint"),
        "mtp_hybrid_override_pattern": Refused(
            "multi-token prediction of a HybridModel is in no name table", (None,)
        ),
        # Rows have another order or split.
        "moe_use_legacy_grouped_gemm": Refused("the experts of a rank are columns of one weight"),
        "moe_single_grouped_bias": Refused("the experts of a rank have one bias"),
        "moe_single_grouped_weight": Refused(
            "DDP does not move these weights into its flat buffers", until="0.19.0"
        ),
        "moe_shared_expert_glu_interleave_size": Refused(_INTERLEAVED, (None,)),
        "use_grouped_gemm_for_dense_mlp": Refused(_INTERLEAVED),
        "use_grouped_gemm_for_shared_expert": Refused(_INTERLEAVED),
        "gtp_weight_remat_size": _SPLIT,
        "expert_gtp_weight_remat_size": _SPLIT,
    },
    "DistributedDataParallelConfig": {
        "fp4_param_gather": _BITS,
        "reuse_grad_buf_for_mxfp8_param_ag": _ONE_BUFFER,
        "use_megatron_fsdp": _NO_BUFFERS,
        "use_custom_fsdp": _NO_BUFFERS,
        "nccl_ub": Refused(
            "it registers buffers that Megatron allocates, and a switch needs its own"
        ),
    },
    "OptimizerConfig": {
        "optimizer": Refused(
            "the tensors that it holds are unknown", ("adam", "sgd", "muon", "lion")
        ),
        "use_layer_wise_distributed_optimizer": Refused(
            "the tensors that Megatron's layer-wise optimizer holds are unknown"
        ),
        "reuse_grad_buf_for_mxfp8_param_ag": _ONE_BUFFER,
        "use_precision_aware_optimizer": Refused("its state has special formats"),
        "optimizer_cpu_offload": Refused(
            "optimizer state is already on the host; use offload_train_optimizer instead"
        ),
        "optimizer_cuda_graph": Refused(
            "the captured step contains addresses of optimizer state, which the first switch moves"
        ),
    },
}
"""Configuration class -> field -> restriction."""

FUNCTION_FIELDS: Final = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "ffn_hidden_size",
    "kv_channels",
    "normalization",
    "layernorm_epsilon",
    "layernorm_zero_centered_gamma",
    "add_bias_linear",
    "add_qkv_bias",
    "qk_layernorm",
    "qk_l2_norm",
    "attention_output_gate",
    "experimental_attention_variant",
    "softmax_scale",
    "window_size",
    "window_attn_skip_freq",
    "gated_linear_unit",
    "activation_func",
    "glu_linear_offset",
    "activation_func_clamp_value",
    "rotary_interleaved",
    "no_rope_freq",
    "mrope_section",
    "rope_type",
    "rotary_base",
    "rotary_percent",
    "rotary_scaling_factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "multi_latent_attention",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_head_dim",
    "qk_pos_emb_head_dim",
    "v_head_dim",
    "num_moe_experts",
    "moe_ffn_hidden_size",
    "moe_layer_freq",
    "moe_shared_expert_intermediate_size",
    "moe_shared_expert_gate",
    "moe_router_topk",
    "moe_router_num_groups",
    "moe_router_group_topk",
    "moe_router_topk_limited_devices",
    "moe_router_pre_softmax",
    "moe_router_topk_scaling_factor",
    "moe_router_score_function",
    "moe_router_enable_expert_bias",
    "moe_router_force_load_balancing",
    "moe_router_force_biased",
    "moe_input_jitter_eps",
    "moe_expert_capacity_factor",
    "moe_apply_probs_on_input",
    "per_block_parameters",
    "heterogeneous_layers_config_path",
    "heterogeneous_layers_config_encoded_json",
)
"""Fields of TransformerConfig that change the function a model computes.

With --enable-resharding and `attach` they must follow from config.json.
"""

UNREAD_BY_LATENT_ATTENTION: Final = ("kv_channels", "softmax_scale")
"""Those of FUNCTION_FIELDS that latent attention (MLA) replaces by other sizes in every model."""

READ_OFF_THE_MODEL: Final = (
    "mtp_num_layers",
    "mtp_standalone",
    "moe_grouped_gemm",
    "moe_mlp_glu_interleave_size",
    "moe_single_grouped_weight",
    "tensor_parallel_num_weight_shards",
    "expert_tensor_parallel_num_weight_shards",
)
"""Fields of TransformerConfig that change the layout of weights.

They are read off a live model, and unknown to a plan without one.
"""


def declared_fields() -> DeclaredFields:
    """Return every field of megatron-core's configurations; empty if it is not installed."""
    try:
        transformer, distributed, optimizer = (
            importlib.import_module(f"megatron.core.{name}")
            for name in ("transformer", "distributed", "optimizer")
        )
    except ModuleNotFoundError as error:
        if error.name not in ("megatron", "megatron.core"):
            raise
        return {}
    classes = {
        # This subclass has all fields of TransformerConfig.
        "TransformerConfig": transformer.MLATransformerConfig,
        "DistributedDataParallelConfig": distributed.DistributedDataParallelConfig,
        "OptimizerConfig": optimizer.OptimizerConfig,
    }
    declared = {}
    for section, config_class in classes.items():
        for field in dataclasses.fields(config_class):
            declared[section, field.name] = field
    return declared


def refusal(section: str, field: str, value: object, version: str = "") -> FieldRefusal | None:
    """Return the refusal of a value; None if it is accepted.

    `version`: of megatron-core; empty for the imported one.
    """
    restriction = REFUSED[section].get(field)
    if restriction is None or restriction.accepts(value):
        return None
    if restriction.until:
        core_version = version or release_of(importlib.import_module("megatron.core").__version__)
        if Version(core_version) >= Version(restriction.until):
            return None
    # A flag that is on needs no value in the message.
    shown = "" if value is True else f"{textwrap.shorten(str(value), 80)}: "
    choices = " or ".join(map(str, restriction.accepted))
    remedy = f"Leave it at {choices}" if len(restriction.accepted) == 1 else f"Use {choices}"
    return FieldRefusal(section, field, f"{shown}{restriction.reason}", remedy)


def live_refusals(model_chunks: Sequence[Any], optimizer: Any) -> list[FieldRefusal]:
    """Return the refused fields of live model chunks, their DDP and their optimizer.

    `optimizer`: None for a model that is only read.
    """
    from megatron.core.utils import unwrap_model

    configs: list[tuple[str, Any]] = []
    for chunk in model_chunks:
        configs += _sections_of(getattr(unwrap_model(chunk), "config", None))
        configs += _sections_of(getattr(chunk, "ddp_config", None))
    for member in _optimizers(optimizer):
        config = getattr(member, "config", None)
        configs += _sections_of(config)
        # megatron-core 0.16 overwrites the name of a layer-wise optimizer with that of a member.
        names = [base.__name__ for base in type(member).__mro__]
        is_layer_wise = "LayerWiseDistributedOptimizer" in names
        if is_layer_wise and not getattr(config, "use_layer_wise_distributed_optimizer", False):
            configs.append(("OptimizerConfig", Namespace(optimizer="dist_muon")))
    return _refusals(configs)


def argument_refusals(args: Namespace, transformer_config: Any) -> list[FieldRefusal]:
    """Return the refused fields in Megatron-LM's validated arguments, before anything is built.

    Args:
        args: the arguments. Megatron fills the configurations of DDP and optimizer from them by
            name.
        transformer_config: configuration that Megatron derives from them.
    """
    configs: list[tuple[str, Any]] = [*_sections_of(transformer_config)]
    configs += [("DistributedDataParallelConfig", args), ("OptimizerConfig", args)]
    return _refusals(configs)


def _refusals(configs: Iterable[tuple[str, Any]]) -> list[FieldRefusal]:
    """Return each refusal once, in order, of (section, object with its fields)."""
    refusals: dict[FieldRefusal, None] = {}
    for section, config in configs:
        for field in REFUSED[section]:
            if hasattr(config, field) and not REFUSED[section][field].unless(config):
                result = refusal(section, field, getattr(config, field))
                if result is not None:
                    refusals[result] = None
        refusals.update(dict.fromkeys(_unknown_fields(section, config)))
    return list(refusals)


def _sections_of(config: Any) -> Iterator[tuple[str, Any]]:
    """Yield (section, config) for each class of Megatron's that a configuration is of."""
    names = [base.__name__ for base in type(config).__mro__]
    for section in REFUSED:
        if section in names:
            yield section, config


def _unknown_fields(section: str, config: Any) -> Iterator[FieldRefusal]:
    """Yield fields that a newer megatron-core has declared, if they are not at their default."""
    for config_class in type(config).__mro__:
        # Classes of other projects, such as Megatron-Bridge's, extend it by settings of their own.
        is_of_megatron = config_class.__module__.startswith("megatron.core.")
        if is_of_megatron and dataclasses.is_dataclass(config_class):
            break
    else:
        return
    for field in dataclasses.fields(config_class):
        # Lists and dicts have a factory in place of a default.
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        value = getattr(config, field.name, default)
        if field.name not in KNOWN_FIELDS[section] and value != default:
            shown = textwrap.shorten(str(value), 80)
            yield FieldRefusal(
                section,
                field.name,
                f"{shown}: the field is newer than the supported versions of megatron-core",
                f"Leave it at {default}, or install {' or '.join(CORE_VERSIONS)}",
            )


def _optimizers(optimizer: Any) -> Iterator[Any]:
    """Yield an optimizer and all nested members of its chain."""
    yield optimizer
    for member in getattr(optimizer, "chained_optimizers", ()):
        yield from _optimizers(member)
