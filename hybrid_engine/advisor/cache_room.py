"""Room for the KV cache in vLLM's share of a device, in tokens and in sequences of the longest length.

    share      gpu_memory_utilization * device; vLLM's weights and its cache are within it, whatever else is free
    a token    in each layer of a rank's stage: a key and a value for each of its key/value heads (one where there are
               fewer heads than TP ranks), or what multi-head latent attention (MLA) keeps in their place
    fits       vLLM does not start unless one sequence of max_model_len fits

vLLM's activations and captured graphs come off it too, and are not known here; layers with a window need less.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hybrid_engine.layouts.parallelism import InferenceParallelism
from hybrid_engine.models.table import ModelDims
from hybrid_engine.records.layout import DTYPE_NBYTES


@dataclass(frozen=True)
class CacheRoom:
    """Room for the KV cache on the rank that has least; sizes in bytes.

    Attributes:
        device: its memory. utilization: vLLM's share of it.
        weights: vLLM's.
        per_token: what a token takes in the cache.
        longest: tokens of the longest sequence (`max_model_len`); 0: not known.
        given: the cache's size where the configuration says it (`kv_cache_mb`), whatever the share.
    """

    device: float
    utilization: float
    weights: int
    per_token: int
    longest: int
    given: int | None = None

    @property
    def share(self) -> float:
        """vLLM's part of the device."""
        return self.device * self.utilization

    @property
    def room(self) -> float:
        """Left for the cache; negative where the weights alone do not fit."""
        return self.share - self.weights if self.given is None else self.given

    @property
    def num_tokens(self) -> int:
        """Tokens that fit in the cache."""
        return max(0, int(self.room // self.per_token))

    @property
    def num_sequences(self) -> float:
        """Longest sequences that fit at once; 0 where their length is not known."""
        return self.num_tokens / self.longest if self.longest else 0.0

    @property
    def needed(self) -> float:
        """The least share of the device for weights and one sequence, in hundredths; above 1 there is none."""
        return math.ceil(100 * (self.weights + max(1, self.longest) * self.per_token) / self.device) / 100

    @property
    def fits(self) -> bool:
        """Whether vLLM starts."""
        return self.num_tokens >= max(1, self.longest) and self.weights + self.room <= self.device


def token_nbytes(dims: ModelDims, infer: InferenceParallelism, dtype: str) -> int:
    """Bytes of a token in the cache of the rank that has most layers."""
    heads = max(1, dims.num_kv_heads // infer.tensor)
    numel = dims.latent_kv_size or 2 * heads * dims.head_dim
    return numel * -(-dims.num_layers // infer.pipeline) * DTYPE_NBYTES[dtype]
