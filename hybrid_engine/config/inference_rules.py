"""Rules of `generate_config` beside the training side."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from hybrid_engine.config.rules import Constraint, Finding, JobContext, constraint, size_constraints
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
    if context.generate.dtype not in (None, context.wire_dtype):
        problem = f"{context.generate.dtype}, but weights are sent in {context.wire_dtype}"
        yield problem, "Leave it out, or set compress_reshard and compression_dtype"


@constraint(INFERENCE, "generate_config.prefetch_mb", "prefetch_mb needs prefetch: auto.")
def _prefetch(context: JobContext) -> Iterator[Finding]:
    if context.generate.prefetch_mb is not None and context.generate.prefetch == "off":
        yield f"{context.generate.prefetch_mb}, but nothing is prefetched", "Set prefetch to auto or leave it out"


@constraint(INFERENCE, "generate_config.compression_dtype", "compression_dtype is narrower than params_dtype.")
def _compression(context: JobContext) -> Iterator[Finding]:
    if context.generate.compress_reshard and (context.actor.params_dtype, context.wire_dtype) not in NARROWER:
        problem = f"{context.wire_dtype} is not narrower than the training dtype {context.actor.params_dtype}"
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


@constraint(INFERENCE, "generate_config.lora_delivery", "Adapters of weights that are stored transposed are merged.")
def _lora_transposed(context: JobContext) -> Iterator[Finding]:
    if context.generate.lora_delivery != "adapter" or context.actor.lora is None:
        return
    if any(parameter.packing.transposed for parameter in parameters_of(context.table)):
        yield "adapter, but this model's checkpoint has transposed weights", "Use merge"


@constraint(
    INFERENCE, "generate_config.lora_delivery", "adapter needs actor_config.lora; with fsdp, LoRA in the model."
)
def _lora_delivery(context: JobContext) -> Iterator[Finding]:
    actor = context.actor
    if context.generate.lora_delivery == "adapter" and actor.lora is None and actor.fsdp is None:
        yield ("adapter, but no adapters are trained", "Set actor_config.lora or leave it out")


@constraint(INFERENCE, "generate_config.lora_delivery", "With adapter, the rank is one that vLLM supports.")
def _lora_rank(context: JobContext) -> Iterator[Finding]:
    lora = context.actor.lora
    if context.generate.lora_delivery == "adapter" and lora is not None and lora.rank > VLLM_LORA_RANKS[-1]:
        yield f"adapter, but rank {lora.rank} is above vLLM's {VLLM_LORA_RANKS[-1]}", "Use a smaller rank or merge"
