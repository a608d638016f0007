"""Rules of `generate_config` and of `generate_config.vllm`.

The rules of `vllm` decide which engine arguments are compatible with a switch and which of them a
file may set. vLLM itself checks names and values of arguments (backends/vllm/arguments.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any, Final

from hybrid_engine.config.keys import TRAINED_DRAFT, FromProgram, GenerateConfig
from hybrid_engine.config.rules import (
    Constraint,
    JobContext,
    given,
    size_constraints,
    without_peft_form,
)
from hybrid_engine.errors import Violation, Violations, nearest, shortened
from hybrid_engine.layouts.parallelism import InferenceParallelism
from hybrid_engine.layouts.size_rules import INFER_RULES
from hybrid_engine.models.block_quantization import BLOCK_METHODS
from hybrid_engine.models.lora_tensors import VLLM_LORA_RANKS

# -- weights ---------------------------------------------------------------------------------------

NARROWER = frozenset({("float32", "bfloat16"), ("float32", "float16")})
"""Allowed pairs of training dtype and wire dtype with compression."""

QUANTIZATIONS: Mapping[str, tuple[str, ...]] = {
    "cpu": ("fp8_per_channel",),
    "cuda": (
        "fp8_per_channel",
        "fp8_per_tensor",
        "fp8_per_block",
        "int8_per_channel_weight_only",
        "nvfp4_per_token",
    ),
}
"""Device type -> vLLM's methods that quantise while loading and have kernels for it."""

UNQUANTISED: Final = "none"
"""Value of `quantization` for weights as in training, whatever config.json has."""

_QUANTIZATIONS: Final = sorted({*BLOCK_METHODS}.union(*QUANTIZATIONS.values()))
"""Methods for any device."""


def _obstacles_to_replay(context: JobContext) -> list[str]:
    generate = context.generate
    if not generate.router_replay:
        return []
    stages = generate.infer_pipeline_parallel_size
    reasons = {
        "the model has no experts": not context.dims.num_experts,
        "models that FSDP2 shards select experts themselves": context.actor.fsdp,
        "servers return no experts": generate.servers,
        f"vLLM returns no experts with infer_pipeline_parallel_size {stages}": stages > 1,
        "vLLM keeps them with its cached prefixes, and enable_prefix_caching is off": (
            generate.vllm.get("enable_prefix_caching") is False
        ),
        "Transformer Engine's fused router (moe_router_fusion) selects experts itself": (
            context.actor.overrides.transformer.get("moe_router_fusion")
        ),
    }
    return given(reasons)


def _obstacles_to_exact_check(context: JobContext) -> list[str]:
    generate = context.generate
    if generate.check_compute != "exact":
        return []
    served = context.served_dtype
    trained = context.actor.params_dtype
    reasons = {
        "servers compute with kernels of their own": generate.servers,
        f"vLLM computes in {served}, and the trainer in {trained}": served != trained,
        "vLLM's weights are quantised": generate.quantization not in (None, UNQUANTISED),
    }
    return given(reasons)


# -- vLLM's arguments ------------------------------------------------------------------------------

_KEYS: Final = {
    "tensor_parallel_size": "infer_tensor_parallel_size",
    "pipeline_parallel_size": "infer_pipeline_parallel_size",
    "data_parallel_size": "infer_data_parallel_size",
    "enable_expert_parallel": "infer_expert_parallel_size",
    "kv_cache_memory_bytes": "kv_cache_mb",
    "enable_return_routed_experts": "router_replay",
    **dict.fromkeys(
        ("enable_lora", "max_loras", "max_lora_rank", "lora_target_modules"), "lora_delivery"
    ),
}
"""Engine argument -> key of `generate_config` of another name that decides it."""

_REASONS: Final = {
    "log-probabilities must be those of the sampled distribution": ("logprobs_mode",),
    "a switch fills weights on the device only, not those that vLLM keeps on the host": (
        "cpu_offload_gb",
        "cpu_offload_params",
        "offload_backend",
        "offload_params",
        "offload_group_size",
        "offload_num_in_group",
        "offload_prefetch_step",
    ),
    "it moves experts between ranks, which a switch does not track": (
        "enable_eplb",
        "eplb_config",
        "enable_elastic_ep",
        "elastic_ep_max_dp_size",
    ),
    "the roles of ranks follow from the job and the parallel sizes": (
        "data_parallel_rank",
        "data_parallel_start_rank",
        "data_parallel_size_local",
        "data_parallel_address",
        "data_parallel_rpc_port",
        "data_parallel_backend",
        "data_parallel_hybrid_lb",
        "data_parallel_external_lb",
        "prefill_context_parallel_size",
        "device_ids",
        "master_addr",
        "master_port",
        "nnodes",
        "node_rank",
        "worker_cls",
    ),
    "the KV cache that it stores outlives the weights it was computed with": (
        "kv_transfer_config",
        "kv_offloading_size",
        "kv_offloading_backend",
    ),
    "the key model names the model": (
        "hf_config_path",
        "model_weights",
        "revision",
        "code_revision",
    ),
}
_REFUSED: Final = {name: reason for reason, names in _REASONS.items() for name in names}
"""Engine argument -> reason why it is incompatible with a switch."""

IN_FILES: Final = frozenset(
    {
        # KV cache
        "block_size",
        "kv_cache_dtype",
        "enable_prefix_caching",
        "prefix_caching_hash_algo",
        "disable_sliding_window",
        "disable_hybrid_kv_cache_manager",
        "kv_sharing_fast_prefill",
        "mamba_block_size",
        "num_gpu_blocks_override",
        "mamba_cache_dtype",
        "mamba_ssm_cache_dtype",
        "mamba_cache_mode",
        # batching and speculation
        "max_num_batched_tokens",
        "max_num_scheduled_tokens",
        "max_num_active_seqs",
        "enable_chunked_prefill",
        "long_prefill_token_threshold",
        "scheduling_policy",
        "async_scheduling",
        "stream_interval",
        "spec_method",
        "spec_tokens",
        "speculative_config.method",
        "speculative_config.num_speculative_tokens",
        "speculative_config.prompt_lookup_max",
        "speculative_config.prompt_lookup_min",
        "speculative_config.suffix_decoding_max_tree_depth",
        "speculative_config.suffix_decoding_max_cached_requests",
        "speculative_config.suffix_decoding_max_spec_factor",
        "speculative_config.suffix_decoding_min_token_prob",
        # kernels and graphs
        "attention_backend",
        "moe_backend",
        "linear_backend",
        "all2all_backend",
        "mamba_backend",
        "gdn_prefill_backend",
        "kda_prefill_backend",
        "kda_decode_backend",
        "enable_flashinfer_autotune",
        "disable_cascade_attn",
        "disable_custom_all_reduce",
        "use_fp64_gumbel",
        "cudagraph_capture_sizes",
        "max_cudagraph_capture_size",
        "optimization_level",
        "performance_mode",
        "enable_sleep_mode",
        "compilation_config.mode",
        "compilation_config.cudagraph_mode",
        "compilation_config.cudagraph_capture_sizes",
        "compilation_config.max_cudagraph_capture_size",
        "compilation_config.cudagraph_num_of_warmups",
        "kernel_config.enable_jit_warmup",
        # ranks and LoRA
        "decode_context_parallel_size",
        "expert_placement_strategy",
        "enable_dbo",
        "ubatch_size",
        "dbo_decode_token_threshold",
        "dbo_prefill_token_threshold",
        "fully_sharded_loras",
        "max_cpu_loras",
        "specialize_active_lora",
        # observability
        "cudagraph_metrics",
        "enable_layerwise_nvtx_tracing",
        "jit_monitor_mode",
        "use_tqdm_on_load",
    }
)
"""Engine arguments that any configuration may set, because their values are numbers or vLLM's own
words. All others, including those of later vLLM versions, must come from a program: vLLM may
import, open or fetch free text."""

WEIGHTLESS_DRAFTS: Final = ("ngram", "ngram_gpu", "suffix")
"""vLLM's methods of speculative decoding without a draft model."""


def _own_key(argument: str) -> str | None:
    """Return the key of `generate_config` that decides an engine argument, or None."""
    key = _KEYS.get(argument, argument)
    return key if key in GenerateConfig.model_fields else None


def _decided_arguments(context: JobContext) -> dict[str, str]:
    return {
        f"generate_config.vllm.{name}": f"generate_config.{key} decides it"
        for name in context.generate.vllm
        if (key := _own_key(name))
    }


def _refused_arguments(context: JobContext) -> dict[str, str]:
    return {
        f"generate_config.vllm.{name}": _REFUSED[name]
        for name in context.generate.vllm
        if name in _REFUSED
    }


def _arguments_of_programs(context: JobContext) -> dict[str, str]:
    arguments = context.generate.vllm
    if isinstance(arguments, FromProgram):
        return {}
    known = {name.partition(".")[0] for name in IN_FILES}
    problems = {}
    for name in _dotted(arguments):
        argument = name.partition(".")[0]
        if name in IN_FILES or argument in _REFUSED or _own_key(argument):
            continue  # allowed, or reported by the rules above
        close = None if argument in known else nearest(name, IN_FILES)
        danger = "vLLM might import, open or fetch its value"
        problems[f"generate_config.vllm.{name}"] = (
            f"unknown; did you mean {close}" if close else danger
        )
    return problems


def _dotted(arguments: Mapping[str, Any]) -> Iterator[str]:
    """Yield names of arguments; those of mappings as `argument.key`, as `IN_FILES` has them."""
    for name, value in arguments.items():
        if isinstance(value, Mapping) and value:
            yield from (f"{name}.{key}" for key in value)
        else:
            yield name


def _drafts(context: JobContext) -> dict[str, object]:
    """Return the keys of arguments that set up speculative decoding, with method or model."""
    arguments = context.generate.vllm
    method = arguments.get("spec_method")
    config = arguments.get("speculative_config")
    if isinstance(config, dict):
        config = config.get("method") or "a draft model"
    drafts = {
        "spec_method": method,
        "speculative_config": config,
        "spec_model": arguments.get("spec_model") if method is None else None,
    }
    return {
        f"generate_config.vllm.{name}": draft for name, draft in drafts.items() if draft is not None
    }


def _draft_models(context: JobContext) -> dict[str, str]:
    methods = (*WEIGHTLESS_DRAFTS, TRAINED_DRAFT)
    drafts = _drafts(context)
    return {key: shortened(draft) for key, draft in drafts.items() if draft not in methods}


def _obstacles_to_trained_draft(context: JobContext) -> Violations:
    generate = context.generate
    config = generate.vllm.get("speculative_config")
    stages = generate.infer_pipeline_parallel_size
    quantization = generate.quantization
    reasons = {
        "a draft model is named as well": (
            "spec_model" in generate.vllm or (isinstance(config, dict) and "model" in config)
        ),
        "transformers' models have no MTP layers (actor_config.fsdp)": context.actor.fsdp,
        "the trained model has no MTP layers": not context.dims.num_mtp_layers,
        "a server drafts by its --speculative-config (servers)": generate.servers,
        f"vLLM drafts with one pipeline stage, not with {stages}": stages > 1,
        "the drafter would not use the adapter (lora_delivery: adapter)": (
            generate.lora_delivery == "adapter"
        ),
        "its experts would be returned as those of the model (router_replay)": (
            generate.router_replay
        ),
        f"its weights are not quantised (quantization: {quantization})": (
            quantization not in (None, UNQUANTISED)
        ),
    }
    keys = [key for key, draft in _drafts(context).items() if draft == TRAINED_DRAFT]
    for key, reason in product(keys, given(reasons)):
        yield Violation(key, reason, "Leave it out, or change that", code="mtp-unsupported")


# -- the rules -------------------------------------------------------------------------------------

INFERENCE: list[Constraint[JobContext]] = [
    *size_constraints(
        "generate_config",
        InferenceParallelism,
        INFER_RULES,
        lambda context: context.infer_sizes,
    ),
    Constraint(
        "generate_config.infer_data_parallel_size",
        "infer_tensor_parallel_size x infer_pipeline_parallel_size x infer_data_parallel_size, if "
        "given, is the world_size.",
        lambda context: (
            context.generate.infer_data_parallel_size is not None
            and context.generate.infer_data_parallel_size * context.infer_sizes.ranks_per_replica
            != context.world_size
        ),
        code="wrong-world-size",
    ),
    Constraint(
        "generate_config.dtype",
        "dtype is the dtype in which weights are sent: compression_dtype with compress_reshard, "
        "or else params_dtype.",
        lambda context: context.generate.dtype not in (None, context.served_dtype),
        code="not-sent-dtype",
    ),
    Constraint(
        "generate_config.servers",
        "Servers get whole weights: with servers, lora_delivery is merge.",
        lambda context: (
            bool(context.generate.servers) and context.generate.lora_delivery == "adapter"
        ),
        code="needs-merged-lora",
    ),
    Constraint(
        "generate_config.incremental",
        "incremental delta shortens messages to servers: without servers, incremental is auto.",
        lambda context: context.generate.incremental == "delta" and not context.generate.servers,
        code="needs-servers",
    ),
    Constraint(
        "generate_config.router_replay",
        "router_replay needs a model with experts, Megatron as the trainer, and vLLM in the "
        "training ranks, with infer_pipeline_parallel_size 1 and prefix caching.",
        _obstacles_to_replay,
        code="replay-unsupported",
    ),
    Constraint(
        "generate_config.compression_dtype",
        "compression_dtype is narrower than params_dtype, or compress_reshard is false.",
        lambda context: (
            context.generate.compress_reshard
            and (context.actor.params_dtype, context.served_dtype) not in NARROWER
        ),
        code="not-narrower",
    ),
    Constraint(
        "generate_config.check_compute",
        "With Megatron, check_compute is not off for a model without a name table: "
        "names do not show what is computed.",
        lambda context: (
            context.actor.fsdp is None
            and context.table.is_derived
            and context.generate.check_compute == "off"
        ),
        code="needs-check",
    ),
    Constraint(
        "generate_config.check_compute",
        "check_compute: exact needs vLLM in the ranks, in the trainer's dtype, without "
        "quantisation; always needs none of these.",
        _obstacles_to_exact_check,
        code="exact-unsupported",
    ),
    Constraint(
        "generate_config.quantization",
        f"quantization is none, or a method that does not need a quantised checkpoint: "
        f"{', '.join(_QUANTIZATIONS)}. The engine checks its device's methods.",
        lambda context: context.generate.quantization not in (None, UNQUANTISED, *_QUANTIZATIONS),
        code="needs-quantised-checkpoint",
    ),
    Constraint(
        "generate_config.quantization",
        "Weights are sent to servers unquantised: with servers, quantization is left out; a server "
        "may quantise while it loads.",
        lambda context: (
            bool(context.generate.servers) and context.generate.quantization in BLOCK_METHODS
        ),
        code="not-for-servers",
    ),
    # FSDP2 takes its adapters from the live model, which is not known yet.
    Constraint(
        "generate_config.lora_delivery",
        "lora_delivery adapter needs lora (or, with fsdp, LoRA in the model); merge also takes the "
        "adapters of an attached model.",
        lambda context: (
            context.generate.lora_delivery == "adapter"
            and context.actor.lora is None
            and context.actor.fsdp is None
        ),
        code="no-adapters",
    ),
    Constraint(
        "generate_config.lora_delivery",
        f"lora_delivery adapter needs a rank of at most {VLLM_LORA_RANKS[-1]}, vLLM's largest.",
        lambda context: context.adapter is not None and context.adapter.rank > VLLM_LORA_RANKS[-1],
        code="rank-too-large",
    ),
    Constraint(
        "generate_config.lora_delivery",
        "lora_delivery adapter needs target_modules outside experts, whose weights a checkpoint "
        "does not store transposed; merge takes all.",
        lambda context: without_peft_form(context.table, context.adapter),
        code="no-peft-form",
    ),
    Constraint(
        "generate_config.vllm",
        "vllm has no argument that another key decides.",
        _decided_arguments,
        code="has-own-key",
    ),
    Constraint(
        "generate_config.vllm",
        "vllm has no argument that takes weights, ranks or KV cache from the switch.",
        _refused_arguments,
        code="breaks-switch",
    ),
    Constraint(
        "generate_config.vllm",
        "vllm has arguments whose values are numbers or words of vLLM's own; "
        "a program may give others as hybrid_engine.config.FromProgram.",
        _arguments_of_programs,
        code="only-from-program",
    ),
    Constraint(
        "generate_config.vllm",
        f"Speculative decoding has no draft model, because a switch brings no weights to one: use "
        f"method {', '.join(WEIGHTLESS_DRAFTS)} or {TRAINED_DRAFT}.",
        _draft_models,
        code="draft-model",
    ),
    Constraint(
        "generate_config.vllm",
        f"Speculative decoding by {TRAINED_DRAFT} needs MTP layers that Megatron trains.",
        _obstacles_to_trained_draft,
    ),
]
