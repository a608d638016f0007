"""Memory that passes from the tensors of one bucket to those of the next."""

from __future__ import annotations

import gc
import itertools
import mmap

import torch
from hypothesis import given
from hypothesis import strategies as st

from hybrid_engine.backends.vllm.cpu.host_memory import StagingPool

F32, BF16 = torch.float32, torch.bfloat16


def test_pages_serve_the_next_bucket() -> None:
    pool = StagingPool()
    first, second = pool.lend([(5000, F32), (100, BF16)])
    address = first.data_ptr()
    assert (first.shape, second.shape, second.dtype) == ((5000,), (100,), BF16)
    assert first.untyped_storage().nbytes() == first.nbytes
    assert second.untyped_storage().nbytes() == 200
    first.fill_(1)
    del first
    assert pool.free_nbytes == 0, "one of them is still there"
    del second
    assert pool.free_nbytes == 20480
    (other,) = pool.lend([(5050, F32)])
    assert other.data_ptr() == address
    assert pool.free_nbytes == 0


def test_a_larger_bucket_gets_larger_pages_and_only_those_stay() -> None:
    pool = StagingPool()
    pool.lend([(1000, F32)])
    pool.lend([(100_000, F32)])
    assert 400_000 <= pool.free_nbytes < 404_096
    pool.lend([(1000, F32)])
    assert pool.free_nbytes >= 400_000


def test_a_tensor_that_is_kept_keeps_its_pages() -> None:
    pool = StagingPool()
    kept = pool.lend([(3000, F32)])[0].fill_(7)[100:]
    (other,) = pool.lend([(3000, F32)])
    other.fill_(8)
    assert bool((kept == 7).all())
    del other
    pool.trim()
    assert pool.free_nbytes == 0
    del pool
    gc.collect()
    assert bool((kept == 7).all()), "a tensor outlives the pool"


def test_nothing_is_lent_for_nothing() -> None:
    pool = StagingPool()
    assert [tensor.numel() for tensor in pool.lend([(0, F32), (0, BF16)])] == [0, 0]
    assert [tensor.numel() for tensor in pool.lend([(0, F32), (3, BF16)])] == [0, 3]


@given(st.lists(st.lists(st.tuples(st.integers(0, 3000), st.sampled_from([F32, BF16])), max_size=5), max_size=6))
def test_living_tensors_never_share(buckets: list[list[tuple[int, torch.dtype]]]) -> None:
    pool, living = StagingPool(), []
    for number, sizes in enumerate(buckets):
        lent = pool.lend(sizes)
        assert [(tensor.numel(), tensor.dtype) for tensor in lent] == sizes
        living += [(tensor.fill_(number), number) for tensor in lent[number % 2 :]]
        del lent
    spans = sorted((one.data_ptr(), one.data_ptr() + one.nbytes) for one, _ in living if one.numel())
    assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(spans))
    assert all(bool((tensor == number).all()) for tensor, number in living)


def test_pages_that_are_lent_at_a_trim_are_not_kept():
    pool = StagingPool()
    (lent,) = pool.lend([(1000, torch.float32)])
    pool.trim()
    del lent
    assert pool.free_nbytes == 0
    pool.lend([(1000, torch.float32)])
    assert pool.free_nbytes == mmap.PAGESIZE
