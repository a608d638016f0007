"""What the colocated engine can be told, and what it answers; plain data, no vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hybrid_engine.errors import ConfigError, Violation


@dataclass(frozen=True)
class InferenceSettings:
    """How vLLM is built in the ranks that train.

    World size must be `data_parallel_size * pipeline_parallel_size * tensor_parallel_size`; global rank r is then
    `tp_rank = r % tp`, `pp_rank = r // tp % pp`, `dp_rank = r // (tp * pp)`.

    Attributes:
        model_dir: directory with `config.json` of the model; weights in it are not read.
        dtype: of the weights and activations: "bfloat16", "float16" or "float32".
        enable_expert_parallel: whole experts per rank instead of a slice of each; data-parallel replicas then share
            the experts and step together.
        max_model_len: longest prompt plus completion, in tokens; None takes the model's.
        max_num_seqs: sequences that are decoded together.
        seed: of the sampler; replica d draws with seed + d, all ranks of a replica alike.
        enforce_eager: no graph capture and no compilation; None means True on CPU and False on GPU.
        kv_cache_bytes: size of this rank's KV cache; None means 256 MiB on CPU and, on GPU, what
            `gpu_memory_utilization` leaves.
        gpu_memory_utilization: share of the device that vLLM may use while it generates.
        enable_sleep_mode: let weights and KV cache be given back on GPU; None means True on GPU. No effect on CPU.
        enable_prefix_caching: share KV cache among prompts with the same beginning.
        log_level: vLLM's own log messages below this level are not shown.
        extra: further keyword arguments of `vllm.LLM`, which win.
    """

    model_dir: str
    dtype: str = "bfloat16"
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    enable_expert_parallel: bool = False
    max_model_len: int | None = None
    max_num_seqs: int = 128
    seed: int = 0
    enforce_eager: bool | None = None
    kv_cache_bytes: int | None = None
    gpu_memory_utilization: float = 0.5
    enable_sleep_mode: bool | None = None
    enable_prefix_caching: bool = True
    log_level: str = "ERROR"
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        violations = [
            Violation(key, f"{getattr(self, key)} is not a positive number", "Set it to 1 or more")
            for key in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "max_num_seqs")
            if getattr(self, key) < 1
        ]
        if self.dtype not in ("bfloat16", "float16", "float32"):
            violations.append(Violation("dtype", f"{self.dtype!r} is unknown", "Use bfloat16, float16 or float32"))
        if violations:
            raise ConfigError(violations)

    @property
    def num_ranks(self) -> int:
        """World size that these settings need."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.data_parallel_size


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn; temperature 0 is greedy.

    Attributes:
        n: completions per prompt.
        max_tokens: most tokens of a completion.
        seed: draws of this request depend on nothing else; None takes the engine's own generator.
        logprobs: also return the log-probability of every drawn token, of the model itself: before temperature,
            top-p and top-k.
        stop_token_ids: a completion ends with any of these, which it keeps.
        ignore_eos: do not end at the end token of the model's config.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 16
    seed: int | None = None
    logprobs: bool = True
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True)
class Completion:
    """One answer.

    Attributes:
        token_ids: drawn tokens; a stop token is the last one.
        logprobs: one per token, or empty when they were not asked for.
        finish_reason: "stop" or "length".
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str
