"""What keeps an engine from generating at all, found in vLLM's own configuration before anything is built.

vLLM notices these late: the one when it has loaded the model, the other in the first `generate`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from hybrid_engine.backends.vllm import internals
from hybrid_engine.backends.vllm.version import TESTED_VERSION
from hybrid_engine.errors import Violation

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from hybrid_engine.layouts.parallelism import InferenceParallelism

_MIB = 1024**2
GENERATING_LAYOUT = "use 1 and 1, and tensor or data parallelism instead"


def generation_problem(sizes: InferenceParallelism, device_type: str) -> str | None:
    """Why vLLM could load a model in this layout and not generate with it; None where it can."""
    if device_type != "cpu" or (sizes.pipeline == 1 and sizes.expert == 1):
        return None
    return (
        f"vLLM {TESTED_VERSION} on CPU loads but cannot generate with pipeline parallel size {sizes.pipeline} "
        f"and expert parallel size {sizes.expert}"
    )


def cannot_generate(config: VllmConfig, device_type: str) -> Iterator[Violation]:
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
        problem = f"{available // _MIB} MiB hold {fits:,} tokens, but a sequence may have {length:,} (max_model_len)"
        remedy = f"Use {-(-needed // _MIB)} or more, or lower generate_config.max_model_len"
        yield Violation("generate_config.kv_cache_mb", problem, remedy)
