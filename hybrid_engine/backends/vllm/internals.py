"""Undocumented names of vLLM and torch that this backend uses or replaces, with the reasons.

    internals.LOADERS                   `NAMES`: a name that is imported at each use
    READ                                attributes of objects, which other files read by name
    ASKED_FOR                           optional attributes, which some versions lack
    with NEW_GROUP.replaced(build):     `Replacement`: a name that is replaced for a while

Go through this list when vLLM is upgraded; `require_names` looks each name up before an engine is
built. Names that vLLM exports (in an `__all__`) are imported where they are needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from hybrid_engine.backends.vllm.private_names import Internal, Replacement
from hybrid_engine.backends.vllm.version import ACCEPTED_VERSIONS, installed
from hybrid_engine.errors import DependencyError

_LAYERS = "vllm.model_executor.layers"
_LOADING = "vllm.model_executor.model_loader"
_ROUTES = "vllm.distributed.aux_output_connector"
_V1 = "vllm.v1"
_TRANSFER = "vllm.distributed.weight_transfer.base"

_ALLOCATOR_CONFIG = "vllm.device_allocator.alloc_conf"
_TRANSFER_ENGINE = f"{_TRANSFER}:WeightTransferEngine"
_CUSTOM_OPS = "vllm._custom_ops"
_PARALLEL_STATE = "vllm.distributed.parallel_state"
_QUANTIZE_METHOD = f"{_LAYERS}.quantization.base_config:QuantizeMethodBase"
_VOCABULARY_EMBEDDING = f"{_LAYERS}.vocab_parallel_embedding:VocabParallelEmbedding"
_ATTENTION_LAYERS = f"{_LAYERS}.attention"

# -- names to import -------------------------------------------------------------------------------

NAMES = {
    "ASYNC_LLM": Internal(
        f"{_V1}.engine.async_llm:AsyncLLM", "is the engine of a server in an actor"
    ),
    "OUTPUT_KIND": Internal("vllm.sampling_params:RequestOutputKind", "requests whole completions"),
    "ENGINE_CORE": Internal(
        f"{_V1}.engine.core:EngineCore", "holds a server's requests until it has weights"
    ),
    "ENGINE_MESSAGES": Internal(
        f"{_V1}.engine", "has the messages between a server's core and its clients"
    ),
    "UNPAUSED": Internal(
        f"{_V1}.core.sched.interface:PauseState.UNPAUSED",
        "lets a paused server compute the probes of its trainers",
    ),
    # This is looked up first: its module replaces names that other modules import.
    "CPU_WORKER": Internal(
        f"{_V1}.worker.cpu_worker:CPUWorker", "is the base of the worker that isolates its process"
    ),
    "ROPES": Internal(
        f"{_LAYERS}.rotary_embedding:_ROPE_DICT",
        "caches rotary embeddings of other engines, see ROTATE, and of models without memory",
    ),
    "MISSING_LAYERS": Internal(
        "vllm.model_executor.models.utils:_model_to_pp_missing_layer_names",
        "records a model's missing layers by its memory address, which another model may get",
    ),
    "CPU_HEAD_SIZES": Internal(
        f"{_V1}.attention.backends.cpu_attn:CPUAttentionBackend.get_supported_head_sizes",
        "lists the head sizes of attention kernels on CPU: others fail in the first generate",
    ),
    "MLA_HEAD_SIZES": Internal(
        f"{_LAYERS}.attention.mla_attention:MLACommonBackend.get_supported_head_sizes",
        "lists the head sizes of latent attention",
    ),
    "MLA_DECODE_SIZES": Internal(
        "vllm.v1.attention.backends.mla.cpu_mla:CPUMLABackend.get_supported_head_sizes",
        "lists the head sizes of latent attention that a CPU can decode",
    ),
    "LENGTH_LIMITS": Internal(
        "vllm.transformers_utils.model_arch_config_convertor"
        ":ModelArchConfigConvertorBase.derive_max_model_len_and_key",
        "reads all families' keys for sequence lengths, without an effect on the computation",
    ),
    "ALLOCATOR_CONFIG": Internal(
        _ALLOCATOR_CONFIG, "parses the configuration of torch's allocator"
    ),
    "CUMEM_LIBRARY": Internal(
        "vllm.device_allocator.cumem:lib_name", "is the extension that keeps the error of a call"
    ),
    "TRANSFER_ENGINE": Internal(
        _TRANSFER_ENGINE, "is the base of a worker's interface for weights"
    ),
    "INIT_INFO": Internal(
        f"{_TRANSFER}:WeightTransferInitInfo", "is a class that a transfer engine must name"
    ),
    "UPDATE_INFO": Internal(
        f"{_TRANSFER}:WeightTransferUpdateInfo", "is a class that a transfer engine must name"
    ),
    "INIT_REQUEST": Internal(
        f"{_TRANSFER}:WeightTransferInitRequest", "is an argument of AsyncLLM's calls"
    ),
    "UPDATE_REQUEST": Internal(
        f"{_TRANSFER}:WeightTransferUpdateRequest", "is an argument of AsyncLLM's calls"
    ),
    "WORLD_GROUP": Internal(
        "vllm.distributed.parallel_state:get_world_group", "is the group of a server's workers"
    ),
    "PAUSED": Internal(
        f"{_V1}.core.sched.interface:PauseState.PAUSED_ALL", "makes a scheduler hold all requests"
    ),
    "MEM_ALLOCATOR": Internal(
        "vllm.device_allocator:get_mem_allocator_instance",
        "has the segments in which weights sleep",
    ),
    "CUMEM_ALLOCATOR": Internal(
        "vllm.device_allocator.cumem:CuMemAllocator",
        "counts the memory of an earlier engine in this process",
    ),
    "SUSPEND_COMMUNICATORS": Internal(
        "vllm.distributed.parallel_state:suspend_device_comms",
        "is called by vLLM's own sleep if its user asked for that",
    ),
    "RESUME_COMMUNICATORS": Internal(
        "vllm.distributed.parallel_state:resume_device_comms",
        "is called by vLLM's own wake-up if its user asked for that",
    ),
    "CHAT_REQUEST": Internal(
        "vllm.entrypoints.openai.chat_completion.protocol:ChatCompletionRequest",
        "has the tools for a parser of calls",
    ),
    "CUSTOM_OPS": Internal(_CUSTOM_OPS, "exchanges the addresses of buffers in captured graphs"),
    "KERNELS": Internal(
        "vllm._custom_ops:torch.ops._C",
        "has init_shm_manager if CPU ranks exchange tensors through shared memory",
    ),
    "PARALLEL_STATE": Internal(
        _PARALLEL_STATE, "its own shutdown would end the caller's groups as well"
    ),
    "DISABLE_ENVS_CACHE": Internal(
        "vllm.envs:disable_envs_cache", "lets the next engine have another environment"
    ),
    "LOADERS": Internal(
        f"{_LOADING}:_LOAD_FORMAT_TO_MODEL_LOADER", "has our load format while an engine is built"
    ),
    "CACHE_SPECS": Internal(
        f"{_V1}.kv_cache_interface", "has the kinds of caches of layers, for plans"
    ),
    "LAYER_NUMBER": Internal(
        "vllm.model_executor.models.utils:extract_layer_index",
        "parses the number of a layer in its prefix",
    ),
    "INITIALIZE_MODEL": Internal(
        f"{_LOADING}.utils:initialize_model",
        "constructs a model without its weights",
        keywords=("vllm_config", "model_config"),
    ),
    "DEFAULT_DTYPE": Internal(
        "vllm.utils.torch_utils:set_default_torch_dtype",
        "is the context in which vLLM constructs a model",
    ),
    "QUANTIZE_METHOD": Internal(
        _QUANTIZE_METHOD,
        "is the class of methods that process a layer's weights after loading",
    ),
    "CACHE_METHOD": Internal(
        f"{_LAYERS}.quantization.kv_cache:BaseKVCacheMethod",
        "is the class of those methods that attention has for its cache",
    ),
    "VOCABULARY_EMBEDDING": Internal(_VOCABULARY_EMBEDDING, "has the number of padding rows"),
    "LAYERWISE_INFO": Internal(
        f"{_LOADING}.reload.layerwise:get_layerwise_info",
        "holds the state of a layer that is quantised while loading",
    ),
    "RELOADING_NOTES": Internal(
        f"{_LOADING}.reload.layerwise:LAYERWISE_INFO",
        "has notes on every layer, some of which keep their layer alive",
    ),
    "ORIGINAL_LOADER": Internal(
        f"{_LOADING}.reload.layerwise:_get_original_loader",
        "loads such a layer's weights without processing them",
    ),
    "MATERIALIZE_LAYER": Internal(
        f"{_LOADING}.reload.meta:materialize_layer", "moves its weights off the meta device"
    ),
    "CLIENT_ERROR": Internal(
        "vllm.exceptions:VLLMClientError",
        "is raised for invalid requests when they are added",
        otherwise="builtins:ValueError",
    ),
    "CACHED_TOKENIZER": Internal(
        "vllm.tokenizers.hf:get_cached_tokenizer",
        "adds the attributes that vLLM reads to a tokenizer of transformers",
    ),
    "HAS_AMX": Internal(
        "torch.cpu:_is_amx_tile_supported", "decides on which CPUs vLLM quantises experts"
    ),
    "FAKE_GROUP": Internal(
        "torch.testing._internal.distributed.fake_pg:FakeStore",
        "registers the backend of a default group without peers, in which plans trace a position",
    ),
    "MAKE_SUBCLASS": Internal(
        "torch:Tensor._make_subclass", "makes a parameter of vLLM's class without its constructor"
    ),
    "ROUTE_SCHEDULER": Internal(
        f"{_ROUTES}.connector:AuxOutputSchedulerConnector",
        "hands the experts of each token over to its request",
    ),
    "ROUTE_WORKER": Internal(
        f"{_ROUTES}.worker:get_aux_output_connector",
        "captures the experts of each token in a worker",
    ),
    "BASE_ROUTER": Internal(
        "vllm.model_executor.layers.fused_moe.router.base_router:BaseRouter",
        "selects the experts of tokens, and passes them to a function",
    ),
    "LORA_REQUEST": Internal("vllm.lora.request:LoRARequest", "names the LoRA of a request"),
    "LORA_MODEL": Internal(
        "vllm.lora.lora_model:LoRAModel.from_lora_tensors",
        "makes vLLM's own LoRA from tensors instead of files",
        keywords=("device", "dtype", "model_vocab_size", "weights_mapper"),
    ),
    "PEFT_HELPER": Internal(
        "vllm.lora.peft_helper:PEFTHelper.from_dict", "carries a LoRA's rank, alpha and modules"
    ),
    "MODULE_RANKS": Internal(
        "vllm.lora.peft_helper:PEFTHelper.get_rank_and_scaling",
        "applies ranks and alphas of single modules; a vLLM without it drops them silently",
    ),
    "ATTENTION_LAYERS": Internal(
        _ATTENTION_LAYERS, "identifies the layers that are processed after all others"
    ),
    "EXPERTS_METHOD": Internal(
        f"{_LAYERS}.fused_moe.fused_moe_method_base:FusedMoEMethodBase",
        "takes another kernel by moe_backend",
    ),
    "ARGUMENT_PARSER": Internal(
        "vllm.utils.argparse_utils:FlexibleArgumentParser",
        "parses the command line of `certify` as `vllm serve` does",
    ),
    "PACKED_PRODUCT": Internal(
        "vllm._custom_ops:onednn_mm", "reads such a copy: `certify` multiplies it by unit vectors"
    ),
}
"""Name of an attribute of this module -> what it is loaded from, at each use."""


def __getattr__(name: str) -> Any:
    if name not in NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return NAMES[name].load()


_OF_PLATFORMS = "lists the kernels of each platform for weights in this format"
_LINEAR_KERNELS = "vllm.model_executor.kernels.linear"
BLOCK_KERNELS = {
    "fp8": Internal(f"{_LINEAR_KERNELS}:_POSSIBLE_FP8_BLOCK_KERNELS", _OF_PLATFORMS),
    "mxfp8": Internal(f"{_LINEAR_KERNELS}:_POSSIBLE_MXFP8_KERNELS", _OF_PLATFORMS),
    "mxfp4": Internal(f"{_LINEAR_KERNELS}:_POSSIBLE_MXFP4_KERNELS", _OF_PLATFORMS),
    "nvfp4": Internal(f"{_LINEAR_KERNELS}:_POSSIBLE_NVFP4_KERNELS", _OF_PLATFORMS),
}

# -- processing of weights after loading (weights/postload.py) -------------------------------------

NOT_ENTERED = (
    Internal(
        f"{_LAYERS}.fused_moe.modular_kernel:FusedMoEPrepareAndFinalize",
        "carries activations between ranks, and holds buffers for them but no weights",
    ),
    Internal(
        f"{_LAYERS}.quantization.base_config:QuantizationConfig",
        "is configuration, shared by all layers",
    ),
)
PACKED_HANDLE = Internal(
    "vllm._custom_ops:CPUDNNLGEMMHandler",
    "its only tensor is the address of a packed copy, which oneDNN keeps",
)
GROUP_CHANNELS = ("cpu_group", "device_group", "device_communicator", "mq_broadcaster")
"""Attributes of vLLM's groups through which ranks communicate (weights/processing_barrier.py)."""

# -- attributes that are read by name --------------------------------------------------------------

Attributes = dict[str, dict[str, tuple[str, ...]]]
"""Purpose -> owner, a class or a module -> attributes."""

DECORATE_DECODER = "_decorate_cls_for_torch_compile"
"""Method of models made of transformers' modules; it makes their decoder's class compile."""

_IN_SLEEP = "put weights and KV cache to sleep on a device, and wake them segment by segment"
_OF_SERVERS = "hold a server's requests, and bring weights to its workers"
_OF_ROUTES = "capture the experts of each token"
_OF_LORAS = "hold the LoRAs of a worker, and list the modules that can have one"

READ: Attributes = {
    "lead from an LLM to its core, its worker and the worker's model runner": {
        "vllm:LLM": ("llm_engine",),
        f"{_V1}.engine.llm_engine:LLMEngine": ("engine_core", "model_config"),
        f"{_V1}.engine.core_client:InprocClient": ("engine_core",),
        f"{_V1}.engine.core:EngineCore": ("scheduler", "model_executor"),
        f"{_V1}.executor.uniproc_executor:UniProcExecutor": ("driver_worker",),
        f"{_V1}.worker.worker_base:WorkerWrapperBase": ("worker",),
        f"{_V1}.worker.cpu_worker:CPUWorker": (
            "distributed_init_method",
            "init_device",
            "load_model",
            "model_runner",
        ),
        f"{_V1}.worker.gpu_worker:Worker": ("model_runner",),
        f"{_V1}.worker.gpu_model_runner:GPUModelRunner": (
            *("model", "input_batch", "discard_request_mask"),
        ),
        f"{_V1}.worker.gpu.model_runner:GPUModelRunner": ("model",),
    },
    "hold the requests of a call that failed half-way, if vLLM's own abort raises": {
        f"{_V1}.engine.llm_engine:LLMEngine": ("output_processor", "should_execute_dummy_batch"),
        f"{_V1}.engine.output_processor:OutputProcessor": (
            *("request_states", "parent_requests", "external_req_ids"),
        ),
        f"{_V1}.engine.core:EngineCore": ("batch_queue", "abort_requests"),
        f"{_V1}.core.sched.scheduler:Scheduler": (
            *("requests", "finished_req_ids", "kv_cache_manager"),
        ),
        f"{_V1}.core.kv_cache_manager:KVCacheManager": ("block_pool",),
        f"{_V1}.core.block_pool:BlockPool": ("num_gpu_blocks", "get_num_free_blocks"),
        f"{_V1}.worker.gpu_model_runner:GPUModelRunner": ("requests", "execute_model_state"),
        f"{_V1}.worker.gpu.model_runner:GPUModelRunner": ("req_states", "execute_model_state"),
        f"{_V1}.worker.gpu.states:RequestState": ("req_id_to_index",),
    },
    "have the tokenizer of requests that need it": {
        f"{_V1}.engine.llm_engine:LLMEngine": ("renderer", "output_processor"),
        "vllm.renderers.base:BaseRenderer": ("tokenizer",),
        f"{_V1}.engine.output_processor:OutputProcessor": ("tokenizer",),
        f"{_V1}.structured_output:StructuredOutputManager": ("tokenizer",),
    },
    "end an engine part by part, because vLLM's own shutdown ends the caller's default group": {
        f"{_V1}.engine.core:EngineCore": ("structured_output_manager",),
        f"{_V1}.structured_output:StructuredOutputManager": ("clear_backend",),
        f"{_V1}.core.sched.scheduler:Scheduler": ("shutdown",),
        _PARALLEL_STATE: ("_WORLD", "_NODE_COUNT", "destroy_model_parallel"),
    },
    _IN_SLEEP: {
        "vllm.device_allocator:AllocationData": ("handle", "is_asleep"),
        "vllm.device_allocator.cumem:CuMemAllocator": (
            *("get_instance", "python_free_callback", "pointer_to_data"),
            *("allocator_and_pools", "get_current_usage"),
        ),
        _ALLOCATOR_CONFIG: ("current_alloc_conf", "conf_flag_enabled", "EXPANDABLE_SEGMENTS"),
    },
    "tell where blocks of the KV cache lie, and in which order requests get them": {
        f"{_V1}.worker.gpu_model_runner:GPUModelRunner": ("kv_caches", "kv_cache_config"),
        f"{_V1}.kv_cache_interface:KVCacheConfig": ("num_blocks", "kv_cache_tensors"),
        f"{_V1}.core.block_pool:BlockPool": ("get_new_blocks", "free_block_queue", "blocks"),
        f"{_V1}.core.kv_cache_utils:FreeKVCacheBlockQueue": (
            *("fake_free_list_head", "get_all_free_blocks"),
        ),
    },
    _OF_SERVERS: {
        _TRANSFER_ENGINE: ("init_transfer_engine", "receive_weights"),
        f"{_V1}.engine.core:EngineCore": (
            *("collective_rpc", "resume_scheduler", "sleep", "add_lora", "is_scheduler_paused"),
            *("model_executor", "_initialize_kv_caches", "batch_queue", "_reset_caches"),
            *("add_request", "abort_requests", "preprocess_add_request", "step_fn"),
            *("scheduler", "vllm_config"),
        ),
        f"{_V1}.engine.core:EngineCoreProc": ("output_queue",),
        f"{_V1}.core.sched.scheduler:Scheduler": (
            *("running", "waiting", "requests", "set_pause_state", "pause_state"),
            *("add_request", "has_requests"),
        ),
        "vllm.config:SchedulerConfig": ("get_scheduler_cls",),
    },
    "lead from a server's worker to its receiver": {
        f"{_V1}.worker.gpu_worker:Worker": ("weight_transfer_engine", "_weight_update_active"),
    },
    "describe the attention of a layer": {
        f"{_ATTENTION_LAYERS}:Attention": ("impl", "sliding_window"),
        f"{_ATTENTION_LAYERS}:MLAAttention": ("impl", "sliding_window", "scale"),
        f"{_LAYERS}.rotary_embedding.base:RotaryEmbeddingBase": ("cos_sin_cache",),
    },
    "hold the KV cache of any kind": {
        f"{_V1}.worker.gpu_model_runner:GPUModelRunner": ("kv_caches", "vllm_config"),
        f"{_V1}.worker.gpu.model_runner:GPUModelRunner": ("kv_caches", "vllm_config"),
        "vllm.config:CompilationConfig": ("static_forward_context",),
    },
    "exchange the addresses of buffers in captured graphs": {
        _CUSTOM_OPS: ("get_graph_buffer_ipc_meta", "register_graph_buffers"),
    },
    "describe a process group of vLLM": {
        f"{_PARALLEL_STATE}:GroupCoordinator": (
            "ranks",
            "rank_in_group",
            "device_group",
            "destroy",
        ),
        "vllm.distributed.device_communicators.cpu_communicator:_CPUSHMDistributed": (
            "group_name",
        ),
    },
    "make groups of coordinators that cannot communicate": {
        _PARALLEL_STATE: ("GroupCoordinator", "initialize_model_parallel"),
    },
    "let ranks communicate": {
        f"{_PARALLEL_STATE}:GroupCoordinator": ("world_size", *GROUP_CHANNELS)
    },
    _OF_ROUTES: {
        f"{_ROUTES}.worker:AuxOutputWorkerConnector": (
            *("begin_step", "prepare_output", "_pending_outputs"),
        ),
        f"{_ROUTES}.worker:PendingAuxOutput": ("enqueue_cpu_copy", "process_output"),
        f"{_V1}.core.sched.scheduler:Scheduler": ("aux_output_connector",),
        f"{_V1}.worker.gpu.model_runner:GPUModelRunner": ("aux_output_connector",),
        f"{_V1}.worker.gpu_model_runner:GPUModelRunner": (
            *("model", "vllm_config", "kv_cache_config", "input_batch", "query_start_loc"),
        ),
    },
    _OF_LORAS: {
        f"{_V1}.worker.gpu_model_runner:GPUModelRunner": ("lora_manager", "reset_lora_state"),
        "vllm.lora.worker_manager:WorkerLoRAManager": (
            *("lora_config", "vocab_size", "_adapter_manager"),
            *("remove_adapter", "remove_all_adapters"),
        ),
        "vllm.lora.model_manager:LoRAModelManager": (
            "model",
            "packed_modules_mapping",
            "supported_lora_modules",
        ),
        "vllm.model_executor.models.utils:WeightsMapper": ("get_rename_mapper",),
    },
    "register a model's class instead of its name": {
        "vllm.model_executor.models.registry:_LazyRegisteredModel": (
            "module_name",
            "load_model_cls",
        ),
    },
    "process weights after loading, and repeat the processing": {
        _QUANTIZE_METHOD: ("process_weights_after_loading", "uses_meta_device"),
        f"{_LOADING}.reload.types:LayerReloadingInfo": ("reset",),
        f"{_LAYERS}.linear:LinearBase": ("update_param_tp_status",),
    },
    "count the rows of padding": {
        _VOCABULARY_EMBEDDING: ("shard_indices",),
        f"{_VOCABULARY_EMBEDDING}ShardIndices": (
            *(
                "num_org_elements",
                "num_org_elements_padded",
                "num_added_elements",
                "num_elements_padded",
            ),
        ),
    },
    "identify the operations that change their arguments": {"torch:_ops.OpOverload": ("_schema",)},
}
"""Purpose -> owner, a class or a module -> attributes; some exist only in instances."""

ASKED_FOR: Attributes = {
    "would end the caller's default process group at collection": {
        f"{_V1}.engine.core_client:InprocClient": ("_finalizer",),
    },
    "would change weights that only trainers change, or sets their version": {
        f"{_V1}.engine.core:EngineCore": ("release_kv_cache_memory", "set_weight_version"),
    },
    "identifies the attention that is processed after all others; without it, three classes do": {
        _ATTENTION_LAYERS: ("is_deferred_attention_layer",),
    },
    "makes transformers' decoder class compile itself": {
        "vllm.model_executor.models.transformers:TransformersForCausalLM": (DECORATE_DECODER,),
    },
    "places all layers of the KV cache; without it, training state leaves before generation": {
        f"{_V1}.kv_cache_interface:KVCacheTensor": ("layers", "layer_stride", "block_stride"),
    },
    "has the KV cache of layers whose class has one, or describes it for plans": {
        f"{_LAYERS}.attention_layer_base:AttentionLayerBase": ("kv_cache", "get_kv_cache_spec"),
    },
}
"""Attributes like those of `READ` that a supported version may lack."""

# -- names that are replaced -----------------------------------------------------------------------

BUILD_APP = Replacement(
    "vllm.entrypoints.launchers.api_server.entry:build_app",
    "makes a server's HTTP routes, some of which require the token",
    otherwise="vllm.entrypoints.openai.api_server:build_app",
    remove_when="vLLM's routes for weights authenticate their clients",
)
COMPLETION_ANSWER = Replacement(
    "vllm.entrypoints.openai.completion.serving"
    ":OpenAIServingCompletion.request_output_to_completion_response",
    "makes the answer of /v1/completions, which gets a label of its weights",
    remove_when="the answer has weight_versions, as that of /inference/v1/generate",
)
UPDATES_OF_WORKERS = tuple(
    Replacement(
        f"{_V1}.worker.gpu_worker:Worker.{name}",
        "reloads layers around an update in vLLM 0.24; later its transfer engine decides",
        remove_when="no server has vLLM 0.24",
    )
    for name in ("start_weight_update", "update_weights", "finish_weight_update")
)
SAMPLE_TOKENS = Replacement(
    f"{_V1}.worker.cpu_worker:CPUWorker.sample_tokens",
    "moves generators of tokens that it drops back, which torch cannot do on a CPU",
    remove_when="torch can",
)
AWAIT_READERS = Replacement(
    "vllm.distributed.device_communicators.shm_broadcast:MessageQueue.wait_until_ready",
    "returns when all have mapped a queue in shared memory, which can be unlinked then",
    remove_when="vLLM unlinks it itself",
)
MAKE_GROUP = Replacement(
    "vllm.distributed.parallel_state:init_model_parallel_group",
    "makes groups of the ranks at the listed positions, without a queue in shared memory",
    keywords=("use_message_queue_broadcaster",),
    remove_when="vLLM takes an order of ranks, and makes no queue for ranks that never broadcast",
)
LOAD_MODEL = Replacement(
    f"{_V1}.worker.gpu_worker:Worker.load_model",
    "allocates only from memory that sleeps, on the stream that vLLM has made current",
    remove_when="torch allocates its workspaces outside of memory pools",
)
CREATE_AND_MAP = Replacement(
    "vllm.device_allocator.cumem:create_and_map",
    "allocates memory for a sleeping segment, which may be training's",
    remove_when="vLLM takes the memory of a segment from its caller",
)
UNMAP_AND_RELEASE = Replacement(
    "vllm.device_allocator.cumem:unmap_and_release",
    "frees the memory of a segment, which may be training's from now on",
    remove_when="vLLM takes the memory of a segment from its caller",
)
NEW_GROUP = Replacement(
    "torch.distributed:new_group",
    "numbers members of vLLM's groups as listed; torch sorts them, and gathers follow its order",
    # torch 2.11 has no sort_ranks: see `isolation.can_list_ranks`
    remove_when="vLLM passes sort_ranks=False",
)
REGISTER_GRAPH_BUFFERS = Replacement(
    "vllm.distributed.device_communicators.custom_all_reduce"
    ":CustomAllreduce.register_graph_buffers",
    "receives the addresses in captured graphs in the group's order; vLLM's uses sorted ranks",
    remove_when="vLLM does not sort the group's ranks there",
)
GROUP_ATTRIBUTE = Replacement(
    "vllm.distributed.parallel_state:GroupCoordinator.__getattribute__",
    "shows whether ranks communicate while weights are processed: they read a group's channel",
    remove_when="vLLM marks the methods that communicate",
)
SHARE_MEMORY = Replacement(
    "vllm.distributed.device_communicators.cpu_communicator:_CPUSHMDistributed._init_cpu_shm",
    "makes shared memory, which is unlinked once all have mapped it, so that none outlives a kill",
    remove_when="vLLM unlinks it itself",
)
BIND_MEMORY = Replacement(
    f"{_V1}.worker.cpu_worker:torch.ops._C.init_cpu_memory_env",
    "binds all memory of the process, training's too, to one node, and each rank prints so",
    remove_when="vLLM leaves it to the launcher, as it does threads with `nobind`",
)
ROTATE = Replacement(
    f"{_LAYERS}.rotary_embedding.base:RotaryEmbedding.forward_cpu",
    "gets rows: its CPU kernel rotates the wrong elements of MLA's [tokens, heads, elements]",
    remove_when="the kernel follows strides",
)
EXPAND = Replacement(
    f"{_V1}.sample.rejection_sampler:expand_batch_to_tokens",
    "is computed by torch: its CPU kernel leaves temperatures of drafts uninitialised",
    remove_when="the kernel writes its output",
)
ROUTES_GROUP = Replacement(
    f"{_ROUTES}.worker:get_tp_group",
    "decides which rank returns the experts of each token: every rank here has a scheduler",
    remove_when="vLLM returns them on all ranks of an external launcher",
)
LOAD_LORA = Replacement(
    "vllm.lora.worker_manager:WorkerLoRAManager._load_adapter",
    "takes a LoRA from memory, in the one place where a worker reads its directory",
    remove_when="vLLM's requests carry tensors",
)

# -- look-up of all names --------------------------------------------------------------------------


def require_names(device_type: str, *, with_lora: bool = True, with_routes: bool = True) -> None:
    """Look up every private name before an engine is built; imports their modules.

    Args:
        device_type: vLLM's name for the platform. On "cpu" names of sleep mode are left out,
            elsewhere modules for the CPU.
        with_lora: include the names that LoRA needs.
        with_routes: include the names that router replay needs.

    Raises DependencyError naming all that are missing, each with its purpose.
    """
    refuse_lacking(list(missing_names(device_type, with_lora=with_lora, with_routes=with_routes)))


def refuse_lacking(lacking: Sequence[str]) -> None:
    """Raise DependencyError unless `lacking` is empty."""
    if lacking:
        packages = {**installed(), "torch": torch.__version__}
        versions = ", ".join(f"{name} {version}" for name, version in packages.items())
        lines = "\n".join(f"  - {line}" for line in lacking)
        raise DependencyError(
            f"{versions} lack {len(lacking)} of the private names that are used of them:\n{lines}\n"
            f"Install vLLM {' or '.join(ACCEPTED_VERSIONS)}",
            code="names-are-missing",
        )


def missing_names(
    device_type: str,
    *,
    with_lora: bool = True,
    with_routes: bool = True,
) -> Iterator[str]:
    """Yield descriptions of records that cannot be loaded, take other keywords or lack attributes.

    These are all records, and those of `READ`.
    """
    # Purpose of attributes, and start of targets -> whether they are used.
    features = {
        (_IN_SLEEP, "vllm.device_allocator"): device_type != "cpu",
        (_OF_LORAS, "vllm.lora."): with_lora,
        (_OF_ROUTES, _ROUTES): with_routes,
    }
    unused = [feature for feature, is_used in features.items() if not is_used]
    for record in (*internal_names(), *_attributes(READ)):
        is_unused = any(
            record.reason == purpose or record.target.startswith(start) for purpose, start in unused
        )
        # Importing a module for CPUs only disables parts of `torch.cuda`.
        is_for_cpu = ".cpu_" in record.target.partition(":")[0]
        if not is_unused and (device_type == "cpu" or not is_for_cpu):
            yield from record.problems()


def missing_for_servers() -> list[str]:
    """Return descriptions of missing names that servers need; imports little but vLLM's core."""
    records = _attributes({_OF_SERVERS: READ[_OF_SERVERS]})
    return [problem for record in records for problem in record.problems()]


def _attributes(read: Attributes) -> list[Internal]:
    return [
        Internal(owner, purpose, attributes=names)
        for purpose, owners in read.items()
        for owner, names in owners.items()
    ]


def internal_names() -> Iterator[Internal]:
    for value in globals().copy().values():
        values = value.values() if isinstance(value, dict) else (value,)
        records = value if isinstance(value, tuple) else values
        yield from (record for record in records if isinstance(record, Internal))


# -- parts of an engine ----------------------------------------------------------------------------


def core_of(llm: Any) -> Any:
    """Return vLLM's `EngineCore`, which is in this process."""
    return llm.llm_engine.engine_core.engine_core


def worker_of(llm: Any) -> Any:
    return core_of(llm).model_executor.driver_worker.worker


def model_runner_of(llm: Any) -> Any:
    """Return the model runner, which holds the model and its requests."""
    return worker_of(llm).model_runner
