"""Every name of vLLM's and of torch's that this backend uses though nobody promises it: the list to go through when
vLLM is upgraded. What of theirs is replaced at run time is in patches.py.

`Internal` is a name to import, `Members` are attributes of their objects that other files read by name. Both say why;
tests/hybrid_engine/backends/vllm/test_internals.py looks each up in the installed versions. Nothing is imported before
it is used. vLLM's public names (`LLM`, `SamplingParams`, `ModelRegistry`) are imported where they are needed.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Internal:
    """A class or function.

    Attributes:
        target: "module:attr.path", or a module.
        reason: what it is needed for.
        parameters: those that are passed to it, as it names them.
    """

    target: str
    reason: str
    parameters: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The last part of the target."""
        return self.target.rpartition(":")[2].rpartition(".")[2]

    def load(self) -> Any:
        """What the target names; imports its module."""
        module, _, path = self.target.partition(":")
        found: Any = importlib.import_module(module)
        for attribute in filter(None, path.split(".")):
            found = getattr(found, attribute)
        return found

    def is_type_of(self, instance: object) -> bool:
        """Whether this is the very class of an object, not one that it inherits from; imports nothing."""
        kind = type(instance)
        return f"{kind.__module__}:{kind.__qualname__}" == self.target


@dataclass(frozen=True)
class Members:
    """Attributes of objects of a class, or of a module; some exist in instances only."""

    owner: str
    names: tuple[str, ...]
    reason: str


# -- building an engine ------------------------------------------------------------------------------------------------

ENGINE_ARGS = Internal(
    "vllm.engine.arg_utils:EngineArgs", "Settings are looked at by vLLM before anything is built, on every rank at once"
)
MODEL_ARCHITECTURE = Internal(
    "vllm.model_executor.model_loader.utils:get_model_architecture",
    "Tells the class of a model, to ask whether it takes LoRA",
    ("model_config",),
)
SUPPORTS_LORA = Internal("vllm.model_executor.models:supports_lora", "See MODEL_ARCHITECTURE", ("model",))
PLATFORM = Internal("vllm.platforms:current_platform", "CPU and GPU repack, sleep and share memory differently")
CPU_WORKER = Internal("vllm.v1.worker.cpu_worker:CPUWorker", "Base of the worker that leaves the process as it was")
ROTARY_EMBEDDING = Internal(
    "vllm.model_executor.layers.rotary_embedding.base:RotaryEmbedding", "Found in a model to mend its CPU kernel"
)
MISSING_LAYERS = Internal(
    "vllm.model_executor.models.utils:_model_to_pp_missing_layer_names",
    "Layers that a model lacks, by its address in memory, where another model may come to lie",
)
PARALLEL_STATE = Internal("vllm.distributed.parallel_state", "vLLM's own shutdown would end the caller's groups too")
DISABLE_ENVS_CACHE = Internal("vllm.envs:disable_envs_cache", "The next engine has another environment")

# -- loading -----------------------------------------------------------------------------------------------------------

BASE_LOADER = Internal(
    "vllm.model_executor.model_loader.base_loader:BaseModelLoader",
    "Base of the loader that traces; calls its load_weights between construction and post-load processing",
    ("load_config",),
)
DEFAULT_LOADER = Internal(
    "vllm.model_executor.model_loader.default_loader:DefaultModelLoader",
    "vLLM's own load of a checkpoint, to compare with",
    ("load_config",),
)
REGISTER_LOADER = Internal(
    "vllm.model_executor.model_loader:register_model_loader", "Makes ours a load format", ("load_format",)
)
LOADERS = Internal(
    "vllm.model_executor.model_loader:_LOAD_FORMAT_TO_MODEL_LOADER", "Tells whether it is registered already"
)
CURRENT_CONFIG = Internal(
    "vllm.config:set_current_vllm_config",
    "Layers and their post-load processing ask for the current configuration",
    ("vllm_config",),
)
DEFAULT_DTYPE = Internal(
    "vllm.utils.torch_utils:set_default_torch_dtype", "A second model is constructed as vLLM does it", ("dtype",)
)

# -- weights -----------------------------------------------------------------------------------------------------------

QUANTIZE_METHOD = Internal(
    "vllm.model_executor.layers.quantization.base_config:QuantizeMethodBase",
    "Whose process_weights_after_loading vLLM calls, so that it can be called again",
)
DENSE_METHODS = (
    Internal("vllm.model_executor.layers.linear:UnquantizedLinearMethod", "Live on GPU; repeatable on CPU"),
    Internal(
        "vllm.model_executor.layers.vocab_parallel_embedding:UnquantizedEmbeddingMethod",
        "Live on GPU; repeatable on CPU",
    ),
    Internal(
        "vllm.model_executor.layers.fused_moe.router.gate_linear:_GateLinearMethod", "Live on GPU; repeatable on CPU"
    ),
)
"""Methods whose weights stay live storage on GPU and whose processing can be repeated on CPU."""

EXPERT_METHODS = (
    Internal(
        "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method:UnquantizedFusedMoEMethod",
        "Repeatable on CPU; live on GPU with a kernel that takes the loader's layout",
    ),
)
"""Methods of expert layers."""

ONLINE_METHODS = {
    "cpu": (
        Internal(
            "vllm.model_executor.layers.quantization.online.fp8:Fp8PtpcOnlineLinearMethod",
            "fp8_per_channel: quantises what was loaded, and can do so again",
        ),
    )
}
"""Device type -> methods that quantise while loading, those of `QUANTIZATIONS`."""

LOADER_LAYOUT_KERNELS = ("TRITON", "BATCHED_TRITON")
"""Expert kernels on GPU that compute with the loader's layout; of `UnquantizedMoeBackend`."""

MOE_BACKENDS = Internal(
    "vllm.model_executor.layers.fused_moe.oracle.unquantized:UnquantizedMoeBackend", "Names LOADER_LAYOUT_KERNELS"
)
IS_DEFERRED_ATTENTION = Internal(
    "vllm.model_executor.layers.attention:is_deferred_attention_layer",
    "Finds the layers that derive something from weights inside them (MLA)",
    ("layer",),
)
VOCABULARY_EMBEDDING = Internal(
    "vllm.model_executor.layers.vocab_parallel_embedding:VocabParallelEmbedding", "Tells which rows are padding"
)
LAYERWISE_INFO = Internal(
    "vllm.model_executor.model_loader.reload.layerwise:get_layerwise_info",
    "What a layer that is quantised while loading keeps until then",
    ("layer",),
)
ORIGINAL_LOADER = Internal(
    "vllm.model_executor.model_loader.reload.layerwise:_get_original_loader",
    "Its weights are loaded by the unwrapped loader, for processing is ours to run",
    ("tensor",),
)
MATERIALIZE_LAYER = Internal(
    "vllm.model_executor.model_loader.reload.meta:materialize_layer",
    "Takes such a layer's weights off the meta device",
    ("layer", "info"),
)
DISPATCH_MODE = Internal("torch.utils._python_dispatch:TorchDispatchMode", "Sees every operation of a loader")
TREE_LEAVES = Internal("torch.utils._pytree:tree_leaves", "Finds the tensors among an operation's arguments", ("tree",))
MAKE_SUBCLASS = Internal("torch:Tensor._make_subclass", "Makes a parameter of vLLM's class without its constructor")

# -- LoRA --------------------------------------------------------------------------------------------------------------

LORA_REQUEST = Internal(
    "vllm.lora.request:LoRARequest",
    "Names the LoRA of a request",
    ("lora_name", "lora_int_id", "lora_path"),
)
LORA_MODEL = Internal(
    "vllm.lora.lora_model:LoRAModel.from_lora_tensors",
    "Makes vLLM's own LoRA from tensors in place of files",
    ("lora_model_id", "tensors", "peft_helper", "device", "dtype", "model_vocab_size", "weights_mapper"),
)
PEFT_HELPER = Internal(
    "vllm.lora.peft_helper:PEFTHelper.from_dict", "Carries rank, alpha and modules", ("config_dict",)
)

# -- attributes of their objects ---------------------------------------------------------------------------------------

MEMBERS = (
    Members("vllm:LLM", ("llm_engine",), "The way to everything below"),
    Members(
        "vllm.v1.engine.llm_engine:LLMEngine",
        ("engine_core", "output_processor", "model_executor", "model_config", "should_execute_dummy_batch"),
        "The way to core and worker; a failed step must leave no dummy batch to execute",
    ),
    Members(
        "vllm.v1.engine.core_client:InprocClient",
        ("engine_core", "_finalizer"),
        "At collection or exit the finalizer would end the default process group, which is the caller's",
    ),
    Members(
        "vllm.v1.engine.core:EngineCore",
        ("scheduler", "model_executor", "structured_output_manager", "batch_queue", "abort_requests"),
        "Aborting a failed call's requests; ending an engine part by part",
    ),
    Members(
        "vllm.v1.engine.output_processor:OutputProcessor",
        ("request_states", "parent_requests", "external_req_ids"),
        "Emptied after a failed call: its own abort may raise when an interruption left them in disagreement",
    ),
    Members(
        "vllm.v1.core.sched.scheduler:Scheduler",
        ("requests", "finished_req_ids", "kv_cache_manager", "shutdown"),
        "Which requests are left; telling the runner of those that ended",
    ),
    Members("vllm.v1.core.kv_cache_manager:KVCacheManager", ("block_pool",), "Which blocks are in use"),
    Members("vllm.v1.core.block_pool:BlockPool", ("num_gpu_blocks", "get_num_free_blocks"), "Which blocks are in use"),
    Members("vllm.v1.structured_output:StructuredOutputManager", ("clear_backend",), "Ending an engine part by part"),
    Members("vllm.v1.executor.uniproc_executor:UniProcExecutor", ("driver_worker",), "The way to the worker"),
    Members("vllm.v1.worker.worker_base:WorkerWrapperBase", ("worker",), "The way to the worker"),
    Members(
        "vllm.v1.worker.cpu_worker:CPUWorker", ("model_runner", "init_device", "load_model"), "The way to the model"
    ),
    Members("vllm.v1.worker.gpu_worker:Worker", ("model_runner",), "The way to the model"),
    Members(
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner",
        ("model", "requests", "execute_model_state", "lora_manager"),
        "Requests of a failed call are forgotten here too",
    ),
    Members("vllm.v1.worker.gpu.model_runner:GPUModelRunner", ("req_states",), "The same of vLLM's second runner"),
    Members("vllm.v1.worker.gpu.states:RequestState", ("req_id_to_index",), "The same of vLLM's second runner"),
    Members(
        "vllm.lora.worker_manager:WorkerLoRAManager",
        ("lora_config", "vocab_size", "_adapter_manager", "remove_adapter", "remove_all_adapters"),
        "Holds the LoRAs of a worker",
    ),
    Members(
        "vllm.lora.model_manager:LoRAModelManager",
        ("model", "packed_modules_mapping", "supported_lora_modules"),
        "Which modules can have LoRA, and what vLLM calls them",
    ),
    Members(
        "vllm.distributed.parallel_state",
        ("_WORLD", "_NODE_COUNT", "destroy_model_parallel", "init_distributed_environment"),
        "destroy_distributed_environment would end the default process group too",
    ),
    Members(
        "vllm.model_executor.layers.fused_moe.fused_moe_method_base:FusedMoEMethodBase",
        ("moe_kernel", "moe_quant_config"),
        "With a kernel in place vLLM takes an expert layer's weights for prepacked ones",
    ),
    Members(
        "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method:UnquantizedFusedMoEMethod",
        ("unquantized_backend",),
        "Which kernel",
    ),
    Members(
        "vllm.model_executor.layers.quantization.base_config:QuantizeMethodBase",
        ("process_weights_after_loading", "uses_meta_device"),
        "Post-load processing; whether weights are quantised while they are loaded",
    ),
    Members(
        "vllm.model_executor.layers.linear:LinearBase", ("update_param_tp_status",), "Follows post-load processing"
    ),
    Members(
        "vllm.model_executor.layers.vocab_parallel_embedding:VocabParallelEmbedding", ("shard_indices",), "Padding"
    ),
    Members(
        "vllm.model_executor.layers.vocab_parallel_embedding:VocabParallelEmbeddingShardIndices",
        ("num_org_elements", "num_org_elements_padded", "num_added_elements", "num_elements_padded"),
        "Padding",
    ),
    Members("torch:UntypedStorage", ("_cdata",), "Identity of a storage, also on the meta device"),
    Members("torch:_ops.OpOverload", ("_schema",), "Which operations change their arguments"),
)


def core_of(llm: Any) -> Any:
    """vLLM's `EngineCore`, which is in this process."""
    return llm.llm_engine.engine_core.engine_core


def model_runner_of(llm: Any) -> Any:
    """What holds the model and the requests in it."""
    return core_of(llm).model_executor.driver_worker.worker.model_runner


def storage_key(tensor: Any) -> int:
    """Identity of a tensor's storage while it lives; equal for all views, also on the meta device."""
    return tensor.untyped_storage()._cdata
