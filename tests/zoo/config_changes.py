"""Single changes of a family's config.json, including keys that the family does not have.

    for change in changes_of("qwen3"):
        config = wide_config("qwen3") | change

Keys come from the family's class in transformers, from the source of vLLM's
model and configuration, and from other families (`VALUES`). Some changes set two keys that have an
effect only together.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
from collections.abc import Iterator
from typing import Any

from tests.harness.values import Values
from tests.zoo.families import FAMILIES, SERVED_SIZES

Change = Values
NUM_POSITIONS = 256


def wide_config(family: str) -> Values:
    """Return a config of any family for vLLM's kernels, in float32 and for longer sequences."""
    length = (
        {"n_positions": NUM_POSITIONS}
        if family == "gpt2"
        else {"max_position_embeddings": NUM_POSITIONS}
    )
    sizes = {**SERVED_SIZES, **FAMILIES[family].served}
    return FAMILIES[family].config(sizes, {"torch_dtype": "float32", **length})


WINDOWED = "sliding_attention"
FULL = "full_attention"
_KINDS = ([WINDOWED, FULL], [FULL, WINDOWED], [WINDOWED, WINDOWED])
_MODEL_TYPES = [str(family.published["model_type"]) for family in FAMILIES.values()]
VALUES: dict[str, tuple[Any, ...]] = {
    # windows
    "sliding_window": (64, 1, 0),
    "use_sliding_window": (True, False),
    "max_window_layers": (0, 1, 2),
    "layer_types": (*_KINDS, ["chunked_attention", FULL]),
    "attention_chunk_size": (64,),
    "window_size": (64,),
    "sliding_window_pattern": (1, 2),
    "_sliding_window_pattern": (1, 2),
    "interleaved_sliding_window": (64,),
    "dual_chunk_attention_config": ({"chunk_size": 64, "local_size": 16},),
    # scores and logits
    "attn_logit_softcapping": (2.0,),
    "final_logit_softcapping": (2.0,),
    "logit_soft_cap": (2.0,),
    "logit_scale": (1.5,),
    "logits_scaling": (2.0,),
    "attn_scale": (0.5,),
    "scale_attn_weights": (False,),
    "query_pre_attn_scalar": (8.0,),
    "attention_multiplier": (0.5,),
    "attn_temperature_tuning": (True,),
    "embedding_multiplier": (2.0,),
    "residual_multiplier": (0.5,),
    "scale_emb": (2.0,),
    "scale_depth": (0.5,),
    "dim_model_base": (32,),
    "clip_qkv": (0.5,),
    "scale_attn_by_inverse_layer_idx": (True,),
    "alibi": (True,),
    "is_causal": (False,),
    "use_bidirectional_attention": (True,),
    "is_decoder": (False,),
    "llama_4_scaling": ({"beta": 0.5, "original_max_position_embeddings": 32},),
    # biases, norms, projections
    "attention_bias": (True, False),
    "mlp_bias": (True,),
    "qkv_bias": (True, False),
    "bias": (True,),
    "attention_out_bias": (True,),
    "lm_head_bias": (True,),
    "use_bias": (True,),
    "add_bias_linear": (True,),
    "qk_norm": (True,),
    "use_qk_norm": (True, False),
    "qk_layernorm": (True,),
    "add_cross_attention": (True,),
    "layer_norm_eps": (0.1,),
    "layer_norm_epsilon": (0.1,),
    "norm_eps": (0.1,),
    "rms_norm_eps": (0.1,),
    "hidden_act": ("gelu", "relu"),
    "hidden_activation": ("gelu", "silu"),
    "activation_function": ("relu",),
    "tie_word_embeddings": (True, False),
    "pretraining_tp": (2,),
    "head_dim": (64,),
    "multi_query": (True,),
    "num_key_value_heads": (1, 4),
    "n_inner": (64,),
    "hidden_size_per_head": (64,),
    "intermediate_size": (64,),
    # positions
    "partial_rotary_factor": (0.5, 1.0),
    "rotary_pct": (0.5,),
    "rotary_dim": (16,),
    "rope_interleave": (False, True),
    "rope_theta": (500.0, 50000),
    "rotary_emb_base": (500.0,),
    "rope_local_base_freq": (500.0,),
    "max_position_embeddings": (128, 512),
    "original_max_position_embeddings": (64,),
    "rope_ratio": (8.0,),
    "no_rope_layers": ([0, 1],),
    "no_rope_layer_interval": (1,),
    "position_embedding_type": ("absolute",),
    # experts
    "norm_topk_prob": (True, False),
    "scoring_func": ("softmax", "sigmoid"),
    "routed_scaling_factor": (1.5,),
    "topk_method": ("greedy", "noaux_tc", "group_limited_greedy"),
    "n_group": (2,),
    "topk_group": (1, 2),
    "num_experts": (8, 0),
    "num_local_experts": (8,),
    "n_routed_experts": (8,),
    "num_experts_per_tok": (1, 3),
    "n_shared_experts": (1, 2, 0),
    "num_shared_experts": (1,),
    "shared_expert_intermediate_size": (0, 32),
    "first_k_dense_replace": (0, 1, 2),
    "moe_layer_freq": (2,),
    "decoder_sparse_step": (2, 0),
    "mlp_only_layers": ([0], [1], []),
    "moe_intermediate_size": (16,),
    "router_jitter_noise": (0.5,),
    "swiglu_limit": (0.5,),
    "router_bias": (True,),
    "moe_router_activation": ("sigmoid",),
    "index_topk": (16,),
    "num_nextn_predict_layers": (0, 1),
    "hc_mult": (2,),
    "compress_ratios": ([4, 4],),
    "kv_lora_rank": (304,),
    "q_lora_rank": (20, None),
    "qk_nope_head_dim": (64,),
    "v_head_dim": (64,),
    # class and dtype
    "model_type": (*_MODEL_TYPES, "mistral", "kimi_k2", "phi3"),
    "text_config": ({"hidden_size": 32},),
    "per_layer_config": ({"1": {"rms_norm_eps": 0.1}},),
    "quantization_config": ({"quant_method": "fp8"},),
    "torch_dtype": ("float16",),
    "dtype": ("float16",),
    "is_encoder_decoder": (True,),
}
"""Values by key, each of which changes the computation of some model."""

_SCALED = {"factor": 2.0, "original_max_position_embeddings": NUM_POSITIONS // 2}
_YARN = {"rope_type": "yarn", **_SCALED}
_LLAMA3 = {"rope_type": "llama3", **_SCALED, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LONG = {"rope_type": "longrope", "short_factor": [1.0] * 16, "long_factor": [2.0] * 16}
ROTATIONS: list[Values] = [
    *(
        {"rope_type": kind, "factor": 2.0}
        for kind in ("linear", "dynamic", "proportional", "unknown")
    ),
    *({"type": kind, "factor": 2.0} for kind in ("linear", "yarn", "su")),
    *({"rope_type": "dynamic", "factor": 2.0, **more} for more in ({"alpha": 1000.0}, _SCALED)),
    *(
        {**_YARN, **more}
        for more in ({}, {"beta_fast": 8}, {"beta_slow": 4}, {"attention_factor": 1.5})
    ),
    *(
        {**_YARN, **more}
        for more in ({"mscale": 0.7, "mscale_all_dim": 0.9}, {"mscale": 0.7}, {"truncate": False})
    ),
    *(
        {**_YARN, **more}
        for more in ({"mscale_all_dim": 0.9}, {"attn_factor": 1.5}, {"extrapolation_factor": 0.5})
    ),
    *(
        {**_YARN, **more}
        for more in ({"apply_yarn_scaling": False}, {"original_max_position_embeddings": None})
    ),
    {**_YARN, "factor": 1.0},  # vLLM then has rotations for fewer positions than there are tokens.
    *({**_LLAMA3, **more} for more in ({}, {"low_freq_factor": 2.0}, {"factor": 8.0})),
    *({**_LONG, **more} for more in (_SCALED, {"factor": 2.0})),
    *(
        {"rope_type": "default", **more}
        for more in ({}, {"partial_rotary_factor": 0.5}, {"mrope_section": [4, 6, 6]})
    ),
    *(
        {"rope_type": "default", **more}
        for more in ({"use_fope": True}, {"factor": 2.0}, {"rope_theta": 500.0})
    ),
    {FULL: {"rope_type": "default", "rope_theta": 500.0}},
    {
        FULL: {"rope_type": "linear", "factor": 2.0},
        WINDOWED: {"rope_type": "default", "rope_theta": 500.0},
    },
]
"""Values of `rope_parameters`, and of `rope_scaling` as written by transformers 4."""

TOGETHER: list[Change] = [
    *({"sliding_window": 64, "layer_types": kinds} for kinds in _KINDS),
    {"sliding_window": 64, "use_sliding_window": True},
    *(
        {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": count}
        for count in (0, 1, 2)
    ),
    *(
        {"sliding_window": 64, "use_sliding_window": flag, "layer_types": _KINDS[2]}
        for flag in (True, False)
    ),
    *({"sliding_window": 64, "sliding_window_pattern": count} for count in (1, 2)),
    *(
        {"n_group": 2, "topk_group": 1, "topk_method": name}
        for name in ("greedy", "group_limited_greedy", "noaux_tc")
    ),
    *({"n_group": 2, "topk_group": 1, "scoring_func": name} for name in ("softmax", "sigmoid")),
    *({"num_experts": 4, "num_local_experts": count} for count in (4, 8)),
    {"attention_chunk_size": 64, "layer_types": ["chunked_attention", FULL]},
    {"max_position_embeddings": 128, "model_max_length": 512},
]


def changes_of(family: str) -> list[Change]:
    """Return all distinct changes that have an effect on the config."""
    config = wide_config(family)
    distinct = {json.dumps(change): change for change in _changes(family, config)}
    return [change for change in distinct.values() if {**config, **change} != config]


def _changes(family: str, config: Values) -> Iterator[Change]:
    values = {
        key: _other_values(value) for key, value in _own_values(family, config).items()
    } | VALUES
    yield from ({key: value} for key, options in values.items() for value in options)
    for rotation in ROTATIONS:
        if "type" not in rotation:
            yield {
                "rope_parameters": rotation
                if FULL in rotation
                else {"rope_theta": 10000.0, **rotation}
            }
        if len(rotation) < 4:
            yield {"rope_scaling": rotation}
    yield from TOGETHER


def _own_values(family: str, config: Values) -> Values:
    """Return the family's keys with their values, or with the defaults of missing keys."""
    import transformers

    architecture = config["architectures"][0]
    config_class = getattr(transformers, f"{FAMILIES[family].transformers}Config")
    written = config_class.from_dict(config).to_dict()
    aliases = {alias: written.get(name) for alias, name in config_class.attribute_map.items()}
    general = (
        transformers.PreTrainedConfig().to_dict()
    )  # These keys concern inputs, outputs and files.
    specific = {key: value for key, value in written.items() if key not in general}
    return {**dict(_read_by_vllm(architecture)), **aliases, **specific, **config}


def _read_by_vllm(architecture: str) -> Iterator[tuple[str, Any]]:
    """Yield the keys that vLLM's source reads from a config, with their literal defaults."""
    from transformers import PreTrainedConfig
    from vllm.model_executor.models.registry import ModelRegistry

    classes = ModelRegistry.models[architecture].load_model_cls().__mro__
    modules = {cls.__module__ for cls in classes if cls.__module__.startswith("vllm.")}
    modules |= {
        "vllm.config.model",
        "vllm.transformers_utils.config",
        "vllm.model_executor.models.config",
    }
    modules.add("vllm.transformers_utils.model_arch_config_convertor")
    for module in sorted(modules):
        for node in ast.walk(ast.parse(inspect.getsource(importlib.import_module(module)))):
            match node:
                case ast.Call(
                    func=ast.Name(id="getattr"),
                    args=[owner, ast.Constant(value=str(key)), *defaults],
                ):
                    default = (
                        defaults[0].value
                        if defaults and isinstance(defaults[0], ast.Constant)
                        else None
                    )
                case ast.Attribute(value=owner, attr=key):
                    default = None
                case _:
                    continue
            is_config = (
                ast.unparse(owner).endswith(("hf_config", "text_config"))
                or ast.unparse(owner) == "config"
            )
            if is_config and not callable(getattr(PreTrainedConfig, key, None)):
                yield key, default


def _other_values(value: Any) -> tuple[Any, ...]:
    """Return other values of the same type; those of names and sections are in `VALUES`."""
    match value:
        case bool():
            return (not value,)
        case int():
            return (max(1, value // 2),)
        case float():
            return (value / 2, value * 4) if value > 1e-3 else (0.1,)
        case None:
            return (2,)  # Also true.
        case _:
            return ()
