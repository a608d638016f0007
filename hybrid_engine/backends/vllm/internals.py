"""Every name of vLLM's and torch's that this backend uses or replaces though nobody promises it, each with the reason.

    LOADERS.load()                      `Internal`: a name to import, at its first use
    READ                                attributes of their objects, which other files read by name
    ASKED_FOR                           those that older versions lack: other files look whether they are there
    with NEW_GROUP.replaced(build):     `Replacement`: a name that is replaced, for a while

This is the list to go through when vLLM is upgraded; `require_names` looks each name up before an engine is built. What
vLLM exports (in an `__all__`) is imported where it is needed.
"""

from __future__ import annotations

import contextlib
import dis
import importlib
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch

from hybrid_engine.backends.vllm.version import ACCEPTED_VERSIONS, TESTED_VERSION, installed
from hybrid_engine.errors import DependencyError, StateError
from hybrid_engine.ranks.torch_internals import PrivateName

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Internal(PrivateName):
    """A private name that is imported when it is used.

    Attributes:
        keywords: parameters that are passed to it by name.
        otherwise: the target that serves in a vLLM without it.
    """

    keywords: tuple[str, ...] = ()
    otherwise: str = ""

    def load(self) -> Any:
        module, _, path = self.target.partition(":")
        try:
            return _find(module, path.split("."))
        except (ImportError, AttributeError):
            if not self.otherwise:
                raise
            return Internal(self.otherwise, self.reason).load()

    @property
    def is_for_cpu(self) -> bool:
        """Whether its module is for vLLM's CPU platform alone; the worker's disables parts of `torch.cuda`."""
        return ".cpu_" in self.target.partition(":")[0]

    def is_type_of(self, instance: object) -> bool:
        """Whether this is the very class of an object, not one that it inherits from; imports nothing."""
        kind = type(instance)
        return f"{kind.__module__}:{kind.__qualname__}" == self.target


@dataclass(frozen=True)
class Replacement(Internal):
    """A private name that is replaced for a while.

    Attributes:
        remove_when: the condition under which it may go.
    """

    remove_when: str = ""

    @property
    def targets(self) -> tuple[str, ...]:
        """The target, and the one that serves in its place in other versions."""
        return (self.target, self.otherwise) if self.otherwise else (self.target,)

    @contextlib.contextmanager
    def replaced(self, build: Callable[[Any], Any], owner: Any = None) -> Iterator[None]:
        """Within this context the target is `build(original)`; with an `owner`, in this object alone.

        Raises DependencyError for a missing target, before anything changes. Contexts nest. What somebody else put in
        its place meanwhile stays there: StateError, unless the block ends by an error of its own.
        """
        owner, name, original = self._place(self.target, owner)
        replacement, is_inherited = build(original), name not in vars(owner)
        setattr(owner, name, replacement)
        try:
            yield
            if vars(owner).get(name) is not replacement:
                raise StateError(f"{self.target} was replaced by somebody else meanwhile: it is left to them")
        finally:
            if vars(owner).get(name) is replacement:
                delattr(owner, name) if is_inherited else setattr(owner, name, original)

    def _place(self, target: str, owner: Any) -> tuple[Any, str, Any]:
        """Return the object that has the target as an attribute, the attribute's name, and the attribute."""
        module, _, path = target.partition(":")
        *owners, name = path.split(".")
        try:
            place = _find(module, owners) if owner is None else owner
            return place, name, getattr(place, name)
        except (ImportError, AttributeError) as error:
            if self.otherwise and target != self.otherwise:
                return self._place(self.otherwise, owner)
            raise DependencyError(f"{self.target} is missing: not as in vLLM {TESTED_VERSION}") from error


def _find(module: str, path: Sequence[str]) -> Any:
    return reduce(getattr, filter(None, path), importlib.import_module(module))


_LAYERS, _LOADING, _V1 = "vllm.model_executor.layers", "vllm.model_executor.model_loader", "vllm.v1"

# -- names to import ---------------------------------------------------------------------------------------------------

ASYNC_LLM = Internal(f"{_V1}.engine.async_llm:AsyncLLM", "is the engine of a server that is an actor")
OUTPUT_KIND = Internal("vllm.sampling_params:RequestOutputKind", "asks such a server for whole completions alone")
ENGINE_CORE = Internal(f"{_V1}.engine.core:EngineCore", "is where a server's requests are held until it has weights")
ENGINE_MESSAGES = Internal(f"{_V1}.engine", "has the messages between a server's core and its clients")
UNPAUSED = Internal(
    f"{_V1}.core.sched.interface:PauseState.UNPAUSED", "lets a paused server compute what its trainers compare"
)
# the first that is looked up: its module replaces names that others import
CPU_WORKER = Internal(f"{_V1}.worker.cpu_worker:CPUWorker", "is the base of the worker that leaves the process alone")
ROPES = Internal(
    f"{_LAYERS}.rotary_embedding:_ROPE_DICT",
    "may hold another engine's rotary embeddings; see ROTATE. Those of a model without memory go with it",
)
MISSING_LAYERS = Internal(
    "vllm.model_executor.models.utils:_model_to_pp_missing_layer_names",
    "remembers layers that a model lacks by its address in memory, where another model may come to lie",
)
CPU_HEAD_SIZES = Internal(
    f"{_V1}.attention.backends.cpu_attn:CPUAttentionBackend.get_supported_head_sizes",
    "tells which sizes of heads attention on CPU has kernels for: others fail in the first generate",
)
MLA_HEAD_SIZES = Internal(
    f"{_LAYERS}.attention.mla_attention:MLACommonBackend.get_supported_head_sizes",
    "tells the same of latent attention",
)
LENGTH_LIMITS = Internal(
    "vllm.transformers_utils.model_arch_config_convertor:ModelArchConfigConvertorBase.derive_max_model_len_and_key",
    "reads keys of all families that limit the length of sequences, and change nothing that is computed",
)
ALLOCATOR_CONFIG = Internal("vllm.device_allocator.alloc_conf", "tells how torch's allocator is configured now")
CUMEM_LIBRARY = Internal("vllm.device_allocator.cumem:lib_name", "is the extension that keeps the error of a call")
TRANSFER_ENGINE = Internal(
    "vllm.distributed.weight_transfer.base:WeightTransferEngine", "is the base of what a worker is told of weights by"
)
INIT_INFO = Internal("vllm.distributed.weight_transfer.base:WeightTransferInitInfo", "is what such a class must name")
UPDATE_INFO = Internal("vllm.distributed.weight_transfer.base:WeightTransferUpdateInfo", "is the other such class")
INIT_REQUEST = Internal(
    "vllm.distributed.weight_transfer.base:WeightTransferInitRequest", "is what an AsyncLLM is called with"
)
UPDATE_REQUEST = Internal(
    "vllm.distributed.weight_transfer.base:WeightTransferUpdateRequest", "is what an AsyncLLM is called with"
)
WORLD_GROUP = Internal("vllm.distributed.parallel_state:get_world_group", "is the group of a server's workers")
PAUSED = Internal("vllm.v1.core.sched.interface:PauseState.PAUSED_ALL", "is how a scheduler holds all requests")
MEM_ALLOCATOR = Internal(
    "vllm.device_allocator:get_mem_allocator_instance", "knows the segments in which weights sleep"
)
CUMEM_ALLOCATOR = Internal(
    "vllm.device_allocator.cumem:CuMemAllocator", "has memory of an earlier engine in this process, or none"
)
CREATE_AND_MAP = Internal("vllm.device_allocator.cumem:create_and_map", "gives one of them memory again")
SLEEP_BACKEND = Internal(
    "vllm.device_allocator.sleep_mode_backend:CuMemBackend", "is the way of sleeping that has such segments"
)
CUSTOM_OPS = Internal("vllm._custom_ops", "exchanges the addresses of buffers in captured graphs")
KERNELS = Internal(
    "vllm._custom_ops:torch.ops._C",
    "has init_shm_manager where CPU ranks exchange tensors through shared memory: vLLM asks the same",
)
PARALLEL_STATE = Internal("vllm.distributed.parallel_state", "its own shutdown would end the caller's groups too")
DISABLE_ENVS_CACHE = Internal("vllm.envs:disable_envs_cache", "lets the next engine have another environment")
LOADERS = Internal(f"{_LOADING}:_LOAD_FORMAT_TO_MODEL_LOADER", "has our load format while an engine is built")
LAYER_NUMBER = Internal(
    "vllm.model_executor.models.utils:extract_layer_index", "reads the number of a layer off its prefix"
)
INITIALIZE_MODEL = Internal(
    f"{_LOADING}.utils:initialize_model",
    "constructs a model without its weights",
    keywords=("vllm_config", "model_config"),
)
DEFAULT_DTYPE = Internal("vllm.utils.torch_utils:set_default_torch_dtype", "is what vLLM constructs a model in")
QUANTIZE_METHOD = Internal(
    f"{_LAYERS}.quantization.base_config:QuantizeMethodBase",
    "is the class of what processes a layer's weights after loading, so that it can be called again",
)
VOCABULARY_EMBEDDING = Internal(
    f"{_LAYERS}.vocab_parallel_embedding:VocabParallelEmbedding", "tells which rows are padding"
)
LAYERWISE_INFO = Internal(
    f"{_LOADING}.reload.layerwise:get_layerwise_info", "holds what a layer that is quantised while loading keeps for it"
)
RELOADING_NOTES = Internal(
    f"{_LOADING}.reload.layerwise:LAYERWISE_INFO", "has notes on every layer, some of which keep their layer alive"
)
ORIGINAL_LOADER = Internal(
    f"{_LOADING}.reload.layerwise:_get_original_loader", "loads such a layer's weights without processing them"
)
MATERIALIZE_LAYER = Internal(f"{_LOADING}.reload.meta:materialize_layer", "takes its weights off the meta device")
CLIENT_ERROR = Internal(
    "vllm.exceptions:VLLMClientError",
    "is raised of requests that cannot be, in adding them",
    otherwise="builtins:ValueError",
)
CACHED_TOKENIZER = Internal(
    "vllm.tokenizers.hf:get_cached_tokenizer", "gives a tokenizer of transformers what vLLM reads of its own"
)
DISPATCH_MODE = Internal("torch.utils._python_dispatch:TorchDispatchMode", "sees every operation of a loader")
TREE_LEAVES = Internal(
    "torch.utils._pytree:tree_leaves", "finds the tensors among an operation's arguments, and in a layer's cache"
)
MAKE_SUBCLASS = Internal("torch:Tensor._make_subclass", "makes a parameter of vLLM's class without its constructor")
LORA_REQUEST = Internal("vllm.lora.request:LoRARequest", "names the LoRA of a request")
LORA_MODEL = Internal(
    "vllm.lora.lora_model:LoRAModel.from_lora_tensors",
    "makes vLLM's own LoRA from tensors in place of files",
    keywords=("device", "dtype", "model_vocab_size", "weights_mapper"),
)
PEFT_HELPER = Internal("vllm.lora.peft_helper:PEFTHelper.from_dict", "carries a LoRA's rank, alpha and modules")
MODULE_RANKS = Internal(
    "vllm.lora.peft_helper:PEFTHelper.get_rank_and_scaling",
    "heeds ranks and alphas of single modules; a vLLM without it drops them silently",
)

# -- how weights are processed after loading (weights/postload.py) ------------------------------------

ATTENTION_LAYERS = Internal(f"{_LAYERS}.attention", "tells which layers are processed after all others")
EXPERTS_METHOD = Internal(
    f"{_LAYERS}.fused_moe.fused_moe_method_base:FusedMoEMethodBase", "takes another kernel by moe_backend"
)
NOT_ENTERED = (
    Internal(
        f"{_LAYERS}.fused_moe.modular_kernel:FusedMoEPrepareAndFinalize",
        "carries activations between ranks, and holds buffers for them but no weights",
    ),
    Internal(f"{_LAYERS}.quantization.base_config:QuantizationConfig", "says how, and is shared by all layers"),
)
GROUP_CHANNELS = ("cpu_group", "device_group", "device_communicator", "mq_broadcaster")
"""Attributes of vLLM's groups through which ranks communicate (weights/processing_barrier.py)."""
PACKED_HANDLE = Internal(
    "vllm._custom_ops:CPUDNNLGEMMHandler", "its one tensor is the address of a packed copy, which oneDNN keeps"
)
ARGUMENT_PARSER = Internal(
    "vllm.utils.argparse_utils:FlexibleArgumentParser", "reads the command line of `certify` as `vllm serve` does"
)
PACKED_PRODUCT = Internal("vllm._custom_ops:onednn_mm", "reads such a copy: `certify` multiplies it by unit vectors")

# -- attributes that are read by name ----------------------------------------------------------------------------------

_IN_SLEEP = "let weights and KV cache sleep on a device, and wake segment by segment"
_OF_SERVERS = "let a server's requests wait, and its workers get weights"
_OF_LORAS = "hold the LoRAs of a worker, and say which modules can have one"

READ: dict[str, dict[str, tuple[str, ...]]] = {
    "lead from an LLM to its core, its worker and that one's model runner": {
        "vllm:LLM": ("llm_engine",),
        f"{_V1}.engine.llm_engine:LLMEngine": ("engine_core", "model_config"),
        f"{_V1}.engine.core_client:InprocClient": ("engine_core",),
        f"{_V1}.engine.core:EngineCore": ("scheduler", "model_executor"),
        f"{_V1}.executor.uniproc_executor:UniProcExecutor": ("driver_worker",),
        f"{_V1}.worker.worker_base:WorkerWrapperBase": ("worker",),
        f"{_V1}.worker.cpu_worker:CPUWorker": ("distributed_init_method", "init_device", "load_model", "model_runner"),
        f"{_V1}.worker.gpu_worker:Worker": ("model_runner",),
        f"{_V1}.worker.gpu_model_runner:GPUModelRunner": ("model",),
        f"{_V1}.worker.gpu.model_runner:GPUModelRunner": ("model",),
    },
    "hold what a call that failed half-way left, which vLLM's own abort may refuse to clear": {
        f"{_V1}.engine.llm_engine:LLMEngine": ("output_processor", "should_execute_dummy_batch"),
        f"{_V1}.engine.output_processor:OutputProcessor": ("request_states", "parent_requests", "external_req_ids"),
        f"{_V1}.engine.core:EngineCore": ("batch_queue", "abort_requests"),
        f"{_V1}.core.sched.scheduler:Scheduler": ("requests", "finished_req_ids", "kv_cache_manager"),
        f"{_V1}.core.kv_cache_manager:KVCacheManager": ("block_pool",),
        f"{_V1}.core.block_pool:BlockPool": ("num_gpu_blocks", "get_num_free_blocks"),
        f"{_V1}.worker.gpu_model_runner:GPUModelRunner": ("requests", "execute_model_state"),
        f"{_V1}.worker.gpu.model_runner:GPUModelRunner": ("req_states", "execute_model_state"),
        f"{_V1}.worker.gpu.states:RequestState": ("req_id_to_index",),
    },
    "have the tokenizer of a request that needs one": {
        f"{_V1}.engine.llm_engine:LLMEngine": ("renderer", "output_processor"),
        "vllm.renderers.base:BaseRenderer": ("tokenizer",),
        f"{_V1}.engine.output_processor:OutputProcessor": ("tokenizer",),
        f"{_V1}.structured_output:StructuredOutputManager": ("tokenizer",),
    },
    "end an engine part by part, for vLLM's own way ends the caller's default process group too": {
        f"{_V1}.engine.core:EngineCore": ("structured_output_manager",),
        f"{_V1}.structured_output:StructuredOutputManager": ("clear_backend",),
        f"{_V1}.core.sched.scheduler:Scheduler": ("shutdown",),
        PARALLEL_STATE.target: ("_WORLD", "_NODE_COUNT", "destroy_model_parallel"),
    },
    _IN_SLEEP: {
        f"{_V1}.worker.gpu_worker:Worker": (
            *("sleep", "wake_up", "discard", "sleep_mode_backend", "_sleep_saved_parameters", "get_draft_model"),
        ),
        f"{_V1}.executor.abstract:Executor": ("discard",),
        "vllm.device_allocator.sleep_mode_backend:CuMemBackend": ("suspend", "discard"),
        "vllm.device_allocator:AllocationData": ("handle", "is_asleep"),
        "vllm.device_allocator.cumem:CuMemAllocator": (
            *("get_instance", "python_free_callback", "pointer_to_data", "allocator_and_pools", "get_current_usage"),
        ),
        ALLOCATOR_CONFIG.target: ("current_alloc_conf", "conf_flag_enabled", "EXPANDABLE_SEGMENTS"),
    },
    _OF_SERVERS: {
        TRANSFER_ENGINE.target: ("start_weight_update", "finish_weight_update", "update_weights"),
        f"{_V1}.engine.core:EngineCore": (
            *("collective_rpc", "resume_scheduler", "sleep", "add_lora", "is_scheduler_paused"),
            *("model_executor", "_initialize_kv_caches", "batch_queue", "_reset_caches", "add_request"),
            *("abort_requests", "preprocess_add_request", "step_fn", "scheduler", "vllm_config"),
        ),
        f"{_V1}.engine.core:EngineCoreProc": ("output_queue",),
        f"{_V1}.core.sched.scheduler:Scheduler": (
            *("running", "waiting", "requests", "set_pause_state", "pause_state", "add_request", "has_requests"),
        ),
        "vllm.config:SchedulerConfig": ("get_scheduler_cls",),
    },
    "lead from a server's worker to its receiver": {
        f"{_V1}.worker.gpu_worker:Worker": ("weight_transfer_engine", "_weight_update_active"),
    },
    "say what the attention of a layer computes": {
        f"{ATTENTION_LAYERS.target}:Attention": ("impl", "sliding_window"),
        f"{ATTENTION_LAYERS.target}:MLAAttention": ("impl", "sliding_window", "scale"),
        f"{_LAYERS}.rotary_embedding.base:RotaryEmbeddingBase": ("cos_sin_cache",),
    },
    "hold the KV cache, whatever its kind": {
        f"{_V1}.worker.gpu_model_runner:GPUModelRunner": ("kv_caches", "vllm_config"),
        f"{_V1}.worker.gpu.model_runner:GPUModelRunner": ("kv_caches", "vllm_config"),
        "vllm.config:CompilationConfig": ("static_forward_context",),
    },
    "exchange the addresses of buffers in captured graphs": {
        CUSTOM_OPS.target: ("get_graph_buffer_ipc_meta", "register_graph_buffers"),
    },
    "say what a process group of vLLM's is": {
        f"{PARALLEL_STATE.target}:GroupCoordinator": ("ranks", "rank_in_group", "device_group", "destroy"),
        "vllm.distributed.device_communicators.cpu_communicator:_CPUSHMDistributed": ("group_name",),
    },
    "make groups of coordinators that cannot communicate": {
        PARALLEL_STATE.target: ("GroupCoordinator", "initialize_model_parallel"),
    },
    "let ranks communicate": {f"{PARALLEL_STATE.target}:GroupCoordinator": ("world_size", *GROUP_CHANNELS)},
    _OF_LORAS: {
        f"{_V1}.worker.gpu_model_runner:GPUModelRunner": ("lora_manager", "reset_lora_state"),
        "vllm.lora.worker_manager:WorkerLoRAManager": (
            *("lora_config", "vocab_size", "_adapter_manager", "remove_adapter", "remove_all_adapters"),
        ),
        "vllm.lora.model_manager:LoRAModelManager": ("model", "packed_modules_mapping", "supported_lora_modules"),
        "vllm.model_executor.models.utils:WeightsMapper": ("get_rename_mapper",),
    },
    "let a model's class be registered, not its name": {
        "vllm.model_executor.models.registry:_LazyRegisteredModel": ("module_name", "load_model_cls"),
    },
    "say how weights are processed after loading, and let it be done again": {
        QUANTIZE_METHOD.target: ("process_weights_after_loading", "uses_meta_device"),
        f"{_LOADING}.reload.types:LayerReloadingInfo": ("reset",),
        f"{_LAYERS}.linear:LinearBase": ("update_param_tp_status",),
    },
    "count the rows of padding": {
        VOCABULARY_EMBEDDING.target: ("shard_indices",),
        f"{VOCABULARY_EMBEDDING.target}ShardIndices": (
            *("num_org_elements", "num_org_elements_padded", "num_added_elements", "num_elements_padded"),
        ),
    },
    "tell which operations change their arguments": {"torch:_ops.OpOverload": ("_schema",)},
}
"""What they are read for -> owner, a class or a module -> its attributes; some exist in instances only."""

ASKED_FOR: dict[str, dict[str, tuple[str, ...]]] = {
    "would end the caller's default process group at collection": {
        f"{_V1}.engine.core_client:InprocClient": ("_finalizer",),
    },
    "would change what only trainers change, or says of which version it is": {
        f"{_V1}.engine.core:EngineCore": ("release_kv_cache_memory", "set_weight_version"),
    },
    "tells which attention is processed after all others; else three classes are": {
        ATTENTION_LAYERS.target: ("is_deferred_attention_layer",),
    },
    "hold the KV cache of layers whose class has one": {
        "vllm.model_executor.layers.attention_layer_base:AttentionLayerBase": ("kv_cache",),
    },
}
"""The same of attributes that a version which works may lack."""

# -- names that are replaced -------------------------------------------------------------------------------------------

BUILD_APP = Replacement(
    "vllm.entrypoints.launchers.api_server.entry:build_app",
    "makes a server's HTTP routes, some of which are for whoever has the token alone",
    otherwise="vllm.entrypoints.openai.api_server:build_app",
    remove_when="vLLM's routes for weights authenticate who calls",
)
COMPLETION_ANSWER = Replacement(
    "vllm.entrypoints.openai.completion.serving:OpenAIServingCompletion.request_output_to_completion_response",
    "makes the answer of /v1/completions, which is to say of which weights it is",
    remove_when="the answer has weight_versions, as that of /inference/v1/generate",
)
AWAIT_READERS = Replacement(
    "vllm.distributed.device_communicators.shm_broadcast:MessageQueue.wait_until_ready",
    "is where all have mapped a queue in shared memory, whose name can go so that nothing stays of a killed server",
    remove_when="vLLM unlinks it itself",
)
MAKE_GROUP = Replacement(
    "vllm.distributed.parallel_state:init_model_parallel_group",
    "makes groups of the ranks that take the listed positions, and without a queue in shared memory",
    keywords=("use_message_queue_broadcaster",),
    remove_when="vLLM takes an order of ranks, and makes no queue for ranks that never broadcast objects",
)
LOAD_MODEL = Replacement(
    "vllm.v1.worker.gpu_worker:Worker.load_model",
    "takes all that it allocates from memory that sleeps, on whatever stream vLLM has made the current one",
    remove_when="torch takes its workspaces from no memory pool",
)
SLEEPS_COLLECTOR = Replacement(
    "vllm.device_allocator.cumem:gc",
    "collects garbage among all objects of the process whenever vLLM goes to sleep or wakes up",
    remove_when="vLLM collects garbage only where memory is short",
)
NEW_GROUP = Replacement(
    "torch.distributed:new_group",
    "counts the members of vLLM's process groups as listed; torch sorts them, and gathers come in that order",
    # torch 2.11 has no sort_ranks: see `isolation.can_list_ranks`
    remove_when="vLLM passes sort_ranks=False",
)
REGISTER_GRAPH_BUFFERS = Replacement(
    "vllm.distributed.device_communicators.custom_all_reduce:CustomAllreduce.register_graph_buffers",
    "receives the addresses in captured graphs in the group's own order; vLLM's receives them in that of sorted ranks",
    remove_when="vLLM does not sort the group's ranks there",
)
GROUP_ATTRIBUTE = Replacement(
    "vllm.distributed.parallel_state:GroupCoordinator.__getattribute__",
    "sees whether ranks communicate while weights are processed after loading: they take a channel of their group",
    remove_when="vLLM says which methods do",
)
SHARE_MEMORY = Replacement(
    "vllm.distributed.device_communicators.cpu_communicator:_CPUSHMDistributed._init_cpu_shm",
    "takes the name of shared memory away once all have mapped it, so that nothing stays when all ranks are killed",
    remove_when="vLLM unlinks it itself",
)
ROTATE = Replacement(
    f"{_LAYERS}.rotary_embedding.base:RotaryEmbedding.forward_cpu",
    "gives the CPU kernel rows: it rotates the wrong elements of queries [tokens, heads, elements], as MLA passes them",
    remove_when="the kernel follows strides",
)
STEP = Replacement(
    f"{_V1}.engine.llm_engine:LLMEngine.step",
    "tells how many sequences are left before each step, in one engine and during one call",
    remove_when="LLM.generate reports it",
)
LOAD_LORA = Replacement(
    "vllm.lora.worker_manager:WorkerLoRAManager._load_adapter",
    "takes a LoRA from memory, in the one place in which a worker reads its directory",
    remove_when="vLLM's requests carry tensors",
)

# -- whether they are there -------------------------------------------------------------------------------------------


def require_names(device_type: str, *, with_lora: bool = True) -> None:
    """Look for every private name of vLLM and torch that is used, before an engine is built; imports their modules.

    Args:
        device_type: vLLM's name for the platform: on "cpu" nothing sleeps, elsewhere modules for the CPU are left out.
        with_lora: also those without which there is no LoRA.

    Raises DependencyError naming all that are missing, each with what it is for.
    """
    refuse_lacking([*missing_names(device_type, with_lora=with_lora)])


def refuse_lacking(lacking: Sequence[str]) -> None:
    """Raise DependencyError, unless nothing is lacking."""
    if lacking:
        versions = ", ".join(
            f"{name} {version}" for name, version in {**installed(), "torch": torch.__version__}.items()
        )
        lines = "\n".join(f"  - {line}" for line in lacking)
        raise DependencyError(
            f"{versions} lack {len(lacking)} of the private names that are used of them:\n{lines}\n"
            f"Install vLLM {' or '.join(ACCEPTED_VERSIONS)}"
        )


def missing_names(device_type: str, *, with_lora: bool = True) -> Iterator[str]:
    """Describe each record of this module that does not load or takes other keywords, and each missing attribute of
    `READ`."""
    for record, names in [*((each, ()) for each in internal_names()), *_attributes(READ)]:
        if device_type == "cpu" and (record.reason == _IN_SLEEP or record.target.startswith("vllm.device_allocator")):
            continue
        if device_type != "cpu" and record.is_for_cpu:
            continue
        if not with_lora and (record.reason == _OF_LORAS or record.target.startswith("vllm.lora.")):
            continue
        yield from _problems(record, names)


def missing_for_servers() -> list[str]:
    """The same of what vLLM's calls go through in a server's processes; imports little beside its core."""
    return [
        each for record, names in _attributes({_OF_SERVERS: READ[_OF_SERVERS]}) for each in _problems(record, names)
    ]


def _attributes(read: Mapping[str, Mapping[str, tuple[str, ...]]]) -> list[tuple[Internal, tuple[str, ...]]]:
    return [(Internal(owner, why), names) for why, each in read.items() for owner, names in each.items()]


def _problems(record: Internal, names: Sequence[str]) -> Iterator[str]:
    try:
        loaded = record.load()
    except (ImportError, AttributeError) as error:
        if isinstance(error, ModuleNotFoundError) and not str(error.name).startswith(("vllm", "torch")):
            logger.warning("%s was not looked up: %s", record.target, error)  # it may not be needed here
            return
        yield f"{record.target}: {error} ({record.reason})"
        return
    lacking = [f".{name} is missing" for name in names if not _has(loaded, name)]
    for keyword in record.keywords:
        if keyword not in inspect.signature(loaded).parameters:
            lacking.append(f" takes no {keyword}")
    yield from (f"{record.target}{problem} ({record.reason})" for problem in lacking)


def internal_names() -> Iterator[Internal]:
    for value in globals().copy().values():
        for each in value if isinstance(value, tuple) else (value,):
            if isinstance(each, Internal):
                yield each


def _has(owner: object, name: str) -> bool:
    """Whether a module or a class has it, or the class's objects do: annotated, or set in one of its methods."""
    if hasattr(owner, name) or not isinstance(owner, type):
        return hasattr(owner, name)
    own = [vars(base) for base in owner.__mro__]
    methods = (inspect.unwrap(each) for space in own for each in space.values() if inspect.isfunction(each))
    return any(name in space.get("__annotations__", ()) for space in own) or any(
        (found.opname, found.argval) == ("STORE_ATTR", name)
        for each in methods
        if name in each.__code__.co_names  # to disassemble all of them takes long
        for found in dis.get_instructions(each)
    )


# -- parts of an engine -----------------------------------------------------------------------------------------------


def core_of(llm: Any) -> Any:
    """vLLM's `EngineCore`, which is in this process."""
    return llm.llm_engine.engine_core.engine_core


def worker_of(llm: Any) -> Any:
    return core_of(llm).model_executor.driver_worker.worker


def model_runner_of(llm: Any) -> Any:
    """What holds the model and the requests in it."""
    return worker_of(llm).model_runner
