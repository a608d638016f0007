"""Bytes that vLLM's layers cache of a sequence: of every token, of a window, or a state."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from hybrid_engine.layouts.inference import stage_bounds
from hybrid_engine.layouts.parallelism import InferenceParallelism
from hybrid_engine.models.table import ModelTable


@dataclass(frozen=True)
class LayerCache:
    """Cache of one layer on a rank.

    Attributes:
        per_token: bytes of keys and values of a token; 0: the layer has a state instead.
        window: tokens that stay cached of a sequence; None: all.
        state: bytes of a sequence regardless of its length (Mamba, linear attention, short
            convolutions).
    """

    per_token: int = 0
    window: int | None = None
    state: int = 0

    def nbytes(self, length: int, in_flight: int = 0) -> int:
        """Return the bytes of a sequence of `length` tokens.

        in_flight: scheduled tokens that vLLM keeps beyond the window until their step has ended.
        """
        tokens = length if self.window is None else min(self.window + in_flight, length)
        return self.state + self.per_token * tokens


def sequence_nbytes(layers: Iterable[LayerCache], length: int, in_flight: int = 0) -> int:
    """Return the bytes of a sequence in all layers; see `LayerCache.nbytes`."""
    return sum(layer.nbytes(length, in_flight) for layer in layers)


def layer_caches(
    table: ModelTable,
    infer: InferenceParallelism,
    itemsize: int,
) -> list[tuple[LayerCache, ...]]:
    """Return the caches of a rank's layers, by pipeline stage, of a model with a written table.

    Each layer has a key and a value for each of the rank's key/value heads (one if there are fewer
    heads than ranks). Multi-head latent attention has a latent vector instead, whole on every rank.
    `itemsize`: bytes of an element.
    """
    dims = table.dims
    # 8 key/value heads of 128 elements in bfloat16 with TP 4: 2 heads * 2 * 128 * 2 = 1,024 bytes
    # per token and layer. With TP 16 each rank has a copy of one head, not half of one.
    heads = max(1, dims.num_kv_heads // infer.tensor)
    per_token = itemsize * (dims.latent_kv_size or 2 * heads * dims.head_dim)
    windows = table.extras.windows or (None,) * dims.num_layers
    layers = [LayerCache(per_token, window) for window in windows]
    bounds = stage_bounds(dims.num_layers, infer.pipeline)
    return [tuple(layers[start:end]) for start, end in pairwise(bounds)]
