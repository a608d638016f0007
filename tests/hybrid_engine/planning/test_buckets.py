"""Buckets: while one layout replaces the other, no rank holds much more than the larger one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid_engine.planning.buckets import (
    BytesByRank,
    Need,
    Outline,
    Residency,
    frozen_everywhere,
    outline_buckets,
    release_schedule,
)
from hybrid_engine.planning.plan import Bucket
from hybrid_engine.records.layout import Buffer, BufferId, Extent, Layout, Place, Shard
from hybrid_engine.records.regions import Region
from hybrid_engine.records.sides import Side
from tests.hybrid_engine.planning.cases import Case, cases, elements_of, plan


def box(ranks: Iterable[int], nbytes: int) -> BytesByRank:
    ranks = np.array(list(ranks))
    return BytesByRank(ranks, np.full(len(ranks), nbytes))


def pipeline(num_layers: int, stages: int, num_ranks: int, layer_nbytes: int) -> list[BytesByRank]:
    """Return the holders of each layer, cut into as many slices as a stage has ranks."""
    per_stage = num_ranks // stages
    stages_of_layers = [layer * stages // num_layers for layer in range(num_layers)]
    slice_nbytes = layer_nbytes // per_stage
    return [box(range(s * per_stage, (s + 1) * per_stage), slice_nbytes) for s in stages_of_layers]


def layers(fills: list[BytesByRank], frees: list[BytesByRank]) -> dict[str, Need]:
    pairs = zip(fills, frees, strict=True)
    return {f"layer{n}": Need((f"group{n}",), fill, free) for n, (fill, free) in enumerate(pairs)}


def peak_and_larger(needs: dict[str, Need], outlines: list[Outline], num_ranks: int) -> tuple[np.ndarray, np.ndarray]:
    """Return each rank's peak bytes and the bytes of its larger layout.

    The source of a bucket is released once the bucket has been sent.
    """
    filled, freed, peak = (np.zeros(num_ranks, dtype=int) for _ in range(3))
    trained = np.zeros(num_ranks, dtype=int)
    for need in needs.values():
        np.add.at(trained, need.frees.ranks, need.frees.nbytes)
    for outline in outlines:
        for tensor in outline.tensors:
            np.add.at(filled, needs[tensor].fills.ranks, needs[tensor].fills.nbytes)
        peak = np.maximum(peak, trained - freed + filled)
        for tensor in outline.tensors:
            np.add.at(freed, needs[tensor].frees.ranks, needs[tensor].frees.nbytes)
    return np.maximum(peak, filled), np.maximum(trained, filled)


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("train_stages", [1, 2, 4, 8])
@pytest.mark.parametrize("infer_stages", [1, 2, 4, 8])
def test_no_rank_holds_more_than_the_larger_layout_and_one_layer(
    train_stages: int, infer_stages: int, copies: int
) -> None:
    num_ranks = 8
    layer = 840 * 8
    inference = pipeline(32, infer_stages, num_ranks, copies * layer)
    needs = layers(inference, pipeline(32, train_stages, num_ranks, layer))
    outlines = outline_buckets(needs, num_ranks, bucket_nbytes=1)
    peak, larger = peak_and_larger(needs, outlines, num_ranks)
    largest = max(int(side.nbytes.max()) for need in needs.values() for side in (need.fills, need.frees))
    assert (peak <= larger + largest).all()
    assert len(outlines) == 32


@pytest.mark.parametrize("sides", [(1, 10), (10, 1)])
def test_filled_and_freed_bytes_both_close_a_bucket(sides: tuple[int, int]) -> None:
    need = [box([0], nbytes) for nbytes in sides]
    needs = {name: Need((name,), *need) for name in "ab"}
    assert [outline.tensors for outline in outline_buckets(needs, 1, 10)] == [("a",), ("b",)]


needs_of_any_kind = st.lists(
    st.tuples(
        st.sets(st.integers(0, 4)),
        st.dictionaries(st.integers(0, 3), st.integers(1, 9), max_size=4),
        st.dictionaries(st.integers(0, 3), st.integers(1, 9), max_size=4),
    ),
    min_size=1,
    max_size=12,
)


@given(needs_of_any_kind, st.integers(1, 40), st.sets(st.integers(0, 11)))
def test_buckets_contain_each_tensor_once_and_whole_groups(
    drawn: list[tuple[set[int], dict[int, int], dict[int, int]]], size: int, frozen: set[int]
) -> None:
    def by_rank(side: dict[int, int]) -> BytesByRank:
        return BytesByRank(np.array(list(side), dtype=int), np.array(list(side.values()), dtype=int))

    needs = {}
    for n, (groups, fills, frees) in enumerate(drawn):
        names = tuple(f"g{group}" for group in sorted(groups)) or (f"own{n}",)
        needs[f"t{n}"] = Need(names, by_rank(fills), by_rank(frees))
    outlines = outline_buckets(needs, 4, size, {f"t{n}" for n in frozen})
    assert sorted(tensor for outline in outlines for tensor in outline.tensors) == sorted(needs)
    groups = [group for outline in outlines for group in outline.groups]
    assert len(groups) == len(set(groups))
    for outline in outlines:
        filled, freed = np.zeros((2, 4), dtype=int)
        for tensor in outline.tensors:
            np.add.at(filled, needs[tensor].fills.ranks, needs[tensor].fills.nbytes)
            np.add.at(freed, needs[tensor].frees.ranks, needs[tensor].frees.nbytes)
        assert outline.nbytes == max(filled.max(), freed.max())
        assert outline in outlines[-2:] or outline.nbytes >= size


def test_frozen_tensors_have_separate_buckets() -> None:
    """Half of the stages are frozen; other ranks fill those before they release anything."""
    num_ranks = 4
    layer = 4000
    needs = layers(pipeline(32, 1, num_ranks, layer), pipeline(32, 4, num_ranks, layer))
    frozen = {f"layer{n}" for n in range(16)}
    outlines = outline_buckets(needs, num_ranks, bucket_nbytes=2 * layer, frozen=frozen)
    for outline in outlines:
        assert frozen.issuperset(outline.tensors) or frozen.isdisjoint(outline.tensors)
    peak, larger = peak_and_larger(needs, outlines, num_ranks)
    assert (peak <= larger + 2 * max(outline.nbytes for outline in outlines)).all()


BUCKETS = [Bucket(0, (), (), ("a", "b"), 0), Bucket(1, (), (), ("c",), 0)]


def test_residency_counts_bytes_of_buckets() -> None:
    buffers = {
        BufferId(0, "one"): Buffer(10, "float32", "a"),
        BufferId(0, "two"): Buffer(3, "bfloat16", "b"),
        BufferId(1, "one"): Buffer(5, "float32", "c"),
        BufferId(1, "two"): Buffer(1, "float32", "a"),
    }
    side = Side.split(Layout({}, buffers), 4)
    by_rank = [Residency.of(BUCKETS, side, rank, limit=None) for rank in range(4)]
    assert by_rank[0].nbytes.tolist() == [[46, 4, 0], [0, 20, 0]]
    assert [residency.nbytes_of({0, 1}) for residency in by_rank] == [46, 24, 0, 0]


def test_a_bucket_stays_on_all_ranks_or_on_none() -> None:
    nbytes = np.array([[9, 1], [1, 9], [1, 1]])
    for kind in range(2):
        assert Residency(nbytes, kind, 9).kept([0, 1, 2]) == {0}
        assert Residency(nbytes, kind, 10).kept([0, 1, 2]) == {0, 1}
        assert Residency(nbytes, kind, 10).kept([2, 1, 0]) == {2, 1}
        assert Residency(nbytes, kind, 0).kept([0, 1, 2]) == frozenset()
        assert Residency(0 * nbytes, kind, 0).kept([0, 1, 2]) == {0, 1, 2}
        assert Residency(nbytes, kind, None).kept([0, 1, 2]) == {0, 1, 2}


def test_a_tensor_trained_on_one_rank_is_not_frozen() -> None:
    held = [{"a", "b"}, {"b", "c"}, {"d"}]
    assert frozen_everywhere(zip(held, [{"a", "b"}, {"c"}, set()], strict=True)) == {"a", "c"}


def test_memory_with_two_names_is_released_after_the_later_bucket() -> None:
    tied, view, after = (
        Shard(Region(name, (0,), (8,)), Place(BufferId(0, "flat"), at, (1,)))
        for name, at in (("a", 0), ("b", 4), ("c", 12))
    )
    adjacent = release_schedule([after, tied, view], ["ab", "c"])
    assert adjacent == ({"flat": (Extent(0, 12),)}, {"flat": (Extent(12, 20),)})
    assert release_schedule([after, tied, view], ["abc"]) == ({"flat": (Extent(0, 20),)},)
    for shards in ([tied, view], [view, tied]):
        assert release_schedule(shards, ["a", "b"]) == ({}, {"flat": (Extent(0, 12),)})
        assert release_schedule(shards, ["b", "a"]) == ({}, {"flat": (Extent(0, 12),)})
        assert release_schedule(shards, ["b"]) == ({},)  # "a" is not read, so its memory stays


@given(cases(), st.booleans(), st.integers(0, 3))
def test_memory_is_released_after_its_last_reader(case: Case, is_last_read: bool, tied: int) -> None:
    """Unread memory stays. Unless `tied` is 0, memory has two names, as of tied weights."""
    buckets = plan(case.source, case.destination, case.hosts, case.bucket_nbytes).buckets
    number_of = {tensor: bucket.index for bucket in buckets for tensor in bucket.tensors}
    if not is_last_read:
        number_of |= dict.fromkeys(buckets[-1].tensors, len(buckets))
        buckets = buckets[:-1]
    names = list(case.source.tensors)
    for rank in range(len(case.hosts)):
        shards = [shard for shard in case.source.shards if shard.place.buffer.rank == rank]
        for shard in shards[:]:
            other = names[(names.index(shard.region.tensor) + tied) % len(names)]
            shards.append(replace(shard, region=replace(shard.region, tensor=other)))
        last_read = {
            buffer_id.name: np.full(buffer.numel, -1)
            for buffer_id, buffer in case.source.buffers.items()
            if buffer_id.rank == rank
        }
        for shard in shards:
            numbers = last_read[shard.place.buffer.name]
            for _, position in elements_of(shard):
                numbers[position] = max(numbers[position], number_of[shard.region.tensor])
        released_before = {name: np.zeros(len(numbers), dtype=bool) for name, numbers in last_read.items()}
        schedule = release_schedule(shards, [bucket.tensors for bucket in buckets])
        for bucket, released in zip(buckets, schedule, strict=True):
            for name, extents in released.items():
                for extent in extents:
                    assert not released_before[name][extent.start : extent.stop].any()
                    released_before[name][extent.start : extent.stop] = True
                    assert (last_read[name][extent.start : extent.stop] <= bucket.index).all()
        for name, numbers in last_read.items():
            assert not is_last_read or released_before[name][numbers >= 0].all()
