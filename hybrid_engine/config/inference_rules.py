"""Rules of `generate_config` and of `generate_config.vllm`.

The rules of `vllm` decide which engine arguments are compatible with a switch and which of them a
file may set. vLLM itself checks names and values of arguments (backends/vllm/arguments.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from hybrid_engine.config.keys import TRAINED_DRAFT, FromProgram, GenerateConfig
from hybrid_engine.config.rules import Constraint, JobContext, constraint, size_constraints
from hybrid_engine.errors import Violation, Violations, nearest, shortened
from hybrid_engine.layouts.parallelism import InferenceParallelism
from hybrid_engine.layouts.parameters import linear_modules, parameters_of
from hybrid_engine.layouts.size_rules import INFER_RULES
from hybrid_engine.models.block_quantization import BLOCK_METHODS
from hybrid_engine.models.lora_tensors import VLLM_LORA_RANKS

INFERENCE: list[Constraint[JobContext]] = size_constraints(
    "generate_config",
    InferenceParallelism,
    INFER_RULES,
    lambda context: context.infer_sizes,
)

NARROWER = frozenset({("float32", "bfloat16"), ("float32", "float16")})
"""Allowed pairs of training dtype and wire dtype with compression."""


@constraint(
    INFERENCE,
    "generate_config.infer_data_parallel_size",
    "If given, DP satisfies TP x PP x DP == number of ranks.",
)
def _inference_replicas(context: JobContext) -> Violations:
    sizes = context.infer_sizes
    replicas = context.generate.infer_data_parallel_size
    if replicas is not None and sizes.ranks_per_replica * replicas != context.world_size:
        yield Violation(
            "generate_config.infer_data_parallel_size",
            f"TP {sizes.tensor} x PP {sizes.pipeline} x DP {replicas} "
            f"is not the world size {context.world_size}",
            "Leave it out: DP is the world size divided by TP x PP",
            code="wrong-world-size",
        )


@constraint(INFERENCE, "generate_config.dtype", "dtype is the dtype in which weights are sent.")
def _dtype(context: JobContext) -> Violations:
    if context.generate.dtype not in (None, context.served_dtype):
        yield Violation(
            "generate_config.dtype",
            f"{context.generate.dtype}, but weights are sent in {context.served_dtype}",
            "Leave it out, or set compress_reshard and compression_dtype",
            code="not-sent-dtype",
        )


@constraint(
    INFERENCE,
    "generate_config.servers",
    "Servers get whole weights: with servers, lora_delivery is merge.",
)
def _servers(context: JobContext) -> Violations:
    if context.generate.servers and context.generate.lora_delivery == "adapter":
        yield Violation(
            "generate_config.servers",
            "named, but lora_delivery is adapter",
            "Set lora_delivery to merge, which adds adapters to the weights that are sent",
            code="needs-merged-lora",
        )


@constraint(
    INFERENCE,
    "generate_config.router_replay",
    "router_replay needs a model with experts, Megatron as the trainer, and vLLM in the training "
    "ranks, with infer_pipeline_parallel_size 1 and prefix caching.",
)
def _router_replay(context: JobContext) -> Violations:
    generate = context.generate
    if not generate.router_replay:
        return
    reasons = {
        "the model has no experts": not context.table.dims.num_experts,
        "models that FSDP2 shards select experts themselves": context.actor.fsdp is not None,
        "servers return no experts": bool(generate.servers),
        "vLLM returns no experts with infer_pipeline_parallel_size "
        f"{generate.infer_pipeline_parallel_size}": generate.infer_pipeline_parallel_size > 1,
        "vLLM keeps them with its cached prefixes, and enable_prefix_caching is off": (
            generate.vllm.get("enable_prefix_caching") is False
        ),
        "Transformer Engine's fused router (moe_router_fusion) selects experts itself": bool(
            context.actor.overrides.transformer.get("moe_router_fusion")
        ),
    }
    for reason, is_given in reasons.items():
        if is_given:
            yield Violation(
                "generate_config.router_replay",
                f"true, but {reason}",
                "Leave it out, or change that",
                code="replay-unsupported",
            )


@constraint(
    INFERENCE,
    "generate_config.compression_dtype",
    "compression_dtype is narrower than params_dtype.",
)
def _compression(context: JobContext) -> Violations:
    dtypes = (context.actor.params_dtype, context.served_dtype)
    if context.generate.compress_reshard and dtypes not in NARROWER:
        yield Violation(
            "generate_config.compression_dtype",
            f"{context.served_dtype} is not narrower than the training "
            f"dtype {context.actor.params_dtype}",
            "Set compress_reshard to false",
            code="not-narrower",
        )


@constraint(
    INFERENCE,
    "generate_config.check_compute",
    "With Megatron, check_compute is not off for a model without a name table: "
    "names do not show what is computed.",
)
def _check_of_derived_rules(context: JobContext) -> Violations:
    is_megatron = context.actor.fsdp is None
    if is_megatron and context.table.is_derived and context.generate.check_compute == "off":
        yield Violation(
            "generate_config.check_compute",
            f"off, but the layout of {context.table.architecture} follows "
            "from the names of its tensors alone",
            "Leave it out: the first switch compares what both sides compute",
            code="needs-check",
        )


@constraint(
    INFERENCE,
    "generate_config.check_compute",
    "check_compute: exact needs vLLM in the ranks, in the trainer's dtype, without quantisation.",
)
def _exact_check(context: JobContext) -> Violations:
    generate = context.generate
    if generate.check_compute != "exact":
        return
    reasons = {
        "servers compute with kernels of their own": bool(generate.servers),
        f"vLLM computes in {context.served_dtype}, and the trainer in "
        f"{context.actor.params_dtype}": context.served_dtype != context.actor.params_dtype,
        "vLLM's weights are quantised": generate.quantization not in (None, UNQUANTISED),
    }
    for reason, is_given in reasons.items():
        if is_given:
            yield Violation(
                "generate_config.check_compute",
                f"exact, but {reason}",
                "Set it to always, or change that",
                code="exact-unsupported",
            )


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


@constraint(
    INFERENCE,
    "generate_config.quantization",
    "The method quantises while loading, or is fp8, mxfp8, mxfp4 or nvfp4 for weights that are "
    "quantised before they are sent; servers take none of the latter. The engine checks its "
    "device's methods.",
)
def _quantization(context: JobContext) -> Violations:
    method = context.generate.quantization
    known = {name for names in QUANTIZATIONS.values() for name in names} | set(BLOCK_METHODS)
    if method is not None and method not in known | {UNQUANTISED}:
        yield Violation(
            "generate_config.quantization",
            f"method {method!r} needs a checkpoint that is already quantised",
            f"Use {' or '.join(sorted(known))}, or leave it out",
            code="needs-quantised-checkpoint",
        )
    if method in BLOCK_METHODS and context.generate.servers:
        yield Violation(
            "generate_config.quantization",
            f"{method}, but weights are sent to servers unquantised",
            "Leave it out; a server may quantise while it loads (vllm serve --quantization)",
            code="not-for-servers",
        )


@constraint(
    INFERENCE,
    "generate_config.lora_delivery",
    "adapter needs actor_config.lora (with fsdp, LoRA in the model) of a rank that vLLM supports, "
    "on weights that are neither stored transposed nor in experts.",
)
def _lora_delivery(context: JobContext) -> Violations:
    if context.generate.lora_delivery != "adapter":
        return
    lora = context.actor.lora
    if lora is None:
        # FSDP2 takes its adapters from the live model, which is not known yet.
        if context.actor.fsdp is None:
            yield Violation(
                "generate_config.lora_delivery",
                "adapter, but actor_config.lora is not set",
                "Set it, or use merge, which also takes adapters of an attached model",
                code="no-adapters",
            )
        return
    if lora.rank > VLLM_LORA_RANKS[-1]:
        yield Violation(
            "generate_config.lora_delivery",
            f"adapter, but rank {lora.rank} is above vLLM's {VLLM_LORA_RANKS[-1]}",
            "Use a smaller rank or merge",
            code="rank-too-large",
        )
    modules = linear_modules(context.table)
    in_experts = [target for target in lora.target_modules if modules.get(target)]
    if in_experts:
        yield Violation(
            "generate_config.lora_delivery",
            f"adapter, but target_modules {', '.join(in_experts)} are parts of experts",
            "Use merge",
            code="adapters-in-experts",
        )
    if any(parameter.packing.transposed for parameter in parameters_of(context.table)):
        yield Violation(
            "generate_config.lora_delivery",
            "adapter, but this model's checkpoint has transposed weights",
            "Use merge",
            code="transposed-weights",
        )


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

_OFFLOADED = "a switch fills weights on the device only, not those that vLLM keeps on the host"
_MOVED = "it moves experts between ranks, which a switch does not track"
_PLACED = "the roles of ranks follow from the job and the parallel sizes"
_STALE = "the KV cache that it stores outlives the weights it was computed with"
_OTHER_MODEL = "the key model names the model"

_REFUSED: Final = {
    "logprobs_mode": "log-probabilities must be those of the sampled distribution",
    **dict.fromkeys(
        ("cpu_offload_gb", "cpu_offload_params", "offload_backend", "offload_params"), _OFFLOADED
    ),
    **dict.fromkeys(
        ("offload_group_size", "offload_num_in_group", "offload_prefetch_step"), _OFFLOADED
    ),
    **dict.fromkeys(
        ("enable_eplb", "eplb_config", "enable_elastic_ep", "elastic_ep_max_dp_size"), _MOVED
    ),
    **dict.fromkeys(
        ("data_parallel_rank", "data_parallel_start_rank", "data_parallel_size_local"), _PLACED
    ),
    **dict.fromkeys(
        ("data_parallel_address", "data_parallel_rpc_port", "data_parallel_backend"), _PLACED
    ),
    **dict.fromkeys(("data_parallel_hybrid_lb", "data_parallel_external_lb"), _PLACED),
    **dict.fromkeys(("prefill_context_parallel_size", "device_ids"), _PLACED),
    **dict.fromkeys(("master_addr", "master_port", "nnodes", "node_rank", "worker_cls"), _PLACED),
    **dict.fromkeys(("kv_transfer_config", "kv_offloading_size", "kv_offloading_backend"), _STALE),
    **dict.fromkeys(("hf_config_path", "model_weights", "revision", "code_revision"), _OTHER_MODEL),
}
"""Engine argument -> reason why it is incompatible with a switch."""

IN_FILES: Final = frozenset(
    {
        # KV cache
        *("block_size", "kv_cache_dtype", "enable_prefix_caching", "prefix_caching_hash_algo"),
        *(
            "disable_sliding_window",
            "disable_hybrid_kv_cache_manager",
            "kv_sharing_fast_prefill",
            "mamba_block_size",
        ),
        *(
            "num_gpu_blocks_override",
            "mamba_cache_dtype",
            "mamba_ssm_cache_dtype",
            "mamba_cache_mode",
        ),
        # batching and speculation
        *(
            "max_num_batched_tokens",
            "max_num_scheduled_tokens",
            "max_num_active_seqs",
            "enable_chunked_prefill",
        ),
        *(
            "long_prefill_token_threshold",
            "scheduling_policy",
            "async_scheduling",
            "stream_interval",
        ),
        *("spec_method", "spec_tokens"),
        *(f"speculative_config.{part}" for part in ("method", "num_speculative_tokens")),
        *(f"speculative_config.prompt_lookup_{part}" for part in ("max", "min")),
        *(
            f"speculative_config.suffix_decoding_max_{part}"
            for part in ("tree_depth", "cached_requests")
        ),
        *(
            f"speculative_config.suffix_decoding_{part}"
            for part in ("max_spec_factor", "min_token_prob")
        ),
        # kernels and graphs
        *("attention_backend", "moe_backend", "linear_backend", "all2all_backend", "mamba_backend"),
        *(
            "gdn_prefill_backend",
            "kda_prefill_backend",
            "kda_decode_backend",
            "enable_flashinfer_autotune",
        ),
        *("disable_cascade_attn", "disable_custom_all_reduce", "use_fp64_gumbel"),
        *(
            "cudagraph_capture_sizes",
            "max_cudagraph_capture_size",
            "optimization_level",
            "performance_mode",
        ),
        "enable_sleep_mode",
        *(
            f"compilation_config.{part}"
            for part in ("mode", "cudagraph_mode", "cudagraph_capture_sizes")
        ),
        *(
            f"compilation_config.{part}"
            for part in ("max_cudagraph_capture_size", "cudagraph_num_of_warmups")
        ),
        "kernel_config.enable_jit_warmup",
        # ranks and LoRA
        *("decode_context_parallel_size", "expert_placement_strategy", "enable_dbo", "ubatch_size"),
        *("dbo_decode_token_threshold", "dbo_prefill_token_threshold"),
        *("fully_sharded_loras", "max_cpu_loras", "specialize_active_lora"),
        # observability
        *("cudagraph_metrics", "enable_layerwise_nvtx_tracing", "jit_monitor_mode"),
        "use_tqdm_on_load",
    }
)
"""Engine arguments that any configuration may set, because their values are numbers or vLLM's own
words. All others, including those of later vLLM versions, must come from a program: vLLM may
import, open or fetch free text."""

WEIGHTLESS_DRAFTS: Final = ("ngram", "ngram_gpu", "suffix")
"""vLLM's methods of speculative decoding without a draft model."""


@constraint(
    INFERENCE,
    "generate_config.vllm",
    "vllm has no argument that another key decides, or that takes weights, "
    "ranks or KV cache from the switch.",
)
def _arguments(context: JobContext) -> Violations:
    for name in context.generate.vllm:
        path = f"generate_config.vllm.{name}"
        key = _KEYS.get(name, name)
        if key in GenerateConfig.model_fields:
            yield Violation(
                path,
                "a configuration key decides it",
                f"Use generate_config.{key}",
                code="has-own-key",
            )
        elif name in _REFUSED:
            yield Violation(path, _REFUSED[name], "Leave it out", code="breaks-switch")


@constraint(
    INFERENCE,
    "generate_config.vllm",
    "vllm has arguments whose values are numbers or words of vLLM's own; "
    "a program may give others as FromProgram.",
)
def _arguments_in_files(context: JobContext) -> Violations:
    arguments = context.generate.vllm
    if isinstance(arguments, FromProgram):
        return
    known = {name.partition(".")[0] for name in IN_FILES}
    for name in _dotted(arguments):
        argument = name.partition(".")[0]
        key = _KEYS.get(argument, argument)
        if name in IN_FILES or argument in _REFUSED or key in GenerateConfig.model_fields:
            continue  # allowed, or reported by the rule above
        close = None if argument in known else nearest(name, IN_FILES)
        remedy = "Leave it out, or give vllm as hybrid_engine.config.FromProgram in your program"
        yield Violation(
            f"generate_config.vllm.{name}",
            "a configuration file cannot set it: vLLM might import, open or fetch its value",
            f"Did you mean {close}?" if close else remedy,
            code="only-from-program",
        )


def _dotted(arguments: Mapping[str, Any]) -> Iterator[str]:
    """Yield names of arguments; those of mappings as `argument.key`, as `IN_FILES` has them."""
    for name, value in arguments.items():
        if isinstance(value, Mapping) and value:
            yield from (f"{name}.{key}" for key in value)
        else:
            yield name


@constraint(
    INFERENCE,
    "generate_config.vllm",
    "Speculative decoding has no draft model but the MTP layers that Megatron trains.",
)
def _speculation(context: JobContext) -> Violations:
    arguments = context.generate.vllm
    config = arguments.get("speculative_config")
    methods = {"spec_method": arguments.get("spec_method")}
    if config is not None:
        methods["speculative_config"] = config.get("method") if isinstance(config, dict) else config
    if "spec_model" in arguments and methods["spec_method"] is None:
        methods["spec_model"] = arguments["spec_model"]
    for name, method in methods.items():
        # A speculative_config without a method names a draft model.
        names_model = name == "speculative_config" and method is None
        path = f"generate_config.vllm.{name}"
        if method == TRAINED_DRAFT:
            yield from _trained_draft(context, path)
        elif names_model or method not in (None, *WEIGHTLESS_DRAFTS):
            yield Violation(
                path,
                f"{shortened(method)}: a switch brings no weights to a draft model",
                f"Use method {', '.join((*WEIGHTLESS_DRAFTS, TRAINED_DRAFT))}, or leave it out",
                code="draft-model",
            )


def _trained_draft(context: JobContext, path: str) -> Violations:
    generate = context.generate
    config = generate.vllm.get("speculative_config")
    num_stages = generate.infer_pipeline_parallel_size
    reasons = {
        "a draft model is named as well": "spec_model" in generate.vllm
        or (isinstance(config, dict) and "model" in config),
        "transformers' models have no MTP layers (actor_config.fsdp)": (
            context.actor.fsdp is not None
        ),
        "the trained model has no MTP layers": not context.table.dims.num_mtp_layers,
        "a server drafts by its --speculative-config (servers)": bool(generate.servers),
        f"vLLM drafts with one pipeline stage, not with {num_stages}": num_stages > 1,
        "the drafter would not use the adapter (lora_delivery: adapter)": (
            generate.lora_delivery == "adapter"
        ),
        "its experts would be returned as those of the model (router_replay)": (
            generate.router_replay
        ),
        f"its weights are not quantised (quantization: {generate.quantization})": (
            generate.quantization not in (None, UNQUANTISED)
        ),
    }
    for reason, is_given in reasons.items():
        if is_given:
            problem = f"{TRAINED_DRAFT}, but {reason}"
            yield Violation(path, problem, "Leave it out, or change that", code="mtp-unsupported")
