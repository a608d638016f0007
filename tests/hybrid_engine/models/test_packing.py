"""Packing rules against Megatron's packing, built row by row with numpy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid_engine.models.packing import (
    GateUp,
    HeadRows,
    InterleavedQKV,
    Over,
    PackedHeads,
    Packing,
    Replicated,
    Span,
    Split,
    Vocabulary,
    held_regions,
    part_of_tensor,
)
from hybrid_engine.records.layout import BufferId, Place
from hybrid_engine.records.regions import Shapes, contiguous_strides
from tests.hybrid_engine.planning.cases import elements_of

BUFFER = BufferId(0, "parameter")
PADDING = -1
WIDTH = 3


def numbered(rows: int, columns: int, tag: int) -> np.ndarray:
    return np.arange(rows * columns).reshape(rows, columns) + tag * 10**6


def assert_packs(
    packing: Packing,
    canonical: dict[str, np.ndarray],
    locals_of_ranks: list[np.ndarray],
    shapes: Shapes | None = None,
) -> list[int]:
    """Check every rank's parameter, assembled from its regions; return how many a rank has.

    shapes: of the checkpoint, unless they are those of `canonical`; names are of expert 2.
    """
    shapes = shapes or {name: values.shape for name, values in canonical.items()}
    counts = []
    for rank, expected in enumerate(locals_of_ranks):
        actual = np.full(expected.size, PADDING)
        place = Place(BUFFER, 0, contiguous_strides(expected.shape))
        indices = {"expert": 2}
        held = held_regions(
            packing, indices, shapes, expected.shape, place, rank, len(locals_of_ranks)
        )
        counts.append(len(held))
        for shard in held:
            for index, position in elements_of(shard):
                assert actual[position] == PADDING  # regions do not overlap
                actual[position] = canonical[shard.region.tensor][index]
        np.testing.assert_array_equal(actual.reshape(expected.shape), expected)
    return counts


@given(
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2, 4, 8]),
    st.integers(1, 3),
    st.sampled_from([4, 8]),
    st.booleans(),
)
def test_qkv_is_packed_group_by_group(
    tp_size: int, num_kv_heads: int, queries: int, head_dim: int, on_disk: bool
) -> None:
    query = numbered(num_kv_heads * queries * head_dim, WIDTH, 1)
    key, value = (numbered(num_kv_heads * head_dim, WIDTH, tag) for tag in (2, 3))
    rows = []
    for group in range(num_kv_heads):
        for head in range(group * queries, (group + 1) * queries):
            rows += list(query[head * head_dim : (head + 1) * head_dim])
        for source in (key, value):
            rows += list(source[group * head_dim : (group + 1) * head_dim])
    canonical = {"q": query, "k": key, "v": value}
    spans = [Span(name) for name in "qkv"]
    if on_disk:  # one transposed tensor, like GPT-2's c_attn
        canonical = {"c": np.concatenate([query, key, value]).T}
        spans = [Span("c"), Span("c", len(query)), Span("c", len(query) + len(key))]
    packing = InterleavedQKV(
        *spans, num_kv_heads, queries, head_dim, dim=int(on_disk), transposed=on_disk
    )
    assert_packs(packing, canonical, np.split(np.array(rows), tp_size))


@given(st.sampled_from([1, 2, 3, 4]), st.integers(1, 5), st.booleans())
def test_gate_and_up_are_packed_in_sequence(
    tp_size: int, rows_per_rank: int, on_disk: bool
) -> None:
    ffn = tp_size * rows_per_rank
    gate = numbered(ffn, WIDTH, 1)
    up = numbered(ffn, WIDTH, 2)
    ranks = [
        np.concatenate(pair)
        for pair in zip(np.split(gate, tp_size), np.split(up, tp_size), strict=True)
    ]
    assert_packs(GateUp(Span("gate"), Span("up")), {"gate": gate, "up": up}, ranks)
    fused = GateUp(Span("both"), Span("both", ffn), over=Over.EXPERT_TENSOR)
    assert_packs(fused, {"both": np.concatenate([gate, up])}, ranks)


@given(st.sampled_from([1, 2, 3]), st.integers(1, 4), st.integers(1, 3))
def test_gate_and_up_are_packed_in_alternating_blocks(
    tp_size: int, blocks_per_rank: int, block: int
) -> None:
    ffn = tp_size * blocks_per_rank * block
    gate = numbered(ffn, WIDTH, 1)
    up = numbered(ffn, WIDTH, 2)
    ranks = []
    for pair in zip(np.split(gate, tp_size), np.split(up, tp_size), strict=True):
        # Gate and up in turn, as Megatron reorders outputs.
        halves = np.concatenate(pair).reshape(2, blocks_per_rank, block, WIDTH)
        ranks.append(halves.swapaxes(0, 1).reshape(-1, WIDTH))
    assert_packs(GateUp(Span("gate"), Span("up"), block), {"gate": gate, "up": up}, ranks)


@given(st.sampled_from([1, 2, 4]), st.integers(1, 3), st.integers(1, 4), st.integers(1, 4))
def test_each_rank_has_a_share_of_every_section(
    tp_size: int, heads_per_rank: int, rows_a: int, rows_b: int
) -> None:
    num_heads = tp_size * heads_per_rank
    # One tensor has the rows of both sections in turn for every head, the other those of a third
    # one.
    mixed = numbered(num_heads * (rows_a + rows_b), WIDTH, 1)
    alone = numbered(num_heads, WIDTH, 2)
    by_head = mixed.reshape(num_heads, rows_a + rows_b, WIDTH)
    sections = (
        HeadRows("mixed", num_heads, rows_a, 0, rows_a + rows_b),
        HeadRows("mixed", num_heads, rows_b, rows_a, rows_a + rows_b),
        HeadRows("alone", num_heads, 1),
    )
    shares = np.split(by_head, tp_size)
    ranks = [
        np.concatenate(
            [share[:, :rows_a].reshape(-1, WIDTH), share[:, rows_a:].reshape(-1, WIDTH), rows]
        )
        for share, rows in zip(shares, np.split(alone, tp_size), strict=True)
    ]
    canonical = {"mixed": mixed, "alone": alone}
    assert_packs(PackedHeads(sections), canonical, ranks)
    assert PackedHeads(sections).num_units(num_heads * (rows_a + rows_b + 1)) == num_heads
    # With as many shares on one rank, the rows are the same.
    assert_packs(PackedHeads(sections, num_shares=tp_size), canonical, [np.concatenate(ranks)])


@given(st.sampled_from([1, 2, 4]), st.integers(1, 40), st.integers(1, 9))
def test_the_vocabulary_is_padded_at_the_end(tp_size: int, vocab: int, multiple: int) -> None:
    embedding = numbered(vocab, WIDTH, 1)
    missing = -vocab % (multiple * tp_size)  # every rank has a multiple of rows
    padded = np.concatenate([embedding, np.full((missing, WIDTH), PADDING)])
    assert_packs(Vocabulary("e", vocab), {"e": embedding}, np.split(padded, tp_size))


@given(st.sampled_from([1, 2, 4]), st.integers(1, 5), st.sampled_from([0, 1]), st.booleans())
def test_tensors_are_split_or_replicated(
    tp_size: int, size_per_rank: int, dim: int, transposed: bool
) -> None:
    shape = (size_per_rank * tp_size, 4) if dim == 0 else (4, size_per_rank * tp_size)
    weight = numbered(*shape, 1)
    ranks = [part.T if transposed else part for part in np.split(weight, tp_size, axis=dim)]
    assert_packs(Split("w", dim=dim, transposed=transposed), {"w": weight}, ranks)
    assert_packs(Replicated("w"), {"w": weight}, [weight] * tp_size)
    assert_packs(Split("w", dim=dim, may_be_whole=True), {"w": weight}, [weight] * tp_size)


@pytest.mark.parametrize("tp_size", [1, 2])
def test_every_second_column_of_an_expert_is_one_box(tp_size: int) -> None:
    experts, hidden, ffn = 3, 5, 4
    both = numbered(experts * hidden, 2 * ffn, 1).reshape(experts, hidden, ffn, 2)
    packing = GateUp(Span("w[{expert},:,0::2]"), Span("w[{expert},:,1::2]"), dim=1, transposed=True)
    ranks = [
        np.concatenate([part[..., half].T for half in (0, 1)])
        for part in np.split(both[2], tp_size, axis=1)
    ]
    shapes = {"w": (experts, hidden, 2 * ffn)}
    assert assert_packs(packing, {"w": both}, ranks, shapes) == [2] * tp_size


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ("w[0,:]", "has 2 dims, the tensor 3"),
        ("w[0,:,0::3]", "no whole steps of 3"),
        ("w[7,:,:]", "index 7 is out of range"),
        ("w[0,:,2::2]", "index 2 is out of range"),
        ("w[0,:,1:3]", "is not a name with"),
        ("w[0,:,0::0]", "a step of 0"),
        ("w[0,:,0::2", "selection in brackets"),
    ],
)
def test_a_part_that_does_not_fit_is_refused(part: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        part_of_tensor(part, (3, 5, 8))


QKV = InterleavedQKV(Span("q"), Span("k"), Span("v"), num_groups=2, queries_per_group=2, head_dim=4)
SHAPES = {"q": (16, 3), "k": (8, 3), "v": (8, 3), "e": (10, 3), "gate": (6, 3), "up": (6, 3)}


@pytest.mark.parametrize(
    ("packing", "local_shape", "message"),
    [
        (QKV, (12, 3), "24 packed in Megatron, 32 by"),
        (QKV, (16, 5), r"holds q in shape \(16, 5\), but its shape is \(16, 3\)"),
        (Vocabulary("e", 10), (4, 3), "8 packed in Megatron, 10 by"),
        (GateUp(Span("gate"), Span("up")), (3, 3), "6 packed in Megatron, 4 by"),
        (
            PackedHeads((HeadRows("gate", 3, 1), HeadRows("up", 3, 1))),
            (4, 3),
            "2 does not divide the 3 heads of gate",
        ),
        (
            GateUp(Span("gate"), Span("up"), 2),
            (6, 3),
            "3 rows of each projection on a rank are not whole blocks of 2",
        ),
        (GateUp(Span("gate"), Span("up")), (4, 3), r"shape \(4, 3\), but its shape is \(6, 3\)"),
        (Replicated("norm"), (3,), "no tensor norm"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(
    packing: Packing, local_shape: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        held_regions(packing, {}, SHAPES, local_shape, Place(BUFFER, 0, local_shape), 0, 2)
