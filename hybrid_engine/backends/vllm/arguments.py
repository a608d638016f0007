"""Settings -> the arguments of `vllm.LLM`, and all checks of them before anything is built.

vLLM checks its own configuration. Beside that there are arguments that follow from other keys, quantization methods
that cannot be fed, and what vLLM would notice only when it has loaded the model, or in the first `generate`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
from collections.abc import Iterator
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
from hybrid_engine.config.inference_rules import QUANTIZATIONS
from hybrid_engine.errors import ConfigError, Violation, nearest
from hybrid_engine.layouts.memory import MIB
from hybrid_engine.layouts.parallelism import InferenceParallelism, named
from hybrid_engine.ranks.job import Job

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger(__name__)

CPU_WORKER = "hybrid_engine.backends.vllm.cpu.cpu_worker.IsolatedCPUWorker"

GENERATING_LAYOUT = "use 1 and 1, and tensor or data parallelism instead"

_CPU_KV_CACHE_MB = 256
_REMEDY = "vLLM itself refuses these inference settings for this model: change the inference layout or the model"


def llm_arguments(settings: InferenceSettings, device_type: str) -> dict[str, Any]:
    """Keyword arguments of `vllm.LLM` for an engine that lives in the processes that train.

    Args:
        settings: the engine's; `generate.vllm` wins over everything.
        device_type: vLLM's name for the platform: "cpu" or "cuda".
    """
    defaults: dict[str, Any] = {"enable_prefix_caching": True, "enable_sleep_mode": is_sleepy(settings, device_type)}
    if device_type == "cuda":
        defaults |= _defaults_on_cuda(settings)
    elif device_type == "cpu" and "attention_config" not in settings.generate.vllm:
        # for latent attention alone: a CPU with AMX would take kernels that know bfloat16 and DeepSeek's sizes only
        defaults["attention_backend"] = "CPU_MLA"
    return {**defaults, **_arguments_that_follow(settings, device_type), **settings.generate.vllm}


def engine_config(settings: InferenceSettings, rank: int, device_type: str, **changes: Any) -> VllmConfig:
    """vLLM's configuration of such an engine for this rank, in vLLM's own worker; `changes`: of its arguments.

    Raises ConfigError for keys of config.json that vLLM reads and the trainer does not know.
    """
    from vllm import EngineArgs

    wanted = llm_arguments(settings, device_type) | changes
    wanted.pop("worker_cls", None)
    with rank_in_instance(settings, rank), wanted["hf_overrides"].checked():
        return EngineArgs(**wanted).create_engine_config()


def reads_of(config: VllmConfig) -> ConfigReads:
    """The record of reads that a configuration of `engine_config` makes."""
    assert isinstance(config.model_config.hf_overrides, ConfigReads)
    return config.model_config.hf_overrides


def _defaults_on_cuda(settings: InferenceSettings) -> dict[str, Any]:
    """Where what vLLM would choose by itself makes switches slower, or cannot be had here."""
    defaults: dict[str, Any] = {}
    if settings.generate.quantization is None and "quantization_config" not in settings.generate.vllm:
        defaults["moe_backend"] = "triton"  # it computes with the loader's layout; for others a switch derives theirs
    allocator = internals.ALLOCATOR_CONFIG.load()
    is_expandable = allocator.conf_flag_enabled(allocator.current_alloc_conf(), allocator.EXPANDABLE_SEGMENTS)
    if settings.sizes.tensor > 1 and is_expandable:
        # it opens the memory of captured graphs in other processes, which that of expandable segments does not allow
        defaults["disable_custom_all_reduce"] = True
    return defaults


def _arguments_that_follow(settings: InferenceSettings, device_type: str) -> dict[str, Any]:
    """Those that the keys, the job and the way of building determine."""
    generate, seconds = settings.generate, math.ceil(settings.generate.timeout_seconds)
    arguments: dict[str, Any] = {
        **generate.of_vllm(),
        "model": settings.model_dir,
        "load_format": LOAD_FORMAT,
        "skip_tokenizer_init": True,
        "distributed_executor_backend": "external_launcher",
        **named(settings.sizes, "vllm"),
        # Replicas know of each other only where they share experts; else vLLM would keep them in lockstep.
        "data_parallel_size": settings.sizes.replicas_per_instance,
        "enable_expert_parallel": settings.sizes.expert > 1,
        "dtype": settings.dtype,
        "hf_overrides": ConfigReads(settings.model_dir),
        "enforce_eager": is_eager(settings, device_type),
        "max_logprobs": -1,
        "logprobs_mode": LOGPROBS_MODE,
        "disable_log_stats": True,
        "distributed_timeout_seconds": seconds,
        "cpu_distributed_timeout_seconds": seconds,
    }
    kv_cache_mb = generate.kv_cache_mb
    if device_type == "cpu":
        kv_cache_mb = kv_cache_mb or _CPU_KV_CACHE_MB
        arguments["worker_cls"] = CPU_WORKER
    if kv_cache_mb is not None:
        arguments["kv_cache_memory_bytes"] = kv_cache_mb << 20
    if settings.max_loras:
        arguments |= {
            "enable_lora": True,
            "max_loras": settings.max_loras,
            "max_lora_rank": settings.max_lora_rank,
            "lora_target_modules": list(settings.lora_target_modules),
        }
    return arguments


def check_before_building(settings: InferenceSettings, job: Job) -> None:
    """Raise what `InferenceEngine` would raise about these settings, while nothing is built yet and nothing is changed.

    The order of ranks need not be known. Raises DependencyError, ConfigError or UnknownModelError.
    """
    with process_settings_kept(), random_state_kept():
        check_settings(settings, job)


def check_settings(settings: InferenceSettings, job: Job) -> str:
    """Import vLLM, which must be accepted, check world, model and settings, and return vLLM's device type.

    Raises as `check_before_building`, and leaves the environment as vLLM wants it.
    """
    check_world(settings, job)
    require_vllm(allow_version=settings.generate.allow_version)
    set_environment(settings, job.rank)
    register_model_class(settings.model_dir)
    from vllm.platforms import current_platform

    device_type: str = current_platform.device_type
    check_arguments(settings, job.rank, device_type)
    return device_type


def check_arguments(settings: InferenceSettings, rank: int, device_type: str) -> None:
    """Have vLLM look at its configuration before anything is built. Raises ConfigError with its complaints, and with
    what would keep it from generating."""
    _check_quantization(settings.generate.quantization, device_type)
    _check_extra(settings, device_type)
    _check_allocator(settings, device_type)
    from vllm.model_executor.model_loader import get_model_architecture
    from vllm.model_executor.models import supports_lora

    try:
        config = engine_config(settings, rank, device_type, load_format="dummy")
        model_class, _ = get_model_architecture(config.model_config)
    except (ValidationError, ValueError, NotImplementedError) as error:
        details = error.errors() if isinstance(error, ValidationError) else [{"msg": str(error)}]
        messages = [str(detail["msg"]).removeprefix("Value error, ").rstrip(". ") for detail in details]
        raise ConfigError([Violation("vLLM", message, _REMEDY) for message in messages]) from error
    if violations := [*_cannot_generate(config, device_type)]:
        raise ConfigError(violations)
    reason = ""
    if not supports_lora(model_class):
        reason = f"vLLM's {model_class.__name__} takes no LoRA"
    elif device_type == "cpu" and config.model_config.is_moe:
        reason = "vLLM's kernels for experts beside LoRA do not run on CPU"
    quantization = settings.generate.quantization
    if quantization is not None and device_type == "cpu" and config.model_config.is_moe:
        problem = f"{quantization!r} on cpu: vLLM {TESTED_VERSION} has no kernels for such experts there"
        raise ConfigError([Violation("quantization", problem, "Leave it out")])
    if settings.max_loras and reason:
        problem = f"{settings.max_loras}, but {reason}"
        raise ConfigError([Violation("max_loras", problem, "Set it to 0 and merge it into the weights")])


def _check_extra(settings: InferenceSettings, device_type: str) -> None:
    """Raise ConfigError with every further argument that vLLM does not know, or that follows from other keys."""
    from vllm import EngineArgs

    known = {field.name for field in dataclasses.fields(EngineArgs)}
    follow = _arguments_that_follow(settings, device_type)
    violations = []
    for name in settings.generate.vllm:
        key = f"generate_config.vllm.{name}"
        if name not in known:
            close = nearest(name, known)
            remedy = f"Did you mean {close}?" if close else "See the engine arguments in vLLM's documentation"
            violations.append(Violation(key, "this vLLM has no such argument", remedy))
        elif name in follow:
            problem = f"it follows from other keys: {follow[name]!r}"
            violations.append(Violation(key, problem, "Leave it out; set those of generate_config"))
    if violations:
        raise ConfigError(violations)


def _check_quantization(chosen: str | None, device_type: str) -> None:
    """Raise ConfigError for a method that cannot be fed on this platform, naming those that can.

    Only methods that quantise while loading can be fed: a checkpoint that is already quantised has other tensors than
    training does.
    """
    known = QUANTIZATIONS.get(device_type, ())
    if chosen is not None and chosen not in known:
        problem = (
            f"{chosen!r} on {device_type}: vLLM {TESTED_VERSION} has no kernels for it there, or it needs weights that "
            "are quantised already"
        )
        remedy = f"Use {' or '.join(map(repr, known))}, or leave it out" if known else "Leave it out"
        raise ConfigError([Violation("quantization", problem, remedy)])


def _check_allocator(settings: InferenceSettings, device_type: str) -> None:
    """Raise ConfigError for sleep mode on top of an allocator of torch's that has no memory pools."""
    if is_sleepy(settings, device_type) and "cudaMallocAsync" in internals.ALLOCATOR_CONFIG.load().current_alloc_conf():
        remedy = "Leave the backend out, or set generate_config.vllm: {enable_sleep_mode: false}"
        raise ConfigError([Violation("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync has no memory pools", remedy)])


def is_eager(settings: InferenceSettings, device_type: str) -> bool:
    """Whether vLLM captures no graphs and compiles nothing."""
    chosen = settings.generate.enforce_eager
    return device_type == "cpu" if chosen is None else chosen


def eager_stance(settings: InferenceSettings, device_type: str) -> contextlib.AbstractContextManager[object]:
    """Eager on CPU means eager: vLLM's samplers carry `torch.compile` decorators that cost seconds at first use."""
    eager = device_type == "cpu" and is_eager(settings, "cpu")
    return torch.compiler.set_stance("force_eager") if eager else contextlib.nullcontext()


def is_sleepy(settings: InferenceSettings, device_type: str) -> bool:
    """Whether vLLM's sleep mode gives memory back; on CPU it does nothing."""
    return device_type == "cuda" and settings.generate.vllm.get("enable_sleep_mode") is not False


# -- engines that could not generate -----------------------------------------------------------------------------------


def generation_problem(sizes: InferenceParallelism, device_type: str) -> str | None:
    """Why vLLM's generation would crash in this layout, in which it can load a model; None where it would not."""
    if device_type != "cpu" or (sizes.pipeline == 1 and sizes.expert == 1):
        return None
    return (
        f"vLLM {TESTED_VERSION} on CPU loads but cannot generate with pipeline parallel size {sizes.pipeline} "
        f"and expert parallel size {sizes.expert}"
    )


def _cannot_generate(config: VllmConfig, device_type: str) -> Iterator[Violation]:
    """Why this engine could not answer one request of the longest length."""
    if device_type == "cpu":
        yield from heads_without_kernel(config.model_config.get_head_size(), latent=config.model_config.use_mla)
    yield from _windows_of_some_layers(config.model_config.hf_text_config)
    if config.cache_config.kv_cache_memory_bytes is not None:
        yield from _cache_too_small(config, config.cache_config.kv_cache_memory_bytes)


def heads_without_kernel(size: int, *, latent: bool = False) -> Iterator[Violation]:
    """Why vLLM cannot compute heads of so many elements on CPU. On GPUs FlexAttention takes any.

    `latent`: heads of latent attention (MLA), of kv_lora_rank + qk_rope_head_dim elements.
    """
    known = (internals.MLA_HEAD_SIZES if latent else internals.CPU_HEAD_SIZES).load()()
    if size not in known:
        sizes, kind = ", ".join(map(str, known)), "latent " if latent else ""
        problem = f"its {kind}attention heads have {size} elements, and vLLM's attention on CPU computes {sizes} only"
        yield Violation("model", problem, "Use a model with such heads, or a GPU")


def _windows_of_some_layers(config: Any) -> Iterator[Violation]:
    """vLLM's Qwen2 and Qwen3 assert that a sliding window is that of all layers or of none."""
    num_layers, first = config.num_hidden_layers, getattr(config, "max_window_layers", None)
    kinds = set(getattr(config, "layer_types", None) or ())
    if config.model_type in ("qwen2", "qwen3") and len(kinds) > 1 and first != num_layers:
        problem = f"layers from {first} of {num_layers} on (max_window_layers) see a sliding window, the others do not"
        yield Violation("model", f"{problem}; vLLM computes one for all layers or for none", "Use such a model")


def _cache_too_small(config: VllmConfig, available: int) -> Iterator[Violation]:
    """Compare with the least that vLLM asks for: blocks for one sequence in every layer of this stage, and a spare."""
    model, block = config.model_config, config.cache_config.block_size or 1
    length, window = model.max_model_len, model.get_sliding_window()
    tokens = min(length, window) if window else length
    vectors = 1 if model.use_mla else 2 * model.get_num_kv_heads(config.parallel_config)
    itemsize = model.dtype.itemsize if config.cache_config.cache_dtype == "auto" else 1
    per_token = vectors * model.get_head_size() * itemsize * model.get_num_layers(config.parallel_config)
    needed = (-(-tokens // block) + 1) * block * per_token
    if needed > available:
        fits = max(0, available // (block * per_token) - 1) * block
        problem = f"{available // MIB} MiB hold {fits:,} tokens, but a sequence may have {length:,} (max_model_len)"
        remedy = f"Use {-(-needed // MIB)} or more, or lower generate_config.max_model_len"
        yield Violation("generate_config.kv_cache_mb", problem, remedy)
