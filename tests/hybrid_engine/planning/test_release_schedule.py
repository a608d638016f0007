"""What goes after a bucket is read by no later one, and in the end everything that was read has gone."""

from __future__ import annotations

import numpy as np
from hypothesis import given

from hybrid_engine.planning.planner import plan
from hybrid_engine.planning.release_schedule import release_schedule
from tests.hybrid_engine.planning.cases import Case, cases, elements_of


@given(cases())
def test_nothing_goes_before_its_last_reader(case: Case) -> None:
    buckets = plan(case.source, case.destination, case.hosts, case.bucket_nbytes).buckets
    number_of = {tensor: bucket.index for bucket in buckets for tensor in bucket.tensors}
    for rank in range(len(case.hosts)):
        own = [shard for shard in case.source.shards if shard.place.buffer.rank == rank]
        last_read = {
            buffer_id.name: np.full(buffer.numel, -1)
            for buffer_id, buffer in case.source.buffers.items()
            if buffer_id.rank == rank
        }
        for shard in own:
            for _, position in elements_of(shard):
                last_read[shard.place.buffer.name][position] = number_of[shard.region.tensor]
        gone = {name: np.zeros(len(numbers), dtype=bool) for name, numbers in last_read.items()}
        schedule = release_schedule(own, [bucket.tensors for bucket in buckets])
        for bucket, released in zip(buckets, schedule, strict=True):
            for name, extents in released.items():
                for extent in extents:
                    assert not gone[name][extent.start : extent.stop].any()
                    gone[name][extent.start : extent.stop] = True
                    assert (last_read[name][extent.start : extent.stop] <= bucket.index).all()
        for name, numbers in last_read.items():
            assert gone[name][numbers >= 0].all()


@given(cases())
def test_what_nobody_reads_stays(case: Case) -> None:
    buckets = plan(case.source, case.destination, case.hosts, case.bucket_nbytes).buckets[:-1]
    kept = {tensor for bucket in buckets for tensor in bucket.tensors}
    for rank in range(len(case.hosts)):
        own = [shard for shard in case.source.shards if shard.place.buffer.rank == rank]
        gone = {
            (name, position)
            for released in release_schedule(own, [bucket.tensors for bucket in buckets])
            for name, extents in released.items()
            for extent in extents
            for position in range(extent.start, extent.stop)
        }
        for shard in own:
            if shard.region.tensor not in kept:
                assert not any((shard.place.buffer.name, position) in gone for _, position in elements_of(shard))
