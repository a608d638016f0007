"""From settings to the arguments of `vllm.LLM`."""

from __future__ import annotations

import math
from typing import Any

from pydantic import ValidationError

from hybrid_engine.backends.vllm.engine_settings import InferenceSettings
from hybrid_engine.backends.vllm.process.group_placement import rank_in_instance
from hybrid_engine.backends.vllm.weights.loader import LOAD_FORMAT
from hybrid_engine.backends.vllm.weights.quantization import check_quantization, config_overrides
from hybrid_engine.errors import ConfigError, Violation
from hybrid_engine.layouts.parallelism import named

CPU_WORKER = "hybrid_engine.backends.vllm.process.cpu_worker.IsolatedCPUWorker"

_DEFAULT_CPU_KV_CACHE = 256 << 20
_REMEDY = "vLLM itself refuses these inference settings for this model: change the inference layout or the model"


def llm_arguments(settings: InferenceSettings, device_type: str) -> dict[str, Any]:
    """Keyword arguments of `vllm.LLM` for an engine that lives in the processes that train.

    Args:
        settings: the engine's.
        device_type: vLLM's name for the platform: "cpu" or "cuda".
    """
    arguments: dict[str, Any] = {
        "model": settings.model_dir,
        "load_format": LOAD_FORMAT,
        "skip_tokenizer_init": True,
        "distributed_executor_backend": "external_launcher",
        **named(settings.sizes, "vllm"),
        # Replicas know of each other only where they share experts; else vLLM would keep them in lockstep.
        "data_parallel_size": settings.sizes.replicas_per_instance,
        "enable_expert_parallel": settings.sizes.expert > 1,
        "dtype": settings.dtype,
        "quantization": settings.quantization,
        "hf_overrides": config_overrides(settings),
        "seed": settings.seed,
        "enforce_eager": is_eager(settings, device_type),
        "max_num_seqs": settings.max_num_seqs,
        "enable_prefix_caching": settings.enable_prefix_caching,
        "gpu_memory_utilization": settings.gpu_memory_utilization,
        "enable_sleep_mode": is_sleepy(settings, device_type),
        "max_logprobs": -1,
        "disable_log_stats": True,
    }
    kv_cache_bytes = settings.kv_cache_bytes
    if device_type == "cpu":
        kv_cache_bytes = kv_cache_bytes or _DEFAULT_CPU_KV_CACHE
        arguments["worker_cls"] = CPU_WORKER
    if kv_cache_bytes is not None:
        arguments["kv_cache_memory_bytes"] = kv_cache_bytes
    if settings.max_loras:
        arguments |= {
            "enable_lora": True,
            "max_loras": settings.max_loras,
            "max_lora_rank": settings.max_lora_rank,
            "lora_target_modules": list(settings.lora_target_modules),
        }
    if settings.timeout_seconds is not None:
        seconds = math.ceil(settings.timeout_seconds)
        arguments |= {"distributed_timeout_seconds": seconds, "cpu_distributed_timeout_seconds": seconds}
    if settings.max_model_len is not None:
        arguments["max_model_len"] = settings.max_model_len
    return {**arguments, **settings.extra}


def check_arguments(settings: InferenceSettings, rank: int, device_type: str) -> None:
    """Have vLLM look at its configuration before anything is built. Raises ConfigError with its complaints."""
    check_quantization(settings, device_type)
    arguments = {**llm_arguments(settings, device_type), "load_format": "dummy"}
    from vllm import EngineArgs
    from vllm.model_executor.model_loader import get_model_architecture
    from vllm.model_executor.models import supports_lora

    try:
        with rank_in_instance(settings, rank):
            config = EngineArgs(**arguments).create_engine_config()
        model_class, _ = get_model_architecture(config.model_config)
    except (ValidationError, ValueError, NotImplementedError) as error:
        details = error.errors() if isinstance(error, ValidationError) else [{"msg": str(error)}]
        raise ConfigError([Violation("vLLM", detail["msg"], _REMEDY) for detail in details]) from error
    reason = ""
    if not supports_lora(model_class):
        reason = f"vLLM's {model_class.__name__} takes no LoRA"
    elif device_type == "cpu" and config.model_config.is_moe:
        reason = "vLLM's kernels for experts beside LoRA do not run on CPU"
    if settings.max_loras and reason:
        problem = f"{settings.max_loras}, but {reason}"
        raise ConfigError([Violation("max_loras", problem, "Set it to 0 and merge it into the weights")])


def is_eager(settings: InferenceSettings, device_type: str) -> bool:
    """Whether vLLM captures no graphs and compiles nothing."""
    chosen = settings.enforce_eager
    return device_type == "cpu" if chosen is None else chosen


def is_sleepy(settings: InferenceSettings, device_type: str) -> bool:
    """Whether vLLM's sleep mode gives memory back; on CPU it does nothing."""
    return device_type == "cuda" and settings.enable_sleep_mode is not False
