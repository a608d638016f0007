"""Packing rules against Megatron's packing, built row by row with numpy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid_engine.models.packing import (
    GateUp,
    InterleavedQKV,
    ModelDims,
    Packing,
    Replicated,
    Split,
    Vocabulary,
    local_pieces,
    packed_shape,
)

PADDING = -1
WIDTH = 3


def make_dims(num_kv_heads: int = 1, queries: int = 1, head_dim: int = 1, ffn: int = 1, vocab: int = 1) -> ModelDims:
    return ModelDims(
        num_layers=1,
        hidden_size=WIDTH,
        ffn_hidden_size=ffn,
        vocab_size=vocab,
        num_heads=num_kv_heads * queries,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        tied_embeddings=False,
    )


def numbered(rows: int, columns: int, tag: int) -> np.ndarray:
    return np.arange(rows * columns).reshape(rows, columns) + tag * 10**6


def assert_packs(
    packing: Packing, dims: ModelDims, canonical: dict[str, np.ndarray], locals_of_ranks: list[np.ndarray]
) -> None:
    """Every rank's parameter, put together from the pieces, is the expected one."""
    tp_size = len(locals_of_ranks)
    for rank, expected in enumerate(locals_of_ranks):
        found = np.full_like(expected, PADDING)
        taken = np.zeros(expected.shape[packing.dim], int)
        for piece in local_pieces(packing, dims, expected.shape[packing.dim], tp_size, rank):
            local = slice(piece.local_start, piece.local_start + piece.length)
            part = slice(piece.start, piece.start + piece.length)
            if packing.dim == 0:
                found[local] = canonical[piece.tensor][part]
            else:
                found[:, local] = canonical[piece.tensor][:, part]
            taken[local] += 1
        np.testing.assert_array_equal(found, expected)
        assert taken.max(initial=0) <= 1
        whole = packed_shape(packing, expected.shape, tp_size)
        factor = tp_size if packing.split else 1
        assert whole[packing.dim] == expected.shape[packing.dim] * factor


@given(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4, 8]), st.integers(1, 3), st.sampled_from([4, 8]))
def test_interleaved_projections(tp_size: int, num_kv_heads: int, queries: int, head_dim: int) -> None:
    """Group by group; with fewer groups than ranks the rows are split evenly all the same."""
    dims = make_dims(num_kv_heads=num_kv_heads, queries=queries, head_dim=head_dim)
    query = numbered(dims.num_heads * head_dim, WIDTH, 1)
    key, value = (numbered(num_kv_heads * head_dim, WIDTH, tag) for tag in (2, 3))
    rows = []
    for group in range(num_kv_heads):
        for head in range(group * queries, (group + 1) * queries):
            rows += list(query[head * head_dim : (head + 1) * head_dim])
        for source in (key, value):
            rows += list(source[group * head_dim : (group + 1) * head_dim])
    canonical = {"q": query, "k": key, "v": value}
    assert_packs(InterleavedQKV("q", "k", "v"), dims, canonical, np.split(np.array(rows), tp_size))


@given(st.sampled_from([1, 2, 3, 4]), st.integers(1, 5))
def test_gate_and_up(tp_size: int, rows_per_rank: int) -> None:
    ffn = tp_size * rows_per_rank
    gate, up = numbered(ffn, WIDTH, 1), numbered(ffn, WIDTH, 2)
    ranks = [np.concatenate(pair) for pair in zip(np.split(gate, tp_size), np.split(up, tp_size), strict=True)]
    assert_packs(GateUp("gate", "up"), make_dims(ffn=ffn), {"gate": gate, "up": up}, ranks)


@given(st.sampled_from([1, 2, 4]), st.integers(1, 40), st.integers(1, 9))
def test_padded_vocabulary(tp_size: int, vocab: int, multiple: int) -> None:
    embedding = numbered(vocab, WIDTH, 1)
    missing = -vocab % (multiple * tp_size)
    padded = np.concatenate([embedding, np.full((missing, WIDTH), PADDING)])
    assert_packs(Vocabulary("e"), make_dims(vocab=vocab), {"e": embedding}, np.split(padded, tp_size))


@given(st.sampled_from([1, 2, 4]), st.integers(1, 5), st.sampled_from([0, 1]))
def test_split_and_replicated(tp_size: int, size_per_rank: int, dim: int) -> None:
    shape = (size_per_rank * tp_size, 4) if dim == 0 else (4, size_per_rank * tp_size)
    weight = numbered(*shape, 1)
    assert_packs(Split("w", dim), make_dims(), {"w": weight}, np.split(weight, tp_size, axis=dim))
    assert_packs(Replicated("w"), make_dims(), {"w": weight}, [weight] * tp_size)


@pytest.mark.parametrize(
    ("packing", "local_size"),
    [(InterleavedQKV("q", "k", "v"), 12), (Vocabulary("e"), 4), (GateUp("gate", "up"), 3)],
)
def test_lists_that_do_not_add_up(packing: Packing, local_size: int) -> None:
    dims = make_dims(num_kv_heads=2, queries=2, head_dim=4, ffn=6, vocab=10)
    with pytest.raises(ValueError, match=rf"{local_size * 2 if local_size != 3 else 3} packed in Megatron, \d+ by"):
        local_pieces(packing, dims, local_size, 1 if local_size == 3 else 2, 0)
