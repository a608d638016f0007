"""Which weights may stay on the inference side; test_deliveries.py has what comes of it."""

from __future__ import annotations

import numpy as np

from hybrid_engine.planning.plan import Bucket
from hybrid_engine.planning.residency import Residency, frozen_everywhere
from hybrid_engine.records.layout import Buffer, BufferId

BUCKETS = [Bucket(0, (), (), ("a", "b"), 0), Bucket(1, (), (), ("c",), 0)]


def test_bytes_of_a_bucket_by_rank() -> None:
    buffers = {
        BufferId(0, "one"): Buffer(10, "float32", "a"),
        BufferId(0, "two"): Buffer(3, "bfloat16", "b"),
        BufferId(1, "one"): Buffer(5, "float32", "c"),
        BufferId(1, "two"): Buffer(1, "float32", "a"),
    }
    residency = Residency.of(BUCKETS, buffers, 3, limit=None)
    assert residency.nbytes.tolist() == [[46, 4, 0], [0, 20, 0]]
    assert [residency.nbytes_of({0, 1}, rank) for rank in range(3)] == [46, 24, 0]


def test_a_bucket_stays_on_all_ranks_or_on_none() -> None:
    nbytes = np.array([[9, 1], [1, 9], [1, 1]])
    assert Residency(nbytes, 9).kept([0, 1, 2]) == {0}
    assert Residency(nbytes, 10).kept([0, 1, 2]) == {0, 1}
    assert Residency(nbytes, 10).kept([2, 1, 0]) == {2, 1}
    assert Residency(nbytes, 0).kept([0, 1, 2]) == frozenset()
    assert Residency(nbytes, None).kept([0, 1, 2]) == {0, 1, 2}


def test_what_one_rank_trains_is_not_frozen() -> None:
    held = [{"a", "b"}, {"b", "c"}, {"d"}]
    assert frozen_everywhere(held, [{"a", "b"}, {"c"}, set()]) == {"a", "c"}
