"""Code of vLLM's that is relied on for what it does, not only for its name.

Each has the digests of its code in the versions in which it was read, with what the reading found where it differs.
A version whose code has another digest is not wrong, but unread: read it, and add the digest here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_LAYERS, _LOADING, _V1 = "vllm.model_executor.layers", "vllm.model_executor.model_loader", "vllm.v1"
_ALL = "0.31.0 to 0.33.0"


@dataclass(frozen=True)
class Behaviour:
    """A function or a class.

    Attributes:
        target: ``module:attr.path``.
        reason: what is relied on.
        read: digest (`source_reader.digest`) -> the versions that have it, and what the reading found.
    """

    target: str
    reason: str
    read: Mapping[str, str]


_FIRST, _BOTH, _LAST = "0.31.0", "0.31.0, 0.32.0", "0.33.0"
_LATER = "0.32.0, 0.33.0"

BEHAVIOURS = (
    # -- weights after loading: weights/ -------------------------------------------------------------------------------
    Behaviour(
        "vllm.model_executor.utils:replace_parameter",
        "what processing makes of a weight takes its place; held.py and looking.py find it wherever it comes to lie",
        {
            "677a6be7061b": f"{_BOTH}: in a new Parameter, unless it is told to copy",
            "bd7bc9d16e22": f"{_LAST}: in the same Parameter: copied into its memory where shape, stride and dtype are "
            "the same, else `.data` is rebound. Its memory is not lent again while it lives, and of live weights vLLM "
            "gets other Parameters over the same memory (weights/commit.py)",
        },
    ),
    Behaviour(
        f"{_LOADING}.base_loader:BaseModelLoader.load_model",
        "constructs, loads, processes, in this order: the model is traced and looked at in between",
        {"6af1c7f0395d": _FIRST, "0fe895c2e64a": f"{_LATER}: logs times, collects garbage"},
    ),
    Behaviour(
        f"{_LOADING}.utils:process_weights_after_loading",
        "calls every method, then attention: postload.py calls the same of one group",
        {"35b4cc86fe31": _FIRST, "55a33337e20e": f"{_LATER}: takes the time of methods that quantise"},
    ),
    Behaviour(f"{_LOADING}:register_model_loader", "makes our load format known", {"da878c14cbc2": _ALL}),
    Behaviour(f"{_LAYERS}.attention:is_deferred_attention_layer", "which come last", {"f371e471fe43": _ALL}),
    Behaviour(
        f"{_LOADING}.reload.layerwise:initialize_online_processing",
        "leaves weights that are quantised while loading on the meta device, with a loader around theirs",
        {"103c6e630f9c": _ALL},
    ),
    Behaviour(f"{_LOADING}.reload.layerwise:get_layerwise_info", "has what it left", {"adf14de99e68": _ALL}),
    Behaviour(f"{_LOADING}.reload.layerwise:_get_original_loader", "has the one inside", {"c7d70b2d3be3": _ALL}),
    Behaviour(f"{_LOADING}.reload.meta:materialize_layer", "makes them real", {"4b671a8b56d4": _ALL}),
    Behaviour(
        f"{_LOADING}.reload.layerwise:finalize_layerwise_processing",
        "passes over layers whose `LayerReloadingInfo` was reset",
        {"ede2b09fd2d2": _ALL},
    ),
    Behaviour(
        f"{_LAYERS}.linear:UnquantizedLinearMethod",
        "multiplies by the weight that was loaded, in any form: proof.py reads it through the kernel",
        {"756c738011d6": _BOTH, "f7d2b183ea5b": f"{_LAST}: on ROCm rebinds `.data` to a padded copy"},
    ),
    Behaviour(f"{_LAYERS}.vocab_parallel_embedding:UnquantizedEmbeddingMethod", "the same", {"65bd126d17ef": _ALL}),
    Behaviour(
        f"{_LAYERS}.vocab_parallel_embedding:VocabParallelEmbeddingShardIndices",
        "counts rows of padding",
        {"ec0ff4efe5aa": _ALL},
    ),
    Behaviour(
        f"{_LAYERS}.fused_moe.unquantized_fused_moe_method:UnquantizedFusedMoEMethod.process_weights_after_loading",
        "can run again once what it wrote is taken back",
        {"7d295578389a": _ALL},
    ),
    Behaviour(
        f"{_LAYERS}.fused_moe.unquantized_fused_moe_method:UnquantizedFusedMoEMethod._setup_kernel",
        "makes the kernel where `moe_kernel` is None, as derivation.py leaves it",
        {
            "28521aa4cb7c": f"{_BOTH}: copies into the former weights where it is not",
            "c72d25639fb8": f"{_LAST}: leaves that to `replace_parameter`",
        },
    ),
    Behaviour(
        f"{_LAYERS}.attention.mla_attention:MLAAttention.process_weights_after_loading",
        "makes views of `kv_b_proj`'s weight",
        {
            "d80eab4be145": _FIRST,
            "1416944b5976": "0.32.0: what it makes on ROCm is in parameters",
            "9aa613d1dfa0": f"{_LAST}: with AMX the weight's Parameter is left empty, not replaced",
        },
    ),
    Behaviour("vllm._custom_ops:CPUDNNLGEMMHandler", "keeps an address in a tensor", {"453eaad643c4": _ALL}),
    # -- groups and the process: process/ ------------------------------------------------------------------------------
    Behaviour(
        "vllm.distributed.parallel_state:init_model_parallel_group",
        "makes every group but the world's, of lists of positions",
        {"8af4d79972e8": _ALL},
    ),
    Behaviour(
        "vllm.distributed.parallel_state:initialize_model_parallel",
        "counts positions: replica, stage, shard",
        {"da1fab8ff04f": _BOTH, "4eade079b153": f"{_LAST}: another group for the Engram of DeepSeek-V4.1 alone"},
    ),
    Behaviour(
        "vllm.distributed.parallel_state:init_distributed_environment",
        "takes up the caller's default process group",
        {"1b5ff63bf909": _FIRST, "774807c3972e": f"{_LATER}: a store of its own, with other executors than ours"},
    ),
    Behaviour(
        "vllm.distributed.parallel_state:destroy_model_parallel",
        "ends every group but the world's, also a second time",
        {"09d7ca46d835": _BOTH, "7d9abe1761be": f"{_LAST}: the Engram's once, if it is another's"},
    ),
    Behaviour(
        "vllm.distributed.parallel_state:GroupCoordinator.__init__",
        "makes its process groups by `torch.distributed.new_group`",
        {"5ee45826eef7": _BOTH, "a94dd1186f20": f"{_LAST}: keeps the timeout"},
    ),
    Behaviour("vllm.distributed.parallel_state:GroupCoordinator.destroy", "ends them", {"7c699530989f": _ALL}),
    Behaviour(
        "vllm.distributed.device_communicators.custom_all_reduce:CustomAllreduce.register_graph_buffers",
        "is replaced by what gathers in the group's own order",
        {"d9157776418d": _ALL},
    ),
    Behaviour(
        "vllm.distributed.device_communicators.cpu_communicator:_CPUSHMDistributed._init_cpu_shm",
        "ends with a barrier, after which all have mapped the memory",
        {"bf3fa1a72335": _ALL},
    ),
    Behaviour(
        f"{_LAYERS}.rotary_embedding.base:RotaryEmbedding.forward_cpu",
        "returns queries and keys in the form in which it got them",
        {"21a3f232793d": _ALL},
    ),
    Behaviour(
        f"{_V1}.executor.uniproc_executor:ExecutorWithExternalLauncher",
        "has its one worker in this process",
        {
            "335276af5151": _BOTH,
            "56799c6fd4c6": f"{_LAST}: its shutdown ends vLLM's groups, which isolation.py repeats",
        },
    ),
    Behaviour(f"{_V1}.worker.cpu_worker:CPUWorker.init_device", "names shared memory", {"535d4a99660e": _ALL}),
    Behaviour(f"{_V1}.worker.cpu_worker:CPUWorker.load_model", "makes rotary embeddings", {"cb170970f710": _ALL}),
    # -- memory: weights/weight_memory.py, weights/sleeping_segments.py ------------------------------------------------
    Behaviour(
        f"{_V1}.worker.gpu_worker:Worker.sleep",
        "keeps buffers on the host, then suspends",
        {"e9c50bbc817a": _BOTH, "6406bf5b7188": f"{_LAST}: and tells a connector of KV caches"},
    ),
    Behaviour(
        f"{_V1}.worker.gpu_worker:Worker.wake_up",
        "resumes, then writes buffers",
        {"5378df4d5d4a": _BOTH, "2385c52b32a1": f"{_LAST}: and tells a connector of KV caches"},
    ),
    Behaviour(f"{_V1}.engine.core:EngineCore.sleep", "level 0 takes no memory", {"3f88328cf242": _ALL}),
    Behaviour(
        f"{_V1}.engine.core:EngineCore.wake_up",
        "wakes by tags",
        {"44f95d6b6e8f": _BOTH, "cfea568ecfd6": f"{_LAST}: and tells a connector of KV caches"},
    ),
    Behaviour(f"{_V1}.executor.abstract:Executor.discard", "gives memory back by tags", {"72706d5eba3c": _ALL}),
    Behaviour(
        "vllm.device_allocator.sleep_mode_backend:CuMemBackend",
        "suspends whatever is awake",
        {"94a783ca8e2f": _FIRST, "42ed5d6f076d": f"{_LATER}: keeps graphs' memory on the host"},
    ),
    Behaviour(
        "vllm.device_allocator.cumem:CuMemAllocator",
        "keeps a segment's handle, and whether it sleeps",
        {
            "580e1e7589b3": f"{_FIRST}: one pool a tag, the last, which sleeping_segments.py takes too",
            "f40c2ed763dd": "0.32.0: a list of pools",
            "ed7852d557a5": f"{_LAST}: other names for torch's calls",
        },
    ),
    Behaviour("vllm.device_allocator.cumem:create_and_map", "gives a segment memory", {"5578b95cd090": _ALL}),
    Behaviour("vllm.device_allocator.cumem:unmap_and_release", "raises a kept error", {"d6e860b247e1": _ALL}),
    # -- requests and LoRA: requests.py, lora/ -------------------------------------------------------------------------
    Behaviour(
        f"{_V1}.engine.llm_engine:LLMEngine.step",
        "is called by `LLM.generate` for every step",
        {"9059ef0250fb": _FIRST, "e2d7b3129de0": f"{_LATER}: weight versions, caches of images"},
    ),
    Behaviour(f"{_V1}.engine.core:EngineCore.abort_requests", "frees their blocks", {"69a8a5761850": _ALL}),
    Behaviour(
        f"{_V1}.core.block_pool:BlockPool.reset_prefix_cache",
        "refuses while blocks are in use, but for one",
        {"3edfc9dbbb9a": _ALL},
    ),
    Behaviour(
        "vllm.lora.worker_manager:WorkerLoRAManager._load_adapter",
        "is where a worker reads a LoRA",
        {
            "b0f17ee7b3bf": _FIRST,
            "489ee4a37c6e": "0.32.0: checks LoRAs of experts",
            "079271959697": f"{_LAST}: checks heads of classifiers",
        },
    ),
    Behaviour(
        "vllm.lora.lora_model:LoRAModel.from_lora_tensors",
        "scales B by the module's own alpha and rank",
        {"d0fe3cbca400": f"{_FIRST}: by those of the LoRA, see PEFTHelper", "be63dd92d448": _LATER},
    ),
    Behaviour(
        "vllm.lora.peft_helper:PEFTHelper",
        "takes ranks and alphas of single modules",
        {
            "b40b03055e96": f"{_FIRST}: drops them silently: delivered_loras.py refuses such LoRAs",
            "581fe03901dc": _LATER,
        },
    ),
    Behaviour(
        "vllm.model_executor.models.registry:_LazyRegisteredModel",
        "imports the class in this process",
        {"784e59d47e36": _ALL},
    ),
)
