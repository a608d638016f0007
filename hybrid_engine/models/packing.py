"""How Megatron packs canonical tensors into one parameter, and how tensor parallelism cuts it.

Every rule is the same statement: along one dim the whole parameter is a list of segments of canonical tensors, and
tensor parallel rank r of n holds the r-th of n equal parts of that list. Interleaved QKV, gate/up, padded vocabulary
and fewer KV heads than ranks differ in nothing but the list.

Sources: Megatron-LM `megatron/core/transformer/attention.py` (per query group: its query heads, key, value),
`megatron/core/transformer/mlp.py` (gated linear unit: gate rows, then up rows, per rank),
`megatron/core/tensor_parallel/layers.py` (even split along the partition dim).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ModelDims:
    """The sizes packing needs, from the Hugging Face config.

    Attributes:
        num_layers, hidden_size, ffn_hidden_size, vocab_size: as in the config; vocab_size without padding.
        num_heads, num_kv_heads, head_dim: attention heads, key/value heads (query groups), elements per head.
        tied_embeddings: the output head is the embedding.
    """

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    tied_embeddings: bool


@dataclass(frozen=True, slots=True)
class Segment:
    """`length` consecutive indices of canonical `tensor` from `start` on, along the packed dim. None is padding."""

    tensor: str | None
    start: int
    length: int


class Packing(Protocol):
    """One parameter's rule. Names are patterns with `{layer}` for the 0-based global layer number."""

    dim: int
    split: bool

    def segments(self, dims: ModelDims, tp_size: int, packed_size: int) -> Sequence[Segment]:
        """The whole parameter (all ranks) along `dim`; `packed_size` is its length there, padding included."""
        ...


@dataclass(frozen=True, slots=True)
class Replicated:
    """Every tensor parallel rank holds all of it (norms, biases of row-parallel layers)."""

    name: str
    dim: int = 0
    split: bool = False

    def segments(self, dims: ModelDims, tp_size: int, packed_size: int) -> Sequence[Segment]:
        return [Segment(self.name, 0, packed_size)]


@dataclass(frozen=True, slots=True)
class Split:
    """Cut along `dim`: 0 for column-parallel weights and their biases, 1 for row-parallel weights."""

    name: str
    dim: int
    split: bool = True

    def segments(self, dims: ModelDims, tp_size: int, packed_size: int) -> Sequence[Segment]:
        return [Segment(self.name, 0, packed_size)]


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Rows by token, padded at the end to a multiple Megatron chose."""

    name: str
    dim: int = 0
    split: bool = True

    def segments(self, dims: ModelDims, tp_size: int, packed_size: int) -> Sequence[Segment]:
        rows = [Segment(self.name, 0, dims.vocab_size)]
        if packed_size > dims.vocab_size:
            rows.append(Segment(None, 0, packed_size - dims.vocab_size))
        return rows


@dataclass(frozen=True, slots=True)
class InterleavedQKV:
    """Per query group: the rows of its query heads, of its key head, of its value head. Weight or bias."""

    query: str
    key: str
    value: str
    dim: int = 0
    split: bool = True

    def segments(self, dims: ModelDims, tp_size: int, packed_size: int) -> Sequence[Segment]:
        query_rows = dims.num_heads // dims.num_kv_heads * dims.head_dim
        return [
            segment
            for group in range(dims.num_kv_heads)
            for segment in (
                Segment(self.query, group * query_rows, query_rows),
                Segment(self.key, group * dims.head_dim, dims.head_dim),
                Segment(self.value, group * dims.head_dim, dims.head_dim),
            )
        ]


@dataclass(frozen=True, slots=True)
class GateUp:
    """Each rank holds its rows of the gate projection followed by its rows of the up projection."""

    gate: str
    up: str
    dim: int = 0
    split: bool = True

    def segments(self, dims: ModelDims, tp_size: int, packed_size: int) -> Sequence[Segment]:
        rows = packed_size // 2 // tp_size
        return [Segment(name, rank * rows, rows) for rank in range(tp_size) for name in (self.gate, self.up)]


def packed_shape(packing: Packing, local_shape: tuple[int, ...], tp_size: int) -> tuple[int, ...]:
    """Shape of the whole parameter, all tensor parallel ranks together, from one rank's shape."""
    if not packing.split:
        return local_shape
    return tuple(size * tp_size if dim == packing.dim else size for dim, size in enumerate(local_shape))


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of a rank's parameter: local indices [local_start, local_start + length) hold that part of a tensor."""

    tensor: str
    start: int
    local_start: int
    length: int


def local_pieces(packing: Packing, dims: ModelDims, local_size: int, tp_size: int, tp_rank: int) -> list[Piece]:
    """What one rank holds of the packed list, along the packed dim. Raises ValueError if the list does not add up."""
    packed_size = local_size * tp_size if packing.split else local_size
    segments = packing.segments(dims, tp_size, packed_size)
    total = sum(segment.length for segment in segments)
    if total != packed_size:
        raise ValueError(f"{packed_size} packed in Megatron, {total} by the model's configuration")
    low = tp_rank * local_size if packing.split else 0
    pieces, position = [], 0
    for segment in segments:
        start, stop = max(position, low), min(position + segment.length, low + local_size)
        if segment.tensor is not None and start < stop:
            pieces.append(Piece(segment.tensor, segment.start + start - position, start - low, stop - start))
        position += segment.length
    return pieces
