"""GPU memory of weights with and without vLLM's sleep mode, and blocks of the KV cache.

test_adaptor.py covers CPUs.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybrid_engine.backends.vllm.weights import weight_memory
from hybrid_engine.backends.vllm.weights.cache_blocks import CacheBlocks
from hybrid_engine.backends.vllm.weights.weight_memory import (
    SleepMode,
    WeightMemory,
    prepare_allocator,
    without_what_stays,
)
from hybrid_engine.errors import StateError
from hybrid_engine.memory.offload_items import Spans
from tests.harness.errors import has_code
from tests.hybrid_engine.backends.vllm import sleeping
from tests.hybrid_engine.backends.vllm.sleeping import SleepingVllm
from tests.software_gpu.device import GRANULE, VirtualMemory, limit, load_driver, virtual_memory

ALL = ["second", "third", "kv"]


@pytest.fixture(params=["compiled", "ported"])
def vllm(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[SleepingVllm]:
    api = load_driver()
    extension = sleeping.compiled() if request.param == "compiled" else sleeping.Ported(api)
    vllm = SleepingVllm(monkeypatch, api, extension)
    yield vllm
    vllm.leave()


@pytest.fixture
def memory(vllm: SleepingVllm) -> SleepMode:
    return SleepMode(lambda: vllm.worker)


@pytest.mark.slow  # imports vLLM
def test_module_tensors_leave_the_memory_of_weights(
    vllm: SleepingVllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("imported_while_weights_are_loaded")
    module.table = table = vllm.over("second", 0)
    table.copy_(torch.arange(table.numel()))  # like the table of FP4 values in compressed_tensors
    before = table.data_ptr()
    load = without_what_stays(lambda _: monkeypatch.setitem(sys.modules, module.__name__, module))
    load(SimpleNamespace(device=torch.device("cpu")))
    assert module.table is table
    assert table.data_ptr() != before
    assert torch.equal(table, torch.arange(table.numel(), dtype=table.dtype))


@pytest.mark.slow  # imports vLLM
def test_weights_wake_up_group_by_group(vllm: SleepingVllm, memory: SleepMode) -> None:
    live = vllm.live
    addresses = {name: tensor.data_ptr() for name, tensor in live.items()}
    for value in (1, 2):
        memory.free(live)  # twice: the second call changes nothing
        memory.free(live)
        assert vllm.asleep() == ALL
        assert memory.nbytes(live) == 0
        memory.restore([live["d"]])
        assert vllm.asleep() == ["second", "kv"]
        # What no fill writes has stayed.
        assert bool((vllm.model.rotary == 7).all() and (vllm.workspace == 5).all())
        assert memory.nbytes(live) == 2 * 64
        live["d"].fill_(value)
        memory.restore([live["b"]])
        assert vllm.asleep() == ["kv"]
        live["c"].fill_(value)
        memory.restore([live["c"]])
        memory.complete()
        # Mapping a segment again would lose the values.
        assert bool((live["d"] == value).all() and (live["c"] == value).all())
        memory.wake_kv_cache()
        memory.wake_kv_cache()
        assert vllm.asleep() == []
    assert {name: tensor.data_ptr() for name, tensor in live.items()} == addresses


def unknown_tensor(vllm: SleepingVllm) -> None:
    vllm.requested["third"] += 16


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "derived", "asleep"),
    [
        (lambda _: None, [], ["second", "third", "kv"]),
        (lambda _: None, ["c"], ["third", "kv"]),
        (unknown_tensor, [], ["second", "kv"]),
    ],
)
def test_segments_with_anything_else_stay(
    vllm: SleepingVllm,
    memory: SleepMode,
    change: Callable[[SleepingVllm], None],
    derived: list[str],
    asleep: list[str],
) -> None:
    change(vllm)
    memory.free(vllm.live)
    memory.restore(vllm.live[name] for name in derived)
    assert vllm.asleep() == asleep
    memory.complete()
    assert vllm.asleep() == ["kv"]


@pytest.mark.slow
def test_a_wake_up_without_memory_can_be_undone(vllm: SleepingVllm, memory: SleepMode) -> None:
    live = vllm.live
    memory.free(live)
    limit(virtual_memory().nbytes + GRANULE)
    with pytest.raises(RuntimeError, match=r"(?i)out.of.memory"):
        memory.restore([live["d"], live["b"]])
    assert not memory.is_given_back(live)
    memory.free(live)
    memory.free(live)
    assert vllm.asleep() == ALL
    limit(None)
    memory.restore([live["d"]])
    assert vllm.asleep() == ["second", "kv"]


@pytest.mark.slow
def test_the_kv_cache_is_freed_while_weights_stay(vllm: SleepingVllm, memory: SleepMode) -> None:
    vllm.add("kv, second part", "kv_cache")
    kv_segments = ["kv", "kv, second part"]
    for _ in range(2):
        memory.free_kv_cache()
        memory.free_kv_cache()
        assert vllm.asleep() == kv_segments
        limit(virtual_memory().nbytes + GRANULE)  # room for one of two segments
        with pytest.raises(RuntimeError, match=r"(?i)out.of.memory"):
            memory.wake_kv_cache()
        assert vllm.asleep() == kv_segments  # a cache that does not fit takes no memory
        limit(None)
        memory.wake_kv_cache()
        assert vllm.asleep() == []


INTERRUPT = mock.Mock(side_effect=KeyboardInterrupt)


@pytest.mark.slow
def test_the_next_call_completes_one_that_failed(
    vllm: SleepingVllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = SleepMode(lambda: vllm.worker, resume=INTERRUPT)
    for step in ("sleep", "of"):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(weight_memory.SleepingSegments, step, INTERRUPT)
            memory.free(vllm.live)
    memory.free(vllm.live)
    assert vllm.asleep() == ALL
    memory.restore(vllm.live.values())
    with pytest.raises(KeyboardInterrupt):
        memory.wake_kv_cache()
    memory.free(vllm.live)
    assert vllm.asleep() == ALL


@pytest.mark.slow
@pytest.mark.parametrize("asleep", [[], ["kv"], ALL])
def test_the_next_engine_gets_memory_after_the_end(
    vllm: SleepingVllm, memory: SleepMode, asleep: list[str]
) -> None:
    if asleep == ALL:
        memory.free(vllm.live)
    elif asleep:
        memory.free_kv_cache()
    assert vllm.asleep() == asleep
    # The driver reuses the handles of released memory, here for an owner that keeps using it.
    handles = [vllm.driver.create(GRANULE) for _ in ALL]
    limit(virtual_memory().nbytes)  # an engine can end on a full device
    vllm.end("kv", "first", "workspace", "second", "third")  # vLLM ends the pool of the cache first
    assert virtual_memory() == VirtualMemory(len(handles), nbytes=len(handles) * GRANULE)
    limit(None)
    for handle in handles:
        vllm.driver.release(handle)
    prepare_allocator()
    vllm.add("next", "weights")


@pytest.mark.slow
def test_segments_released_by_vllm_end_with_their_pool(
    vllm: SleepingVllm, memory: SleepMode
) -> None:
    vllm.add("free after loading", "weights")
    vllm.trim("free after loading")  # vLLM does so after loading
    memory.free(vllm.live)
    vllm.end()
    assert virtual_memory() == VirtualMemory()


@pytest.mark.slow
def test_memory_that_outlives_its_engine_is_reported(vllm: SleepingVllm, memory: SleepMode) -> None:
    memory.free(vllm.live)
    vllm.end("kv", "workspace")
    with pytest.raises(StateError, check=has_code("earlier-engine-in-use", str(3 * GRANULE))):
        prepare_allocator()
    vllm.end()
    prepare_allocator()
    vllm.add("next", "weights")


@pytest.mark.slow
def test_blocks_are_wrapped_once(vllm: SleepingVllm, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = mock.Mock(return_value=SimpleNamespace(address=0))  # not the KV cache's
    monkeypatch.setattr(weight_memory, "CacheBlocks", blocks)
    monkeypatch.setattr(weight_memory, "driver_of", lambda _: vllm.driver)
    memory = SleepMode(lambda: vllm.worker, block_pool=mock.Mock())
    memory.free(vllm.live)
    for _ in range(2):
        assert memory.share(vllm.live, {}, vllm.leave)
        memory.give_back()
    blocks.assert_called_once()


def test_without_sleep_mode_weights_stay_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    memory = WeightMemory()
    live = {"norm.weight": torch.zeros(4)}
    with caplog.at_level(logging.WARNING):
        memory.free(live)
    assert "its 16 bytes of weights stay on the device" in caplog.text
    assert memory.nbytes(live) == 16


# -- blocks of the KV cache
# -----------------------------------------------------------------------------------------------

NUM_BLOCKS = 12
PAGE = 3
CACHE_GRANULE = 4


class Cache:
    """A cache of three layers, of which each block has a page, as vLLM lays it out: by layers or by
    blocks.
    """

    def __init__(self, by_blocks: bool) -> None:
        from vllm.v1.core.block_pool import BlockPool
        from vllm.v1.kv_cache_interface import KVCacheTensor

        strides = (PAGE, 3 * PAGE) if by_blocks else (NUM_BLOCKS * PAGE, PAGE)
        self.nbytes = 3 * PAGE * NUM_BLOCKS
        tensor = KVCacheTensor(self.nbytes, ["a", "b", "c"], *strides)
        runner = SimpleNamespace(
            kv_cache_config=SimpleNamespace(num_blocks=NUM_BLOCKS, kv_cache_tensors=[tensor]),
            kv_caches=[torch.zeros(self.nbytes, dtype=torch.int8)],
        )
        self.pool: Any = BlockPool(NUM_BLOCKS, enable_caching=False, hash_block_size=16)
        self.blocks = CacheBlocks(runner, self.pool)
        self.block_of = [0] * self.nbytes
        for layer in range(3):
            for block in range(NUM_BLOCKS):
                first = layer * strides[0] + block * strides[1]
                self.block_of[first : first + PAGE] = [block] * PAGE

    def granules(self, first: int) -> set[int]:
        """Return the bytes of the granules that have no block before `first`."""
        starts = range(0, self.nbytes, CACHE_GRANULE)
        granules = [range(start, start + CACHE_GRANULE) for start in starts]
        return {
            byte
            for granule in granules
            if min(self.block_of[granule.start : granule.stop]) >= first
            for byte in granule
        }

    def addresses(self, *offsets: tuple[int, int]) -> Spans:
        spans = Spans()
        for start, stop in offsets:
            spans.add(self.blocks.address + start, self.blocks.address + stop)
        return spans


@given(st.booleans(), st.integers(0, 120))
def test_the_last_blocks_have_as_many_bytes(by_blocks: bool, nbytes: int):
    cache = Cache(by_blocks)
    covered: dict[bool, list[int]] = {True: [], False: []}
    for of in cache.blocks.ranges(nbytes, CACHE_GRANULE):
        assert of.is_late
        assert of.segment == cache.blocks.address
        start = of.address - of.segment
        covered[of.is_last] += range(start, start + of.nbytes)
    enough = [first for first in range(NUM_BLOCKS) if len(cache.granules(first)) >= nbytes]
    assert set(covered[True]) == cache.granules(max(enough, default=0))
    assert sorted(covered[True] + covered[False]) == list(range(cache.nbytes))


@given(
    st.booleans(),
    st.lists(st.tuples(st.integers(0, 107), st.integers(1, 20)), min_size=1, max_size=3),
)
def test_requests_wait_before_they_get_a_held_block(by_blocks: bool, ranges: list[tuple[int, int]]):
    cache = Cache(by_blocks)
    offsets = [(start, min(start + nbytes, cache.nbytes)) for start, nbytes in ranges]
    held = {cache.block_of[byte] for start, stop in offsets for byte in range(start, stop)}
    taken = [block.block_id for block in cache.pool.get_new_blocks(NUM_BLOCKS - 1)]
    got: list[int] = []
    released_at: list[int] = []
    cache.pool.free_blocks(cache.pool.blocks[number] for number in taken)
    cache.blocks.hold(cache.addresses(*offsets), lambda: released_at.append(len(got)))
    cached = cache.pool.get_new_blocks(1)
    cached[0].ref_cnt = 0
    cache.pool.free_block_queue.append_n(cached)  # As one with a cached prefix.
    for _ in range(NUM_BLOCKS - 1):
        got += [block.block_id for block in cache.pool.get_new_blocks(1)]
    assert sorted(got) == list(range(1, NUM_BLOCKS)), "block 0 is nobody's"
    assert len(released_at) == 1
    assert not held.intersection(got[: released_at[0]])
    assert 0 in held or min(held) == released_at[0] + 1 or by_blocks, (
        "they wait no earlier than they must"
    )


def test_memory_of_others_holds_all_blocks():
    cache = Cache(by_blocks=True)
    released: list[bool] = []
    cache.blocks.hold(cache.addresses((-CACHE_GRANULE, 0)), lambda: released.append(True))
    assert released
