"""Every name of vLLM's that is used here, and how it is called.

A name comes from `internals` (nobody promises it) or is one that vLLM exports (`EXPORTED`); `CALLS` says what is passed
to those that are called, `OVERRIDDEN` what vLLM passes to those that are replaced or overridden here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from hybrid_engine.backends.vllm import internals
from hybrid_engine.backends.vllm.internals import READ, Internal

_LAYERS, _LOADING, _V1 = "vllm.model_executor.layers", "vllm.model_executor.model_loader", "vllm.v1"


@dataclass(frozen=True)
class Call:
    """What is passed to a name.

    Attributes:
        num_positional: arguments by position.
        keywords: arguments by name.
    """

    num_positional: int = 0
    keywords: tuple[str, ...] = ()


@dataclass(frozen=True)
class Use:
    """A name of vLLM's.

    Attributes:
        target: ``module:attr.path``.
        reason: what it is needed for.
        call: how it is called; None where it is only read.
        parameters: of the definition, exactly, where a replacement has to take what vLLM passes to it.
        since: the first version that has it; earlier ones do without.
    """

    target: str
    reason: str
    call: Call | None = None
    parameters: tuple[str, ...] | None = None
    since: str = ""


EXPORTED: Mapping[str, Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "is the engine": {
            "vllm": ("LLM", "SamplingParams", "EngineArgs", "ModelRegistry"),
            "vllm:LLM": ("generate", "reset_prefix_cache", "sleep", "wake_up"),
        },
        "says how tokens are drawn": {
            "vllm:SamplingParams": (
                *("clone", "output_kind", "prompt_logprobs", "stop", "bad_words", "structured_outputs", "detokenize"),
                *("skip_special_tokens", "include_stop_str_in_output", "logprobs", "logprob_token_ids", "max_tokens"),
            ),
        },
        "counts the requests that are left": {
            f"{_V1}.engine.llm_engine:LLMEngine": ("get_num_unfinished_requests",),
        },
        "makes vLLM's configuration, and says what it is": {
            "vllm:EngineArgs": ("create_engine_config",),
            "vllm.config": ("set_current_vllm_config", "VllmConfig", "ModelConfig", "DeviceConfig", "LoRAConfig"),
            "vllm.config:VllmConfig": (
                "model_config",
                "load_config",
                "device_config",
                "cache_config",
                "parallel_config",
                "compilation_config",
            ),
            "vllm.config:ModelConfig": (
                *("dtype", "max_model_len", "get_vocab_size", "is_moe", "use_mla", "get_head_size"),
                *(
                    "get_num_kv_heads",
                    "get_num_layers",
                    "get_sliding_window",
                    "hf_config",
                    "hf_text_config",
                    "quantization",
                ),
            ),
            "vllm.config:CacheConfig": ("kv_cache_memory_bytes", "block_size", "cache_dtype"),
            "vllm.config:DeviceConfig": ("device",),
            "vllm.config:LoRAConfig": ("max_lora_rank", "lora_dtype", "target_modules"),
            "vllm.platforms.interface:Platform": ("device_type",),
            "vllm.platforms": ("current_platform",),
        },
        "finds the model's class, and registers it": {
            f"{_LOADING}": ("get_model_architecture",),
            "vllm.model_executor.models": ("supports_lora",),
            "vllm.model_executor.models.registry:_ModelRegistry": ("models", "register_model"),
            "vllm.model_executor.models.interfaces:SupportsLoRA": ("packed_modules_mapping",),
            "vllm.model_executor.models.qwen2_vl:Qwen2VLForConditionalGeneration": ("hf_to_vllm_mapper",),
        },
        "loads a model, or stands where a loader would": {
            f"{_LOADING}": ("BaseModelLoader", "DefaultModelLoader", "register_model_loader"),
            f"{_LOADING}:BaseModelLoader": ("download_model", "load_weights", "load_model"),
            f"{_LOADING}:DefaultModelLoader": ("create_model", "load_weights"),
        },
        "says which layers process weights after all others": {
            f"{_LAYERS}.attention": ("is_deferred_attention_layer",),
            f"{_LAYERS}.attention.mla_attention:MLAAttention": ("process_weights_after_loading", "impl"),
        },
        "is what vLLM answers with": {
            "vllm.outputs:RequestOutput": ("outputs", "prompt_token_ids", "prompt_logprobs"),
            "vllm.outputs:CompletionOutput": (
                *("token_ids", "logprobs", "cumulative_logprob", "finish_reason", "stop_reason", "text"),
            ),
            "vllm.logprobs:Logprob": ("logprob",),
        },
        "names and checks a LoRA": {
            internals.LORA_REQUEST.target: ("lora_name",),
            "vllm.lora.peft_helper:PEFTHelper": ("validate_legal", "r", "lora_alpha", "target_modules"),
        },
        "is read of the environment by vLLM": {
            "vllm.envs": (
                *("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_CPU_OMP_THREADS_BIND", "VLLM_LOGGING_LEVEL"),
                *("VLLM_NO_USAGE_STATS", "VLLM_USE_V2_MODEL_RUNNER", "VLLM_DISTRIBUTED_USE_SPLIT_GROUP"),
            ),
        },
        "is what a communicator of the custom all-reduce has": {
            "vllm.distributed.device_communicators.custom_all_reduce:CustomAllreduce": ("_ptr", "group", "rank"),
        },
        "hangs on a parameter, and loads it": {"vllm.model_executor.parameter:BasevLLMParameter": ("weight_loader",)},
        "processes a layer's weights": {f"{_LAYERS}.linear:LinearBase": ("quant_method",)},
        "computes with a layer's weights": {internals.LINEAR_METHOD.target: ("apply",)},
        "ends the worker": {f"{_V1}.executor.uniproc_executor:UniProcExecutor": ("shutdown",)},
    }
)
"""What they are for -> owner, a module or a class -> its names. What vLLM hands out has the class named here."""

ENGINE_ARGUMENTS = (
    *("model", "load_format", "skip_tokenizer_init", "distributed_executor_backend", "worker_cls", "seed"),
    *("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "enable_expert_parallel"),
    *("dtype", "quantization", "hf_overrides", "enforce_eager", "max_num_seqs", "max_model_len", "max_logprobs"),
    *("enable_prefix_caching", "gpu_memory_utilization", "kv_cache_memory_bytes", "enable_sleep_mode"),
    *("enable_lora", "max_loras", "max_lora_rank", "lora_target_modules", "disable_log_stats"),
    *("distributed_timeout_seconds", "cpu_distributed_timeout_seconds"),
    *("moe_backend", "linear_backend", "attention_backend", "disable_custom_all_reduce"),
)
"""Fields of `EngineArgs` that are set here, or named in a remedy."""

CALLS: Mapping[str, Call] = MappingProxyType(
    {
        "vllm:EngineArgs": Call(keywords=ENGINE_ARGUMENTS),
        "vllm:EngineArgs.create_engine_config": Call(),
        "vllm:SamplingParams": Call(
            keywords=(
                *("n", "temperature", "top_p", "top_k", "max_tokens", "seed", "logprobs", "prompt_logprobs"),
                *("stop_token_ids", "ignore_eos", "detokenize", "stop", "min_p", "repetition_penalty", "min_tokens"),
            )
        ),
        "vllm:SamplingParams.clone": Call(),
        internals.CACHED_TOKENIZER.target: Call(1),
        "vllm:LLM": Call(keywords=ENGINE_ARGUMENTS),  # the rest goes on to EngineArgs
        "vllm:LLM.generate": Call(2, ("use_tqdm", "lora_request")),
        "vllm:LLM.reset_prefix_cache": Call(),
        "vllm:LLM.sleep": Call(keywords=("level",)),
        "vllm:LLM.wake_up": Call(keywords=("tags",)),
        f"{_V1}.engine.llm_engine:LLMEngine.get_num_unfinished_requests": Call(),
        f"{_V1}.engine.llm_engine:LLMEngine.step": Call(),
        f"{_V1}.engine.core:EngineCore.abort_requests": Call(1),
        f"{_V1}.core.sched.scheduler:Scheduler.shutdown": Call(),
        f"{_V1}.core.block_pool:BlockPool.get_num_free_blocks": Call(),
        f"{_V1}.structured_output:StructuredOutputManager.clear_backend": Call(),
        f"{_V1}.executor.uniproc_executor:UniProcExecutor.shutdown": Call(),
        f"{_V1}.executor.abstract:Executor.discard": Call(1),
        f"{_V1}.worker.gpu_worker:Worker.get_draft_model": Call(),
        f"{_V1}.worker.gpu_model_runner:GPUModelRunner.reset_lora_state": Call(),
        "vllm.config:set_current_vllm_config": Call(1),
        "vllm.config:ModelConfig.get_vocab_size": Call(),
        f"{_LOADING}:get_model_architecture": Call(1),
        f"{_LOADING}:register_model_loader": Call(1),
        f"{_LOADING}:DefaultModelLoader": Call(1),
        f"{_LOADING}:DefaultModelLoader.create_model": Call(2),
        f"{_LOADING}:DefaultModelLoader.load_weights": Call(2),
        "vllm.model_executor.models:supports_lora": Call(1),
        "vllm.model_executor.models.registry:_ModelRegistry.register_model": Call(2),
        "vllm.model_executor.models.registry:_LazyRegisteredModel.load_model_cls": Call(),
        "vllm.model_executor.models.utils:WeightsMapper.get_rename_mapper": Call(),
        f"{_LAYERS}.attention:is_deferred_attention_layer": Call(1),
        f"{_LAYERS}.attention.mla_attention:MLAAttention.process_weights_after_loading": Call(1),
        f"{internals.QUANTIZE_METHOD.target}.process_weights_after_loading": Call(1),
        f"{internals.LINEAR_METHOD.target}.apply": Call(2),
        f"{_LAYERS}.linear:LinearBase.update_param_tp_status": Call(),
        internals.LAYERWISE_INFO.target: Call(1),
        internals.MATERIALIZE_LAYER.target: Call(2),
        internals.ORIGINAL_LOADER.target: Call(1),
        f"{_LOADING}.reload.types:LayerReloadingInfo.reset": Call(),
        internals.DEFAULT_DTYPE.target: Call(1),
        internals.DISABLE_ENVS_CACHE.target: Call(),
        internals.MEM_ALLOCATOR.target: Call(),
        internals.CREATE_AND_MAP.target: Call(1),
        internals.UNMAP.target: Call(1),
        f"{internals.SLEEP_BACKEND.target}.suspend": Call(keywords=("level",)),
        f"{internals.SLEEP_BACKEND.target}.discard": Call(1),
        f"{internals.ALLOCATOR_CONFIG.target}:current_alloc_conf": Call(),
        f"{internals.ALLOCATOR_CONFIG.target}:conf_flag_enabled": Call(2),
        f"{internals.CUSTOM_OPS.target}:get_graph_buffer_ipc_meta": Call(1),
        f"{internals.CUSTOM_OPS.target}:register_graph_buffers": Call(3),
        f"{internals.PARALLEL_STATE.target}:destroy_model_parallel": Call(),
        f"{internals.PARALLEL_STATE.target}:GroupCoordinator.destroy": Call(),
        internals.LORA_REQUEST.target: Call(3),
        internals.LORA_MODEL.target: Call(3, internals.LORA_MODEL.keywords),
        internals.PEFT_HELPER.target: Call(1),
        "vllm.lora.peft_helper:PEFTHelper.validate_legal": Call(1),
        "vllm.lora.worker_manager:WorkerLoRAManager.remove_adapter": Call(1),
        "vllm.lora.worker_manager:WorkerLoRAManager.remove_all_adapters": Call(),
    }
)
"""Name -> how it is called."""

OVERRIDDEN: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        f"{_LOADING}:BaseModelLoader.download_model": ("model_config",),
        f"{_LOADING}:BaseModelLoader.load_weights": ("model", "model_config"),
        f"{_LOADING}:BaseModelLoader.load_model": ("vllm_config", "model_config", "prefix"),
        f"{_V1}.worker.cpu_worker:CPUWorker.init_device": (),
        internals.REGISTER_GRAPH_BUFFERS.target: (),
        internals.SHARE_MEMORY.target: (),
        internals.ROTATE.target: ("positions", "query", "key"),
        internals.STEP.target: (),
        internals.LOAD_LORA.target: ("lora_request",),
    }
)
"""Name -> its parameters, which a replacement or an override here takes."""


def uses() -> Iterator[Use]:
    """All of them, by target."""
    reasons = {each.target: (each.reason, each.since) for each in internal_names() if _is_vllm(each.target)}
    for table in (READ, EXPORTED):
        for reason, owners in table.items():
            for owner, names in owners.items():
                targets = (f"{owner}{'.' if ':' in owner else ':'}{name}" for name in names)
                reasons |= {each: (reason, "") for each in (owner, *targets) if each not in reasons and _is_vllm(each)}
    for target, (reason, since) in sorted(reasons.items()):
        yield Use(target, reason, CALLS.get(target), OVERRIDDEN.get(target), since)


def internal_names() -> Iterator[Internal]:
    """The records of `internals`, those in its tuples and tables too; torch's among them."""
    return _records(tuple(vars(internals).values()))


def _records(value: object) -> Iterator[Internal]:
    if isinstance(value, Internal):
        yield value
    elif isinstance(value, dict | tuple):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _records(part)


def _is_vllm(target: str) -> bool:
    return target.partition(":")[0].partition(".")[0] == "vllm"
