"""Arguments of `vllm.LLM` from settings, and all checks of them before anything is built.

vLLM checks its own configuration. The checks here cover arguments that follow from other keys,
quantization methods that cannot be fed, and problems that vLLM would report only after it has
loaded the model, or in the first `generate`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
from typing import TYPE_CHECKING, Any

import torch
from pydantic import ValidationError

from hybrid_engine.backends.vllm import internals
from hybrid_engine.backends.vllm.config_reads import ConfigReads
from hybrid_engine.backends.vllm.engine_settings import InferenceSettings
from hybrid_engine.backends.vllm.isolation import (
    check_world,
    rank_in_instance,
    register_model_class,
    set_environment,
)
from hybrid_engine.backends.vllm.process_state import process_settings_kept, random_state_kept
from hybrid_engine.backends.vllm.requests import LOGPROBS_MODE
from hybrid_engine.backends.vllm.version import TESTED_VERSION, require_vllm
from hybrid_engine.backends.vllm.weights.loader import LOAD_FORMAT
from hybrid_engine.config.inference_rules import QUANTIZATIONS, UNQUANTISED
from hybrid_engine.errors import (
    ConfigError,
    Violation,
    Violations,
    nearest,
    require_none,
)
from hybrid_engine.layouts.memory import MIB
from hybrid_engine.layouts.parallelism import InferenceParallelism, named
from hybrid_engine.models.quantization_configs import format_in
from hybrid_engine.ranks.job import Job

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger(__name__)

Arguments = dict[str, Any]
"""Keyword arguments of `vllm.LLM`."""

CPU_WORKER = "hybrid_engine.backends.vllm.cpu.cpu_worker.IsolatedCPUWorker"

GENERATING_LAYOUT = "use 1 and 1, and tensor or data parallelism instead"

_CPU_KV_CACHE_MB = 256
_REMEDY = (
    "vLLM itself refuses these inference settings for this model: "
    "change the inference layout or the model"
)


def llm_arguments(settings: InferenceSettings, device_type: str) -> Arguments:
    """Return keyword arguments of `vllm.LLM` for an engine in the training processes.

    Args:
        settings: the engine's settings; `generate.vllm` takes precedence over everything else.
        device_type: vLLM's name for the platform: "cpu" or "cuda".
    """
    defaults: Arguments = {
        "enable_prefix_caching": True,
        "enable_sleep_mode": is_sleepy(settings, device_type),
    }
    if device_type == "cuda":
        defaults |= _defaults_on_cuda(settings)
    elif device_type == "cpu" and "attention_config" not in settings.generate.vllm:
        # Only latent attention uses this backend. On a CPU with AMX vLLM would choose kernels that
        # support only bfloat16 and DeepSeek's sizes.
        defaults["attention_backend"] = "CPU_MLA"
    derived = _derived_arguments(settings, device_type)
    if derived["hf_overrides"].takes_images:
        # vLLM would normalize by preprocessor_config.json alone. Without a mean in that file
        # it normalizes nothing, and transformers' processor has defaults.
        defaults["mm_device_do_normalize"] = False
    arguments = {**defaults, **derived, **settings.generate.vllm}
    if device_type == "cpu" and arguments.get("speculative_config"):
        # A drafter with latent attention chooses by itself.
        drafts = {"attention_backend": "CPU_MLA", **arguments["speculative_config"]}
        arguments["speculative_config"] = drafts
    return arguments


def engine_config(
    settings: InferenceSettings,
    rank: int,
    device_type: str,
    **changes: Any,
) -> VllmConfig:
    """Return vLLM's configuration of the engine for this rank, with vLLM's own worker class.

    `changes`: arguments of vLLM to override.

    Raises ConfigError for keys of config.json that vLLM reads and the trainer does not know.
    """
    from vllm import EngineArgs

    wanted = llm_arguments(settings, device_type) | changes
    wanted.pop("worker_cls", None)
    reads: ConfigReads = wanted["hf_overrides"]
    with rank_in_instance(settings, rank), reads.checked():
        return EngineArgs(**wanted).create_engine_config()


def reads_of(config: VllmConfig) -> ConfigReads:
    """Return the record of reads that a configuration of `engine_config` makes."""
    assert isinstance(config.model_config.hf_overrides, ConfigReads)
    return config.model_config.hf_overrides


def _defaults_on_cuda(settings: InferenceSettings) -> Arguments:
    """Return defaults that replace vLLM's choices where these slow switches down or do not work."""
    defaults: Arguments = {}
    if (
        settings.generate.quantization in (None, UNQUANTISED)
        and settings.quantization_config is None
        and "quantization_config" not in settings.generate.vllm
    ):
        # Triton computes with the loader's layout; for other backends a switch derives another one.
        defaults["moe_backend"] = "triton"
    allocator = internals.ALLOCATOR_CONFIG
    is_expandable = allocator.conf_flag_enabled(
        allocator.current_alloc_conf(), allocator.EXPANDABLE_SEGMENTS
    )
    if settings.sizes.tensor > 1 and is_expandable:
        # It opens memory of captured graphs in other processes, which expandable segments forbid.
        defaults["disable_custom_all_reduce"] = True
    return defaults


def _derived_arguments(settings: InferenceSettings, device_type: str) -> Arguments:
    """Return the arguments that follow from the keys, the job and the way of building."""
    generate = settings.generate
    seconds = math.ceil(generate.timeout_seconds)
    reads = ConfigReads(settings.model_dir, settings.quantization_config)
    arguments: Arguments = {
        **generate.of_vllm(),
        "model": settings.model_dir,
        "load_format": LOAD_FORMAT,
        "skip_tokenizer_init": True,
        "distributed_executor_backend": "external_launcher",
        **named(settings.sizes, "vllm"),
        # Only replicas that share experts are declared to vLLM, which keeps declared replicas in
        # lockstep.
        "data_parallel_size": settings.sizes.replicas_per_instance,
        "enable_expert_parallel": settings.sizes.expert > 1,
        "dtype": settings.dtype,
        "hf_overrides": reads,
        "enforce_eager": is_eager(settings, device_type),
        "max_logprobs": -1,
        "logprobs_mode": LOGPROBS_MODE,
        "disable_log_stats": True,
        "distributed_timeout_seconds": seconds,
        "cpu_distributed_timeout_seconds": seconds,
    }
    if settings.quantization_config is not None or generate.quantization == UNQUANTISED:
        arguments.pop("quantization", None)  # config.json decides, as vLLM sees it
    if reads.takes_images:
        # vLLM processes images with the model's tokenizer.
        arguments["skip_tokenizer_init"] = False
        arguments["tokenizer"] = settings.tokenizer_dir or settings.model_dir
    kv_cache_mb = generate.kv_cache_mb
    if device_type == "cpu":
        kv_cache_mb = kv_cache_mb or _CPU_KV_CACHE_MB
        arguments["worker_cls"] = CPU_WORKER
    if kv_cache_mb is not None:
        arguments["kv_cache_memory_bytes"] = kv_cache_mb << 20
    if generate.router_replay and device_type != "cpu":
        # For a CPU, see cpu/cpu_worker.py.
        arguments["enable_return_routed_experts"] = True
    if settings.max_loras:
        arguments |= {
            "enable_lora": True,
            "max_loras": settings.max_loras,
            "max_lora_rank": settings.max_lora_rank,
            "lora_target_modules": list(settings.lora_target_modules),
        }
    return arguments


def check_before_building(settings: InferenceSettings, job: Job) -> None:
    """Raise the errors that `InferenceEngine` would raise about these settings; change nothing.

    The order of ranks may be unknown yet. Raises DependencyError or ConfigError.
    """
    with process_settings_kept(), random_state_kept():
        check_settings(settings, job)


def check_settings(settings: InferenceSettings, job: Job) -> str:
    """Import vLLM, check its version, world, model and settings, and return vLLM's device type.

    Raises as `check_before_building`, and leaves the environment as vLLM requires it.
    """
    check_world(settings, job)
    device_type = _imported(settings, job.rank)
    check_arguments(settings, job.rank, device_type)
    return device_type


def check_without_job(settings: InferenceSettings, rank: int) -> str:
    """Do the same for a rank of a job that does not run, whose devices may be others than these.

    What this machine's kernels and memory decide is not checked.
    """
    device_type = _imported(settings, rank)
    _accepted_config(settings, rank, device_type)
    return device_type


def _imported(settings: InferenceSettings, rank: int) -> str:
    """Import vLLM for a rank, and return its device type."""
    require_vllm(allow_version=settings.generate.allow_version)
    set_environment(settings, rank)
    register_model_class(settings.model_dir)
    from vllm.platforms import current_platform

    device_type: str = current_platform.device_type
    if settings.generate.check_compute == "exact" and device_type == "cuda":
        # It replaces torch's matrix products, means and log-softmax in the whole process, the
        # trainer's too. The replacements need Triton, which CPUs do not have.
        os.environ["VLLM_BATCH_INVARIANT"] = "1"
    return device_type


def check_arguments(settings: InferenceSettings, rank: int, device_type: str) -> None:
    """Have vLLM check its configuration before anything is built.

    Raises ConfigError with vLLM's complaints, and with reasons why vLLM could not generate.
    """
    require_none(_refused_settings(settings, device_type))
    config, model_class = _accepted_config(settings, rank, device_type)
    require_none(_cannot_generate(config, device_type, settings.generate.drafts_with_mtp))
    require_none(_without_kernels(config, model_class, device_type, settings.max_loras))


def _refused_settings(settings: InferenceSettings, device_type: str) -> Violations:
    """Yield settings that vLLM would not refuse itself, or too late."""
    if settings.quantization_config is not None:
        yield from _no_block_kernels(format_in(settings.quantization_config).method)
    elif settings.generate.quantization != UNQUANTISED:
        yield from _refused_quantization(settings.generate.quantization, device_type)
    yield from _refused_extra(settings, device_type)
    # torch's other allocator has no memory pools, which sleep mode needs.
    if is_sleepy(settings, device_type):
        configuration = internals.ALLOCATOR_CONFIG.current_alloc_conf()
        if "cudaMallocAsync" in configuration:
            yield Violation(
                "PYTORCH_CUDA_ALLOC_CONF",
                "backend:cudaMallocAsync has no memory pools",
                "Leave the backend out, or set generate_config.vllm: {enable_sleep_mode: false}",
                code="no-memory-pools",
            )


def _without_kernels(
    config: VllmConfig,
    model_class: type[Any],
    device_type: str,
    max_loras: int,
) -> Violations:
    """Yield what vLLM has no kernels for with this model, of quantization and of LoRA."""
    from vllm.model_executor.models import supports_lora

    is_moe_on_cpu = device_type == "cpu" and config.model_config.is_moe
    quantization = config.model_config.quantization
    if quantization is not None and is_moe_on_cpu:
        lack = "were not tried here"
        if not internals.HAS_AMX():
            lack = "need AMX, which this CPU has not"
        yield Violation(
            "quantization",
            f"{quantization!r} on cpu: vLLM's kernels for quantised experts {lack}",
            "Leave it out",
            code="no-kernel",
        )
    reason = ""
    if not supports_lora(model_class):
        reason = f"vLLM's {model_class.__name__} does not support LoRA"
    elif is_moe_on_cpu:
        reason = "vLLM's kernels for experts with LoRA do not run on CPU"
    elif device_type == "cuda" and config.model_config.dtype == torch.float32:
        reason = "vLLM's LoRA kernels on CUDA take float16 and bfloat16, and the dtype is float32"
    if max_loras and reason:
        yield Violation(
            "max_loras",
            f"{max_loras}, but {reason}",
            "Set it to 0 and merge it into the weights",
            code="lora-unsupported",
        )


def _accepted_config(
    settings: InferenceSettings,
    rank: int,
    device_type: str,
) -> tuple[VllmConfig, type[Any]]:
    """Return vLLM's configuration and model class. Raises ConfigError with vLLM's complaints."""
    from vllm.model_executor.model_loader import get_model_architecture

    try:
        config = engine_config(settings, rank, device_type, load_format="dummy")
        model_class, _ = get_model_architecture(config.model_config)
    except (ValidationError, ValueError, NotImplementedError) as error:
        texts = [str(error)]
        if isinstance(error, ValidationError):
            texts = [str(detail["msg"]) for detail in error.errors()]
        messages = [text.removeprefix("Value error, ").rstrip(". ") for text in texts]
        raise ConfigError(
            [Violation("vLLM", message, _REMEDY, code="refused-by-vllm") for message in messages]
        ) from error
    return config, model_class


def _refused_extra(settings: InferenceSettings, device_type: str) -> Violations:
    """Yield extra arguments that are unknown or follow from other keys."""
    from vllm import EngineArgs

    known = {field.name for field in dataclasses.fields(EngineArgs)}
    derived = _derived_arguments(settings, device_type)
    for name in settings.generate.vllm:
        key = f"generate_config.vllm.{name}"
        if name not in known:
            close = nearest(name, known)
            remedy = "See the engine arguments in vLLM's documentation"
            if close:
                remedy = f"Did you mean {close}?"
            yield Violation(key, "this vLLM has no such argument", remedy, code="unknown-key")
        elif name in derived:
            yield Violation(
                key,
                f"it follows from other keys: {derived[name]!r}",
                "Leave it out; set those of generate_config",
                code="derived-argument",
            )


def _refused_quantization(chosen: str | None, device_type: str) -> Violations:
    """Yield a method that cannot be fed on this platform, naming those that can.

    Only methods that quantise while loading can be fed: a quantised checkpoint has other tensors
    than training does.
    """
    known = QUANTIZATIONS.get(device_type, ())
    if chosen is not None and chosen not in known:
        problem = (
            f"{chosen!r} on {device_type}: vLLM {TESTED_VERSION} has no kernels for it there, or "
            "it needs weights that are quantised already"
        )
        names = " or ".join(map(repr, known))
        yield Violation(
            "quantization",
            problem,
            f"Use {names}, or leave it out" if known else "Leave it out",
            code="quantization-unsupported",
        )


def _no_block_kernels(method: str) -> Violations:
    """Yield a violation if vLLM has no kernel for weights in blocks on this device, and why."""
    from vllm.platforms import current_platform

    by_platform = internals.BLOCK_KERNELS[method].load()
    lacks = []
    for kernel in by_platform.get(current_platform._enum, ()):
        is_supported, lack = kernel.is_supported()
        if is_supported:
            return
        lacks.append(f"{kernel.__name__} {lack}")
    names = sorted(platform.name for platform, kernels in by_platform.items() if kernels)
    reasons = "; ".join(lacks) or f"its kernels are for {', '.join(names)}"
    yield Violation(
        "generate_config.quantization",
        f"{method} in blocks, by config.json or this key, but vLLM has no kernel for it on this "
        f"{current_platform.device_type}: {reasons}",
        f"Set it to {UNQUANTISED} to generate with unquantised weights, or use another device",
        code="no-kernel",
    )


def is_eager(settings: InferenceSettings, device_type: str) -> bool:
    """Return whether vLLM captures no graphs and compiles nothing."""
    chosen = settings.generate.enforce_eager
    return device_type == "cpu" if chosen is None else chosen


def eager_stance(
    settings: InferenceSettings,
    device_type: str,
) -> contextlib.AbstractContextManager[object]:
    """Return a context that disables `torch.compile` for an eager engine on CPU.

    vLLM's samplers carry `torch.compile` decorators that cost seconds at first use.
    """
    eager = device_type == "cpu" and is_eager(settings, "cpu")
    return torch.compiler.set_stance("force_eager") if eager else contextlib.nullcontext()


def is_sleepy(settings: InferenceSettings, device_type: str) -> bool:
    """Return whether vLLM's sleep mode frees memory; it has no effect on CPU."""
    return device_type == "cuda" and settings.generate.vllm.get("enable_sleep_mode") is not False


# -- engines that could not generate ---------------------------------------------------------------


def generation_problem(sizes: InferenceParallelism, device_type: str) -> str | None:
    """Return why generation would crash in this layout, although vLLM can load a model; or None."""
    if device_type != "cpu" or (sizes.pipeline == 1 and sizes.expert == 1):
        return None
    return (
        f"vLLM {TESTED_VERSION} on CPU loads but cannot generate with pipeline parallel size "
        f"{sizes.pipeline} and expert parallel size {sizes.expert}"
    )


def scoring_problem(sizes: InferenceParallelism, device_type: str) -> str | None:
    """Return why vLLM cannot compute log-probabilities of prompts in this layout, or None."""
    if sizes.pipeline == 1 or device_type == "cpu":
        return generation_problem(sizes, device_type)
    # Each stage looks for the head, which the last stage alone has.
    return (
        f"vLLM {TESTED_VERSION} computes no log-probabilities of prompts "
        f"with pipeline parallel size {sizes.pipeline}"
    )


def _cannot_generate(config: VllmConfig, device_type: str, drafts: bool) -> Violations:
    """Yield reasons why this engine could not complete a single request of maximum length.

    `drafts`: see `heads_without_kernel`.
    """
    if device_type == "cpu":
        head_size = config.model_config.get_head_size()
        latent = config.model_config.use_mla
        yield from heads_without_kernel(head_size, latent=latent, drafts=drafts)
    # vLLM's Qwen2 and Qwen3 need windows of all layers or of none.
    text_config = config.model_config.hf_text_config
    num_layers = text_config.num_hidden_layers
    first = getattr(text_config, "max_window_layers", None)
    kinds = set(getattr(text_config, "layer_types", None) or ())
    if text_config.model_type in ("qwen2", "qwen3") and len(kinds) > 1 and first != num_layers:
        yield Violation(
            "model",
            f"layers from {first} of {num_layers} on (max_window_layers) see a sliding window, the "
            "others do not; vLLM computes one for all layers or for none",
            "Use such a model",
            code="mixed-sliding-windows",
        )
    if config.cache_config.kv_cache_memory_bytes is not None:
        yield from _cache_too_small(config, config.cache_config.kv_cache_memory_bytes)


def heads_without_kernel(size: int, *, latent: bool = False, drafts: bool = False) -> Violations:
    """Yield a violation if vLLM cannot compute heads of `size` elements on CPU.

    On GPUs FlexAttention takes any size.

    `latent`: heads of latent attention (MLA), of kv_lora_rank + qk_rope_head_dim elements.
    `drafts`: the engine has a drafter, which is of no use if only weights are compared.
    """
    sizes = internals.MLA_HEAD_SIZES if latent else internals.CPU_HEAD_SIZES
    if latent and drafts:
        sizes = internals.MLA_DECODE_SIZES
    known = sizes()
    if size not in known:
        yield Violation(
            "model",
            f"its {'latent ' if latent else ''}attention heads have {size} elements, and vLLM's "
            f"attention on CPU computes {', '.join(map(str, known))} only",
            "Use a model with such heads, or a GPU",
            code="no-kernel",
        )


def _cache_too_small(config: VllmConfig, available: int) -> Violations:
    """Yield a violation if `available` bytes are less than vLLM's minimum for the KV cache.

    The minimum is the blocks of one sequence in every layer of this stage, and a spare block.
    """
    model = config.model_config
    if model.is_hybrid:
        return  # layers with a state are known to vLLM's model only, which vLLM asks itself
    block = config.cache_config.block_size or 1  # tokens
    length = model.max_model_len
    window = model.get_sliding_window()
    tokens = min(length, window) if window else length
    # Latent attention stores one vector per token, other attention a key and a value per head.
    vectors = 1 if model.use_mla else 2 * model.get_num_kv_heads(config.parallel_config)
    itemsize = model.dtype.itemsize if config.cache_config.cache_dtype == "auto" else 1
    num_layers = model.get_num_layers(config.parallel_config)
    block_nbytes = block * vectors * model.get_head_size() * itemsize * num_layers
    needed = (-(-tokens // block) + 1) * block_nbytes
    if needed > available:
        fits = max(0, available // block_nbytes - 1) * block
        yield Violation(
            "generate_config.kv_cache_mb",
            f"{available // MIB} MiB hold {fits:,} tokens, "
            f"but a sequence may have {length:,} (max_model_len)",
            f"Use {-(-needed // MIB)} or more, or lower generate_config.max_model_len",
            code="kv-cache-too-small",
        )
