"""Memory that passes from the tensors of one bucket to those of the next."""

from __future__ import annotations

import gc
import itertools
import mmap

import torch
from hypothesis import given
from hypothesis import strategies as st

from hybrid_engine.memory.staging_pool import Passage

F32, BF16 = torch.float32, torch.bfloat16


def test_pages_serve_the_next_bucket() -> None:
    passage = Passage()
    first, second = passage.lend([(5000, F32), (100, BF16)])
    address = first.data_ptr()
    assert (first.shape, second.shape, second.dtype) == ((5000,), (100,), BF16)
    assert first.untyped_storage().nbytes() == first.nbytes and second.untyped_storage().nbytes() == 200
    first.fill_(1)
    del first
    assert passage.free_nbytes == 0, "one of them is still there"
    del second
    assert passage.free_nbytes == 20480
    (other,) = passage.lend([(5050, F32)])
    assert other.data_ptr() == address and passage.free_nbytes == 0


def test_a_larger_bucket_gets_larger_pages_and_only_those_stay() -> None:
    passage = Passage()
    passage.lend([(1000, F32)])
    passage.lend([(100_000, F32)])
    assert 400_000 <= passage.free_nbytes < 404_096
    passage.lend([(1000, F32)])
    assert passage.free_nbytes >= 400_000


def test_a_tensor_that_is_kept_keeps_its_pages() -> None:
    passage = Passage()
    kept = passage.lend([(3000, F32)])[0].fill_(7)[100:]
    (other,) = passage.lend([(3000, F32)])
    other.fill_(8)
    assert bool((kept == 7).all())
    del other
    passage.trim()
    assert passage.free_nbytes == 0
    del passage
    gc.collect()
    assert bool((kept == 7).all()), "a tensor outlives the passage"


def test_nothing_is_lent_for_nothing() -> None:
    passage = Passage()
    assert [tensor.numel() for tensor in passage.lend([(0, F32), (0, BF16)])] == [0, 0]
    assert [tensor.numel() for tensor in passage.lend([(0, F32), (3, BF16)])] == [0, 3]


@given(st.lists(st.lists(st.tuples(st.integers(0, 3000), st.sampled_from([F32, BF16])), max_size=5), max_size=6))
def test_living_tensors_never_share(buckets: list[list[tuple[int, torch.dtype]]]) -> None:
    passage, living = Passage(), []
    for number, sizes in enumerate(buckets):
        lent = passage.lend(sizes)
        assert [(tensor.numel(), tensor.dtype) for tensor in lent] == sizes
        living += [(tensor.fill_(number), number) for tensor in lent[number % 2 :]]
        del lent
    spans = sorted((one.data_ptr(), one.data_ptr() + one.nbytes) for one, _ in living if one.numel())
    assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(spans))
    assert all(bool((tensor == number).all()) for tensor, number in living)


def test_pages_that_are_lent_at_a_trim_are_not_kept():
    passage = Passage()
    (lent,) = passage.lend([(1000, torch.float32)])
    passage.trim()
    del lent
    assert passage.free_nbytes == 0
    passage.lend([(1000, torch.float32)])
    assert passage.free_nbytes == mmap.PAGESIZE
