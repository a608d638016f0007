"""vLLM on a CPU: memory reused from bucket to bucket, and the patched rotary kernel."""

from __future__ import annotations

import gc
import itertools
import math
import mmap
import weakref
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybrid_engine.backends.vllm import internals
from hybrid_engine.backends.vllm.cpu import host_memory
from hybrid_engine.backends.vllm.cpu.host_memory import CpuWeightMemory, StagingPool
from hybrid_engine.errors import StateError
from hybrid_engine.memory.elastic import ElasticBuffer
from hybrid_engine.memory.host_pages import HostMemory, PoolPiece
from tests.harness.errors import has_code

F32 = torch.float32
BF16 = torch.bfloat16
HEADS = 3
ELEMENTS = 64
TOKENS = 5


def test_pages_are_reused_for_the_next_bucket() -> None:
    pool = StagingPool()
    first, second = pool.lend([(5000, F32), (100, BF16)])
    address = first.data_ptr()
    assert (first.shape, second.shape, second.dtype) == ((5000,), (100,), BF16)
    assert first.untyped_storage().nbytes() == first.nbytes
    assert second.untyped_storage().nbytes() == 200
    first.fill_(1)
    del first
    assert pool.free_nbytes == 0, "a living tensor's pages were freed"
    del second
    assert pool.free_nbytes == 20480  # five pages
    (other,) = pool.lend([(5050, F32)])
    assert other.data_ptr() == address
    assert pool.free_nbytes == 0


def test_a_larger_bucket_replaces_the_pages() -> None:
    pool = StagingPool()
    for numel in (1000, 100_000, 1000):
        pool.lend([(numel, F32)])
    assert 400_000 <= pool.free_nbytes < 404_096


def test_a_living_tensor_outlives_the_pool() -> None:
    pool = StagingPool()
    kept = pool.lend([(3000, F32)])[0].fill_(7)[100:]
    del pool
    gc.collect()
    assert bool((kept == 7).all())


@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 3000), st.sampled_from([F32, BF16])), max_size=5),
        max_size=6,
    )
)
def test_living_tensors_never_overlap(buckets: list[list[tuple[int, torch.dtype]]]) -> None:
    pool = StagingPool()
    living = []
    for number, sizes in enumerate(buckets):
        lent = pool.lend(sizes)
        assert [(tensor.numel(), tensor.dtype) for tensor in lent] == sizes
        # Some are dropped at once.
        living += [(tensor.fill_(number), number) for tensor in lent[number % 2 :]]
        del lent
    tensors = [tensor for tensor, _ in living if tensor.numel()]
    spans = sorted((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in tensors)
    assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(spans))
    assert all(bool((tensor == number).all()) for tensor, number in living)


def test_pages_lent_during_a_trim_are_not_kept():
    pool = StagingPool()
    (lent,) = pool.lend([(1000, torch.float32)])
    pool.trim()
    del lent
    assert pool.free_nbytes == 0
    pool.lend([(1000, torch.float32)])
    assert pool.free_nbytes == mmap.PAGESIZE


# -- memory shared with gradients ------------------------------------------------------------------


class Sides:
    """Gradients and weights that use their memory, with every byte that either side wrote."""

    def __init__(self, buffers: list[int], weights: list[int]) -> None:
        self.buffers = [ElasticBuffer(nbytes, torch.uint8, "grad") for nbytes in buffers]
        self.live = {
            str(number): torch.zeros(nbytes, dtype=torch.uint8)
            for number, nbytes in enumerate(weights)
        }
        self.memory = CpuWeightMemory()
        self.memory.free(self.live)
        self.kept: list[torch.Tensor] = []

    def share(self) -> None:
        memories = [
            buffer.memory for buffer in self.buffers if isinstance(buffer.memory, HostMemory)
        ]
        for buffer in self.buffers:
            buffer.release()
        assert self.memory.share(self.live, {"grad": memories}, gc.collect)

    def infer(self, value: int, *, keeps: bool = False) -> None:
        for buffer in self.buffers:
            buffer.release()
        assert not any(buffer.resident_nbytes() for buffer in self.buffers)
        self.memory.restore(self.live.values())
        assert self.memory.nbytes(self.live) == sum(tensor.nbytes for tensor in self.live.values())
        for number, tensor in enumerate(self.live.values()):
            tensor.fill_(value + number)
        (passing,) = self.memory._pool.lend([(3 * mmap.PAGESIZE, torch.uint8)])
        passing.fill_(7)
        assert all(
            bool((tensor == value + number).all())
            for number, tensor in enumerate(self.live.values())
        )
        assert bool((passing == 7).all())
        if keeps:
            self.kept.append(passing)
        del passing
        self.memory.trim()
        assert all(bool((tensor == 7).all()) for tensor in self.kept)

    def train(self, value: int) -> None:
        self.memory.free(self.live)
        for number, buffer in enumerate(self.buffers):
            buffer.release()
            buffer.restore()
            assert not buffer.tensor.any()
            buffer.tensor.fill_(value + number)
        assert all(
            bool((buffer.tensor == value + number).all())
            for number, buffer in enumerate(self.buffers)
        )


SIZES = st.lists(st.integers(1, 5 * mmap.PAGESIZE), min_size=1, max_size=4)


@given(
    SIZES,
    SIZES,
    st.lists(st.sampled_from(["infer", "keep", "train", "share", "give_back"]), max_size=8),
)
def test_weights_and_gradients_use_memory_in_turn(
    buffers: list[int], weights: list[int], steps: list[str]
) -> None:
    sides = Sides(buffers, weights)
    for step in ("share", *steps, "train", "give_back"):
        if step in ("infer", "keep"):
            sides.infer(1 + len(steps), keeps=step == "keep")
            continue
        if step == "train":
            sides.train(1 + len(steps))
            assert all(bool((tensor == 7).all()) for tensor in sides.kept)
            continue
        # Neither side has contents.
        sides.memory.free(sides.live)
        for buffer in sides.buffers:
            buffer.release()
        getattr(sides if step == "share" else sides.memory, step)()
    assert not any(buffer.resident_nbytes() for buffer in sides.buffers)
    sides.infer(1)


def test_a_switch_touches_no_new_page() -> None:
    size = 64 * mmap.PAGESIZE
    sides = Sides([2 * size], [size, size // 2])
    sides.share()
    (buffer,) = sides.buffers
    sides.infer(1)
    sides.train(2)
    pages = buffer.resident_nbytes()
    assert pages >= size
    sides.infer(3)
    with pytest.raises(StateError, match="inference"):
        buffer.restore()
    sides.train(4)
    assert buffer.resident_nbytes() == pages
    with pytest.raises(StateError, match="training"):
        sides.memory.restore(sides.live.values())


INTERRUPT = mock.Mock(side_effect=KeyboardInterrupt)


def test_an_interrupted_call_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    size = 8 * mmap.PAGESIZE
    sides = Sides([size], [size])
    sides.share()
    sides.infer(1)
    sides.memory.free(sides.live)
    (buffer,) = sides.buffers
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(HostMemory, "_permit", INTERRUPT)
        buffer.restore()
    assert not buffer.resident_nbytes()
    sides.train(2)
    sides.infer(3)
    leave = PoolPiece.leave
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(PoolPiece, "leave", lambda *of: INTERRUPT(leave(*of)))
        sides.memory.close()
    sides.memory.close()
    assert sides.live["0"].eq(3).all()


@pytest.mark.slow  # takes 4 GiB
def test_a_loan_longer_than_an_int_keeps_its_contents() -> None:
    pages = host_memory._Pages(2**31)
    pages.memory[-1] = 7
    pages.piece.take("inference", pages.address)
    host_memory._renew(pages.address, pages.nbytes, pages.piece)
    assert pages.memory[-1] == 7


def test_another_engine_gets_no_memory_with_contents() -> None:
    size = 8 * mmap.PAGESIZE
    first = Sides([size], [size])
    first.share()
    first.infer(1)
    second = Sides([], [size])
    memories = [buffer.memory for buffer in first.buffers]
    with pytest.raises(StateError, check=has_code("memory-in-use")):
        second.memory.share(second.live, {"grad": memories}, gc.collect)
    first.train(2)
    first.memory.close()
    first.buffers[0].release()
    assert second.memory.share(second.live, {"grad": memories}, gc.collect)
    second.infer(3)


def test_shared_memory_lives_on_when_one_side_ends() -> None:
    size = 8 * mmap.PAGESIZE
    sides = Sides([2 * size], [size])
    sides.share()
    sides.infer(1)
    # The engine ends with its weights awake.
    ended = weakref.ref(sides.memory)
    weights = sides.live.pop("0")
    sides.memory = CpuWeightMemory()
    assert ended() is None
    sides.train(2)
    assert bool((weights == 1).all())
    sides.buffers[0].release()
    assert sides.buffers[0].resident_nbytes() == 0, "the loan has ended"
    sides.live["0"] = torch.zeros(size, dtype=torch.uint8)
    sides.memory.free(sides.live)
    sides.share()
    sides.infer(3)
    # The trainer ends.
    sides.buffers.clear()
    gc.collect()
    assert math.isclose(float(sides.live["0"].float().mean()), 3)


# -- rotary embedding ------------------------------------------------------------------------------


def rotate(
    queries: torch.Tensor, key: torch.Tensor | None, *, is_patched: bool
) -> tuple[torch.Tensor, ...]:
    """Rotate by an embedding that vLLM built with or without the patched kernel."""
    from vllm.config import CompilationConfig, VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    from hybrid_engine.backends.vllm.cpu.cpu_worker import _on_rows

    # Like an eager engine: vLLM's kernels instead of torch operations.
    eager = set_current_vllm_config(
        VllmConfig(compilation_config=CompilationConfig(custom_ops=["all"]))
    )
    with eager, internals.ROTATE.replaced(_on_rows) if is_patched else nullcontext():
        embedding = RotaryEmbedding(ELEMENTS, ELEMENTS, 32, 10000.0, False, torch.float32)
    return embedding(torch.arange(TOKENS), queries.clone(), None if key is None else key.clone())


@pytest.mark.slow  # imports vLLM
def test_queries_by_head_are_rotated_like_queries_in_rows() -> None:
    queries = torch.randn(TOKENS, HEADS, ELEMENTS, generator=torch.Generator().manual_seed(0))
    key = queries[:, :1] * 2
    rows, row = rotate(queries.flatten(1), key.flatten(1), is_patched=False)
    by_head, one_head = rotate(queries, key, is_patched=True)
    assert torch.equal(by_head.flatten(1), rows)
    assert torch.equal(one_head.flatten(1), row)
    without_key, missing = rotate(queries, None, is_patched=True)
    assert torch.equal(without_key, by_head)
    assert missing is None
    # If this fails, the kernel follows strides, and ROTATE can be removed.
    unpatched, _ = rotate(queries, queries[:, :1], is_patched=False)
    assert not torch.equal(unpatched.flatten(1), rows)
