"""Rules of `generate_config`, and of `generate_config.vllm`: which arguments go with a switch, which a file may set.

Whether vLLM has an argument of a name, and takes its value, it says itself (backends/vllm/arguments.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from hybrid_engine.config.keys import FromProgram, GenerateConfig
from hybrid_engine.config.rules import Constraint, Finding, JobContext, constraint, size_constraints
from hybrid_engine.errors import Violation, nearest, shortened
from hybrid_engine.layouts.parallelism import InferenceParallelism
from hybrid_engine.layouts.parameters import parameters_of
from hybrid_engine.layouts.size_rules import INFER_RULES
from hybrid_engine.models.lora_tensors import VLLM_LORA_RANKS

INFERENCE: list[Constraint[JobContext]] = size_constraints(
    "generate_config", InferenceParallelism, INFER_RULES, lambda context: context.infer_sizes
)

NARROWER = frozenset({("float32", "bfloat16"), ("float32", "float16")})
"""Pairs of dtypes, training and wire, that compression may have."""


@constraint(
    INFERENCE, "generate_config.infer_data_parallel_size", "If given, DP satisfies TP x PP x DP == number of ranks."
)
def _inference_replicas(context: JobContext) -> Iterator[Finding]:
    tp, pp = context.infer_sizes.tensor, context.infer_sizes.pipeline
    replicas = context.generate.infer_data_parallel_size
    if replicas is not None and context.infer_sizes.ranks_per_replica * replicas != context.world_size:
        yield (
            f"TP {tp} x PP {pp} x DP {replicas} is not the world size {context.world_size}",
            "Leave it out: it is what remains of the world",
        )


@constraint(INFERENCE, "generate_config.dtype", "dtype is the one in which weights are sent.")
def _dtype(context: JobContext) -> Iterator[Finding]:
    if context.generate.dtype not in (None, context.served_dtype):
        problem = f"{context.generate.dtype}, but weights are sent in {context.served_dtype}"
        yield problem, "Leave it out, or set compress_reshard and compression_dtype"


@constraint(INFERENCE, "generate_config.servers", "Servers get whole weights, and hold what they hold by themselves.")
def _servers(context: JobContext) -> Iterator[Finding]:
    if not context.generate.servers:
        return
    if context.generate.lora_delivery == "adapter":
        yield "named, but lora_delivery is adapter", "Set lora_delivery to merge: adapters are added on their way"


@constraint(INFERENCE, "generate_config.prefetch_mb", "prefetch_mb needs prefetch: auto.")
def _prefetch(context: JobContext) -> Iterator[Finding]:
    if context.generate.prefetch_mb is not None and context.generate.prefetch == "off":
        yield f"{context.generate.prefetch_mb}, but nothing is prefetched", "Set prefetch to auto or leave it out"


@constraint(INFERENCE, "generate_config.compression_dtype", "compression_dtype is narrower than params_dtype.")
def _compression(context: JobContext) -> Iterator[Finding]:
    if context.generate.compress_reshard and (context.actor.params_dtype, context.served_dtype) not in NARROWER:
        problem = f"{context.served_dtype} is not narrower than the training dtype {context.actor.params_dtype}"
        yield problem, "Set compress_reshard to false"


QUANTIZATIONS: Mapping[str, tuple[str, ...]] = {
    "cpu": ("fp8_per_channel",),
    "cuda": (
        *("fp8_per_channel", "fp8_per_tensor", "fp8_per_block", "mxfp8", "mxfp4"),
        *("int8_per_channel_weight_only", "nvfp4_per_token"),
    ),
}
"""Device type -> names of vLLM's methods that quantise while loading; on CPU those that it has kernels for."""


@constraint(
    INFERENCE,
    "generate_config.quantization",
    "The method quantises while loading: training has no quantised weights. The engine checks its device's methods.",
)
def _quantization(context: JobContext) -> Iterator[Finding]:
    chosen, known = context.generate.quantization, {method for methods in QUANTIZATIONS.values() for method in methods}
    if chosen is not None and chosen not in known:
        problem = f"method {chosen!r} needs a checkpoint that is quantised already"
        yield problem, f"Use {' or '.join(sorted(known))}, or leave it out"


@constraint(
    INFERENCE,
    "generate_config.lora_delivery",
    "adapter needs actor_config.lora (with fsdp, LoRA in the model) of a rank that vLLM supports, on weights that are "
    "not stored transposed.",
)
def _lora_delivery(context: JobContext) -> Iterator[Finding]:
    actor, lora = context.actor, context.actor.lora
    if context.generate.lora_delivery != "adapter":
        return
    if lora is None and actor.fsdp is None:
        yield "adapter, but no adapters are trained", "Set actor_config.lora or leave it out"
    if lora is not None and lora.rank > VLLM_LORA_RANKS[-1]:
        yield f"adapter, but rank {lora.rank} is above vLLM's {VLLM_LORA_RANKS[-1]}", "Use a smaller rank or merge"
    if lora is not None and any(parameter.packing.transposed for parameter in parameters_of(context.table)):
        yield "adapter, but this model's checkpoint has transposed weights", "Use merge"


_KEYS: Final = {
    "tensor_parallel_size": "infer_tensor_parallel_size",
    "pipeline_parallel_size": "infer_pipeline_parallel_size",
    "data_parallel_size": "infer_data_parallel_size",
    "enable_expert_parallel": "infer_expert_parallel_size",
    "kv_cache_memory_bytes": "kv_cache_mb",
    **dict.fromkeys(("enable_lora", "max_loras", "max_lora_rank", "lora_target_modules"), "lora_delivery"),
}
"""Arguments that a key of ours decides, by another name."""

_OFFLOADED = "weights that vLLM keeps on the host are not where a switch fills them"
_MOVED = "it moves experts between ranks, which a switch does not follow"
_PLACED = "which rank does what follows from the job and the parallel sizes"
_STALE = "what it keeps of the KV cache outlives the weights that it was computed with"
_OTHER_MODEL = "the model is that of the key model"

_REFUSED: Final = {
    "logprobs_mode": "log-probabilities are those of the distribution that was sampled from",
    **dict.fromkeys(("cpu_offload_gb", "cpu_offload_params", "offload_backend", "offload_params"), _OFFLOADED),
    **dict.fromkeys(("offload_group_size", "offload_num_in_group", "offload_prefetch_step"), _OFFLOADED),
    **dict.fromkeys(("enable_eplb", "eplb_config", "enable_elastic_ep", "elastic_ep_max_dp_size"), _MOVED),
    **dict.fromkeys(("data_parallel_rank", "data_parallel_start_rank", "data_parallel_size_local"), _PLACED),
    **dict.fromkeys(("data_parallel_address", "data_parallel_rpc_port", "data_parallel_backend"), _PLACED),
    **dict.fromkeys(("data_parallel_hybrid_lb", "data_parallel_external_lb"), _PLACED),
    **dict.fromkeys(("prefill_context_parallel_size", "device_ids"), _PLACED),
    **dict.fromkeys(("master_addr", "master_port", "nnodes", "node_rank", "worker_cls"), _PLACED),
    **dict.fromkeys(("kv_transfer_config", "kv_offloading_size", "kv_offloading_backend"), _STALE),
    **dict.fromkeys(("hf_config_path", "model_weights", "revision", "code_revision"), _OTHER_MODEL),
}
"""Argument -> why it does not go with a switch."""

IN_FILES: Final = frozenset(
    {
        # KV cache
        *("block_size", "kv_cache_dtype", "enable_prefix_caching", "prefix_caching_hash_algo"),
        *("disable_sliding_window", "disable_hybrid_kv_cache_manager", "kv_sharing_fast_prefill", "mamba_block_size"),
        *("num_gpu_blocks_override", "mamba_cache_dtype", "mamba_ssm_cache_dtype", "mamba_cache_mode"),
        # what is computed together
        *("max_num_batched_tokens", "max_num_scheduled_tokens", "max_num_active_seqs", "enable_chunked_prefill"),
        *("long_prefill_token_threshold", "scheduling_policy", "async_scheduling", "stream_interval"),
        *("spec_method", "spec_tokens"),
        *(f"speculative_config.{part}" for part in ("method", "num_speculative_tokens")),
        *(f"speculative_config.prompt_lookup_{part}" for part in ("max", "min")),
        *(f"speculative_config.suffix_decoding_max_{part}" for part in ("tree_depth", "cached_requests")),
        *(f"speculative_config.suffix_decoding_{part}" for part in ("max_spec_factor", "min_token_prob")),
        # kernels and graphs
        *("attention_backend", "moe_backend", "linear_backend", "all2all_backend", "mamba_backend"),
        *("gdn_prefill_backend", "kda_prefill_backend", "kda_decode_backend", "enable_flashinfer_autotune"),
        *("disable_cascade_attn", "disable_custom_all_reduce", "use_fp64_gumbel"),
        *("cudagraph_capture_sizes", "max_cudagraph_capture_size", "optimization_level", "performance_mode"),
        "enable_sleep_mode",
        *(f"compilation_config.{part}" for part in ("mode", "cudagraph_mode", "cudagraph_capture_sizes")),
        *(f"compilation_config.{part}" for part in ("max_cudagraph_capture_size", "cudagraph_num_of_warmups")),
        "kernel_config.enable_jit_warmup",
        # ranks and LoRA
        *("decode_context_parallel_size", "expert_placement_strategy", "enable_dbo", "ubatch_size"),
        *("dbo_decode_token_threshold", "dbo_prefill_token_threshold"),
        *("fully_sharded_loras", "max_cpu_loras", "specialize_active_lora"),
        # what is told
        *("cudagraph_metrics", "enable_layerwise_nvtx_tracing", "jit_monitor_mode"),
        "use_tqdm_on_load",
    }
)
"""Arguments that a configuration may set wherever it comes from: their values are numbers, or one of vLLM's own words.
All others, those that a later vLLM brings too, come from a program: free text may be imported, opened or fetched."""

WEIGHTLESS_DRAFTS: Final = ("ngram", "ngram_gpu", "suffix")
"""vLLM's methods of speculative decoding that have no weights of their own."""


@constraint(
    INFERENCE,
    "generate_config.vllm",
    "vllm has no argument that another key decides, or that takes weights, ranks or KV cache from the switch.",
)
def _arguments(context: JobContext) -> Iterator[Violation]:
    for name in context.generate.vllm:
        key = f"generate_config.vllm.{name}"
        own = _KEYS.get(name, name)
        if own in GenerateConfig.model_fields:
            yield Violation(key, "a key of its own decides it", f"Use generate_config.{own}")
        elif name in _REFUSED:
            yield Violation(key, _REFUSED[name], "Leave it out")


@constraint(
    INFERENCE,
    "generate_config.vllm",
    "vllm has arguments whose values are numbers or words of vLLM's own; a program may give others as FromProgram.",
)
def _code(context: JobContext) -> Iterator[Violation]:
    arguments = context.generate.vllm
    if isinstance(arguments, FromProgram):
        return
    known = {name.partition(".")[0] for name in IN_FILES}
    for name in _dotted(arguments):
        argument = name.partition(".")[0]
        if name in IN_FILES or argument in _REFUSED or _KEYS.get(argument, argument) in GenerateConfig.model_fields:
            continue
        problem = "a configuration file cannot set it: vLLM might import, open or fetch what it names"
        close = None if argument in known else nearest(name, IN_FILES)
        remedy = "Leave it out, or give vllm as hybrid_engine.config.FromProgram in your program"
        yield Violation(f"generate_config.vllm.{name}", problem, f"Did you mean {close}?" if close else remedy)


def _dotted(arguments: Mapping[str, Any]) -> Iterator[str]:
    """Names of arguments, and of what is in those of which a file may set a part."""
    for name, value in arguments.items():
        if isinstance(value, Mapping) and value:
            yield from (f"{name}.{key}" for key in value)
        else:
            yield name


@constraint(
    INFERENCE,
    "generate_config.vllm",
    "Speculative decoding drafts without a model, to which a switch would bring no weights.",
)
def _speculation(context: JobContext) -> Iterator[Violation]:
    arguments = context.generate.vllm
    config = arguments.get("speculative_config")
    methods = {"spec_method": arguments.get("spec_method")}
    if config is not None:
        methods["speculative_config"] = config.get("method") if isinstance(config, dict) else config
    if "spec_model" in arguments and methods["spec_method"] is None:
        methods["spec_model"] = arguments["spec_model"]
    for name, method in methods.items():
        if method not in (None, *WEIGHTLESS_DRAFTS) or (name == "speculative_config" and method is None):
            problem = f"{shortened(method)}: a switch brings no weights to what drafts tokens"
            remedy = f"Use method {', '.join(WEIGHTLESS_DRAFTS)}, or leave it out"
            yield Violation(f"generate_config.vllm.{name}", problem, remedy)
