"""Fields of Megatron's configuration that move weights or memory, or change what is computed; every other field passes.

REFUSED, FUNCTION_FIELDS and READ_OFF_THE_MODEL list them; `live_refusals` and `argument_refusals` say what of live
objects, or of a script's arguments, is refused, and why. Fields of FUNCTION_FIELDS are accepted here; who knows what
the model should compute compares them. A field of another version stays in the list: a configuration that lacks it is
not asked for it.
"""

from __future__ import annotations

import dataclasses
import importlib
import logging
import textwrap
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from packaging.version import Version

from megatron_patches.patch import release_of


@dataclass(frozen=True)
class Refused:
    """A field that may not have every value.

    Attributes:
        reason: why.
        accepted: values that it may have, Megatron's default first.
        until: the megatron-core from which on any value goes; empty if that is none.
    """

    reason: str
    accepted: tuple[object, ...] = (False,)
    until: str = ""

    def accepts(self, value: object) -> bool:
        """Whether the field may have this value; of a list, whether it may have each value in it."""
        if value in self.accepted:
            return True
        return isinstance(value, list | tuple) and bool(value) and all(one in self.accepted for one in value)


_BITS = Refused("weights are switched in 16 or 32 bits")
_GRAPHS = "captured graphs hold addresses of caches that a switch frees"
_INTERLEAVED = "whether rows of gates and units lie interleaved is up to Transformer Engine"
_ONE_BUFFER = Refused("parameters and gradients share one buffer")
_NO_BUFFERS = Refused("there are no flat buffers to read")
_SPLIT = Refused("weights are split once more, over ranks that no region names", (1,))

REFUSED: Final[Mapping[str, Mapping[str, Refused]]] = {
    "TransformerConfig": {
        # computed otherwise than vLLM does
        "softmax_type": Refused("vLLM's softmax has no offsets and learned ones are in no name table", ("vanilla",)),
        "moe_router_load_balancing_type": Refused(
            "it chooses other experts than the scores alone, which vLLM goes by",
            ("aux_loss", "seq_aux_loss", "global_aux_loss", "none"),
        ),
        "use_mup": Refused("it scales embeddings, attention and logits, which vLLM does not do"),
        # kept in another form, or twice
        "fp8": Refused(
            "Transformer Engine keeps 8-bit copies of the weights, which a switch does not offload", (None,)
        ),
        "fp4": Refused(
            "Transformer Engine keeps 4-bit copies of the weights, which a switch does not offload", (None,)
        ),
        "fp8_param": _BITS,
        "fp4_param": _BITS,
        "quant_recipe": Refused("it may keep the weights of chosen layers in other formats", (None,)),
        "use_kitchen": Refused("how Kitchen's layers keep their weights was not read"),
        "transformer_impl": Refused("layers made for inference keep weights twice", ("transformer_engine", "local")),
        "init_model_with_meta_device": Refused("parameters have no memory yet when they are moved into shared buffers"),
        # captured addresses
        "enable_cuda_graph": Refused(_GRAPHS),
        "external_cuda_graph": Refused(_GRAPHS),
        "cuda_graph_impl": Refused(_GRAPHS, ("none",)),
        # parameters that no name table describes
        "attention_output_gate": Refused("linear_qkv has rows for gates, which no name table describes"),
        "experimental_attention_variant": Refused("its layers have parameters that are in no name table", (None,)),
        "heterogeneous_block_specs": Refused("layers differ in ways that no name table describes"),
        "mla_down_proj_fusion": Refused(
            "the projections to latent vectors are one weight, which no name table describes"
        ),
        "moe_latent_size": Refused("its projections around the experts are in no name table", (None,)),
        "mtp_use_repeated_layer": Refused("one layer stands for all MTP layers of the checkpoint"),
        "mtp_hybrid_override_pattern": Refused("multi-token prediction of a HybridModel is in no name table", (None,)),
        "is_hybrid_model": Refused("which layers a MambaModel has is in no pattern that is read", until="0.18.0"),
        # rows in another order, or split otherwise
        "moe_use_legacy_grouped_gemm": Refused("the experts of a rank are columns of one weight"),
        "moe_single_grouped_bias": Refused("the experts of a rank have one bias"),
        "moe_single_grouped_weight": Refused("DDP does not move these weights into its flat buffers", until="0.19.0"),
        "moe_shared_expert_glu_interleave_size": Refused(_INTERLEAVED, (None,)),
        "use_grouped_gemm_for_dense_mlp": Refused(_INTERLEAVED),
        "use_grouped_gemm_for_shared_expert": Refused(_INTERLEAVED),
        "gtp_weight_remat_size": _SPLIT,
        "expert_gtp_weight_remat_size": _SPLIT,
    },
    "DistributedDataParallelConfig": {
        "fp8_param_gather": _BITS,
        "fp4_param_gather": _BITS,
        "reuse_grad_buf_for_mxfp8_param_ag": _ONE_BUFFER,
        "use_megatron_fsdp": _NO_BUFFERS,
        "use_custom_fsdp": _NO_BUFFERS,
        "nccl_ub": Refused("it registers Megatron's own allocation of the buffers, which are ours here"),
    },
    "OptimizerConfig": {
        "optimizer": Refused("which tensors it holds was not read", ("adam", "sgd", "muon", "lion")),
        "use_layer_wise_distributed_optimizer": Refused(
            "which tensors Megatron's layer-wise optimizer holds is not known"
        ),
        "reuse_grad_buf_for_mxfp8_param_ag": _ONE_BUFFER,
        "use_precision_aware_optimizer": Refused("its state has forms of its own"),
        "optimizer_cpu_offload": Refused("optimizer state is on the host already; offload_train_optimizer does that"),
        "optimizer_cuda_graph": Refused(
            "the captured step holds addresses of optimizer state, which a switch moves once"
        ),
    },
}
"""Configuration class -> field -> what is refused."""

FUNCTION_FIELDS: Final = (
    *("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "ffn_hidden_size", "kv_channels"),
    *("normalization", "layernorm_epsilon", "layernorm_zero_centered_gamma", "add_bias_linear", "add_qkv_bias"),
    *("qk_layernorm", "qk_l2_norm", "softmax_scale", "window_size", "window_attn_skip_freq"),
    *("gated_linear_unit", "activation_func", "glu_linear_offset", "activation_func_clamp_value"),
    *("rotary_interleaved", "no_rope_freq", "mrope_section", "rope_type", "rotary_base", "rotary_percent"),
    *("rotary_scaling_factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale"),
    *("mscale_all_dim", "multi_latent_attention", "q_lora_rank", "kv_lora_rank", "qk_head_dim"),
    *("qk_pos_emb_head_dim", "v_head_dim", "num_moe_experts", "moe_ffn_hidden_size", "moe_layer_freq"),
    *("moe_shared_expert_intermediate_size", "moe_shared_expert_gate", "moe_router_topk", "moe_router_num_groups"),
    *("moe_router_group_topk", "moe_router_topk_limited_devices", "moe_router_pre_softmax"),
    *("moe_router_topk_scaling_factor", "moe_router_score_function", "moe_router_enable_expert_bias"),
    *("moe_router_force_load_balancing", "moe_router_force_biased", "moe_input_jitter_eps"),
    *("moe_expert_capacity_factor", "moe_apply_probs_on_input", "per_block_parameters"),
    *("heterogeneous_layers_config_path", "heterogeneous_layers_config_encoded_json"),
)
"""Fields of TransformerConfig that change what a model computes: they have to follow from config.json where there is
one, as with --enable-resharding and `attach`."""

UNREAD_BY_LATENT_ATTENTION: Final = ("kv_channels", "softmax_scale")
"""Those of FUNCTION_FIELDS that latent attention (MLA) overwrites by sizes of its own, whatever builds the model."""

READ_OFF_THE_MODEL: Final = (
    *("mtp_num_layers", "mtp_standalone", "moe_grouped_gemm", "moe_mlp_glu_interleave_size"),
    *("moe_single_grouped_weight", "tensor_parallel_num_weight_shards", "expert_tensor_parallel_num_weight_shards"),
)
"""Fields of TransformerConfig that lay weights out otherwise, as a live model says itself and a plan does not know."""

DeclaredFields = Mapping[tuple[str, str], "dataclasses.Field[Any]"]


def declared_fields() -> DeclaredFields:
    """Every field of the imported megatron-core's configurations, by class of `REFUSED` and name; none without one."""
    try:
        transformer, distributed, optimizer = (
            importlib.import_module(f"megatron.core.{name}") for name in ("transformer", "distributed", "optimizer")
        )
    except ModuleNotFoundError as error:
        if error.name not in ("megatron", "megatron.core"):
            raise
        return {}
    classes = {
        "TransformerConfig": transformer.MLATransformerConfig,  # it has all of TransformerConfig's
        "DistributedDataParallelConfig": distributed.DistributedDataParallelConfig,
        "OptimizerConfig": optimizer.OptimizerConfig,
    }
    return {(name, field.name): field for name, found in classes.items() for field in dataclasses.fields(found)}


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Refusal:
    """A field that keeps a switch from being possible.

    Attributes:
        section: its configuration class, of `REFUSED`.
        field: its name.
        problem: the value, and what is wrong with it.
        remedy: what to do.
    """

    section: str
    field: str
    problem: str
    remedy: str


def refusal(section: str, field: str, value: object, version: str = "") -> Refusal | None:
    """What is wrong with a value; None if nothing is. `version`: of megatron-core; default: the imported one's."""
    found = REFUSED[section].get(field)
    if found is None or found.accepts(value):
        return None
    if found.until and Version(version or _imported()) >= Version(found.until):
        return None
    shown = "" if value is True else f"{textwrap.shorten(str(value), 80)}: "
    choices = " or ".join(map(str, found.accepted))
    remedy = f"Leave it at {choices}" if len(found.accepted) == 1 else f"Use {choices}"
    return Refusal(section, field, f"{shown}{found.reason}", remedy)


def live_refusals(model_chunks: Sequence[Any], optimizer: Any) -> list[Refusal]:
    """What of live model chunks, their DDP and their optimizer (None for a model that is only read) is refused."""
    from megatron.core.utils import unwrap_model

    found: list[tuple[str, Any]] = []
    for chunk in model_chunks:
        found += [*_configured(getattr(unwrap_model(chunk), "config", None))]
        found += [*_configured(getattr(chunk, "ddp_config", None))]
    for one in _optimizers(optimizer):
        found += [*_configured(getattr(one, "config", None))]
        if _is_layer_wise(one):
            found.append(("OptimizerConfig", Namespace(optimizer="dist_muon")))
    return _refusals(found)


def argument_refusals(args: Namespace, transformer_config: Any) -> list[Refusal]:
    """What of Megatron-LM's validated arguments is refused, before anything is built.

    Megatron derives `transformer_config` from them, and fills the configurations of DDP and optimizer by name.
    """
    own = ("DistributedDataParallelConfig", "OptimizerConfig")
    return _refusals([*_configured(transformer_config), *((section, args) for section in own)])


def _refusals(objects: Iterable[tuple[str, Any]]) -> list[Refusal]:
    """Each once, in order."""
    found = (
        refusal(section, field, getattr(one, field))
        for section, one in objects
        for field in REFUSED[section]
        if hasattr(one, field)
    )
    return list(dict.fromkeys(each for each in found if each is not None))


def _configured(config: Any) -> Iterator[tuple[str, Any]]:
    """A configuration with the class of Megatron's that it is of; nothing for anything else."""
    names = [base.__name__ for base in type(config).__mro__]
    for section in (section for section in REFUSED if section in names):
        _log_others(section, config)
        yield section, config


def _log_others(section: str, config: Any) -> None:
    """Fields that are in no list pass; log those that are not at their default, for whoever looks for what they do."""
    listed = {*REFUSED[section], *FUNCTION_FIELDS, *READ_OFF_THE_MODEL}
    others = [
        field.name
        for field in (dataclasses.fields(config) if dataclasses.is_dataclass(config) else ())
        if field.name not in listed and field.default_factory is dataclasses.MISSING
        if getattr(config, field.name, field.default) != field.default
    ]
    if others:
        logger.debug("%s: in no list, and not at their default: %s", section, ", ".join(others))


def _optimizers(optimizer: Any) -> Iterator[Any]:
    yield optimizer
    for member in getattr(optimizer, "chained_optimizers", ()):
        yield from _optimizers(member)


def _is_layer_wise(optimizer: Any) -> bool:
    """Whether its configuration conceals that it is layer-wise: 0.16 overwrites the name with that of a member."""
    config = getattr(optimizer, "config", None)
    is_layer_wise = any(base.__name__ == "LayerWiseDistributedOptimizer" for base in type(optimizer).__mro__)
    return is_layer_wise and not getattr(config, "use_layer_wise_distributed_optimizer", False)


def _imported() -> str:
    return release_of(importlib.import_module("megatron.core").__version__)
