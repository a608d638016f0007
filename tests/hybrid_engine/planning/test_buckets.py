"""Buckets: while one layout replaces the other, no rank holds much more than the larger one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid_engine.planning.buckets import (
    Outline,
    Residency,
    clusters_of,
    frozen_everywhere,
    outline_buckets,
    release_schedule,
)
from hybrid_engine.planning.plan import Bucket
from hybrid_engine.records.holdings import BoxOwners, Holdings, PlacedBox, PlacedBoxes
from hybrid_engine.records.layout import Buffer, BufferId, Extent, Layout, Place, Shard
from hybrid_engine.records.regions import Region
from hybrid_engine.records.sides import Side
from tests.hybrid_engine.planning.cases import Case, cases, elements_of, holdings_by_rank, plan


def pipeline(num_layers: int, stages: int, num_ranks: int, layer_nbytes: int) -> np.ndarray:
    """Return bytes [layers, ranks]; a layer has as many slices as a stage has ranks."""
    per_stage = num_ranks // stages
    stage_of_layer = np.arange(num_layers) * stages // num_layers
    stage_of_rank = np.arange(num_ranks) // per_stage
    return (stage_of_layer[:, None] == stage_of_rank) * (layer_nbytes // per_stage)


def layers(fills: np.ndarray, frees: np.ndarray) -> list[Outline]:
    sides = np.stack([fills, frees], axis=1)
    return [Outline((f"layer{n}",), (f"group{n}",), moved) for n, moved in enumerate(sides)]


def peak_and_larger(
    clusters: list[Outline], outlines: list[Outline]
) -> tuple[np.ndarray, np.ndarray]:
    """Return each rank's peak bytes and the bytes of its larger layout; one tensor per cluster.

    The source of a bucket is released once the bucket has been sent.
    """
    moved = {cluster.tensors[0]: cluster.moved for cluster in clusters}
    _, trained = np.sum([cluster.moved for cluster in clusters], axis=0)
    filled, freed, peak = np.zeros((3, len(trained)), dtype=int)
    for outline in outlines:
        fills, frees = np.sum([moved[tensor] for tensor in outline.tensors], axis=0)
        filled += fills
        peak = np.maximum(peak, trained - freed + filled)
        freed += frees
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
    clusters = layers(inference, pipeline(32, train_stages, num_ranks, layer))
    outlines = outline_buckets(clusters, bucket_nbytes=1)
    peak, larger = peak_and_larger(clusters, outlines)
    assert (peak <= larger + max(cluster.moved.max() for cluster in clusters)).all()
    assert len(outlines) == 32


@pytest.mark.parametrize("sides", [(1, 10), (10, 1)])
def test_filled_and_freed_bytes_both_close_a_bucket(sides: tuple[int, int]) -> None:
    clusters = [Outline((name,), (name,), np.array(sides)[:, None]) for name in "ab"]
    assert [outline.tensors for outline in outline_buckets(clusters, 10)] == [("a",), ("b",)]


NAMES = st.sampled_from("abcdefghijkl")
GROUPS = st.lists(st.sampled_from("vwxyz"), min_size=1, unique=True)
BY_RANK = st.lists(st.integers(0, 9), min_size=4, max_size=4)
Tensor = tuple[list[str], list[int], list[int]]
"""Groups, and bytes filled and freed by rank."""


def holdings(tensors: dict[str, Tensor], side: int) -> Holdings:
    placed = {}
    for name, (groups, *moved) in tensors.items():
        held = [(rank, nbytes) for rank, nbytes in enumerate(moved[side]) if nbytes]
        owners = [BoxOwners((0,), (nbytes,), np.array([rank])) for rank, nbytes in held]
        boxes = tuple(PlacedBox(box, "", box.region.numel, 0, (1,)) for box in owners)
        # All boxes are in the first group.
        parts = zip(groups, (boxes, *((),) * len(groups)), strict=False)
        placed[name] = tuple(PlacedBoxes(part, {}, group) for group, part in parts)
    return Holdings(4, {}, dict.fromkeys(tensors, "uint8"), placed)


@given(
    st.dictionaries(NAMES, st.tuples(GROUPS, BY_RANK, BY_RANK), min_size=4),
    st.integers(1, 40),
    st.sets(NAMES),
)
def test_buckets_contain_each_tensor_once_and_whole_groups(
    tensors: dict[str, Tensor], size: int, frozen: set[str]
) -> None:
    outlines = outline_buckets(
        clusters_of(holdings(tensors, 1), holdings(tensors, 0)), size, frozen
    )
    assert sorted(tensor for outline in outlines for tensor in outline.tensors) == sorted(tensors)
    groups = [group for outline in outlines for group in outline.groups]
    assert len(groups) == len(set(groups))
    for outline in outlines:
        groups_of, *moved = zip(*(tensors[name] for name in outline.tensors), strict=True)
        assert set(outline.groups) == set().union(*groups_of)
        np.testing.assert_array_equal(outline.moved, np.sum(moved, axis=1))
        assert outline.nbytes == np.sum(moved, axis=1).max()
        assert outline in outlines[-2:] or outline.nbytes >= size


@given(cases())
def test_bytes_of_buckets_add_up_to_both_layouts(case: Case) -> None:
    layouts = (case.source, case.destination)
    sides = [holdings_by_rank(layout, len(case.hosts)) for layout in layouts]
    outlines = outline_buckets(clusters_of(*sides), case.bucket_nbytes)
    moved = np.sum([outline.moved for outline in outlines], axis=0)
    np.testing.assert_array_equal(moved[::-1], [side.nbytes_by_rank() for side in sides])


def test_frozen_tensors_have_separate_buckets() -> None:
    """Half of the stages are frozen; other ranks fill those before they release anything."""
    num_ranks = 4
    layer = 4000
    clusters = layers(pipeline(32, 1, num_ranks, layer), pipeline(32, 4, num_ranks, layer))
    frozen = {f"layer{n}" for n in range(16)}
    outlines = outline_buckets(clusters, bucket_nbytes=2 * layer, frozen=frozen)
    for outline in outlines:
        assert frozen.issuperset(outline.tensors) or frozen.isdisjoint(outline.tensors)
    peak, larger = peak_and_larger(clusters, outlines)
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
def test_memory_is_released_after_its_last_reader(
    case: Case, is_last_read: bool, tied: int
) -> None:
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
        released_before = {
            name: np.zeros(len(numbers), dtype=bool) for name, numbers in last_read.items()
        }
        schedule = release_schedule(shards, [bucket.tensors for bucket in buckets])
        for bucket, released in zip(buckets, schedule, strict=True):
            for name, extents in released.items():
                for extent in extents:
                    assert not released_before[name][extent.start : extent.stop].any()
                    released_before[name][extent.start : extent.stop] = True
                    assert (last_read[name][extent.start : extent.stop] <= bucket.index).all()
        for name, numbers in last_read.items():
            assert not is_last_read or released_before[name][numbers >= 0].all()
